"""Countdown: the search against brute force, the published rules, and the published file."""

from __future__ import annotations

import itertools
import json
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.helpers import read_task, shared_path
from unmask.errors import ConfigError, DataError
from unmask.rewards.arithmetic import evaluate, numbers_used
from unmask.rewards.verdict import Verdict
from unmask.tasks import Countdown, Countdown4, get_rewards
from unmask.tasks.countdown import expressions, solve

TASK = Countdown()
triples = st.lists(st.integers(1, 30), min_size=3, max_size=3)


def _reachable(numbers: list[int]) -> set[Fraction]:
    """Every value of a o b o c with either bracketing, by Python's own arithmetic."""
    values = set()
    for a, b, c in itertools.permutations(map(Fraction, numbers)):
        for first, second in itertools.product("+-*/", repeat=2):
            for text in (f"(a{first}b){second}c", f"a{first}(b{second}c)"):
                try:
                    values.add(eval(text, {"a": a, "b": b, "c": c}))
                except ZeroDivisionError:
                    continue
    return values


@given(triples)
def test_the_search_finds_every_value_and_no_other(numbers):
    found = expressions(tuple(sorted(numbers)))
    assert set(found.values()) == _reachable(numbers)


@given(triples)
def test_expressions_are_worth_what_they_say_and_fit(numbers):
    for text, value in expressions(tuple(sorted(numbers))).items():
        assert evaluate(text) == value
        assert numbers_used(text) == sorted(numbers)
        assert len(text) < TASK.max_completion


@given(triples, st.permutations(range(3)), st.integers(1, 100))
def test_the_solution_does_not_depend_on_the_order(numbers, order, target):
    assert solve(numbers, target) == solve([numbers[index] for index in order], target)


def test_no_pair_of_parentheses_is_spare():
    for text, value in expressions((101, 103, 107)).items():  # primes: no two expressions agree by chance
        bare = text.replace("(", "").replace(")", "")
        assert bare == text or evaluate(bare) != value


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("93-(100-30)", Verdict(1.0, "ok")),
        ("30+93-100", Verdict(1.0, "ok")),
        (" 30 + 93 - 100 ", Verdict(1.0, "ok")),
        ("(93+30)-100", Verdict(1.0, "ok")),
        ("30+93+100", Verdict(0.1, "wrong")),
        ("23", Verdict(0.0, "wrong")),
        ("100-77", Verdict(0.0, "wrong")),
        ("30+93-100+30-30", Verdict(0.0, "wrong")),
        ("30+93-100=23", Verdict(1.0, "ok")),
        ("23 = 30+93-100", Verdict(1.0, "ok")),
        ("93\u2212(100\u201330)", Verdict(1.0, "ok")),
        ("30+93+100=223", Verdict(0.1, "wrong")),
        *(
            (text, Verdict(0.0, "malformed"))
            for text in (
                "30+93+100=23",
                "30+93-100=24",
                "30+93-100=23=23",
                "23=30+93-100=23",
                "30+93-100=",
                "=23",
                "=",
                "==",
                "30+93-100=30+93-100",
                "30+93-100=23.0",
                "30+93-100=023",
                "30+93-100==23",
                "30+93-100=\u0662\u0663",
                "30+93-100=23 or 30",
                "30+93-100=9**9**9",
                "30+93-100=" + "9" * 10**6,
                "30=93-100",
                "=" * 10**6,
            )
        ),
        ("30+93/(100-100)", Verdict(0.0, "malformed")),
        ("30+93-0100", Verdict(0.0, "malformed")),
        ("30+93-100*1.0", Verdict(0.0, "malformed")),
        ("9**9**9", Verdict(0.0, "malformed")),
        ("", Verdict(0.0, "malformed")),
    ],
)
def test_the_published_rules(text, verdict):
    assert TASK.verify(text, {"numbers": [30, 100, 93], "target": 23}) == verdict


@pytest.mark.parametrize("text", ["2\u00d73\u00d74", "2\u00b73*4", "4\u00d73\u00d72=24", "2\u22c54\u22c53"])
def test_other_signs_of_the_operators(text):
    assert TASK.verify(text, {"numbers": [2, 3, 4], "target": 24}).solved
    assert TASK.verify("8\u00f72\u00d73", {"numbers": [2, 3, 8], "target": 12}).solved


READ = [
    *("(30+93)-100 = 23.", "30+93-100.", "30 + 93 - 100\n= 23", "30+93\u2014100", "30 + 93 \u2212 100", "30+93\u2012100", "`30+93-100`", "$30+93-100$", r"\(30+93-100\)", r"\[30+93-100 = 23\]"),
    *(r"\boxed{30+93-100}", r"\boxed{30+93-100} = 23", r"30+93-100 = \boxed{23}", r"$\boxed{93-(100-30)}$.", "**30+93-100**", "**30+93-100 = 23**", "**30+93-100** = 23", "30+93-100 = **23**", "```\n30+93-100\n```", "<answer>`30+93-100`</answer>"),
    *(r"\left(30+93\right)-100", "$30+93-100$ = $23$", "23 = 30+93-100.", "(30+93-100)", "*30+93-100*", '"30+93-100"', "30 + 93 - 100 = 23\n"),
]  # fmt: skip
PRODUCTS = [
    "2x3x4",
    "2 x 3 x 4",
    "2X3X4",
    r"2\times3\times4",
    r"2 \times 3 \cdot 4",
    "2\u22193\u22194",
    "2\u20223\u20224",
    "2\u22173\u22174",
    "(2x3)x4",
    "2x(3x4) = 24",
    r"2\cdot(3\cdot4)",
    "2\u27153\u27164",
    r"$2\times3\times4=24$",
    r"2 \ast 3 \ast 4",
]
FORGED = [
    *("30+93-100 or 23", "30+93-100. 23", "30+93-100 23", "`30+93-100` `30+93+100`", "30+93-100, 100-93+30", "$30+93$-$100$", r"\boxed{30}+\boxed{93}-\boxed{100}", r"\boxed{30+93-100} \boxed{30}", "**30+93**-**100**", "30**93-100", "30+93-100\n30+93+100"),
    *("30+93-100\n23", "30+93-100 = 24.", "30+93-100 = 23 = 24", r"30+93-100 = \boxed{24}", r"\boxed{23}", "30+93-100=..", "x30+93-100", "30+93-100x", "30x+93-100", "30xx93-100", r"30\timess93-100", r"\times30+93-100", r"30+93-100\pi", "30+93-100%", "30+93-1OO", "30+93-100.0"),
    *("30.+93-100", "30+9.3-100", "30+93-(100", "30+93-100)", "[30+93)-100", "30[93-100]", "30(93-100)", "30+93--100", "`" * 9_000, "**" * 8_000, r"\boxed{" * 2_000, "(" * 9_000, "=" * 9_000, "30+93-100" + "." * 9_000 + "!", "x" * 9_000, "30+93-100``", "`", "$$", "****", r"\boxed{}"),
]  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_an_expression_may_be_set_as_a_formula(text):
    assert TASK.verify(text, {"numbers": [30, 100, 93], "target": 23}).solved


@pytest.mark.parametrize("text", PRODUCTS)
def test_every_sign_of_a_product(text):
    assert TASK.verify(text, {"numbers": [2, 3, 4], "target": 24}).solved


@pytest.mark.parametrize(
    "text",
    ["8\u22152*3", r"8\div2\times3", "8\u20442*3", r"\frac{8}{2}*3", r"3\cdot\dfrac{8}{2}", "(8\u00f72)x3"],
)
def test_every_sign_of_a_quotient(text):
    assert TASK.verify(text, {"numbers": [2, 3, 8], "target": 12}).solved


@pytest.mark.parametrize("text", FORGED)
def test_more_or_other_than_an_expression_is_not(text):
    assert not TASK.verify(text, {"numbers": [30, 100, 93], "target": 23}).solved


def test_a_repeated_number_is_used_as_often_as_given():
    row = {"numbers": [5, 5, 2], "target": 12}
    assert TASK.verify("5+5+2", row).solved
    assert TASK.verify("5*2+2", row) == Verdict(0.0, "wrong")


def test_ranges_hold():
    rows = Countdown(max_number=9, max_target=20).generate("train", 500, seed=0)
    assert {number for row in rows for number in row["numbers"]} == set(range(1, 10))
    assert {row["target"] for row in rows} == set(range(1, 21))
    assert all(row["prompt"] == ",".join(map(str, row["numbers"])) + f">{row['target']}:" for row in rows)


def test_train_and_test_share_no_problem_in_any_order():
    train, test = (
        {(*sorted(row["numbers"]), row["target"]) for row in TASK.generate(split, 600, 0)}
        for split in ("train", "test")
    )
    assert not train & test


@pytest.mark.parametrize("options", [{"max_number": 0}, {"max_number": 1000}, {"max_target": 0}])
def test_settings_are_checked(options):
    with raises(ConfigError, where="countdown"):
        Countdown(**options)


def test_the_published_file():
    rows = read_task(TASK, shared_path("data", "countdown", "countdown_cd3_test.jsonl"))
    assert len(rows) == 256
    assert rows[0]["prompt"] == "30,100,93>23:" and rows[0]["numbers"] == [30, 100, 93]
    for row in rows:
        assert TASK.verify(row["completion"], row).solved
        assert len(row["completion"]) < TASK.max_completion
        assert set(row["prompt"] + row["completion"]) <= set(TASK.alphabet)


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"input": "1,2,3"}, ", line 2"),
        ({"input": "1,2", "output": "3"}, ", line 2, key 'input'"),
        ({"input": "1,2,x", "output": "3"}, ", line 2, key 'input'"),
        ({"input": [1, 2, 3], "output": "3"}, ", line 2, key 'input'"),
        ({"input": "0,2,3", "output": "3"}, ", line 2, key 'input'"),
        ({"input": "1,2,3", "output": "-3"}, ", line 2, key 'output'"),
        ({"input": "1,2,3", "output": None}, ", line 2, key 'output'"),
        ({"input": "1,2,3", "output": "77"}, ", line 2"),
        ([1], ", line 2"),
    ],
)
def test_malformed_files_name_file_and_line(tmp_path, row, where):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"input": "1,2,3", "output": 6}) + "\n" + json.dumps(row) + "\n")
    with raises(DataError, where=f"{path}{where}") as caught:
        read_task(TASK, path)
    assert caught.value.remedy


def test_four_numbers():
    task = Countdown4()
    rows = task.generate("test", 12, seed=1)
    for row in rows:
        assert len(row["numbers"]) == 4 and task.verify(row["completion"], row).solved
        assert len(row["completion"]) < task.max_completion
        assert task.verify(task.corrupt(row, random.Random(0)), row) == Verdict(0.1, "wrong")
    (read,) = task.rows([("row 1", {"input": "3,7,5,11", "output": "1"})])
    assert read["numbers"] == [3, 7, 5, 11] and task.verify(read["completion"], read).solved
    with raises(DataError, where="row 1, key 'input'"):
        next(TASK.rows([("row 1", {"input": "3,7,5,11", "output": "1"})]))


def test_the_strict_reward_gives_nothing_for_the_form():
    (strict,), (partial,) = get_rewards("countdown"), get_rewards("countdown/partial")
    texts, columns = ["30+93-100", "30+93+100", "x"], {"numbers": [[30, 100, 93]] * 3, "target": [23] * 3}
    assert strict([""] * 3, texts, **columns) == [1.0, 0.0, 0.0] and partial([""] * 3, texts, **columns) == [
        1.0,
        0.1,
        0.0,
    ]
