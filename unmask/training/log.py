"""What a training run tells while it runs: the log of its metrics, and a display of how far it is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from unmask.monitor import MetricsLog, write_atomic
from unmask.training.phases import Phases

LOG_NAME = "training_logs.json"
SHOWN = ("loss", "cross_entropy", "reward", "margin", "accuracy", "learning_rate", "tokens_per_second")
"""What a display shows, beside the memory."""
OWN = {
    *("step", "stage", "epoch", "loss", "grad_norm", "learning_rate"),
    *("memory_gb", "tokens_per_second", "samples_per_second", "total_flos", "num_input_tokens_seen"),
    *("reward", "reward_std", "unscored", "truncated", "completion_length", "entropy", "groups_kept", "groups_replaced"),
    *("clipped", "kl", "ratio", "importance", "server_gap"),
}
"""What reinforcement learning logs; and all that begins with one of these:"""
OWN_BEGINNINGS = ("eval_", "train_", "logged/", "masks/", "memory/", "prefix/", "rewards/", "throughput/", "time/")


def metric_of_function(name: str) -> str:
    """What a metric of a reward function is logged as: its name, as in TRL, or `logged/NAME` where that is one of the trainer's own."""
    return f"logged/{name}" if name in OWN or name.startswith(OWN_BEGINNINGS) else name


class Progress(Protocol):
    """What shows how far a run is: a stage of `unmask.monitor.Progress`, or a part of one."""

    def update(self, fraction: float, **metrics: float) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The metrics of a run, one JSON object a line.

    Attributes:
        folder: where `training_logs.json` lies.
        first_step: steps of the run that came before, where this is a part of it (a stage of a conversion).
        stage: the number of the stage, in every line of a conversion.
    """

    folder: Path
    first_step: int = 0
    stage: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; `step` counts within this part."""
        stage = {} if self.stage is None else {"stage": self.stage}
        MetricsLog(self.folder / LOG_NAME).write({"step": self.first_step + step, **stage, **metrics})

    def read(self) -> list[dict[str, Any]]:
        """The lines of this part as it wrote them, with its own steps."""
        mine = [line for line in self._lines() if line.pop("stage", None) == self.stage]
        return [line | {"step": line["step"] - self.first_step} for line in mine]

    def rewind(self, step: int) -> None:
        """Drop what was logged after this step (0: all of this part), which will be logged again."""
        lines = self._lines()
        kept = list(takewhile(lambda line: not self._later(line, step), lines))
        if len(kept) < len(lines):
            write_atomic(self.folder / LOG_NAME, "".join(json.dumps(line) + "\n" for line in kept))

    def _later(self, line: Mapping[str, Any], step: int) -> bool:
        """Whether it was written after a step's checkpoint; the summary of a part comes after its last."""
        stage, own = line.get("stage", 0), self.stage or 0
        return stage > own or (stage == own and (step == 0 or line["step"] > self.first_step + step or "train_loss" in line))

    def _lines(self) -> list[dict[str, Any]]:
        path = self.folder / LOG_NAME
        return MetricsLog(path).read() if path.exists() else []


class RunCallback(TrainerCallback):
    """Keeps the log of the run and the progress display, and ends the steps of the phases.

    Attributes:
        memory_gb: the peak memory that the display shows with the next metrics.
    """

    memory_gb = 0.0

    def __init__(self, progress: Progress | None, log: RunLog, phases: Phases):
        self.progress, self.log, self.phases = progress, log, phases

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            self.log.write(state.global_step, logs)
        if self.progress is not None and logs:
            shown = {name: logs[name] for name in SHOWN if math.isfinite(logs.get(name, math.nan))}
            self.progress.update(state.global_step / max(state.max_steps, 1), **shown | {"memory_gb": self.memory_gb})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.phases.end_step()
        if self.progress is not None:
            self.progress.update(state.global_step / max(state.max_steps, 1))
