"""Losses of many views in the memory of one: the loss is found from scores alone, then each view gets its gradient by itself.

A loss of scores s has the gradient sum over views of (d loss / d s_v) (d s_v / d weights). With the first factor known, a view is
scored with gradients, multiplied, gone back through and forgotten: exact, whatever the loss is.

Shapes: B batch, V views, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from unmask.data.rows import documents_apart
from unmask.diffusion.log_probs import passes, score
from unmask.diffusion.views import Views
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.trainer import DiffusionTrainer

Piece = tuple[slice, slice]
"""Rows and views of one forward pass."""


class ViewwiseTrainer(DiffusionTrainer):
    """A trainer whose loss is a function of the scores of views.

    Subclasses say which views a batch has (`views_of`) and what their scores cost (`loss_on`).
    """

    def views_of(self, batch: Any) -> Views:
        """The views of a micro-batch; the same at every call."""
        raise NotImplementedError

    def tokens_of(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The clean ids and the documents [B, T] of a micro-batch; None where every row is one, without padding."""
        return batch["input_ids"], documents_apart(batch)

    def loss_on(self, batch: Any, log_prob_BVT: Tensor, piece: Piece | None = None) -> Tensor:
        """The summed loss, from the scores of all views; of a `separable` loss also of a piece of them."""
        raise NotImplementedError

    separable = False
    """Whether the loss is the sum of the losses of its pieces."""
    temperature = 1.0
    """Of the log-probabilities."""

    def micro_loss(self, lm: DiffusionLM, batch: Any) -> Tensor:
        """The loss in one piece."""
        return self.loss_on(batch, self.score_views(lm, batch))

    def score_views(self, lm: DiffusionLM, batch: Any, piece: Piece | None = None) -> Tensor:
        """Log-probabilities [B, V, T] of all views of a batch, pass by pass; or those of one pass.

        With the same passes they are the same bits with gradients and without.
        """
        ids_BT, documents_BT = self.tokens_of(batch)
        views = self.views_of(batch)
        if piece is not None:
            rows, at = piece
            part_BT = None if documents_BT is None else documents_BT[rows]
            return score(lm, ids_BT[rows], part_BT, views.piece(rows, at), temperature=self.temperature)
        return score(lm, ids_BT, documents_BT, views, temperature=self.temperature, chunk=self.chunk(batch))

    def chunk(self, batch: Any) -> int:
        """Noised rows in a pass: as many as the micro-batch has rows, unless `score_chunk` says."""
        return self.args.score_chunk or len(self.tokens_of(batch)[0])

    def passes_of(self, batch: Any) -> list[Piece]:
        """The passes that a batch takes, but for those in which nothing is scored."""
        every, views = self._every_pass(batch), self.views_of(batch)
        return [piece for piece in every if views.scored_BVT[piece].any()] or every[:1]

    def _every_pass(self, batch: Any) -> list[Piece]:
        views = self.views_of(batch)
        return list(passes(self.lm, len(views.hidden_BVT), views.count, self.chunk(batch)))

    def _most(self, count: int) -> int:
        """The largest count of a rank, where all must make the same passes (their weights or gradients are sharded); else this one's."""
        return int(self.accelerator.gather(torch.tensor([count], device=self.args.device)).max()) if self.sharded else count

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One pass is an ordinary step. Of several each gets the part of the gradient that is its own."""
        model.train()
        if self._most(len(self._every_pass(inputs))) == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        with self.phases("backward"):
            return self.record_loss(self._pass_by_pass(model, inputs, num_items_in_batch))

    def _pass_by_pass(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None) -> Tensor:
        made = self.passes_of(inputs)
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        lm = self.lm.bind(model)
        assert num_items_in_batch is not None
        own = len(made)
        made += [made[-1]] * (self._most(own) - own)
        total = torch.zeros((), device=self.accelerator.device)
        if not self.separable:
            total, slope_BVT = self._slopes(lm, inputs, num_items_in_batch)
        for index, piece in enumerate(made):
            with self._accumulating(model, last=index == len(made) - 1):
                with self.compute_loss_context_manager():
                    with self.phases("forward"):
                        log_prob_BVT = self.score_views(lm, inputs, piece)
                    if not self.separable:
                        loss = (slope_BVT[piece] * log_prob_BVT).sum()
                    else:
                        loss = self.per_item(self.loss_on(inputs, log_prob_BVT, piece), num_items_in_batch)
                        total = total + loss.detach() * (index < own)
                deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
                self.accelerator.backward(loss * (index < own), **({"scale_wrt_gas": False} if deepspeed else {}))
        return total

    def _slopes(self, lm: DiffusionLM, batch: Any, items: Tensor | int) -> tuple[Tensor, Tensor]:
        """The loss, and what it changes by with each score [B, V, T]."""
        with torch.no_grad(), self.compute_loss_context_manager(), self.phases("forward"), self.lockstep():
            values_BVT = self.score_views(lm, batch).detach().requires_grad_()
        with torch.enable_grad():
            loss = self.per_item(self.loss_on(batch, values_BVT), items)
        [slope_BVT] = torch.autograd.grad(loss, values_BVT)
        return loss.detach(), slope_BVT

    @contextmanager
    def _accumulating(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Inside, gradients are added up; ranks exchange them with the last pass of a step, and DeepSpeed steps there."""
        state = self.accelerator.gradient_state
        kind = self.accelerator.distributed_type
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
            with nullcontext() if alone else self.accelerator.no_sync(model):
                yield
