"""Task accuracy: metrics, the rows they are computed over, and the comparison of two results."""

from __future__ import annotations

import json
import random

import pytest

from unmask.config.run import SamplerConfig
from unmask.demo import DemoSettings, small_model
from unmask.errors import DataError
from unmask.evaluation import tasks
from unmask.evaluation.tasks import TaskResult, evaluate_task
from unmask.generation.sampler import generate
from unmask.rewards.verdict import Verdict
from unmask.tasks import get_task

TASK = get_task("sudoku")
ROWS = TASK.generate("test", 12, 0)
LM = small_model(TASK, DemoSettings(hidden=16, layers=1), 0)


def result_of(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> TaskResult:
    """The result of a model with these completions."""

    class Written:
        def __init__(self, *_: object) -> None:
            self.texts = texts

    monkeypatch.setattr(tasks, "generate", Written)
    return evaluate_task(LM, TASK, ROWS)


def test_right_wrong_and_malformed_answers(monkeypatch):
    rng = random.Random(0)
    right = [row["completion"] for row in ROWS]
    wrong = [TASK.corrupt(row, rng) for row in ROWS]
    perfect, poor, none = (result_of(texts, monkeypatch) for texts in (right, wrong, ["?"] * len(ROWS)))
    assert perfect.solved == perfect.values == [1.0] * len(ROWS)
    assert poor.solved == none.solved == none.values == [0.0] * len(ROWS)
    assert all(0 < value < 1 for value in poor.values)
    assert {name: interval.mean for name, interval in perfect.metrics.items()} == {"solved": 1.0, "value": 1.0}
    assert poor.groups == [row["group"] for row in ROWS] and poor.completions == wrong

    gain = perfect.gain_over(poor)
    assert (gain.mean, gain.low, gain.high) == (1.0, 1.0, 1.0)
    half = result_of(right[:6] + wrong[6:], monkeypatch)
    assert half.metrics["solved"].low < half.metrics["solved"].mean == 0.5 < half.metrics["solved"].high
    assert half.gain_over(poor).mean == pytest.approx(0.5) and half.gain_over(perfect).mean == pytest.approx(-0.5)


def test_results_on_different_rows_are_not_compared(monkeypatch):
    one = result_of([row["completion"] for row in ROWS], monkeypatch)
    other = TaskResult("sudoku", one.solved, one.values, one.groups[::-1], one.completions)
    with pytest.raises(AssertionError, match="different rows"):
        one.gain_over(other)


def test_the_json_holds_the_figures_and_the_completions(monkeypatch):
    result = result_of([row["completion"] for row in ROWS[:3]] + ["", "1", "\n␄"] * 3, monkeypatch)
    written = json.loads(result.to_json())
    solved = result.metrics["solved"]
    assert written["metrics"]["solved"] == {"mean": solved.mean, "low": solved.low, "high": solved.high}
    assert (written["task"], written["rows"], written["completions"]) == ("sudoku", 12, result.completions)


def test_the_default_sampler_is_greedy_with_the_task_s_answer_length():
    greedy = SamplerConfig(max_new_tokens=TASK.max_completion)
    expected = generate(LM, [row["prompt"] for row in ROWS], greedy)
    assert max(map(len, expected.tokens)) == TASK.max_completion
    assert evaluate_task(LM, TASK, ROWS).completions == expected.texts
    drawn = evaluate_task(LM, TASK, ROWS, SamplerConfig(max_new_tokens=4, temperature=1.0))
    assert drawn.completions == generate(LM, [row["prompt"] for row in ROWS], greedy.model_copy(update={"temperature": 1.0})).texts


def test_unseen_solutions_are_reported_separately():
    task = get_task("sudoku")
    rows = [*task.generate("train", 3, 0), *task.generate("test", 2, 0)]
    result = TaskResult("sudoku", [0.0, 0.0, 0.0, 1.0, 0.0], [0.5] * 5, [row["group"] for row in rows], [""] * 5)
    assert result.metrics["solved"].mean == 0.2
    assert result.metrics["solved, 2 unseen"].mean == 0.5
    alone = TaskResult("sudoku", [1.0, 0.0], [0.5] * 2, [row["group"] for row in rows[3:]], [""] * 2)
    assert set(alone.metrics) == {"solved", "value"}


def test_unverified_rows_are_left_out_and_counted(monkeypatch):
    verdicts = [Verdict(None, "infrastructure", "no sandbox"), Verdict(1.0, "ok"), Verdict(0.0, "timeout")] * 4
    monkeypatch.setattr(type(TASK), "verify_all", lambda *_: verdicts)
    result = result_of(["?"] * 12, monkeypatch)
    assert (len(result.solved), result.metrics["solved"].mean) == (8, 0.5)
    assert result.statuses == {"infrastructure": 4, "ok": 4, "timeout": 4}
    monkeypatch.setattr(type(TASK), "verify_all", lambda *_: verdicts[:1] * 12)
    with pytest.raises(DataError, match="no row could be verified: no sandbox"):
        result_of(["?"] * 12, monkeypatch)
