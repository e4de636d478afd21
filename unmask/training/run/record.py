"""The settings and inputs of a run, recorded in its checkpoints and compared when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.artifacts import plain, read_file, write_atomic
from unmask.config.base import OnResume, flat_values, kinds_of
from unmask.config.run import RunConfig
from unmask.console import show_line
from unmask.data.streamed_rows import StreamedRows
from unmask.errors import ConfigError
from unmask.redaction import masked
from unmask.tasks import get_task
from unmask.training.run.fingerprints import code_fingerprint, file_fingerprints

if TYPE_CHECKING:
    from unmask.training.config import TrainingConfig

RECORD_FILE = "run.json"
SECTION = "training."
"""The prefix of a trainer's own settings, as on the command line."""
ROWS_PER_STEP = "rows_per_step"
PARTS_OF_A_STEP = {
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "processes",
}
"""Only their product makes another run."""


ELSEWHERE = {"training", "rewards", "output_dir", "overwrite"}
"""Settings that the trainer's arguments or inputs hold, or that belong to a launch."""


def run_settings(config: RunConfig) -> dict[str, tuple[Any, OnResume]]:
    """The settings besides `training` that a resumed run compares, by dotted name, with their kinds; of
    streamed data also their files, of a task of the user its code."""
    values, kinds = flat_values(config), kinds_of(RunConfig)
    settings = {name: (value, kinds[name]) for name, value in values.items() if name not in ELSEWHERE}
    if config.data.task:
        task = get_task(config.data.task)
        settings["data.task"] = task.name, OnResume.OTHER
        settings["data.task_code"] = code_fingerprint(task), OnResume.OTHER
    if config.data.streaming and config.data.train is not None:
        train = config.data.train
        paths = [train] if isinstance(train, str) else [source.path for source in train]
        settings["data.file_contents"] = file_fingerprints(paths), OnResume.OTHER
    return settings


class RunRecord:
    """The settings and inputs that identify a run.

    Attributes:
        values: the settings by dotted name, and the inputs (fingerprints of data, rewards and model), of JSON
            types only.
        kinds: the kinds of the settings. All others, and inputs, make another run.
        changes: what was changed when the run was resumed: step, setting, old and new value; oldest first.
    """

    def __init__(self, args: TrainingConfig, inputs: dict[str, Any], inputs_that_act: dict[str, Any]):
        run = args.run_settings or {}
        own = {SECTION + name: value for name, value in args.values_on_resume().items()}
        sizes = {
            ROWS_PER_STEP: args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "processes": args.world_size,
        }
        # secrets change nothing that is learned
        settings = masked(own | {name: value for name, (value, _) in run.items()})
        self.values: dict[str, Any] = plain(settings | inputs | inputs_that_act | sizes)
        self.inputs = {*inputs, *inputs_that_act, ROWS_PER_STEP}
        self.kinds = {SECTION + name: kind for name, kind in args.kinds_on_resume().items()}
        self.kinds |= {name: kind for name, (_, kind) in run.items()} | dict.fromkeys(
            inputs_that_act, OnResume.ACTS
        )
        self.changes: list[dict[str, Any]] = []
        self._prefix = "" if run else SECTION  # left out of messages in Python

    def resume(self, checkpoint: Path, step: int) -> dict[str, Any]:
        """Compare with the record in a checkpoint, and take over its changes.

        Returns:
            The earlier values of the settings that were changed, by name.

        Raises:
            ConfigError: a setting or an input would make another run.
        """
        recorded = read_record(checkpoint)
        changed = self.changed_since(recorded)
        self._refuse(changed, checkpoint)
        new = [
            {"step": step, "setting": name, "old": old, "new": self.values[name]}
            for name, old in changed.items()
        ]
        self.changes = [*recorded["changes"], *new]
        return changed

    def refuse_settings(self, folder: Path) -> None:
        """Raise ConfigError if settings would make another run than that of the checkpoints in a folder.
        Those of the model are compared once it is loaded."""
        records = [
            path
            for place in ("", "checkpoint-*/", "stage-*/checkpoint-*/")
            for path in folder.glob(place + RECORD_FILE)
        ]
        for path in sorted(records)[-1:]:  # all of a run agree in what makes another run
            try:
                changed = self.changed_since(json.loads(read_file(path)))
            # damaged: the checkpoint will not be used
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                return
            self._refuse(
                {name: old for name, old in changed.items() if not name.startswith("model.")}, path.parent
            )

    def changed_since(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """The earlier values of what differs, by name. What only the command line or only Python records is
        left out."""
        earlier = recorded["settings"]
        return {
            name: earlier[name]
            for name, value in self.values.items()
            if name in earlier and earlier[name] != value
        }

    def kind(self, name: str, changed: Mapping[str, Any]) -> OnResume:
        """The kind of a setting or input, given all that changed."""
        whole = ROWS_PER_STEP not in changed and not self.values["training.dataloader_drop_last"]
        return OnResume.NEUTRAL if name in PARTS_OF_A_STEP and whole else self.kinds.get(name, OnResume.OTHER)

    def show(self, changed: Mapping[str, Any], step: int, steps: int) -> None:
        """Print where the run continues, and a line for each change. `step` of `steps` steps are done."""
        show_line(f"resumed after step {step} of {steps}")
        for name, old in changed.items():
            line = (
                f"resumed after step {step}: {self.named(name)} was {_shown(old)}, now "
                f"{_shown(self.values[name])}"
            )
            kind = self.kind(name, changed)
            show_line(f"{line}: {'no step follows' if kind is OnResume.ACTS and step >= steps else kind}")

    def write(
        self,
        folder: Path,
        reported: Mapping[str, Any],
        visited: Mapping[str, int] | None = None,
        stage: int | None = None,
    ) -> None:
        """Save it in a checkpoint. `reported`: the settings that the model card shows. `visited`: see
        `StreamedRows`. `stage`: the number of the stage of a conversion."""
        content = {
            "settings": self.values,
            "changes": self.changes,
            "reported": plain(reported),
            "visited": visited,
            "stage": stage,
        }
        write_atomic(folder / RECORD_FILE, json.dumps(content, indent=2) + "\n")

    def _refuse(self, changed: Mapping[str, Any], checkpoint: Path) -> None:
        refused = [name for name in changed if self.kind(name, changed) is OnResume.OTHER]
        # inputs follow from settings
        refused = [name for name in refused if name not in self.inputs] or refused
        if refused:
            values = ", ".join(
                f"{self.named(name)} {_shown(changed[name])}, now {_shown(self.values[name])}"
                for name in refused
            )
            what = f"would make another run than that of {checkpoint} ({values})"
            remedy = "Set it back, or start a new run in another output folder (--output) without --resume"
            raise ConfigError(what, where=" and ".join(map(self.named, refused)), remedy=remedy)

    def named(self, name: str) -> str:
        """A setting's name in messages."""
        return name.removeprefix(self._prefix)


def read_record(checkpoint: Path) -> dict[str, Any]:
    """The record in a checkpoint."""
    return dict(json.loads(read_file(checkpoint / RECORD_FILE)))


def expect_visited(rows: Any, checkpoint: Path) -> None:
    """Let a stream compare the rows that the run of a checkpoint has read, when it reads them again."""
    if isinstance(rows, StreamedRows):
        rows.expected = read_record(checkpoint)["visited"]


def _shown(value: Any) -> str:
    """A value in a message: fingerprints are shortened."""
    if isinstance(value, dict) and "sha256" in value:
        formats = {"name": "{}", "rows": "{} rows", "bytes": "{:,} bytes"}
        parts = "".join(
            f"{text.format(value[key])}, " for key, text in formats.items() if value.get(key) is not None
        )
        return f"{parts}content {str(value['sha256'])[:8]}"
    if isinstance(value, list) and value:
        return ", ".join(map(_shown, value))
    return "unset" if value is None else str(value)
