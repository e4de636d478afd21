"""What the folder of a run says of it: its settings and inputs, its state, and what was changed when it was
resumed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers.utils import CONFIG_NAME

from unmask.artifacts import run_manifest, write_atomic, write_json
from unmask.cli.inputs import task_of
from unmask.config.base import OnResume, flat_values, kinds_of
from unmask.config.run import LOCK_FILE, RunConfig, check_output_folder, inputs_of, resumes_in_place, to_yaml
from unmask.errors import TrainingError
from unmask.models.model_paths import RUN_CONFIG, RUN_MANIFEST, TRAINED_MODEL
from unmask.training.config import TrainingConfig
from unmask.training.run.around import running_in
from unmask.training.run.checkpoint import UNFINISHED
from unmask.training.run.fingerprints import code_fingerprint, file_fingerprints
from unmask.training.run.folder import is_run, refuse_nothing
from unmask.training.run.record import RunRecord

RUN_OUTPUT = re.compile(rf"(checkpoint|stage)-\d+|{TRAINED_MODEL}|{re.escape(UNFINISHED)}")
"""The folders that a run writes, replaces and removes."""
ELSEWHERE = {"training", "rewards", "output_dir", "overwrite"}
"""Settings that the trainer's arguments or inputs hold, or that belong to a launch."""


def run_settings(config: RunConfig) -> dict[str, tuple[Any, OnResume]]:
    """The settings besides `training` that a resumed run compares, by dotted name, with their kinds; of
    streamed data also their files, of a task of the user its code."""
    values, kinds = flat_values(config), kinds_of(RunConfig)
    settings = {name: (value, kinds[name]) for name, value in values.items() if name not in ELSEWHERE}
    if task := task_of(config):
        settings["data.task"] = task.name, OnResume.OTHER
        settings["data.task_code"] = code_fingerprint(task), OnResume.OTHER
    if config.data.streaming and config.data.train is not None:
        train = config.data.train
        paths = [train] if isinstance(train, str) else [source.path for source in train]
        settings["data.file_contents"] = file_fingerprints(paths), OnResume.OTHER
    return settings


class RunFolder:
    """The output folder of a run. Only the first process writes.

    Attributes:
        in_place: whether a run in this folder is resumed.
        overwrite: whether an earlier run in it is removed.
    """

    def __init__(self, verb: str, config: RunConfig, args: TrainingConfig, resume: str | bool):
        self.verb, self.config, self.args, self.resume = verb, config, args, resume
        self.path = Path(config.output_dir)
        self.in_place = resumes_in_place(self.path, resume)
        self.overwrite = config.overwrite and not self.in_place
        self._manifest: dict[str, Any] = {}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Like `locked`, for a run that begins or is resumed.

        Raises:
            TrainingError: another run is here, or was here since the folder was checked, or this is a part of
                another; or there is no run to resume.
            ConfigError: the settings would make another run than the one to resume.
        """
        if self.resume is True:
            refuse_nothing(self.path)
        if not self.in_place:
            _refuse_inside(self.path)
            self._refuse_other_files()
        with self.locked():
            inputs = inputs_of(self.config)
            check_output_folder(self.path, overwrite=self.overwrite, resume=self.in_place, inputs=inputs)
            self.args.run_settings = run_settings(self.config)  # type: ignore[misc]
            if self.resume:
                RunRecord(self.args, {}, {}).refuse_settings(
                    self.path if self.resume is True else Path(self.resume)
                )
            yield

    def _refuse_other_files(self) -> None:
        """Raise TrainingError if the folder holds what a run replaces, removes or would be mixed with, and no
        run has written it."""
        names = sorted(each.name for each in self.path.iterdir()) if self.path.is_dir() else []
        found = [
            name
            for name in names
            if name in (RUN_CONFIG, RUN_MANIFEST, CONFIG_NAME) or RUN_OUTPUT.fullmatch(name)
        ]
        if found and not is_run(self.path):
            raise TrainingError(
                f"holds a {found[0]} that no run has written",
                where=str(self.path),
                remedy="Choose another output folder",
            )

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """A context in which no other run can write here, and the manifest gets the state in which the run
        ends."""
        return running_in(self.path, self._end)

    def begin(self, settings: RunConfig, record: RunRecord, steps: int) -> None:
        """Write `config.yaml` and the manifest.

        Args:
            settings: the resolved config.
            record: the trainer's record of its settings, inputs and changes.
            steps: of the whole run.
        """
        changes = [
            f"# {each['setting']} was {each['old']} until step {each['step']}\n" for each in record.changes
        ]
        yaml = to_yaml(settings.model_copy(update={"overwrite": False}))
        inputs = {
            name: record.values[name] for name in sorted(record.inputs) if record.values[name] is not None
        }
        self._manifest = run_manifest(
            settings.model_dump(),
            verb=self.verb,
            seed=self.args.seed,
            steps=steps,
            processes=PartialState().num_processes,
            inputs=inputs,
            changes=record.changes,
        )
        if self.args.should_save:
            write_atomic(self.path / RUN_CONFIG, "".join(changes) + yaml)
            self._write_state("running")

    def finish(self) -> None:
        """Record that the run is finished."""
        self._write_state("finished")

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Record that the run is not finished: the exit callback of `locked`."""
        with contextlib.suppress(OSError):  # of a full disk, which may be what ended the run
            if isinstance(error, Exception):
                self._write_state("failed", error=" ".join(str(error).split()))
            elif error is not None:  # a signal
                self._write_state("interrupted")

    def _write_state(self, state: str, **more: str) -> None:
        if self._manifest and self.args.should_save:
            write_json(self.path / RUN_MANIFEST, self._manifest | {"state": state, **more})


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
