"""What a run leaves in its folder: its log and its checkpoints. Nothing here imports torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from unmask.artifacts import MetricsLog, write_atomic
from unmask.config.run import LOCK_FILE
from unmask.errors import TrainingError
from unmask.models.model_paths import RUN_CONFIG, RUN_MANIFEST

LOG_NAME = "training_logs.json"
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
SHOWN = ("reward", "loss", "accuracy", "margin", "tokens_per_second", "cross_entropy", "learning_rate")
"""The metrics on the progress display, those first that matter most: a narrow one has room for some."""
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def refuse_nothing(folder: Path) -> None:
    """Raise TrainingError if no run began in the output folder. One that ended before its first checkpoint
    left other files."""
    if not any(any(folder.glob(pattern)) for pattern in RUN_PATTERNS):
        remedy = "Check the path, or start a new run without --resume (resume_from_checkpoint)"
        raise TrainingError("holds no run: there is nothing to resume", where=str(folder), remedy=remedy)


def is_run(folder: Path) -> bool:
    """Whether a run has written into a folder: it has a log of one, or a manifest with its verb."""
    with suppress(OSError, ValueError):
        return (folder / LOG_NAME).is_file() or "verb" in json.loads((folder / RUN_MANIFEST).read_text())
    return False


def numbers(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The numbers of each line of a log: null stands for one that was not finite."""
    return [{name: value for name, value in line.items() if isinstance(value, int | float)} for line in lines]


def last_loss(lines: Sequence[Mapping[str, float]]) -> float:
    """The last loss that was logged, of a conversion in its last stage; if that ended before, the mean over
    its steps. NaN: none."""
    stage = lines[-1].get("stage") if lines else None
    losses = [
        line[name]
        for name in ("train_loss", "loss")
        for line in lines
        if name in line and line.get("stage") == stage
    ]
    return losses[-1] if losses else math.nan


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


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The metrics of a run, one JSON object a line."""

    folder: Path  # of `training_logs.json`
    first_step: int = 0  # the steps before this stage of a conversion
    stage: int | None = None  # the stage number, written to every line of a conversion

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; `step` counts from the start of this stage."""
        stage = {} if self.stage is None else {"stage": self.stage}
        MetricsLog(self.folder / LOG_NAME).write({"step": self.first_step + step, **stage, **metrics})

    def read(self) -> list[dict[str, Any]]:
        """The lines of this stage, with steps counted from its start."""
        mine = [line for line in self._lines() if line.pop("stage", None) == self.stage]
        return [line | {"step": line["step"] - self.first_step} for line in mine]

    def rewind(self, step: int) -> None:
        """Drop the lines after this step (0: all lines of this stage). They will be logged again."""
        lines = self._lines()
        kept = list(takewhile(lambda line: not self._later(line, step), lines))
        if len(kept) < len(lines):
            write_atomic(self.folder / LOG_NAME, "".join(json.dumps(line) + "\n" for line in kept))

    def ends_with_summary(self) -> bool:
        """Whether the summary of this stage is the last line: an evaluation after it is missing."""
        lines = self._lines()
        return bool(lines) and "train_loss" in lines[-1] and lines[-1].get("stage") == self.stage

    def _later(self, line: Mapping[str, Any], step: int) -> bool:
        """Whether a line was written after a step's checkpoint; the summary of a stage comes after its last
        checkpoint."""
        line_stage, stage = line.get("stage", 0), self.stage or 0
        after_step = step == 0 or line["step"] > self.first_step + step or "train_loss" in line
        return line_stage > stage or (line_stage == stage and after_step)

    def _lines(self) -> list[dict[str, Any]]:
        path = self.folder / LOG_NAME
        return MetricsLog(path).read() if path.exists() else []
