"""Metrics of a trainer's evaluations, and values that are not finite or not there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from unmask.errors import ConfigError, TrainingError
from unmask.training.run_log import Means

Value = TypeVar("Value", Tensor, float)


def finite(trainer: Any, name: str, value: Value) -> Value:
    """Return the value. Raises TrainingError if it is not finite: the cause may be in the weights, or in this step."""
    if math.isfinite(number := float(value.detach() if isinstance(value, Tensor) else value)):
        return value
    damaged = next((name for name, weight in trainer.lm.model.named_parameters() if not weight.isfinite().all()), None)
    if damaged is not None:
        cause = f"because weights are not finite ({damaged})"
        remedy = "Resume from a checkpoint before it: --resume. If it happens again, lower the learning rate or max_grad_norm"
    else:
        cause = "although all weights are finite"
        remedy = "Lower the learning rate or max_grad_norm, or use float32; earlier checkpoints are intact"
    raise TrainingError(f"the {name} is {number}, {cause}", where=f"step {trainer.state.global_step}", remedy=remedy)


@contextmanager
def measuring(trainer: Any, prefix: str) -> Iterator[None]:
    """Inside, metrics are recorded as an evaluation's, under this prefix, separately from those of training."""
    if prefix == "train":
        raise ConfigError("train is reserved for the summary of a run", where="metric_key_prefix", remedy="Use another, as train_rows")
    outside = trainer.means, trainer.evaluating
    trainer.means, trainer.evaluating = Means(f"{prefix}_"), True
    try:
        yield
    finally:
        trainer.means, trainer.evaluating = outside


@contextmanager
def naming_missing_metric(name: str | None, metrics: Iterable[str]) -> Iterator[None]:
    """Inside, an evaluation without the metric that names the best checkpoint is a ConfigError."""
    try:
        yield
    except KeyError as error:
        what, remedy = f"an evaluation has no {name!r}", f"Use one of {', '.join(metrics)}"
        raise ConfigError(what, where="metric_for_best_model", remedy=remedy) from error
