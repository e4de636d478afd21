"""Checkpoints: written whole or not at all, listed with sizes and hashes, and compared with that list before
a run resumes from one.

`output_dir/checkpoint-N` holds trained weights or adapters, the config with the model's earlier training,
metric sums (`metric_sums.json`), and settings and inputs in `run.json` (`DiffusionTrainer.save_model`).
transformers adds optimizer, scheduler, random state and `trainer_state.json`. RL adds `rollouts-RANK.pt`
(updates left on a rollout), `prompts.json` (rewards) and the weights of a reference that moves
(`GRPOTrainer.save_model`). A conversion has checkpoints in each `stage-N/`.

A folder is written in `.unfinished` beside its place, and renamed when every file is on the disk. The list,
`checkpoint_files.json`, is written last. It covers the files of all processes, so also the shards of FSDP and
DeepSpeed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from accelerate import PartialState
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from unmask.artifacts import default_mode, irregular_file, read_file, write_atomic
from unmask.errors import TrainingError, UnmaskWarning, first_line
from unmask.training.run.around import MAKE_ROOM, naming_write_errors
from unmask.training.run.folder import CHECKPOINT, UNFINISHED, checkpoints, resumes_in_place, step_of
from unmask.training.run.record import RECORD_FILE, read_record
from unmask.training.run.shards import INDEX, check_shards

FILE_LIST = "checkpoint_files.json"
SUMS_NAME = "metric_sums.json"
LAST_ON_HUB = "last-checkpoint"  # with `hub_strategy: checkpoint`
EARLIER = ".earlier"  # ends the name of a folder that a new one replaces
THREADS = 4  # hashing releases the lock of the interpreter


# Write.


@contextlib.contextmanager
def written_checkpoint(checkpoint: Path, needed: Callable[[], int], *, writes: bool) -> Iterator[Path]:
    """A context in which all processes write a checkpoint into the folder that this yields. It is in its
    place afterwards. If it cannot be written, earlier checkpoints are intact.

    Args:
        needed: the expected bytes of a first checkpoint.
        writes: whether this process creates and moves the folder.

    Raises:
        TrainingError: the disk is full or cannot be written.
    """
    earlier = checkpoints(checkpoint.parent)
    kept = f"{earlier[0].name} is intact: " if earlier else ""
    remedy = f"{MAKE_ROOM}. {kept}--resume continues from {'it' if earlier else 'the beginning'}"
    with naming_write_errors(checkpoint, remedy):
        if writes:
            check_free_space(checkpoint.parent, bytes_of(earlier[0]) if earlier else needed(), remedy)
        with written_whole(checkpoint, writes=writes, listed=True) as unfinished:
            yield unfinished


@contextlib.contextmanager
def written_whole(folder: Path, *, writes: bool, listed: bool) -> Iterator[Path]:
    """A context in which all processes write into the folder that this yields. Afterwards it takes the place
    of `folder`. If anything fails, `folder` is unchanged.

    Args:
        writes: whether this process creates and moves the folder.
        listed: whether a list of its files is written.
    """
    unfinished = folder.parent / UNFINISHED / folder.name
    processes = PartialState()
    if writes:
        # of a run that was killed while it moved the folder
        for earlier in unfinished.parent.glob(f"*{EARLIER}"):
            if not (place := folder.with_name(earlier.name.removesuffix(EARLIER))).exists():
                earlier.rename(place)
        shutil.rmtree(unfinished.parent, ignore_errors=True)
        unfinished.mkdir(parents=True)
    processes.wait_for_everyone()
    with contextlib.ExitStack() as failing:
        if writes:
            failing.callback(shutil.rmtree, unfinished.parent, ignore_errors=True)  # it may fill the disk
        yield unfinished
        processes.wait_for_everyone()
        if writes:
            publish(unfinished, folder, listed=listed)
        failing.pop_all()
    processes.wait_for_everyone()


def publish(unfinished: Path, folder: Path, *, listed: bool) -> None:
    """Move a folder to its place when its files are on the disk, with the permissions that the umask
    gives."""
    files = [path for path in sorted(unfinished.rglob("*")) if path.is_file()]
    for path in files:
        path.chmod(default_mode())  # safetensors lets only the owner read
        sync(path)
    if listed:
        content = {"files": described(unfinished, files)}
        write_atomic(unfinished / FILE_LIST, json.dumps(content, indent=1) + "\n")
    for inner in {path.parent for path in files}:
        sync(inner)
    earlier = unfinished.with_name(folder.name + EARLIER)
    if folder.exists():
        folder.rename(earlier)
    try:
        unfinished.rename(folder)
    except OSError:
        if earlier.exists():
            earlier.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(unfinished.parent, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def described(folder: Path, files: list[Path]) -> dict[str, dict[str, int | str]]:
    """Size in bytes and SHA-256 of files, by their paths in the folder."""
    with ThreadPoolExecutor(THREADS) as pool:
        return {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": each}
            for path, each in zip(files, pool.map(_sha256, files), strict=True)
        }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_free_space(folder: Path, needed: int, remedy: str) -> None:
    """Raise TrainingError if the disk of a folder has fewer free bytes than needed."""
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < needed:
        what = f"a checkpoint needs {needed / 1e9:.3g} GB, but the disk has {free / 1e9:.3g} GB left"
        raise TrainingError(what, where=str(folder), remedy=remedy)


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


# Read.


def fault(checkpoint: Path) -> str | None:
    """The first difference between a checkpoint and its list of files, as a sentence; None: there is none."""
    try:
        if irregular := irregular_file(checkpoint):
            return f"{irregular} is not a file"
        listed = json.loads(read_file(checkpoint / FILE_LIST))["files"]
        files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != FILE_LIST]
        found = described(checkpoint, files)
        different = [name for name in listed if found.get(name) != listed[name]]
    except FileNotFoundError:
        return f"{FILE_LIST} is missing"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"its files cannot be read ({first_line(error)})"
    # transformers reads some by their names, such as scaler.pt
    added = [name for name in found if name not in listed and not name.rpartition("/")[2].startswith(".")]
    if added:
        return f"{added[0]} is not in {FILE_LIST}"
    return f"{different[0]} is {'damaged' if different[0] in found else 'missing'}" if different else None


def steps_done(checkpoint: Path) -> int | None:
    """The optimizer steps before the checkpoint; None: its state is missing or damaged."""
    try:
        return int(json.loads(read_file(checkpoint / TRAINER_STATE_NAME))["global_step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


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
        if (found := fault(path)) is not None:
            remedy = (
                "Use --resume without a path, which takes the last whole checkpoint of the run, or name an "
                "earlier one"
            )
            raise TrainingError(found, where=str(path), remedy=remedy)
        return path
    stages = sorted(path.glob("stage-*"), key=lambda stage: (len(stage.name), stage.name), reverse=True)
    return next((found for found in map(last_checkpoint, [*stages, path]) if found is not None), None)


def last_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint. Warns of later ones that are incomplete, because a run was killed while
    saving, or damaged."""
    damaged: list[str] = []
    whole = None
    for path in checkpoints(folder):
        if (found := fault(path)) is None:
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
        TrainingError: it is missing, incomplete or damaged, or was saved with `save_only_model`.
    """
    checkpoint = last_checkpoint(folder) if named is True else named_checkpoint(Path(named))
    for name in (OPTIMIZER_NAME, SCHEDULER_NAME) if checkpoint is not None and not in_shards else ():
        if not (path := checkpoint / name).is_file():
            remedy = "With save_only_model no checkpoint has it: start a new run from its weights"
            raise TrainingError("is missing: the run would not be the same", where=str(path), remedy=remedy)
    if checkpoint is not None and in_shards:
        check_in_shards(checkpoint)
    return checkpoint


def check_in_shards(checkpoint: Path) -> None:
    """Raise TrainingError for shards of FSDP that could run code."""
    for index in sorted(checkpoint.glob(f"*/{INDEX}")):
        try:
            check_shards(index)
        except Exception as error:  # whatever a forged index raises
            what, remedy = f"cannot be loaded ({first_line(error)})", "Delete this checkpoint"
            raise TrainingError(what, where=str(index), remedy=remedy) from error


def named_checkpoint(path: Path) -> Path:
    """Like `last_of_run`. Raises TrainingError if there is none."""
    if (checkpoint := last_of_run(path)) is None:
        raise TrainingError(
            "holds no complete checkpoint",
            where=str(path),
            remedy="Name a folder checkpoint-N, or that of a run",
        )
    return checkpoint


def stage_of(checkpoint: Path) -> int:
    """The number of the stage of a conversion that a checkpoint is of, by its folder, or its record if it is
    elsewhere. Raises TrainingError if it is of none."""
    parents = checkpoint.absolute().parent, checkpoint.resolve().parent  # either may be a link
    named = next((found for parent in parents if (found := re.fullmatch(r"stage-(\d+)", parent.name))), None)
    recorded = {} if named or not (checkpoint / RECORD_FILE).is_file() else read_record(checkpoint)
    if (stage := named[1] if named else recorded.get("stage")) is None:
        remedy = "Name a folder stage-N/checkpoint-M, or that of a conversion"
        raise TrainingError("is no checkpoint of a conversion", where=str(checkpoint), remedy=remedy)
    return int(stage)


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


def _is_checkpoint(path: Path) -> bool:
    return path.name == LAST_ON_HUB or any(CHECKPOINT.fullmatch(each.name) for each in (path, path.resolve()))


def load_renamed(model: Any, checkpoint: Path) -> None:
    """Load the weights that a checkpoint holds under other names. transformers stores experts one by one, and
    its Trainer reads only names that are the model's."""
    files, stored = [*checkpoint.glob("model*.safetensors")], set[str]()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            stored |= set(opened.keys())
    if not files or not isinstance(model, PreTrainedModel):
        return
    state = model.state_dict()
    loaded = {state[name].data_ptr() for name in stored & state.keys()}  # a tied weight has one name there
    if renamed := {name for name, weight in state.items() if weight.data_ptr() not in loaded}:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
        read = kind.from_pretrained(checkpoint, config=model.config, dtype=model.dtype).state_dict()
        model.load_state_dict({name: read[name] for name in renamed & read.keys()}, strict=False)
