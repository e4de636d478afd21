"""Equal answers are accepted in any notation; answers made to look equal are not."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from fractions import Fraction
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import shared_path
from unmask.rewards import symbolic
from unmask.rewards.symbolic import equivalent, equivalent_all, number
from unmask.rewards.verdict import OK, WRONG
from unmask.rewards.workers import RewardWorker


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7), ("-7", -7), ("+7", 7), ("007", 7), ("1,234", 1234), ("1,234,567.5", Fraction(12345675, 10)), (".5", Fraction(1, 2)),
        ("0.50", Fraction(1, 2)), ("3/4", Fraction(3, 4)), (r"\frac{3}{4}", Fraction(3, 4)), (r"-\frac{6}{8}", Fraction(-3, 4)),
        ("1,23", None), ("12,345,6", None), ("1/0", None), ("7=5", None), ("7%", None), ("1e3", None), ("0x7", None), ("\u0667", None),
        ("1_000", None), ("", None), ("7 5", None), ("7.", None), ("--7", None),
    ],
)  # fmt: skip
def test_plain_numbers_have_exact_values_and_nothing_else_has(text, value):
    assert number(text) == value


@given(st.fractions())
def test_every_fraction_is_read_back(value):
    assert number(f"{value.numerator}/{value.denominator}") == value


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("0.5", r"\frac{1}{2}"), ("1,000", "1000"), ("$5$", "5"), (r"2\sqrt{2}", r"\sqrt{8}"), ("x+1", "1+x"), (r"\frac{\pi}{2}", r"\pi/2"),
        (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"), ("50\\%", "50\\%"), ("y = 2x + 1", "y=2x+1"),
        (r"x \in [-2,7]", r"x \in [-2, 7]"), ("even", r"\text{even}"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        ("10080", r"10,\!080"), (r"\$32348", r"\$32,\!348"), ("11 111 111 100", r"11,\!111,\!111,\!100"), (r"10\,000", "10000"),
        (r"x \le 5", r"x \leq 5"), (r"2.5x", r"\frac{5}{2}x"), ("5", r"5\text{ cm}"), (r"5 \text{ cm}", r"5\text{ cm}"), ("90", r"90^\circ"),
        ("π/2", r"\frac{\pi}{2}"), (r"\dfrac{2\pi}{4}", r"\frac{\pi}{2}"), (r"\left[-2, 7\right]", "[-2,7]"), ("(0.5, 1)", r"\left(\frac{1}{2}, 1\right)"),
        (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}"), (r"4210_5", r"4210_{5}"),
    ],
)  # fmt: skip
def test_the_same_is_right(answer, reference):
    assert equivalent(answer, reference).status == "ok"


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("7=5", "5"), ("5=7", "5"), ("x=5", "5"), ("5 \\ne 7", "5"), ("a<5", "5"), ("5,6", "5"), ("\\{5,6\\}", "5"), ("5 or 6", "5"),
        ("50\\%", "50"), ("50", "50\\%"), ("0.5", "50\\%"), ("6", "5"), ("5.0001", "5"), (r"\sqrt{2}", "1.414"), ("(1,2)", "(2,1)"),
        ("1234567890123456x", "1234567890123456"), ("1234567890123456 7", "1234567890123456"), ("", "5"), ("?", "5"), ("\\boxed{5}", "6"),
        ("9" * 600, "5"), (r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), ("garbage≡5", "5"), ("7≔5", "5"), (r"7 \equiv 5", "5"),
        (r"7 \triangleq 5", "5"), (r"0 \Leftrightarrow 5", "5"), ("1.414214", r"\sqrt{2}"), ("1.41421356237", r"\sqrt{2}"), ("3.14159265", r"\pi"),
        ("5 000", "0"), (r"6}$ the final answer is ${5", "5"), (r"6}$. Hence $\fbox{5", "5"), (r"5\text{ miles}", r"5\text{ cm}"), ("}5{", "5"),
        (r"6\text{ cm}^2", r"6\text{ cm}^3"), (r"5\text{garbage but 6}", "5"), (r"4210_{7}", r"4210_{5}"), ("4210", r"4210_{5}"), ("X", "x"),
        ("e", r"\text{(E)}"), (r"\{1,2\}", "(1,2)"), ("2, 2, 2", "2"), ("x/x", "1"), ("[1,2]", "(1,2)"), ("x=y", "x"), ("5:6", "5"),
        ("44**35**19", "5"), pytest.param("10^{10^{10^{10}}}", "5", marks=pytest.mark.slow), ("\\int_0^{10^9} x^x dx", "5"), ("\\frac{1}{0}", "5"),
    ],
)  # fmt: skip
def test_another_is_never_right(answer, reference):
    verdict = equivalent(answer, reference)
    assert verdict.value == 0.0 and verdict.status in {"wrong", "malformed", "timeout"}


def use(monkeypatch, worker):
    """Compare answers with this worker only."""
    idle = SimpleQueue()
    idle.put(worker)
    monkeypatch.setattr(symbolic, "idle_workers", idle)


def test_an_answer_that_keeps_the_checker_busy_costs_its_own_time_alone(monkeypatch):
    worker = RewardWorker("time:sleep")
    worker.start()
    process = worker.process
    use(monkeypatch, worker)
    monkeypatch.setattr(symbolic, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(
        RewardWorker,
        "apply",
        lambda self, args, kwargs, *limits, apply=RewardWorker.apply: apply(self, (60,), {}, *limits),
    )
    assert equivalent("y + y + 3", "2y + 3").status == "timeout"
    assert process.poll() is not None


def test_a_checker_that_is_not_there_blames_nobody(monkeypatch):
    use(monkeypatch, RewardWorker("unmask.absent:judge"))
    for _ in range(2):
        verdict = equivalent("y + y + 1", "2y + 1")
        assert (verdict.value, verdict.status) == (
            None,
            "verifier_error",
        ) and "unmask.absent" in verdict.detail


def test_an_answer_that_ends_the_checker_is_malformed(monkeypatch):
    use(monkeypatch, RewardWorker("os:_exit"))
    monkeypatch.setattr(
        RewardWorker,
        "apply",
        lambda self, args, kwargs, *limits, apply=RewardWorker.apply: apply(self, (3,), {}, *limits),
    )
    verdict = equivalent("y + y + 2", "2y + 2")
    assert (verdict.value, verdict.status) == (0.0, "malformed") and "exit code 3" in verdict.detail


def test_long_answers_are_not_read():
    assert equivalent("x" + "+0" * 300, "x").status == "malformed"


def test_verdicts_are_remembered(monkeypatch):
    assert equivalent("x + x", "2x").status == "ok"
    use(monkeypatch, RewardWorker("unmask.absent:judge"))
    assert equivalent("x + x", "2x").status == "ok"


def test_slow_answers_wait_side_by_side(monkeypatch):
    everyone = threading.Barrier(symbolic.WORKERS)  # which all must reach before any continues
    monkeypatch.setattr(RewardWorker, "apply", lambda *_: everyone.wait(60) * 0 or WRONG)
    assert equivalent_all([(f"x + {n}", "2x") for n in range(symbolic.WORKERS)]) == [WRONG] * symbolic.WORKERS


def references():
    return [
        json.loads(line)["answer"]
        for line in shared_path("data", "math500", "math500.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spell",
    [
        lambda text: re.sub(r"(?<![a-zA-Z\\]) +| +(?![a-zA-Z])", "", text),
        lambda text: text.replace(r"\frac", r"\dfrac"),
        lambda text: f"${text}$",
        lambda text: f"{text}.",
        lambda text: text if "left" in text else text.replace("(", r"\left(").replace(")", r"\right)"),
    ],
)
def test_every_reference_of_math500_is_right_however_spelt(spell):
    assert [text for text in references() if not equivalent(spell(text), text).solved] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "forged",
    [
        "0={}",
        "{}=0",
        "0≡{}",
        "{}, 1",
        "{} or 1",
        "{}+1",
        r"\boxed{{{}}}",
        r"{}\text{{ or so}}",
        "{}q",
        "{} 7",
        "{}}}",
    ],
)
def test_no_reference_of_math500_is_forged(forged):
    assert [text for text in references() if equivalent(forged.format(text), text).solved] == []


def test_a_busy_host_changes_no_verdict(monkeypatch):
    """A worker that gets no processor for a while has not used its time."""
    monkeypatch.setattr(symbolic, "COMPARE_SECONDS", 0.5)
    worker = RewardWorker("unmask.rewards.math_worker:compare")
    use(monkeypatch, worker)
    worker.start()
    os.kill(worker.process.pid, signal.SIGSTOP)
    waking = threading.Timer(0.8, os.kill, (worker.process.pid, signal.SIGCONT))
    waking.start()
    assert equivalent(r"\sqrt{4}+y", "y+2") == OK
    waking.join()
    worker.close()


def test_an_answer_may_use_so_much_processor_time(monkeypatch):
    monkeypatch.setattr(symbolic, "COMPARE_SECONDS", 0.5)
    use(monkeypatch, RewardWorker("builtins:sum"))
    endless = (range(10**15),)
    monkeypatch.setattr(
        RewardWorker,
        "apply",
        lambda self, args, kwargs, *limits, apply=RewardWorker.apply: apply(self, endless, {}, *limits),
    )
    start = time.monotonic()
    assert equivalent("y + y + 4", "2y + 4").status == "timeout"
    assert time.monotonic() - start < symbolic.WAIT_SECONDS
