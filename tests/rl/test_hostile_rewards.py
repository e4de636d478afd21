"""Rewards that hang, crash or return nonsense: a run goes on without them, or ends with one error, and is
never trained on them."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.helpers import partly_nightly
from tests.rl.hostile_rewards import BODIES, source
from tests.training.tiny_runs import PAIRS, make
from unmask.errors import RunStopped, TrainingError
from unmask.rl.weighted_rewards import Rewards
from unmask.training.run.around import StopOnSignal

ROWS = [{"prompt": f"p{i}", "answer": [str(i)]} for i in range(3)]
TEXTS, IDS = ["a", "b", "c"], [[4], [5], [6]]
SHORT = [
    "returns NaN",
    "raises KeyboardInterrupt",
    "forks",
    "edits completions",
    "sleeps",
    "raises an error with a cause without end",
    "returns verdicts of a status that is a list",
]


def good(completions, **_):
    return [float(text == "a") for text in completions]


def outcome(tmp_path, name, workers):
    """The total of the rewards, or the error."""
    path = tmp_path / "hostile.py"
    path.write_text(source(name))
    rewards, own, rows = (
        Rewards([good, f"{path}:reward"], workers=workers, seconds=0.5 if workers == 0 else 2.0),
        os.getpid(),
        ROWS,
    )
    untouched = repr(rows)
    try:
        result = rewards(rows, TEXTS, IDS)
    except TrainingError as error:
        result = error
    assert os.getpid() == own and repr(rows) == untouched
    return result


def check(result, name):
    if isinstance(result, TrainingError):
        assert "reward function reward" in str(result) and result.remedy
        return
    assert result.reward_BF[:, 0].tolist() == [1.0, 0.0, 0.0]  # that of the other function
    value_B = result.reward_BF[:, 1]
    assert (value_B.isnan() | (value_B == 1.0)).all(), (name, value_B)


@pytest.mark.parametrize("name", SHORT)
def test_a_hostile_reward_ends_nothing(tmp_path, name):
    check(outcome(tmp_path, name, 0), name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_reward_is_computed_ends_the_run_and_no_call_is_repeated(tmp_path, number):
    calls = []

    def signalled(completions, **_):
        calls.append(completions)
        os.kill(os.getpid(), number)
        return stopped.wait(60)

    stopped = threading.Event()
    rewards = Rewards([signalled])
    with (
        pytest.raises(RunStopped, match=f"stopped by {number.name} at once"),
        StopOnSignal(tmp_path, resumes=False),
    ):
        rewards(ROWS, TEXTS, IDS)
    stopped.set()
    assert calls == [TEXTS]


@pytest.mark.slow
@pytest.mark.parametrize(  # a process starts for each of the latter
    "name, workers",
    [(name, 0) for name in BODIES]
    + [
        pytest.param(name, 1, marks=[pytest.mark.nightly] * (number % 6 > 0))
        for number, name in enumerate(BODIES)
    ],
)
def test_no_hostile_reward_ends_anything(tmp_path, name, workers):
    assert len(BODIES) > 75
    check(outcome(tmp_path, name, workers), name)


@pytest.mark.slow
@partly_nightly("name", BODIES, 3)
def test_a_run_ends_or_goes_on_with_a_hostile_reward(tmp_path, name):
    path = tmp_path / "hostile.py"
    path.write_text(source(name))
    rows = [{**row, "answer": ["1"]} for row in PAIRS]
    trainer = make(
        "grpo", tmp_path / "run", rows=rows, reward=f"{path}:reward", max_steps=4, reward_timeout=0.3
    )
    try:
        trainer.train()
    except TrainingError as error:
        assert error.remedy and trainer.state.global_step <= 2
    else:
        assert trainer.state.global_step == 4
    assert all(weight.isfinite().all() for weight in trainer.lm.model.parameters())
    assert [row["answer"] for row in rows] == [["1"]] * len(rows)
