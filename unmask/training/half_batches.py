"""After the device's memory was full, micro-batches are halved, once: twice as many of half the size, with
the same result."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unmask.errors import UnmaskWarning

Step = Callable[[nn.Module, Any, Any], Tensor]
"""Makes the forward and backward pass of a micro-batch, and returns its part of the loss."""


class HalfBatches:
    """Makes the micro-batches of a trainer's steps, in halves once its memory was full.

    Several processes would have to agree on it amid a backward pass: for them, and for single rows, a full
    memory stays an error.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.halving = False
        self._made: list[Any] = []  # the micro-batches of this optimizer step so far
        self._recorded = 0  # the metrics that were recorded before the step
        self._begins = True

    def make(self, step: Step, model: nn.Module, batch: Any, items: Any) -> Tensor:
        """The loss of a micro-batch, whose gradients are added."""
        if self._begins:
            self._made, self._recorded = [], len(self.trainer.numbers)
        try:
            loss = self._in_halves(step, model, batch, items) if self.halving else step(model, batch, items)
        except torch.OutOfMemoryError as error:
            if (
                self.halving
                or self.trainer.accelerator.num_processes > 1
                or self.trainer.count_samples(batch) < 2
            ):
                raise
            error.__traceback__ = None  # its frames hold the activations
            loss = None
        if loss is None:
            loss = self._start_over(step, model, batch, items)
        self._made.append(batch)
        self._begins = self.trainer.accelerator.sync_gradients
        return loss

    def _start_over(self, step: Step, model: nn.Module, batch: Any, items: Any) -> Tensor:
        """Repeat the micro-batches of this optimizer step in halves: the backward pass that failed may have
        added some gradients."""
        args = self.trainer.args
        size, accumulated = self.trainer.count_samples(batch), args.gradient_accumulation_steps
        settings = (
            f"training.per_device_train_batch_size={size // 2} "
            f"training.gradient_accumulation_steps={2 * accumulated}"
        )
        where = f"step {self.trainer.state.global_step}: the device's memory is full"
        message = (
            f"{where}: micro-batches of {size} rows are halved from here on, with the same result. To "
            f"start so: {settings}"
        )
        warnings.warn(message, UnmaskWarning, stacklevel=2)
        self.halving = True
        if self.trainer.per_view is not None:
            self.trainer.per_view.tokens_together = 0
        model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        self.trainer.numbers.drop(kept=self._recorded)
        for earlier in self._made:
            self.trainer.numbers.add_loss(self._in_halves(step, model, earlier, items), steps=0)
        return self._in_halves(step, model, batch, items)

    def _in_halves(self, step: Step, model: nn.Module, batch: Any, items: Any) -> Tensor:
        rows = self.trainer.count_samples(batch)
        if rows < 2:
            return step(model, batch, items)
        parts = [
            select_rows(batch, each) for each in (slice(0, rows - rows // 2), slice(rows - rows // 2, rows))
        ]
        return torch.stack([step(model, part, items) for part in parts]).sum()


def select_rows(batch: Any, rows: slice) -> Any:
    """These rows of a batch: of its tensors, of the batches in it, or by its own `select_rows`."""
    if isinstance(batch, Tensor):
        return batch[rows]
    if isinstance(batch, Mapping):
        return {name: select_rows(value, rows) for name, value in batch.items()}
    return batch.select_rows(rows) if hasattr(batch, "select_rows") else batch
