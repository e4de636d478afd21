"""The metrics log of a training run, its progress display, and means over processes."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from accelerate.utils import gather_object
from transformers import TrainerCallback

from unmask.artifacts import MetricsLog, read_file, write_atomic
from unmask.training.run_files import LOG_NAME, SHOWN, last_loss
from unmask.training.step_timer import Phases

SUMS_NAME = "metric_sums.json"
RESERVED = {
    *("step", "stage", "epoch", "loss", "grad_norm", "learning_rate"),
    *("memory_gb", "tokens_per_second", "samples_per_second", "total_flos", "num_input_tokens_seen"),
    *(
        "reward",
        "reward_std",
        "unscored",
        "truncated",
        "completion_length",
        "entropy",
        "groups_kept",
        "groups_replaced",
    ),
    *("clipped", "kl", "ratio", "importance", "server_gap"),
}
"""Metric names of the trainers, reserved together with the prefixes below."""
RESERVED_PREFIXES = (
    "eval_",
    "train_",
    "logged/",
    "masks/",
    "memory/",
    "prefix/",
    "rewards/",
    "throughput/",
    "time/",
)


def metric_of_function(name: str) -> str:
    """The logged name of a reward function's metric: its own name, as in TRL, or `logged/NAME` if a trainer
    uses that name."""
    return f"logged/{name}" if name in RESERVED or name.startswith(RESERVED_PREFIXES) else name


class ProgressTarget(Protocol):
    """What a run reports its progress to: a phase of `unmask.console.Progress`, or a fraction of one."""

    def update(self, fraction: float, **metrics: float | None) -> None: ...


@dataclass
class ProgressPart:
    """A fraction of a progress display, from `start` to `stop`."""

    whole: ProgressTarget
    start: float
    stop: float

    def update(self, fraction: float, **metrics: float | None) -> None:
        self.whole.update(self.start + fraction * (self.stop - self.start), **metrics)


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
        return line_stage > stage or (
            line_stage == stage
            and (step == 0 or line["step"] > self.first_step + step or "train_loss" in line)
        )

    def _lines(self) -> list[dict[str, Any]]:
        path = self.folder / LOG_NAME
        return MetricsLog(path).read() if path.exists() else []


class RunCallback(TrainerCallback):
    """Writes the log of the run, updates the progress display, and ends the steps of the phase timer."""

    memory_gb = 0.0
    """The peak memory that the display shows with the next metrics."""

    def __init__(self, progress: ProgressTarget | None, log: RunLog, phases: Phases):
        self.progress, self.log, self.phases = progress, log, phases

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if state.is_world_process_zero and logs:
            self.log.write(state.global_step, logs)
        if self.progress is not None and logs:
            # the end: no line has a loss if there were fewer steps than `logging_steps`
            if "train_loss" in logs:
                logs = logs | {"loss": last_loss(state.log_history)}
            shown = {name: logs[name] for name in SHOWN if math.isfinite(logs.get(name, math.nan))}
            self.progress.update(
                state.global_step / max(state.max_steps, 1), **shown | {"memory_gb": self.memory_gb}
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.phases.end_step()
        if self.progress is not None:
            self.progress.update(state.global_step / max(state.max_steps, 1))


class Throughput:
    """Tokens and samples per second since the last `take`, including pauses for evaluation and
    checkpoints."""

    def __init__(self) -> None:
        self.samples = 0  # of this process since then
        self._tokens: int | None = None
        self._since = time.perf_counter()

    def take(self, tokens: int, before: int) -> dict[str, float]:
        """The rates over all processes. `tokens`: of all training so far; `before`: those of them before a
        resume. A collective."""
        now, new = time.perf_counter(), tokens - (before if self._tokens is None else self._tokens)
        seconds, samples = now - self._since, sum(gather_object([self.samples]))
        self._since, self._tokens, self.samples = now, tokens, 0
        return {"tokens_per_second": new / seconds, "samples_per_second": samples / seconds}


Sums = dict[str, list[float]]  # by metric name, the sum of the values and their count


class Means:
    """Running means of metrics since each was last taken. Their names begin with `prefix`, which is empty in
    training."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self._sums: Sums = defaultdict(lambda: [0.0, 0.0])

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum of `count` values."""
        sums = self._sums[self.prefix + name]
        sums[0] += total
        sums[1] += count

    def take(self, is_due: Callable[[str], bool]) -> dict[str, float]:
        """The means over all processes of the metrics that are due, which are then reset. A collective."""
        mine = {name: self._sums.pop(name) for name in [*self._sums] if is_due(name)}
        return {name: total / count for name, (total, count) in _everywhere(mine).items() if count > 0}

    def state(self) -> Sums:
        """This process's sums, for `load`."""
        return {name: [*parts] for name, parts in self._sums.items()}

    def state_everywhere(self) -> Sums:
        """The sums over all processes, for `load` on one of them. A collective."""
        return _everywhere(self._sums)

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Replace the sums by these."""
        self._sums.clear()
        self._sums.update({name: [*parts] for name, parts in state.items()})


def write_sums(checkpoint: Path, sums: Sums) -> None:
    """Save the sums since the last log line in a checkpoint."""
    write_atomic(checkpoint / SUMS_NAME, json.dumps(sums))


def read_sums(checkpoint: Path) -> Sums:
    """The sums that `write_sums` saved; earlier versions of Unmask saved them under another name, or none."""
    path = next((path for name in (SUMS_NAME, "recorded.json") if (path := checkpoint / name).exists()), None)
    stored = json.loads(read_file(path)) if path is not None else {}
    return {name: [float(total), float(count)] for name, (total, count) in stored.items()}


def _everywhere(sums: Sums) -> Sums:
    """Sums over all processes, which may have different metric names."""
    ranks = gather_object([dict(sums)])
    names = dict.fromkeys(name for each in ranks for name in each)
    return {
        name: [sum(part) for part in zip(*(each[name] for each in ranks if name in each), strict=True)]
        for name in names
    }
