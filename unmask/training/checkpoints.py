"""Which checkpoint a run goes on from, and whether it is whole."""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from unmask.errors import TrainingError

ADAPTER_CONFIG = "adapter_config.json"
DELETE = "Delete this checkpoint: --resume then goes on from the one before, or from the start"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the last step first."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if re.fullmatch(r"\d+", _step(path)) and path.is_dir()]
    return sorted(found, key=lambda path: int(_step(path)), reverse=True)


def refuse_earlier(folder: Path, *, started: bool) -> None:
    """That no checkpoint of an earlier run would be overwritten; those of a run that has `started` are its own.

    Raises:
        TrainingError: there is one.
    """
    if not started and (earlier := checkpoints(folder)):
        remedy = "Resume with train(resume_from_checkpoint=True), remove it, or choose another output_dir"
        raise TrainingError("holds a checkpoint of an earlier run", where=str(earlier[0]), remedy=remedy)


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that was written to its end; warns of later ones, which a run left that was killed while saving."""
    torn = []
    for checkpoint in checkpoints(folder):
        if steps_done(checkpoint) is not None:
            break
        torn.append(checkpoint.name)
    else:
        checkpoint = None
    if torn:
        message = f"{folder}: {', '.join(torn)} was not written to its end: going on from {checkpoint.name if checkpoint else 'the start'}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return checkpoint


def checked_checkpoint(folder: Path, named: str | Literal[True], *, sharded: bool, adapters: bool) -> Path | None:
    """The checkpoint that a run goes on from.

    Args:
        folder: the output folder.
        named: a path, as of `named_checkpoint`; True: the last whole checkpoint in the output folder, None if it has none.
        sharded: whether it is of FSDP or DeepSpeed, with files that are not looked into.
        adapters: whether the run trains adapters.

    Raises:
        TrainingError: it is not there or not whole, or holds adapters where the run has none, or the reverse.
    """
    checkpoint = last_checkpoint(folder) if named is True else named_checkpoint(Path(named))
    if checkpoint is not None and not sharded:
        check_whole(checkpoint)
        check_adapters(checkpoint, adapters=adapters)
    return checkpoint


def named_checkpoint(path: Path) -> Path:
    """The checkpoint that a user names: itself, or the last whole one of the run in this folder.

    Raises:
        TrainingError: there is none.
    """
    if _is_checkpoint(path):
        return path
    if (checkpoint := last_checkpoint(path)) is None:
        raise TrainingError("holds no whole checkpoint", where=str(path), remedy="Name a folder checkpoint-N, or that of a run")
    return checkpoint


def named_stage(path: Path) -> tuple[int, Path]:
    """The number of the stage, and the checkpoint in it, that a user names of a conversion: a checkpoint, a stage, or the whole folder.

    Raises:
        TrainingError: there is none.
    """
    stages = {int(folder.name.removeprefix("stage-")): folder for folder in path.glob("stage-*") if folder.name[6:].isdecimal()}
    whole = [number for number, folder in stages.items() if last_checkpoint(folder) is not None]
    checkpoint = named_checkpoint(stages[max(whole)] if whole else path)
    stage = re.fullmatch(r"stage-(\d+)", checkpoint.resolve().parent.name)
    if stage is None:
        remedy = "Name a folder stage-N/checkpoint-M, or that of a conversion"
        raise TrainingError("is no checkpoint of a conversion", where=str(path), remedy=remedy)
    return int(stage[1]), checkpoint


def check_last(checkpoint: Path, output: Path) -> None:
    """That a run which goes on from this checkpoint leaves no later one in its output folder: the next --resume would take that.

    Raises:
        TrainingError: there is one.
    """
    folder = checkpoint.resolve().parent
    later = [path.name for path in checkpoints(folder) if int(_step(path)) > int(_step(checkpoint))] if _is_checkpoint(checkpoint) else []
    if later and folder.is_relative_to(output.resolve()):
        remedy = "Remove what is later, choose another output_dir, or resume from the last checkpoint"
        raise TrainingError(f"is followed by {', '.join(reversed(later))}", where=str(checkpoint), remedy=remedy)


def steps_done(checkpoint: Path) -> int | None:
    """The optimizer steps made before the checkpoint; None where its state, which is written last, is not there or torn."""
    try:
        return json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def check_whole(checkpoint: Path) -> None:
    """That a checkpoint of a run that is not sharded has all that the run goes on with.

    Raises:
        TrainingError: a file is missing or torn.
    """
    if steps_done(checkpoint) is None:
        raise TrainingError("is missing or torn", where=str(checkpoint / TRAINER_STATE_NAME), remedy=DELETE)
    check_weights(checkpoint)
    for name in (OPTIMIZER_NAME, SCHEDULER_NAME):
        path = checkpoint / name
        if not path.is_file():
            remedy = f"{DELETE}. With save_only_model no checkpoint has it: start anew, from its weights"
            raise TrainingError("is missing: the run would not be the same", where=str(path), remedy=remedy)
        if not zipfile.is_zipfile(path):
            raise TrainingError("cannot be read", where=str(path), remedy=DELETE)


def check_adapters(checkpoint: Path, *, adapters: bool) -> None:
    """That a checkpoint is of a run with adapters, or without, as this one is. Raises `TrainingError`."""
    if (checkpoint / ADAPTER_CONFIG).is_file() != adapters:
        what, remedy = ("holds no adapters", "Leave lora out") if adapters else ("holds adapters alone", "Set lora as that run had it")
        raise TrainingError(what, where=str(checkpoint), remedy=remedy)


def check_weights(checkpoint: Path) -> None:
    """That the weights are there and whole. Raises `TrainingError`."""
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise TrainingError("has no weights", where=str(checkpoint), remedy=DELETE)
    for path in files:
        try:
            with safe_open(path, framework="pt"):  # reads the header, and compares the file's length with it
                pass
        except SafetensorError as error:
            raise TrainingError(f"cannot be read ({error})", where=str(path), remedy=DELETE) from error


def _is_checkpoint(path: Path) -> bool:
    return re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", path.resolve().name) is not None


def _step(path: Path) -> str:
    return path.resolve().name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
