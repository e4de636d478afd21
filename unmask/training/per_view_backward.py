"""Losses of many views in the memory of one forward pass: the loss is computed without gradients, then each
pass is repeated with gradients and backpropagated.

A loss of log-probabilities s has the gradient sum_v (d loss / d s_v) (d s_v / d weights) over views v. The
first factor is computed once, without the model's graph. Then every pass is repeated with gradients,
multiplied by its part of that factor, backpropagated and freed. This is exact for any loss. A loss that is a
sum over passes (`separable`) needs no first factor: each pass is made once.

Shapes: B batch, M masks (views), T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from unmask.diffusion.log_probs import ViewPasses, passes, view_log_probs
from unmask.diffusion.views import Views
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.step_timer import Phases

Chunk = tuple[slice, slice]  # rows and views of one forward pass


class ViewLoss(Protocol):
    """A trainer whose loss is a function of the log-probabilities of views."""

    lm: DiffusionLM
    args: Any
    accelerator: Accelerator
    optimizer: Any
    phases: Phases

    @property
    def uses_fsdp_or_deepspeed(self) -> bool: ...

    def views_of(self, batch: Any) -> Views:
        """The views of a micro-batch; the same at every call."""

    def tokens_of(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The clean ids and the documents [B, T] of a micro-batch; documents None: every row is one document
        without padding."""

    def loss_on(self, batch: Any, log_prob_BMT: Tensor, chunk: Chunk | None = None) -> Tensor:
        """The summed loss, from the log-probabilities of all views; of a separable loss also from those of a
        chunk."""

    def per_item(self, loss: Tensor, items: Tensor | int) -> Tensor: ...
    def lockstep(self) -> AbstractContextManager[None]: ...
    def compute_loss_context_manager(self) -> AbstractContextManager[Any]: ...
    def _prepare_inputs(self, inputs: Any) -> Any: ...


class PerViewBackward:
    """Computes the log-probabilities of a trainer's views, and makes the training steps of several forward
    passes.

    Args:
        trainer: defines the views and the loss.
        separable: whether the loss is the sum of the losses of its chunks.
        temperature: of the log-probabilities.
        tokens_together: views whose noised rows have at most this many tokens together share a pass.
    """

    def __init__(
        self,
        trainer: ViewLoss,
        *,
        separable: bool = False,
        temperature: float = 1.0,
        tokens_together: int = 0,
    ):
        self.trainer, self.separable, self.temperature, self.tokens_together = (
            trainer,
            separable,
            temperature,
            tokens_together,
        )

    def passes(self, lm: DiffusionLM, batch: Any) -> ViewPasses:
        """The forward passes over a batch's views."""
        return ViewPasses(
            lm, *self.trainer.tokens_of(batch), self.trainer.views_of(batch), temperature=self.temperature
        )

    def log_probs(self, lm: DiffusionLM, batch: Any, chunk: Chunk | None = None) -> Tensor:
        """Log-probabilities [B, M, T] of all views of a batch, pass by pass; or those of one chunk.

        With the same passes they are equal bit for bit with and without gradients.
        """
        if chunk is not None:
            return self.passes(lm, batch).log_probs(*chunk)
        ids_BT, documents_BT = self.trainer.tokens_of(batch)
        rows, views = self._rows_per_pass(batch), self.trainer.views_of(batch)
        return view_log_probs(lm, ids_BT, documents_BT, views, temperature=self.temperature, chunk=rows)

    def _rows_per_pass(self, batch: Any) -> int:
        """Noised rows per pass: `score_chunk`, or the number of rows in the micro-batch, or of those of
        `tokens_together`."""
        rows, length = self.trainer.tokens_of(batch)[0].shape
        return self.trainer.args.score_chunk or max(rows, self.tokens_together // length)

    def chunks_with_targets(self, batch: Any) -> list[Chunk]:
        """The chunks of a batch, one per forward pass, without those that have no target."""
        chunks, views = self._all_chunks(batch), self.trainer.views_of(batch)
        return [chunk for chunk in chunks if views.target_on_host[chunk].any()] or chunks[:1]

    def _all_chunks(self, batch: Any) -> list[Chunk]:
        views = self.trainer.views_of(batch)
        return list(passes(self.trainer.lm, len(views.hidden_BMT), views.count, self._rows_per_pass(batch)))

    def _maximum_over_ranks(self, count: int) -> int:
        """The maximum over ranks if all must make the same number of passes (FSDP, DeepSpeed); otherwise this
        rank's count."""
        if not self.trainer.uses_fsdp_or_deepspeed:
            return count
        return int(
            self.trainer.accelerator.gather(torch.tensor([count], device=self.trainer.args.device)).max()
        )

    def step(self, model: nn.Module, inputs: Any, items: Tensor | int | None) -> Tensor | None:
        """Backpropagate a micro-batch pass by pass and return its loss; None (and nothing done) if one pass
        is enough."""
        model.train()
        if self._maximum_over_ranks(len(self._all_chunks(inputs))) == 1:
            return None
        with self.trainer.phases("backward"):
            return self._pass_by_pass(model, inputs, items)

    def _pass_by_pass(self, model: nn.Module, inputs: Any, items: Tensor | int | None) -> Tensor:
        chunks = self.chunks_with_targets(inputs)
        if callable(getattr(self.trainer.optimizer, "train", None)):
            self.trainer.optimizer.train()
        inputs = self.trainer._prepare_inputs(inputs)
        view_passes = self.passes(self.trainer.lm.bind(model), inputs)
        assert items is not None
        num_chunks = len(chunks)
        # with zero loss: other ranks have more passes
        chunks += [chunks[-1]] * (self._maximum_over_ranks(num_chunks) - num_chunks)
        total = torch.zeros((), device=self.trainer.accelerator.device)
        if not self.separable:
            total, grad_BMT = self._loss_gradient(view_passes, inputs, items)
        for index, chunk in enumerate(chunks):
            with self._accumulating(model, last=index == len(chunks) - 1):
                with self.trainer.compute_loss_context_manager():
                    with self.trainer.phases("forward"):
                        log_prob_BMT = view_passes.log_probs(*chunk)
                    if not self.separable:
                        loss = (grad_BMT[chunk] * log_prob_BMT).sum()
                    else:
                        loss = self.trainer.per_item(self.trainer.loss_on(inputs, log_prob_BMT, chunk), items)
                        if index < num_chunks:
                            total = total + loss.detach()
                deepspeed = self.trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
                if index >= num_chunks:
                    loss = loss * 0
                self.trainer.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
        return total

    def _loss_gradient(
        self, view_passes: ViewPasses, batch: Any, items: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient with respect to the log-probabilities [B, M, T]."""
        with (
            torch.no_grad(),
            self.trainer.compute_loss_context_manager(),
            self.trainer.phases("forward"),
            self.trainer.lockstep(),
        ):
            log_prob_BMT = view_passes.all_log_probs(self._rows_per_pass(batch)).requires_grad_()
        with torch.enable_grad():
            loss = self.trainer.per_item(self.trainer.loss_on(batch, log_prob_BMT), items)
        [grad_BMT] = torch.autograd.grad(loss, log_prob_BMT)
        return loss.detach(), grad_BMT

    @contextmanager
    def _accumulating(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Inside, gradients are accumulated. Ranks exchange them in the last pass of a step, where DeepSpeed
        also steps."""
        state = self.trainer.accelerator.gradient_state
        distributed_type = self.trainer.accelerator.distributed_type
        # without a sync FSDP would keep whole gradients
        if last or distributed_type in (DistributedType.NO, DistributedType.FSDP):
            yield
        elif distributed_type == DistributedType.DEEPSPEED:
            syncs = state.sync_gradients
            state._set_sync_gradients(False)
            try:
                yield
            finally:
                state._set_sync_gradients(syncs)
        else:
            with self.trainer.accelerator.no_sync(model):
                yield
