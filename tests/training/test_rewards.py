"""Reward functions are called as TRL calls them, and what no function judges is unscored, never zero."""

from __future__ import annotations

import math
import os

import pytest
import torch

from unmask.errors import ConfigError, TrainingError, UnmaskError
from unmask.rewards.verdict import Verdict
from unmask.tasks import Task, get_task
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


REWARDS = """
import os
def right(completions, answer, **_): return [float(t == a) if t != "?" else None for t, a in zip(completions, answer)]
def process(completions, **_): return [float(os.getpid())] * len(completions)
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "custom.py").write_text(REWARDS)
    return str(tmp_path / "custom.py")


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_a_function_of_a_file_gives_the_same_in_any_number_of_processes(path, workers):
    rewards = Rewards([f"{path}:right"], workers=workers)
    assert rewards.names == ["right"]
    assert_equal(rewards(ROWS, ["0", "?", "x"], IDS), [[1.0], [math.nan], [0.0]])


def test_workers_are_other_processes_and_without_them_it_is_this_one(path):
    here, there = Rewards(f"{path}:process")(ROWS, TEXTS, IDS), Rewards(f"{path}:process", workers=3)(ROWS, TEXTS, IDS)
    assert set(here.flatten().tolist()) == {float(torch.tensor(float(os.getpid())))}
    assert len(set(there.flatten().tolist())) == 3 and not set(there.flatten().tolist()) & set(here.flatten().tolist())


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_imported_is_told_before_training(path, workers):
    with pytest.raises(UnmaskError, match=r"cannot be imported|has no attribute"):
        Rewards(f"{path}:absent", workers=workers)


def test_a_named_shaping_is_several_functions_of_one_weight():
    rewards = Rewards(["gsm8k/published", right], weights=[0.5, 2.0])
    assert rewards.names == ["xml_count", "soft_format", "strict_format", "integer", "correctness", "right"]
    assert rewards.weights == [0.5] * 5 + [2.0]


def test_statuses_are_counted_and_what_could_not_be_judged_is_unscored(monkeypatch):
    class Odd(Task):
        name, fields, columns = "odd", ("answer",), ("answer",)

        def row(self, record, where):
            return {"prompt": "", "completion": "", "group": "", **record}

        def verify(self, completion, row):
            return {"0": Verdict(1.0, "ok"), "x": Verdict(None, "infrastructure")}.get(completion, Verdict(0.0, "timeout"))

    monkeypatch.setattr(Task, "_known", Task._known)
    rewards = Rewards("odd")
    reward_BF = rewards(ROWS, TEXTS, IDS)
    assert_equal(reward_BF, [[1.0], [math.nan], [0.0]])
    assert rewards.statuses == {"odd": {"ok": 1, "infrastructure": 1, "timeout": 1}}
    del Task._known["odd"]


def test_parts_of_a_wrong_length_are_refused(tmp_path):
    (tmp_path / "odd.py").write_text("def odd(completions, **_): return [1.0] * (3 if completions[0] == '0' else 1)")
    with pytest.raises(TrainingError, match="returned 3 values for 2 completions"):
        Rewards(f"{tmp_path}/odd.py:odd", workers=2)([*ROWS, ROWS[0]], [*TEXTS, "3"], [*IDS, [1]])


def test_what_cannot_be_judged_is_unscored_in_every_shaping(monkeypatch):
    unable = Verdict(None, "infrastructure", "no worker")
    monkeypatch.setattr("unmask.tasks.math500.equivalent", lambda *_: unable)
    monkeypatch.setattr("unmask.tasks.math500.equivalent_all", lambda pairs: [unable for _ in pairs])
    text = ["\\boxed{1}"]
    assert_equal(Rewards(["math500", "math500/published"])([ROWS[1]], text, IDS[:1]), [[math.nan, 0.5, math.nan]])
