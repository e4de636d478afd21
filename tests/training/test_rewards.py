"""Reward functions are called as TRL calls them, and what no function judges is unscored, never zero."""

from __future__ import annotations

import math

import pytest
import torch

from unmask.errors import ConfigError, TrainingError
from unmask.tasks import get_task
from unmask.training.rewards import Rewards

ROWS = [{"prompt": f"p{i}", "answer": str(i), "sample_id": i, "repeat": 0, "completion": "c"} for i in range(3)]
TEXTS = ["0", "x", "2"]
IDS = [[4, 2], [5, 2], [6, 7, 2]]


def right(prompts, completions, answer, **_):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def only_first(completions, **_):
    return [0.25] + [None] * (len(completions) - 1)


async def length(completion_ids, **_):
    return [len(ids) for ids in completion_ids]


class Late:
    """A callable object whose result is awaited."""

    def __call__(self, **columns):
        return length(**columns)


def assert_equal(tensor: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(tensor, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_functions_are_called_with_prompts_completions_ids_and_columns():
    seen = []
    assert_equal(Rewards(lambda **arguments: seen.append(arguments) or [1, 2, 3])(ROWS, TEXTS, IDS), [[1.0], [2.0], [3.0]])
    assert seen == [{"prompts": ["p0", "p1", "p2"], "completions": TEXTS, "completion_ids": IDS, "answer": ["0", "1", "2"]}]


def test_messages_are_answered_with_messages():
    seen = {}
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "sample_id": 0, "repeat": 0}]
    Rewards(lambda **arguments: seen.update(arguments) or [0.0])(rows, ["yes"], [[4]])
    assert seen["completions"] == [[{"role": "assistant", "content": "yes"}]]
    assert seen["prompts"] == [rows[0]["prompt"]]


def test_sync_async_and_objects_side_by_side():
    rewards = Rewards([right, only_first, length, Late()])
    nan = math.nan
    assert_equal(rewards(ROWS, TEXTS, IDS), [[1.0, 0.25, 2.0, 2.0], [0.0, nan, 2.0, 2.0], [1.0, nan, 3.0, 3.0]])
    assert rewards.names == ["right", "only_first", "length", "Late"]


def test_totals_weigh_what_applies():
    nan = math.nan
    reward_BF = torch.tensor([[1.0, 0.5], [1.0, nan], [nan, 2.0], [nan, nan], [0.0, 0.0]])
    assert_equal(Rewards([right, length], [2.0, -1.0]).total(reward_BF), [1.5, 2.0, -2.0, nan, 0.0])
    assert_equal(Rewards([right, length]).total(reward_BF), [1.5, 1.0, 2.0, nan, 0.0])


def test_what_nothing_judges_is_unscored():
    rewards = Rewards(only_first)
    assert_equal(rewards.total(rewards(ROWS, TEXTS, IDS)), [0.25, math.nan, math.nan])


@pytest.mark.parametrize("name", ["sudoku", "countdown"])
def test_tasks_are_named(name):
    rows = get_task(name).generate("train", 3, seed=0)
    rewards = Rewards([name, length], weights=[1.0, 0.0])
    assert rewards.names == [name, "length"]
    answers = [rows[0]["completion"], "", rows[2]["completion"]]
    assert_equal(rewards.total(rewards(rows, answers, IDS)), [1.0, 0.0, 1.0])
    with pytest.raises(ConfigError, match="unknown task"):
        Rewards(name[:-1])


def test_functions_and_weights_that_do_not_fit():
    with pytest.raises(ConfigError, match="reward_funcs: no reward function"):
        Rewards([])
    with pytest.raises(ConfigError, match="reward_weights: 1 weights for 2 functions"):
        Rewards([right, length], weights=[1.0])


@pytest.mark.parametrize("returned", [[1.0, 2.0], [], 0.5, None])
def test_a_wrong_return_value_names_the_function(returned):
    def wrong(**_):
        return returned

    with pytest.raises(TrainingError, match=r"reward function wrong: returned .* for 3 completions\. Return one float or None"):
        Rewards([right, wrong])(ROWS, TEXTS, IDS)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions, **_: ["a" for _ in completions], r"completion 0: returned 'a'"),
        (lambda completions, **_: [1.0, float("nan")], r"completion 1: returned nan"),
        (lambda completions, **_: 1 / 0, "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_reward_that_misbehaves_is_named(function, message):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(TrainingError, match=rf"^reward function <lambda>.*{message}"):
        Rewards(function)(rows, ["x", "y"], [[1], [2]])
