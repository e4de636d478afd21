"""The output folder of a run: what may be written there, where it resumes, its config and its manifest.
Nothing here imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.artifacts import read_file, run_manifest, write_atomic, write_json
from unmask.config.run import LOCK_FILE, RunConfig, check_output_folder, inputs_of, to_yaml
from unmask.errors import ConfigError, TrainingError
from unmask.models.model_paths import CONFIG, RUN_CONFIG, RUN_MANIFEST, TRAINED_MODEL
from unmask.training.run.log import LOG_NAME

if TYPE_CHECKING:
    from unmask.training.run.record import RunRecord

DATA_REPORT = "data_report.json"
RUN_PATTERNS = (
    RUN_CONFIG,
    RUN_MANIFEST,
    LOG_NAME,
    LOCK_FILE,
    "checkpoint-*",
    "stage-*",
    "*_reference_scores.safetensors",
)
"""The files of a run. dpo stores the reference's scores before all else."""
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
CHECKPOINT_PATH = re.compile(r"(stage-\d+/)?checkpoint-\d+|stage-\d+")
"""The checkpoints of a run, and the stages of a conversion, by their paths in its output folder."""
UNFINISHED = ".unfinished"
"""Where a folder is written that takes its name when it is complete."""
RUN_OUTPUT = re.compile(rf"(checkpoint|stage)-\d+|{TRAINED_MODEL}|{re.escape(UNFINISHED)}")
"""The folders that a run writes, replaces and removes."""


def refuse_nothing(folder: Path) -> None:
    """Raise TrainingError if no run began in the output folder. One that ended before its first checkpoint
    left other files."""
    if not any(any(folder.glob(pattern)) for pattern in RUN_PATTERNS):
        remedy = "Check the path, or start a new run without --resume (resume_from_checkpoint)"
        raise TrainingError("holds no run: there is nothing to resume", where=str(folder), remedy=remedy)


def is_run(folder: Path) -> bool:
    """Whether a run has written into a folder: it has a log of one, or a manifest with its verb."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        return (folder / LOG_NAME).is_file() or "verb" in json.loads(read_file(folder / RUN_MANIFEST))
    return False


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, latest first."""
    found = [
        path for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint, or of what a link points to."""
    found = CHECKPOINT.fullmatch(checkpoint.name) or CHECKPOINT.fullmatch(checkpoint.resolve().name)
    assert found is not None, checkpoint
    return int(found[1])


def split_resume(resume: str | None, settings: RunConfig) -> tuple[str | bool, RunConfig]:
    """The checkpoint to resume from, and the settings without it: `training.resume_from_checkpoint` is the
    same as `--resume`.

    Args:
        resume: the option's value: a path, or "" for the last checkpoint; None: it is not set.
        settings: the resolved config.

    Returns:
        True for the last checkpoint in the output folder, a path, or False for a new run.

    Raises:
        ConfigError: the folder does not exist, or two are named.
    """
    training = dict(settings.training)
    setting = training.pop("resume_from_checkpoint", None) or None
    if resume and setting not in (None, True, resume):
        raise ConfigError(
            f"two checkpoints, {resume} and {setting}", where="--resume", remedy="Give one of them"
        )
    wanted = setting if resume is None else resume or setting or True
    settings = settings.model_copy(update={"training": training})
    if wanted is None or wanted is True:
        return bool(wanted), settings
    if not Path(str(wanted)).is_dir():
        raise ConfigError(
            f"there is no folder {wanted}",
            where="--resume",
            remedy="Name a checkpoint, or the folder of a run",
        )
    return str(wanted), settings


def resumes_in_place(output_dir: str | Path, resume: str | bool) -> bool:
    """Whether a run resumes in its own output folder, rather than from a checkpoint elsewhere, which may be
    of another run inside it."""
    if isinstance(resume, bool):
        return resume
    path, output = Path(resume), Path(output_dir).resolve()
    # a checkpoint may be a link, and so may be what names it
    named = (path.resolve(), path.parent.resolve() / path.name)
    return any(
        place == output
        or (place.is_relative_to(output) and CHECKPOINT_PATH.fullmatch(str(place.relative_to(output))))
        for place in named
    )


class RunFolder:
    """The output folder of a run, in which only the first process writes: it alone calls `begin`.

    Args:
        settings: of the run.
        resume: True: from the last complete checkpoint here; a path: from this one; False: a new run.
        files: further inputs, such as config files, which may not be written over.

    Attributes:
        path: the folder.
        in_place: whether a run in this folder is resumed.
        overwrite: whether an earlier run in it is removed.

    Raises:
        TrainingError: there is no run to resume, the folder is in use, or is a part of another run.
        ConfigError: as `check_output_folder`.
    """

    def __init__(self, settings: RunConfig, resume: str | bool = False, files: Sequence[Path] = ()):
        self.settings, self.resume = settings, resume
        self.path = Path(settings.output_dir)
        self.in_place = resumes_in_place(self.path, resume)
        self.overwrite = settings.overwrite and not self.in_place
        resumed = [resume] if isinstance(resume, str) else []
        self._inputs: list[str | Path] = [*inputs_of(settings), *files, *resumed]
        self._manifest: dict[str, Any] = {}
        if resume is True:
            refuse_nothing(self.path)
        self.check()

    def check(self) -> None:
        """Raise the errors of this class: once at the beginning, and again when the folder is locked."""
        check_output_folder(self.path, overwrite=self.overwrite, resume=self.in_place, inputs=self._inputs)
        if not self.in_place:
            _refuse_inside(self.path)
            _refuse_other_files(self.path)

    @property
    def resumed_from(self) -> Path | None:
        """The folder or the checkpoint whose run is resumed; None: a new run."""
        return self.path if self.resume is True else Path(self.resume) if self.resume else None

    def begin(self, verb: str, resolved: RunConfig, record: RunRecord, steps: int) -> None:
        """Write `config.yaml` and the manifest.

        Args:
            verb: of the run.
            resolved: the config with its defaults.
            record: the trainer's record of its settings, inputs and changes.
            steps: of the whole run.
        """
        changes = [
            f"# {each['setting']} was {each['old']} until step {each['step']}\n" for each in record.changes
        ]
        values = {name: record.values[name] for name in sorted(record.inputs)}
        self._manifest = run_manifest(
            resolved.model_dump(),
            verb=verb,
            seed=record.values["training.seed"],
            steps=steps,
            processes=record.values["processes"],
            inputs={name: value for name, value in values.items() if value is not None},
            changes=record.changes,
        )
        yaml = to_yaml(resolved.model_copy(update={"overwrite": False}))
        write_atomic(self.path / RUN_CONFIG, "".join(changes) + yaml)
        self._write_state("running")

    def finish(self) -> None:
        """Record that the run is finished."""
        self._write_state("finished")

    def ended(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Record that the run is not finished, if an error ends it: the exit callback of `running_in`."""
        with suppress(OSError):  # of a full disk, which may be what ended the run
            if isinstance(error, Exception):
                self._write_state("failed", error=" ".join(str(error).split()))
            elif error is not None:  # a signal
                self._write_state("interrupted")

    def _write_state(self, state: str, **more: str) -> None:
        if self._manifest:
            write_json(self.path / RUN_MANIFEST, self._manifest | {"state": state, **more})


def _refuse_other_files(path: Path) -> None:
    """Raise TrainingError if a folder holds what a run replaces, removes or would be mixed with, and no run
    has written it."""
    names = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    found = [
        name for name in names if name in (RUN_CONFIG, RUN_MANIFEST, CONFIG) or RUN_OUTPUT.fullmatch(name)
    ]
    if found and not is_run(path):
        raise TrainingError(
            f"holds a {found[0]} that no run has written",
            where=str(path),
            remedy="Choose another output folder",
        )


def _refuse_inside(path: Path) -> None:
    """Raise TrainingError for what another run writes, replaces and removes in its folder, and for folders
    inside of it. Other folders in that of a run are left alone by it."""
    place = path.resolve()
    for own, run in pairwise([place, *place.parents]):
        if RUN_OUTPUT.fullmatch(own.name) and (
            (run / LOCK_FILE).is_file() or all((run / name).is_file() for name in (RUN_MANIFEST, RUN_CONFIG))
        ):
            remedy = f"Choose a folder beside it, such as {run / f'after-{own.name}'} (--output)"
            what = f"is a part of the run in {run}, which writes, replaces and removes {own.name}"
            raise TrainingError(what, where=str(path), remedy=remedy)
