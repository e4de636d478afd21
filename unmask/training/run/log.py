"""The log of a run: its metrics, one JSON object a line. Nothing here imports torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from unmask.artifacts import MetricsLog, write_atomic

LOG_NAME = "training_logs.json"
SHOWN = ("reward", "loss", "accuracy", "margin", "tokens_per_second", "cross_entropy", "learning_rate")
"""Metrics on the progress display, the most important first: a narrow one shows only these."""


def numbers(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The numbers of each line of a log: null stands for one that was not finite."""
    return [{name: value for name, value in line.items() if isinstance(value, int | float)} for line in lines]


def last_loss(lines: Sequence[Mapping[str, float]]) -> float:
    """The last logged loss, of a conversion in its last stage; else the mean over its steps; NaN if there is
    none."""
    stage = lines[-1].get("stage") if lines else None
    losses = [
        line[name]
        for name in ("train_loss", "loss")
        for line in lines
        if name in line and line.get("stage") == stage
    ]
    return losses[-1] if losses else math.nan


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
