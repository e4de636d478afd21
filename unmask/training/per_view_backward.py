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
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from unmask.diffusion.log_probs import ViewPasses, passes, view_log_probs
from unmask.models.diffusion_lm import DiffusionLM

Chunk = tuple[slice, slice]  # rows and views of one forward pass


class PerViewBackward:
    """How the views of a trainer's micro-batches are divided among forward passes, and their
    log-probabilities.

    Args:
        trainer: has `views_of(batch)`, the views of a micro-batch, the same at every call;
            `tokens_of(batch)`, its clean ids and documents [B, T] (documents None: every row is one document
            without padding); and `loss_on(batch, log_prob_BMT, chunk)`, the summed loss from the
            log-probabilities of all views, of a separable loss also from those of a chunk.
        separable: whether the loss is the sum of the losses of its chunks.
        temperature: of the log-probabilities.
        tokens_together: views whose noised rows have at most this many tokens together share a pass.
    """

    def __init__(
        self, trainer: Any, *, separable: bool = False, temperature: float = 1.0, tokens_together: int = 0
    ):
        self.views_of, self.tokens_of, self.loss_on = trainer.views_of, trainer.tokens_of, trainer.loss_on
        self.args, self.separable, self.temperature = trainer.args, separable, temperature
        self.tokens_together = tokens_together

    def passes(self, lm: DiffusionLM, batch: Any) -> ViewPasses:
        """The forward passes over a batch's views."""
        ids_BT, documents_BT = self.tokens_of(batch)
        views = self.views_of(batch)
        return ViewPasses(lm, ids_BT, documents_BT, views, temperature=self.temperature)

    def log_probs(self, lm: DiffusionLM, batch: Any, chunk: Chunk | None = None) -> Tensor:
        """Log-probabilities [B, M, T] of all views of a batch, pass by pass; or those of one chunk.

        With the same passes they are equal bit for bit with and without gradients.
        """
        if chunk is not None:
            return self.passes(lm, batch).log_probs(*chunk)
        (ids_BT, documents_BT), rows = self.tokens_of(batch), self.rows_per_pass(batch)
        views = self.views_of(batch)
        return view_log_probs(lm, ids_BT, documents_BT, views, temperature=self.temperature, chunk=rows)

    def rows_per_pass(self, batch: Any) -> int:
        """Noised rows per pass: `logprob_batch_size`, or the number of rows in the micro-batch, or of
        those of `tokens_together`."""
        rows, length = self.tokens_of(batch)[0].shape
        return self.args.logprob_batch_size or max(rows, self.tokens_together // length)

    def chunks(self, lm: DiffusionLM, batch: Any) -> list[Chunk]:
        """The chunks of a batch, one per forward pass."""
        views = self.views_of(batch)
        return list(passes(lm, len(views.hidden_BMT), views.count, self.rows_per_pass(batch)))

    def chunks_with_targets(self, lm: DiffusionLM, batch: Any) -> list[Chunk]:
        """The chunks of a batch, without those that have no target."""
        chunks, views = self.chunks(lm, batch), self.views_of(batch)
        return [chunk for chunk in chunks if views.target_on_host[chunk].any()] or chunks[:1]


@contextmanager
def accumulating(accelerator: Accelerator, model: nn.Module, *, last: bool) -> Iterator[None]:
    """A context in which gradients are accumulated. Ranks exchange them in the last pass of a step, where
    DeepSpeed also steps."""
    state, distributed_type = accelerator.gradient_state, accelerator.distributed_type
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
        with accelerator.no_sync(model):
            yield
