"""Which checkpoints a run keeps and resumes from: whatever the clock says, and also if they are links."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.errors import raises
from tests.training.tiny_runs import Before, equal, make, weights
from unmask.errors import TrainingError
from unmask.training.run.checkpoint import check_last, last_checkpoint, remove_old, stage_of
from unmask.training.run.folder import checkpoints

RUN = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_a_clock_that_is_set_back_costs_no_checkpoint(tmp_path):
    def set_back() -> None:
        for path in tmp_path.glob("checkpoint-*"):
            os.utime(path, (time.time() + 1e5,) * 2)

    make(
        "sft", tmp_path, **RUN, save_total_limit=2, callbacks=[Before(step, set_back) for step in (3, 5)]
    ).train()
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]


def test_only_checkpoints_of_the_run_are_removed(tmp_path):
    for name in ("checkpoint-best", "checkpoint-2-good", "old-checkpoint-1"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    make("sft", tmp_path, **RUN, save_total_limit=1).train()
    assert names(tmp_path) == ["checkpoint-2-good", "checkpoint-6", "checkpoint-best", "old-checkpoint-1"]


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, "2 4 6 8"),
        (3, None, "2 4 6"),
        (2, None, "4 6"),
        (2, "2", "2 6"),
        (1, None, "6"),
        (1, "2", "2 6"),
        (0, None, "2 4 6 8"),
    ],
)
def test_later_checkpoints_are_removed_first_and_the_best_stays(limit, best, left, tmp_path):
    for step in ("2", "4", "6", "8"):
        (tmp_path / "of" / f"checkpoint-{step}").mkdir(parents=True)
    (tmp_path / "of/checkpoint-2").rename(tmp_path / "elsewhere")
    (tmp_path / "of/checkpoint-2").symlink_to(tmp_path / "elsewhere")
    remove_old(tmp_path / "of/checkpoint-6", limit, best and str(tmp_path / f"of/checkpoint-{best}"))
    assert names(tmp_path / "of") == [f"checkpoint-{step}" for step in left.split()]
    assert (tmp_path / "elsewhere").is_dir()


def test_a_checkpoint_that_was_moved_and_linked_is_the_last_one(tmp_path):
    straight = make("sft", tmp_path / "run", **RUN)
    straight.train()
    shutil.rmtree(tmp_path / "run/checkpoint-6")
    shutil.move(tmp_path / "run/checkpoint-4", tmp_path / "moved")
    (tmp_path / "run/checkpoint-4").symlink_to(tmp_path / "moved")
    (tmp_path / "run/latest").symlink_to(tmp_path / "run/checkpoint-2")
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run/checkpoint-4"
    for earlier in ("checkpoint-2", "latest"):
        with raises(TrainingError, where=f"{tmp_path}/run/{earlier}"):
            check_last(tmp_path / "run" / earlier, tmp_path / "run")
    check_last(tmp_path / "run/checkpoint-4", tmp_path / "run")
    resumed = make("sft", tmp_path / "run", **RUN)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.lm), weights(straight.lm))


def test_a_stage_that_was_moved_and_linked_is_resumed(tmp_path):
    (tmp_path / "moved/checkpoint-2").mkdir(parents=True)
    (tmp_path / "stage-3").symlink_to(tmp_path / "moved")
    (checkpoint,) = checkpoints(tmp_path / "stage-3")
    assert stage_of(checkpoint) == 3
    with raises(TrainingError, where=str(tmp_path / "moved/checkpoint-2")):
        stage_of(tmp_path / "moved/checkpoint-2")
