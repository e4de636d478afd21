"""For any completion, every reward quickly gives a verdict and raises no exception."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import work_unit
from unmask.rewards.format import code_format
from unmask.rewards.symbolic import equivalent
from unmask.tasks import Task, get_task
from unmask.tasks.code import program_in

SIZES = pytest.mark.parametrize("examples", [10_000, pytest.param(100_000, marks=pytest.mark.nightly)])
LIMIT = 5 * work_unit()
PIECES = [
    *("<answer>", "</answer>", "<reasoning>\n", "\n</reasoning>\n", "####", "\\boxed{", "}", "{", "\\", "$", "```", "```python\n", "\n```"),
    *("\\frac", "\\sqrt", "\\le", "=", "%", "^", "_", "**", "+", "-", "*", "/", "(", ")", "[", "]", ",", ".", "0", "7", "12", "999999999"),
    *("x", "π", "\\pi", "\\text{a}", "\\begin{pmatrix}", "&", "\\\\", " ", "\n", "\0", "\ud800", "٣", "A", "123434122143", "def f(): pass"),
]  # fmt: skip
pieces = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
texts = (
    pieces
    | st.text(max_size=60)
    | st.tuples(st.sampled_from(PIECES), st.integers(1, 4000)).map(lambda pair: pair[0] * pair[1])
)

ROWS: dict[str, dict[str, Any]] = {
    "sudoku": {"puzzle": "0234341221434321", "solution": "1234341221434321"},
    "sudoku9": {"puzzle": "0" * 9 + "456789123789123456231674895875291364694538217317865942542917638968342571",
                "solution": "123456789456789123789123456231674895875291364694538217317865942542917638968342571"},
    "countdown": {"numbers": [30, 100, 93], "target": 23},
    **{name: {"letters": "k d b e"} for name in ("copy", "sort", "shuffle", "count")},
    "gsm8k": {"answer": "72"},
    "multiple_choice": {"letter": "B", "choices": ["a", "b", "c"]},
    "text": {"answer": "signs"},
}  # fmt: skip


def judges() -> dict[str, Callable[[str], Any]]:
    """All rewards that run in this process, by name."""
    found: dict[str, Callable[[str], Any]] = {}
    for name, row in ROWS.items():
        task: Task = get_task(name)
        found[name] = lambda text, task=task, row=row: task.verify(text, row).value
        for component, function in task.published.items():
            found[f"{name}/{component}"] = lambda text, function=function, row=row: function(text, row)
    found["boxed_in_answer"] = lambda text: get_task("math500").published["boxed_in_answer"](text, {})
    found["code_format"] = lambda text: code_format(text, "python")
    found["program"] = lambda text: len(program_in(text, ("python",)) or "")
    return found


def assert_all_answer(examples: int) -> None:
    seconds: dict[str, list[float]] = defaultdict(list)
    functions = judges()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(texts)
    def each(text: str) -> None:
        for name, function in functions.items():
            started = time.perf_counter()
            value = function(text)
            seconds[name].append(time.perf_counter() - started)
            assert isinstance(value, int | float)

    each()
    slow = {
        name: quantile for name, times in seconds.items() if (quantile := np.quantile(times, 0.99)) > LIMIT
    }
    assert not slow and min(map(len, seconds.values())) >= examples


def test_any_text_is_judged():
    assert_all_answer(300)


@pytest.mark.slow
@pytest.mark.alone
@SIZES
def test_many_texts_are_judged_in_time(examples):
    assert_all_answer(examples)


def assert_answers_are_compared(examples: int) -> list[float]:
    seconds: list[float] = []

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(pieces | st.text(max_size=30))
    def each(text: str) -> None:
        started = time.perf_counter()
        verdict = equivalent(text, r"\frac{\pi}{2}")
        seconds.append(time.perf_counter() - started)
        assert verdict.value in (0.0, 1.0)

    each()
    return seconds


def test_any_answer_is_compared():
    assert_answers_are_compared(200)


@pytest.mark.slow
@pytest.mark.alone
@SIZES
def test_many_answers_are_compared_in_time(examples):
    seconds = assert_answers_are_compared(examples)
    assert len(seconds) >= examples and np.quantile(seconds, 0.99) < LIMIT
