"""When the host reads a trainer's metrics, those of evaluations, and values that are not finite or not
there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unmask.errors import ConfigError, TrainingError
from unmask.training.run_log import Means

STEP_LOSSES = ("loss", "train_loss")  # means over steps: since the last log line, and over the whole run


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


class StepNumbers(Unread):
    """The metrics, losses and token counts of a trainer's steps. They are read before the optimizer's step,
    which does not happen if one of them is not finite; in an evaluation after every batch."""

    def __init__(self, trainer: Any):
        super().__init__()
        self.trainer = trainer
        self._tokens: list[Tensor] = []  # of the micro-batches of this step

    def add_mean(self, name: str, mean: Tensor | float, count: Tensor | float) -> None:
        """Add a mean over `count` values to the means of a metric."""
        means = self.trainer.means
        self.add(lambda mean, count: means.add(name, mean * count, count), mean, count)

    def require_finite(self, name: str, value: Tensor | float) -> None:
        """Raise TrainingError when the value is read, if it is not finite."""
        self.add(partial(finite, self.trainer, name), value)

    def add_loss(self, loss: Tensor, steps: int) -> None:
        """Add a micro-batch's part of a step's loss, and this number of steps, to the means of losses
        (transformers loses its own on resume)."""
        means = self.trainer.means

        def use(number: float) -> None:
            finite(self.trainer, "loss", number)
            for name in STEP_LOSSES:
                means.add(name, number, steps)

        self.add(use, loss)

    def add_tokens(self, count: Tensor) -> None:
        """Add the tokens of a micro-batch to those that the model has seen."""
        self._tokens.append(count)

    def read_step(self, grad_norm: Tensor | float | None) -> None:
        """Read the numbers of a step, with the norm of its gradients. Raises TrainingError if one is not
        finite."""
        trainer = self.trainer
        count, self._tokens = torch.stack(self._tokens).sum().to(trainer.args.device), []

        def use(tokens: float) -> None:
            trainer.state.num_input_tokens_seen += int(tokens)

        self.add(use, trainer.accelerator.gather(count).sum())
        # a float16 scaler skips steps whose gradients are not finite
        if grad_norm is not None and trainer.accelerator.scaler is None:
            whole = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
            self.require_finite("gradient norm", whole)
        self.read()


def finite(trainer: Any, name: str, value: Tensor | float) -> None:
    """Raise TrainingError if a value is not finite: the cause may be in the weights, or in this step."""
    if math.isfinite(number := float(value)):
        return
    damaged = next(
        (name for name, weight in trainer.lm.model.named_parameters() if not weight.isfinite().all()), None
    )
    if damaged is not None:
        cause = f"because weights are not finite ({damaged})"
        remedy = (
            "Resume from a checkpoint before it: --resume. If it happens again, lower the learning rate or "
            "max_grad_norm"
        )
    else:
        cause = "although all weights are finite"
        remedy = "Lower the learning rate or max_grad_norm, or use float32; earlier checkpoints are intact"
    raise TrainingError(
        f"the {name} is {number}, {cause}", where=f"step {trainer.state.global_step}", remedy=remedy
    )


@contextmanager
def measuring(trainer: Any, prefix: str) -> Iterator[None]:
    """Inside, metrics are recorded as an evaluation's, under this prefix, separately from those of
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


@contextmanager
def naming_missing_metric(name: str | None, metrics: Iterable[str]) -> Iterator[None]:
    """Inside, an evaluation without the metric that names the best checkpoint is a ConfigError."""
    try:
        yield
    except KeyError as error:
        what, remedy = f"an evaluation has no {name!r}", f"Use one of {', '.join(metrics)}"
        raise ConfigError(what, where="metric_for_best_model", remedy=remedy) from error
