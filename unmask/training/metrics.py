"""The metrics of a run: when the host reads them, their means over steps and processes, those of evaluations,
the progress display, and values that are not finite."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback

from unmask.errors import ConfigError, TrainingError
from unmask.training.run.log import SHOWN, RunLog, last_loss
from unmask.training.step_timer import Phases

SPEEDS = ("runtime", "samples_per_second", "steps_per_second")  # of an evaluation by transformers
STEP_LOSSES = ("loss", "train_loss")  # means over steps: since the last log line, and over the whole run
RESERVED = {
    "step",
    "stage",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "memory_gb",
    "tokens_per_second",
    "samples_per_second",
    "total_flos",
    "num_input_tokens_seen",
    "reward",
    "reward_std",
    "unscored",
    "truncated",
    "completion_length",
    "entropy",
    "groups_kept",
    "groups_replaced",
    "clipped",
    "kl",
    "ratio",
    "importance",
    "server_gap",
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


class Unread:
    """Numbers that are still on the device. They are read together, since the host waits for the device at
    every read."""

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[Tensor | float, ...], Callable[..., None]]] = []

    def add(self, use: Callable[..., None], *numbers: Tensor | float) -> None:
        """Call `use` with these numbers (scalars) at the next `read`."""
        self._waiting.append(
            (
                tuple(
                    each.detach() if isinstance(each, Tensor) and each.requires_grad else each
                    for each in numbers
                ),
                use,
            )
        )

    def read(self) -> None:
        """Read all numbers, and use them in the order in which they were added."""
        waiting, self._waiting = self._waiting, []
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for each in (each for numbers, _ in waiting for each in numbers if isinstance(each, Tensor)):
            by_device[each.device].append(each)
        found = {device: iter(_stacked(scalars).tolist()) for device, scalars in by_device.items()}
        for numbers, use in waiting:
            use(*(next(found[each.device]) if isinstance(each, Tensor) else each for each in numbers))

    def __len__(self) -> int:
        return len(self._waiting)

    def drop(self, kept: int = 0) -> None:
        """Forget the numbers added after these first ones."""
        del self._waiting[kept:]


def _stacked(scalars: list[Tensor]) -> Tensor:
    return torch.stack([scalars[0].double(), *scalars[1:]])  # one in float64 makes all


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


def _everywhere(sums: Sums) -> Sums:
    """Sums over all processes, which may have different metric names."""
    ranks = gather_object([dict(sums)])
    names = dict.fromkeys(name for each in ranks for name in each)
    return {
        name: [sum(part) for part in zip(*(each[name] for each in ranks if name in each), strict=True)]
        for name in names
    }


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


def check_finite(name: str, value: Tensor | float, model: nn.Module, step: int) -> None:
    """Raise TrainingError if a value is not finite: the cause may be in the weights, or in this step."""
    if math.isfinite(number := float(value)):
        return
    damaged = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if damaged is not None:
        cause = f"because weights are not finite ({damaged})"
        remedy = (
            "Resume from a checkpoint before it: --resume. If it happens again, lower the learning rate or "
            "max_grad_norm"
        )
    else:
        cause = "although all weights are finite"
        remedy = "Lower the learning rate or max_grad_norm, or use float32; earlier checkpoints are intact"
    raise TrainingError(f"the {name} is {number}, {cause}", where=f"step {step}", remedy=remedy)


@contextmanager
def measuring(trainer: Any, prefix: str) -> Iterator[None]:
    """A context in which metrics are recorded as an evaluation's, under this prefix, separately from those of
    training."""
    if prefix == "train":
        raise ConfigError(
            "train is reserved for the summary of a run",
            where="metric_key_prefix",
            remedy="Use another, as train_rows",
        )
    outside = trainer.means, trainer.evaluating
    trainer.means, trainer.evaluating = Means(f"{prefix}_"), True
    try:
        yield
    finally:
        trainer.means, trainer.evaluating = outside


def require_best_metric(name: str | None, metrics: Collection[str]) -> None:
    """Raise ConfigError for an evaluation without the metric that names the best checkpoint."""
    if name is not None and f"eval_{name.removeprefix('eval_')}" not in metrics:
        what, remedy = f"an evaluation has no {name!r}", f"Use one of {', '.join(metrics)}"
        raise ConfigError(what, where="metric_for_best_model", remedy=remedy)
