"""What a training run tells while it runs: the log of its metrics, and a display of how far it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from unmask.monitor import MetricsLog

LOG_NAME = "training_logs.json"


class Progress(Protocol):
    """What shows how far a run is: a stage of `unmask.monitor.Progress`, or a part of one."""

    def update(self, fraction: float, **metrics: float) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The metrics of a run, one JSON object a line.

    Attributes:
        folder: where `training_logs.json` lies.
        first_step: steps of the run that came before, where this is a part of it (a stage of a conversion).
        extra: entries of every line, such as the number of the stage.
    """

    folder: Path
    first_step: int = 0
    extra: Mapping[str, float] = field(default_factory=dict)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; `step` counts within this part."""
        MetricsLog(self.folder / LOG_NAME).write({"step": self.first_step + step, **self.extra, **metrics})


class RunCallback(TrainerCallback):
    """Keeps the log of the run and the progress display."""

    def __init__(self, progress: Progress | None, log: RunLog):
        self.progress, self.log = progress, log

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            self.log.write(state.global_step, logs)
        if self.progress is not None and logs:
            shown = {k: v for k, v in logs.items() if k in ("loss", "cross_entropy", "reward", "margin", "accuracy") and math.isfinite(v)}
            self.progress.update(state.global_step / max(state.max_steps, 1), **shown)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.progress is not None:
            self.progress.update(state.global_step / max(state.max_steps, 1))
