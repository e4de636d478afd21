"""The log of a run, line by line."""

from __future__ import annotations

import contextlib
import importlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from tests.training.tiny_runs import PREFERENCES, make
from unmask.artifacts import MetricsLog
from unmask.training.metrics import Means
from unmask.training.run.log import LOG_NAME, RunLog


def steps(log: RunLog) -> list[tuple[Any, Any]]:
    return [(line.get("stage"), line["step"]) for line in MetricsLog(log.folder / LOG_NAME).read()]


@pytest.mark.parametrize(("step", "left"), [(3, [1, 2, 3]), (2, [1, 2]), (0, [])])
def test_a_run_goes_back_to_a_step(step, left, tmp_path):
    log = RunLog(folder=tmp_path)
    for at in (1, 2, 3):
        log.write(at, {"loss": 0.1 + at})
    log.write(3, {"train_loss": 1.0})
    log.write(3, {"eval_loss": 1.0})
    before = (tmp_path / LOG_NAME).read_text().splitlines()
    log.rewind(step)
    assert steps(log) == [(None, at) for at in left]
    assert (tmp_path / LOG_NAME).read_text().splitlines() == before[: len(left)]
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]


def test_a_stage_goes_back_with_those_after_it_and_leaves_those_before(tmp_path):
    parts = [
        RunLog(folder=tmp_path, first_step=first, stage=number) for number, first in ((1, 0), (2, 2), (3, 4))
    ]
    for part in parts:
        for at in (1, 2):
            part.write(at, {"loss": 1.0})
        part.write(2, {"train_loss": 1.0})
    parts[1].rewind(1)
    assert steps(parts[1]) == [(1, 1), (1, 2), (1, 2), (2, 3)]
    assert [line["step"] for line in parts[1].read()] == [1]
    parts[1].rewind(0)
    assert steps(parts[1]) == [(1, 1), (1, 2), (1, 2)]


def test_a_line_torn_by_a_crash_and_a_missing_log_are_no_obstacle(tmp_path):
    log = RunLog(folder=tmp_path)
    log.rewind(1)
    assert log.read() == [] and not list(tmp_path.iterdir())
    log.write(1, {"loss": 1.0})
    with (tmp_path / LOG_NAME).open("a") as file:
        file.write('{"step": 2, "lo')
    log.rewind(1)
    log.write(2, {"loss": 2.0})
    assert steps(log) == [(None, 1), (None, 2)]


SHOWN = {
    "loss",
    "learning_rate",
    "margin",
    "accuracy",
    "chosen",
    "rejected",
    "tokens_per_second",
    "memory_gb",
}
HELD_OUT = {"loss", "margin", "accuracy", "chosen", "rejected"}


def tensorboard_scalars(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return set(EventAccumulator(str(folder / "board")).Reload().Tags()["scalars"])


def wandb_scalars(folder: Path) -> set[str]:
    wandb = importlib.import_module("wandb")
    told = set(wandb.run.summary.keys())
    wandb.finish()
    wandb.teardown()  # else the next run of this process goes to the same folder
    return told


def trackio_scalars(folder: Path) -> set[str]:
    place = importlib.import_module("trackio.utils").TRACKIO_DIR  # that of the first import
    with contextlib.closing(sqlite3.connect(place / "huggingface.db")) as database:
        return {
            name for (line,) in database.execute("SELECT metrics FROM metrics") for name in json.loads(line)
        }


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_trackers_get_what_is_told_of_preferences(tracker, tmp_path, monkeypatch):
    folders = {
        "TENSORBOARD_LOGGING_DIR": tmp_path / "board",
        "WANDB_DIR": tmp_path,
        "TRACKIO_DIR": tmp_path / "trackio",
    }
    for name, value in {**folders, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, str(value))
    pytest.importorskip(tracker)
    more = {
        "log_memory_usage": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": PREFERENCES[:2],
    }
    make("dpo", tmp_path / "run", report_to=[tracker], run_name="run", **more).train()
    scalars = {"tensorboard": tensorboard_scalars, "wandb": wandb_scalars, "trackio": trackio_scalars}[
        tracker
    ](tmp_path)
    assert {f"train/{name}" for name in SHOWN} | {f"eval/{name}" for name in HELD_OUT} <= scalars


measured = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-9, 9), st.integers(0, 3)))


@given(measured, measured, st.sets(st.sampled_from("abc")))
def test_a_mean_is_of_all_since_it_was_last_taken_and_goes_on_from_what_was_kept(before, after, due):
    earlier, means = Means(), Means()
    for name, value, count in before:
        earlier.add(name, value * count, count)
    means.add("of another run", 1, 1)
    means.load(json.loads(json.dumps(earlier.state())))
    for name, value, count in after:
        means.add(name, value * count, count)
    values = {
        name: [value for key, value, count in before + after for _ in range(count) if key == name]
        for name in "abc"
    }
    expected = {name: approx(sum(values[name]) / len(values[name])) for name in "abc" if values[name]}
    assert means.state_everywhere() == means.state()  # of one process
    assert means.take(due.__contains__) == {name: mean for name, mean in expected.items() if name in due}
    assert means.take(lambda name: True) == {name: mean for name, mean in expected.items() if name not in due}
    assert means.take(lambda name: True) == {}
