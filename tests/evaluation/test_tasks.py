"""Task accuracy: metrics, the rows they are computed over, and the comparison of two results."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_model
from unmask.errors import ConfigError, DataError
from unmask.evaluation import tasks
from unmask.evaluation.result_file import Item
from unmask.evaluation.tasks import TaskResult, check_evaluation, evaluate_task
from unmask.generation.output import Generation
from unmask.generation.sampler import generate
from unmask.models.model_card import HISTORY_KEY
from unmask.rewards.verdict import Verdict
from unmask.tasks import get_task

TASK = get_task("sudoku")
ROWS = TASK.generate("test", 12, 0)
LM = character_model(TASK.alphabet, hidden=16, layers=1, context=128, seed=0)


def result_of(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> TaskResult:
    """The result of a model with these completions."""
    monkeypatch.setattr(tasks, "generate", lambda *_: written(texts))
    return evaluate_task(LM, TASK, ROWS)


def written(texts: list[str]) -> Generation:
    """A generation of these texts, of one token each."""
    each = len(texts)
    return Generation([[4]] * each, texts, [[4]] * each, [[0.0]] * each, [[0]] * each, [1] * each)


def item(group: str, solved: float) -> Item:
    return Item(id=group, group=group, scores={"solved": solved, "value": 0.5}, completions=[""])


def test_right_wrong_and_malformed_answers(monkeypatch):
    rng = random.Random(0)
    right = [row["completion"] for row in ROWS]
    wrong = [TASK.corrupt(row, rng) for row in ROWS]
    perfect, poor, none = (result_of(texts, monkeypatch) for texts in (right, wrong, ["?"] * len(ROWS)))
    assert perfect.solved == perfect.values == [1.0] * len(ROWS)
    assert poor.solved == none.solved == none.values == [0.0] * len(ROWS)
    assert all(0 < value < 1 for value in poor.values)
    assert {name: interval.mean for name, interval in perfect.metrics.items()} == {
        "solved": 1.0,
        "value": 1.0,
    }
    assert poor.groups == [row["group"] for row in ROWS] and poor.completions == wrong

    gain = perfect.gain_over(poor)
    assert gain.mean == gain.high == 1.0 and 0.4 < gain.low < 1.0
    half = result_of(right[:6] + wrong[6:], monkeypatch)
    assert half.metrics["solved"].low < half.metrics["solved"].mean == 0.5 < half.metrics["solved"].high
    assert half.gain_over(poor).mean == pytest.approx(0.5) and half.gain_over(perfect).mean == pytest.approx(
        -0.5
    )


@pytest.mark.parametrize(
    "verify",
    [
        lambda completion, row: 1 / len(completion),
        lambda completion, row: 1.0,
    ],
)
def test_a_verifier_that_fails_is_one_error_before_anything_is_generated(verify, monkeypatch):
    task = get_task("sudoku")
    monkeypatch.setattr(task, "verify", verify)
    for check in (check_evaluation, evaluate_task):
        monkeypatch.setattr(tasks, "generate", lambda *_: written([""] * len(ROWS)))
        with raises(ConfigError, where="sudoku"):
            check(LM, task, ROWS)


def test_results_on_different_rows_are_not_compared(monkeypatch):
    one = result_of([row["completion"] for row in ROWS], monkeypatch)
    other = TaskResult("sudoku", one.items[::-1])
    with pytest.raises(AssertionError, match="different rows"):
        one.gain_over(other)


def test_the_scores_hold_the_figures_and_the_completions(monkeypatch):
    result = result_of([row["completion"] for row in ROWS[:3]] + ["", "1", "\n␄"] * 3, monkeypatch)
    scores, solved = result.to_scores(shots=0), result.metrics["solved"]
    assert (scores.metrics["solved"].mean, scores.metrics["solved"].low) == (solved.mean, solved.low)
    assert (scores.task, len(scores.items), scores.protocol["shots"], scores.protocol["rows"]) == (
        "sudoku",
        12,
        0,
        12,
    )
    assert [one.completions for one in scores.items] == [[text] for text in result.completions]
    assert scores.items[0].prompt == ROWS[0]["prompt"] and scores.total("tokens") == 12


def test_the_default_sampler_is_greedy_with_the_task_s_answer_length():
    greedy = SamplerConfig(max_new_tokens=TASK.max_completion)
    expected = generate(LM, [row["prompt"] for row in ROWS], greedy)
    assert max(map(len, expected.tokens)) == TASK.max_completion
    assert evaluate_task(LM, TASK, ROWS).completions == expected.texts
    drawn = evaluate_task(LM, TASK, ROWS, SamplerConfig(max_new_tokens=4, temperature=1.0))
    assert (
        drawn.completions
        == generate(LM, [row["prompt"] for row in ROWS], greedy.model_copy(update={"temperature": 1.0})).texts
    )


def test_unseen_solutions_are_reported_separately():
    task = get_task("sudoku")
    rows = [*task.generate("train", 3, 0), *task.generate("test", 2, 0)]
    items = [item(row["group"], solved) for row, solved in zip(rows, [0.0, 0.0, 0.0, 1.0, 0.0], strict=True)]
    result = TaskResult("sudoku", items, knows_split=True)
    assert result.metrics["solved"].mean == 0.2
    assert result.metrics["solved, 2 unseen"].mean == 0.5
    for alone in (TaskResult("sudoku", items[3:], knows_split=True), TaskResult("sudoku", items)):
        assert set(alone.metrics) == {"solved", "value"}


@pytest.mark.parametrize(
    ("data", "knows"),
    [
        (["sudoku"], True),
        (["sudoku", "sudoku"], True),
        (["sudoku", "pairs.jsonl"], False),
        (["sudoku", None], False),
        ([], False),
    ],
)
def test_only_a_model_whose_history_is_all_of_the_task_knows_what_it_has_not_seen(data, knows):
    lm = character_model(TASK.alphabet, hidden=16, layers=1, context=128, seed=0)
    setattr(lm.config, HISTORY_KEY, [{"verb": "sft", "data": name} for name in data])
    assert evaluate_task(lm, TASK, ROWS[:2]).knows_split == knows


def test_unverified_rows_are_left_out_and_counted(monkeypatch):
    verdicts = [
        Verdict(None, "verifier_error", "no sandbox"),
        Verdict(1.0, "ok"),
        Verdict(0.0, "timeout"),
    ] * 4
    monkeypatch.setattr(type(TASK), "verify_all", lambda *_: verdicts)
    result = result_of(["?"] * 12, monkeypatch)
    assert (len(result.solved), result.metrics["solved"].mean) == (8, 0.5)
    assert result.statuses == {"verifier_error": 4, "ok": 4, "timeout": 4}
    monkeypatch.setattr(type(TASK), "verify_all", lambda *_: verdicts[:1] * 12)
    with raises(DataError, where="sudoku"):
        result_of(["?"] * 12, monkeypatch)


DRAWN = SamplerConfig(max_new_tokens=4, temperature=1.0, seed=3)


def float64_model():
    lm = character_model(TASK.alphabet, hidden=16, layers=1, context=128, seed=0)
    return lm.bind(lm.model.double())


def test_an_item_depends_on_no_batch_and_no_order():
    # equal rows, and equal prompts of different rows
    lm, rows = float64_model(), [*ROWS, *ROWS[:3], {**ROWS[0], "group": "another"}]
    expected = evaluate_task(lm, TASK, rows, DRAWN, attempts=2, pass_at=[1, 2]).items
    assert len({item.id for item in expected}) == len(rows)
    for batch_size in (1, 3, 8):
        sampler = DRAWN.model_copy(update={"batch_size": batch_size})
        assert evaluate_task(lm, TASK, rows, sampler, attempts=2, pass_at=[1, 2]).items == expected
    shuffled = evaluate_task(lm, TASK, rows[::-1], DRAWN, attempts=2, pass_at=[1, 2]).items
    assert sorted(shuffled, key=lambda one: one.id) == sorted(expected, key=lambda one: one.id)


def test_one_attempt_is_the_first_of_several():
    one, three = (
        evaluate_task(float64_model(), TASK, ROWS, DRAWN, attempts=attempts).items for attempts in (1, 3)
    )
    assert [item.completions[0] for item in one] == [item.completions[0] for item in three]
    assert any(len(set(item.completions)) > 1 for item in three)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(attempts, data):
    right, k = data.draw(st.integers(0, attempts)), data.draw(st.integers(1, attempts))
    outcomes = [True] * right + [False] * (attempts - right)
    subsets = list(itertools.combinations(outcomes, k))
    assert tasks.pass_at_k(attempts, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("attempts", "pass_at", "temperature", "where"),
    [
        (2, [3], 1.0, "pass_at"),
        (2, [], 0.0, "attempts"),
    ],
)
def test_attempts_that_say_nothing_are_refused(attempts, pass_at, temperature, where):
    sampler = SamplerConfig(temperature=temperature)
    with raises(ConfigError, where=where):
        evaluate_task(LM, TASK, ROWS, sampler, attempts=attempts, pass_at=pass_at)


def test_attempts_on_canvases_of_random_tokens_differ():
    lm = character_model(TASK.alphabet, hidden=16, layers=1, context=128, seed=0, attention="bidirectional")
    sampler = SamplerConfig(max_denoising_steps=2)
    items = evaluate_task(lm.with_noise("uniform"), TASK, ROWS, sampler, attempts=3).items
    assert any(len({*item.completions}) > 1 for item in items)


def test_traces_have_the_step_of_each_token():
    (first, *_) = evaluate_task(LM, TASK, ROWS[:2], SamplerConfig(trace=True)).items
    (trace,) = first.traces
    assert (
        "".join(trace.tokens).startswith(first.completions[0])
        and len(trace.steps) == len(trace.tokens) == first.tokens
    )
