"""Losses of many views in the memory of one: the loss is found from scores alone, then each view gets its gradient by itself.

A loss of scores s has the gradient sum over views of (d loss / d s_v) (d s_v / d weights). With the first factor known, a view is
scored with gradients, multiplied, gone back through and forgotten: exact, whatever the loss is.

Shapes: B batch, M views, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from unmask.diffusion.log_probs import passes, view_log_probs
from unmask.diffusion.views import Views
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.step_timer import Phases

Chunk = tuple[slice, slice]
"""Rows and views of one forward pass."""


class ViewLoss(Protocol):
    """A trainer whose loss is a function of the log-probabilities of views."""

    lm: DiffusionLM
    args: Any
    accelerator: Accelerator
    optimizer: Any
    phases: Phases

    @property
    def sharded(self) -> bool: ...

    def views_of(self, batch: Any) -> Views:
        """The views of a micro-batch; the same at every call."""

    def tokens_of(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The clean ids and the documents [B, T] of a micro-batch; None where every row is one, without padding."""

    def loss_on(self, batch: Any, log_prob_BMT: Tensor, chunk: Chunk | None = None) -> Tensor:
        """The summed loss, from the log-probabilities of all views; of a separable loss also of a chunk of them."""

    def per_item(self, loss: Tensor, items: Tensor | int) -> Tensor: ...
    def lockstep(self) -> AbstractContextManager[None]: ...
    def compute_loss_context_manager(self) -> AbstractContextManager[Any]: ...
    def _prepare_inputs(self, inputs: Any) -> Any: ...


class PerViewBackward:
    """Scores the views of a trainer's batches, and makes the training steps that take several passes.

    Args:
        trainer: what the loss is.
        separable: whether the loss is the sum of the losses of its chunks.
        temperature: of the log-probabilities.
    """

    def __init__(self, trainer: ViewLoss, *, separable: bool = False, temperature: float = 1.0):
        self.trainer, self.separable, self.temperature = trainer, separable, temperature

    def log_probs(self, lm: DiffusionLM, batch: Any, chunk: Chunk | None = None) -> Tensor:
        """Log-probabilities [B, M, T] of all views of a batch, pass by pass; or those of one pass.

        With the same passes they are the same bits with gradients and without.
        """
        ids_BT, documents_BT = self.trainer.tokens_of(batch)
        views = self.trainer.views_of(batch)
        if chunk is not None:
            rows, at = chunk
            part_BT = None if documents_BT is None else documents_BT[rows]
            return view_log_probs(lm, ids_BT[rows], part_BT, views.select(rows, at), temperature=self.temperature)
        return view_log_probs(lm, ids_BT, documents_BT, views, temperature=self.temperature, chunk=self._rows_per_pass(batch))

    def _rows_per_pass(self, batch: Any) -> int:
        """Noised rows in a pass: as many as the micro-batch has rows, unless `score_chunk` says."""
        return self.trainer.args.score_chunk or len(self.trainer.tokens_of(batch)[0])

    def passes_of(self, batch: Any) -> list[Chunk]:
        """The passes that a batch takes, but for those in which nothing is scored."""
        every, views = self._every_pass(batch), self.trainer.views_of(batch)
        return [chunk for chunk in every if views.target_BMT[chunk].any()] or every[:1]

    def _every_pass(self, batch: Any) -> list[Chunk]:
        views = self.trainer.views_of(batch)
        return list(passes(self.trainer.lm, len(views.hidden_BMT), views.count, self._rows_per_pass(batch)))

    def _most(self, count: int) -> int:
        """The largest count of a rank, where all must make the same passes (their weights or gradients are sharded); else this one's."""
        if not self.trainer.sharded:
            return count
        return int(self.trainer.accelerator.gather(torch.tensor([count], device=self.trainer.args.device)).max())

    def step(self, model: nn.Module, inputs: Any, items: Tensor | int | None) -> Tensor | None:
        """The loss of a micro-batch, whose passes each got the part of the gradient that is their own; None where it takes one pass, which
        is an ordinary step."""
        model.train()
        if self._most(len(self._every_pass(inputs))) == 1:
            return None
        with self.trainer.phases("backward"):
            return self._pass_by_pass(model, inputs, items)

    def _pass_by_pass(self, model: nn.Module, inputs: Any, items: Tensor | int | None) -> Tensor:
        made = self.passes_of(inputs)
        if callable(getattr(self.trainer.optimizer, "train", None)):
            self.trainer.optimizer.train()
        inputs = self.trainer._prepare_inputs(inputs)
        lm = self.trainer.lm.bind(model)
        assert items is not None
        own = len(made)
        made += [made[-1]] * (self._most(own) - own)
        total = torch.zeros((), device=self.trainer.accelerator.device)
        if not self.separable:
            total, slope_BMT = self._slopes(lm, inputs, items)
        for index, chunk in enumerate(made):
            with self._accumulating(model, last=index == len(made) - 1):
                with self.trainer.compute_loss_context_manager():
                    with self.trainer.phases("forward"):
                        log_prob_BMT = self.log_probs(lm, inputs, chunk)
                    if not self.separable:
                        loss = (slope_BMT[chunk] * log_prob_BMT).sum()
                    else:
                        loss = self.trainer.per_item(self.trainer.loss_on(inputs, log_prob_BMT, chunk), items)
                        total = total + loss.detach() * (index < own)
                deepspeed = self.trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
                self.trainer.accelerator.backward(loss * (index < own), **({"scale_wrt_gas": False} if deepspeed else {}))
        return total

    def _slopes(self, lm: DiffusionLM, batch: Any, items: Tensor | int) -> tuple[Tensor, Tensor]:
        """The loss, and what it changes by with each score [B, M, T]."""
        with torch.no_grad(), self.trainer.compute_loss_context_manager(), self.trainer.phases("forward"), self.trainer.lockstep():
            values_BMT = self.log_probs(lm, batch).detach().requires_grad_()
        with torch.enable_grad():
            loss = self.trainer.per_item(self.trainer.loss_on(batch, values_BMT), items)
        [slope_BMT] = torch.autograd.grad(loss, values_BMT)
        return loss.detach(), slope_BMT

    @contextmanager
    def _accumulating(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Inside, gradients are added up; ranks exchange them with the last pass of a step, and DeepSpeed steps there."""
        state = self.trainer.accelerator.gradient_state
        kind = self.trainer.accelerator.distributed_type
        if last:
            yield
        elif kind == DistributedType.DEEPSPEED:
            syncs = state.sync_gradients
            state._set_sync_gradients(False)
            try:
                yield
            finally:
                state._set_sync_gradients(syncs)
        else:
            alone = kind in (DistributedType.NO, DistributedType.FSDP)  # FSDP would keep whole gradients
            with nullcontext() if alone else self.trainer.accelerator.no_sync(model):
                yield
