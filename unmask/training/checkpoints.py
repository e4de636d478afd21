"""What a checkpoint holds, which one a run resumes from, and whether it is complete.

`output_dir/checkpoint-N` holds trained weights or adapters, the config with the model's earlier training,
metric sums (`metric_sums.json`), and settings and inputs in `run.json` (all by `Saver.trained_part`,
`durable/saving.py`). transformers adds optimizer, scheduler, random state and `trainer_state.json`. RL adds
`rollouts-RANK.pt` (updates left on a rollout), `prompts.json` (rewards) and the weights of a reference that
moves (`GRPOTrainer.save_model`, `rl/trainer.py`). `checkpoint_files.json`, written last, lists all files
(`durable/checkpoint_files.py`). A conversion has checkpoints in each `stage-N/`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals

from unmask.artifacts import read_file
from unmask.config.run import resumes_in_place
from unmask.errors import TrainingError, UnmaskWarning, first_line
from unmask.training.durable.checkpoint_files import fault
from unmask.training.durable.shards import INDEX, check_shards
from unmask.training.run_files import CHECKPOINT, checkpoints, step_of
from unmask.training.run_log import SUMS_NAME, read_sums

DELETE = "Delete this checkpoint: --resume then starts from the one before it, or from the beginning"
EARLIER = (
    "Use --resume without a path, which takes the last whole checkpoint of the run, or name an earlier one"
)


def remove_old(checkpoint: Path, limit: int | None, best: str | None) -> None:
    """Remove checkpoints beside one that was just written, until `limit` are left: first those of later
    steps, which a run left that was resumed before them, then the oldest. The best one stays. transformers
    goes by the clock, and removes other folders, too."""
    later_first = sorted(
        checkpoints(checkpoint.parent), key=lambda path: (step_of(path) <= step_of(checkpoint), step_of(path))
    )
    old = [path for path in later_first if path != checkpoint and str(path) != best]
    for path in old[: max(0, len(later_first) - limit)] if limit and limit > 0 else []:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def refuse_earlier(folder: Path, *, started: bool) -> None:
    """Raise TrainingError if the output folder holds checkpoints of an earlier run. Those of a run that has
    `started` are its own."""
    if not started and (earlier := checkpoints(folder)):
        remedy = "Resume with train(resume_from_checkpoint=True), remove it, or choose another output_dir"
        raise TrainingError("holds a checkpoint of an earlier run", where=str(earlier[0]), remedy=remedy)


def last_of_run(path: Path) -> Path | None:
    """The checkpoint at a path: itself, or the last whole one in the folder of a run, of the last stage that
    has one. None: there is none. Raises TrainingError if it is itself a checkpoint that is damaged."""
    if _is_checkpoint(path):
        if (found := _damage(path)) is not None:
            raise TrainingError(found, where=str(path), remedy=EARLIER)
        return path
    stages = sorted(path.glob("stage-*"), key=lambda stage: (len(stage.name), stage.name), reverse=True)
    return next((found for found in map(last_checkpoint, [*stages, path]) if found is not None), None)


def last_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint. Warns of later ones that are incomplete, because a run was killed while
    saving, or damaged."""
    damaged: list[str] = []
    whole = None
    for path in checkpoints(folder):
        if (found := _damage(path)) is None:
            whole = path
            break
        damaged.append(f"{path.name} ({found})")
    if damaged:
        message = (
            f"{folder}: incomplete or damaged: {', '.join(damaged)}: resuming from "
            f"{whole.name if whole else 'the start'}"
        )
        warnings.warn(message, UnmaskWarning, stacklevel=3)
    return whole


def checked_checkpoint(folder: Path, named: str | Path | Literal[True], *, in_shards: bool) -> Path | None:
    """The checkpoint that a run resumes from.

    Args:
        named: a path, as in `named_checkpoint`; True: the last whole checkpoint in the output folder, if
            there is one.
        in_shards: whether FSDP or DeepSpeed wrote it, in files of its own format.

    Raises:
        TrainingError: it is missing, incomplete or damaged.
    """
    checkpoint = last_checkpoint(folder) if named is True else named_checkpoint(Path(named))
    if checkpoint is not None:
        (check_in_shards if in_shards else check_parts)(checkpoint)
    return checkpoint


def named_checkpoint(path: Path) -> Path:
    """As `last_of_run`. Raises TrainingError if there is none."""
    if (checkpoint := last_of_run(path)) is None:
        raise TrainingError(
            "holds no complete checkpoint",
            where=str(path),
            remedy="Name a folder checkpoint-N, or that of a run",
        )
    return checkpoint


def stage_of(checkpoint: Path) -> int:
    """The number of the stage of a conversion that a checkpoint is of. Raises TrainingError if it is of
    none."""
    parents = checkpoint.absolute().parent, checkpoint.resolve().parent  # either may be a link
    stage = next((found for parent in parents if (found := re.fullmatch(r"stage-(\d+)", parent.name))), None)
    if stage is None:
        remedy = "Name a folder stage-N/checkpoint-M, or that of a conversion"
        raise TrainingError("is no checkpoint of a conversion", where=str(checkpoint), remedy=remedy)
    return int(stage[1])


def check_last(checkpoint: Path, output: Path) -> None:
    """Raise TrainingError for a checkpoint with later ones in the output folder, which the next --resume
    would use instead."""
    if not _is_checkpoint(checkpoint) or not resumes_in_place(output, str(checkpoint)):
        return
    folder = (checkpoint if CHECKPOINT.fullmatch(checkpoint.name) else checkpoint.resolve()).parent
    later = [path.name for path in checkpoints(folder) if step_of(path) > step_of(checkpoint)]
    if later:
        remedy = "Remove the later ones, choose another output_dir, or resume from the last checkpoint"
        raise TrainingError(
            f"is followed by {', '.join(reversed(later))}", where=str(checkpoint), remedy=remedy
        )


def steps_done(checkpoint: Path) -> int | None:
    """The optimizer steps before the checkpoint; None if its state file, which is written last, is missing or
    incomplete."""
    try:
        return json.loads(read_file(checkpoint / TRAINER_STATE_NAME))["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_parts(checkpoint: Path) -> None:
    """Raise TrainingError unless a checkpoint of transformers has all the parts that a run resumes from."""
    if not any(checkpoint.glob("*.safetensors")):
        raise TrainingError("has no weights", where=str(checkpoint), remedy=DELETE)
    for name in (OPTIMIZER_NAME, SCHEDULER_NAME):
        if not (path := checkpoint / name).is_file():
            remedy = f"{DELETE}. With save_only_model no checkpoint has it: start a new run from its weights"
            raise TrainingError("is missing: the run would not be the same", where=str(path), remedy=remedy)
    for path in (
        checkpoint / OPTIMIZER_NAME,
        checkpoint / SCHEDULER_NAME,
        *checkpoint.glob("rng_state*.pth"),
    ):
        with _loading(path), safe_globals():
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # reads no tensors yet
    with _loading(checkpoint / SUMS_NAME):
        read_sums(checkpoint)


def check_in_shards(checkpoint: Path) -> None:
    """Raise TrainingError for shards of FSDP that could run code."""
    for index in sorted(checkpoint.glob(f"*/{INDEX}")):
        with _loading(index):
            check_shards(index)


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Inside, whatever is raised is a TrainingError about this file."""
    try:
        yield
    except Exception as error:  # user code: anybody's file
        raise TrainingError(
            f"cannot be loaded ({first_line(error)})", where=str(path), remedy=DELETE
        ) from error


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None: nothing."""
    return (
        f"{TRAINER_STATE_NAME} is missing or incomplete"
        if steps_done(checkpoint) is None
        else fault(checkpoint)
    )


def _is_checkpoint(path: Path) -> bool:
    return any(CHECKPOINT.fullmatch(each.name) for each in (path, path.resolve()))
