"""Training a quality head on the model's own rollouts (PRISM, Kim et al. 2025, arXiv 2510.01384).

Of a row whose tokens are hidden at random, the model fills in a few in one step, as its sampler does. The
head then reads the partly filled row and learns, for these tokens, whether each equals the original one. The
cross-entropy of this event is least where the head gives its probability, given the partly filled row.

Shapes: B batch, T tokens, N filled tokens of the batch, D hidden width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from unmask.data.rows import separate_documents
from unmask.diffusion.log_probs import forward_inputs
from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import MaskRNG, columns
from unmask.errors import ConfigError, ModelError
from unmask.generation.policies import draw as draw_tokens
from unmask.generation.policies import weights
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.hooks.head import Reduction
from unmask.models.hooks.quality_head import add_quality_head
from unmask.models.kernels.log_softmax import at_least_float32
from unmask.models.model_state import training_only
from unmask.supervised.extra_objective import Objective, ObjectiveLoss, Plan, row_weights
from unmask.tensor_checks import check_tensors


@dataclass(frozen=True)
class FilledRows:
    """Rows of which a few hidden tokens were filled in."""

    clean_BT: Tensor
    ids_BT: Tensor  # with the filled tokens; the clean ones elsewhere, also where hidden
    hidden_BT: Tensor  # True where a token is still hidden
    filled_BT: Tensor
    padding_BT: Tensor | None  # the attention mask

    @property
    def right_N(self) -> Tensor:
        """1 where a filled token equals the original one, else 0."""
        return (self.ids_BT == self.clean_BT)[self.filled_BT].float()


def with_quality_head(lm: DiffusionLM, args: Any = None) -> DiffusionLM:
    """The model with a quality head, to be trained.

    Args:
        args: the config of the trainer, if one trains it.

    Raises:
        ModelError: the model is causal: it has no hidden tokens.
        ConfigError: several processes, which do not train the head.
    """
    if lm.attention == "causal":
        raise ModelError(
            "a causal model never revises a token",
            where="quality_head",
            remedy="Convert it first (`unmask convert`)",
        )
    if args is not None and (args.world_size > 1 or args.fsdp or args.deepspeed):
        what = "is not trained by several processes: it is no part of the model's forward pass"
        raise ConfigError(
            what, where="quality_head", remedy="Train it in one process, without fsdp and deepspeed"
        )
    lm = lm.bind(lm.model)
    lm.quality_head = add_quality_head(lm.model)
    return lm


def training_head(lm: DiffusionLM, *, alone: bool) -> AbstractContextManager[None]:
    """A context in which the quality head has gradients; if `alone`, nothing else has."""
    assert lm.quality_head is not None
    others = {weight for weight in lm.model.parameters() if weight.requires_grad and not alone}
    return training_only(lm, others | {*lm.quality_head.parameters()})


class QualityObjective(Objective):
    """A head that learns, from the model's own samples, which visible tokens are right; with `quality_head:
    joint` beside the masked loss."""

    def prepared(self, lm: DiffusionLM) -> DiffusionLM:
        return with_quality_head(lm, self.args)

    def training(self, lm: DiffusionLM) -> AbstractContextManager[None]:
        return training_head(lm, alone=self.args.quality_head == "alone")

    def loss(self, lm: DiffusionLM, batch: dict[str, Any], draw: MaskRNG, plan: Plan) -> ObjectiveLoss:
        views, maskable_BT = plan(batch, draw), batch["maskable"]
        joint, documents_BT = self.args.quality_head == "joint", separate_documents(batch)
        rollout = fill_in(
            lm, batch["input_ids"], documents_BT, views.hidden_BMT[:, 0], draw, self.args.quality_tokens
        )
        logits_N = quality_logits(lm, rollout, trained=joint)
        loss = quality_loss(logits_N, rollout, maskable_BT.sum(1))
        count = maskable_BT.sum()
        metrics = {"quality_loss": (loss.detach() / count.clamp_min(1), float(count))}
        if len(logits_N):
            metrics["filled_in_right"] = rollout.right_N.mean(), len(logits_N)
        return ObjectiveLoss(loss, views if joint else None, metrics)


@torch.no_grad()
def fill_in(
    lm: DiffusionLM, clean_BT: Tensor, padding_BT: Tensor | None, hidden_BT: Tensor, draw: MaskRNG, count: int
) -> FilledRows:
    """Fill in `count` random hidden tokens of each row (or all, if there are fewer) in one step, each drawn
    from the model's distribution at temperature 1.

    Args:
        clean_BT: the tokens of the rows.
        padding_BT: 1 is real, 0 padding; packed documents are numbered. None: every row is one document.
        hidden_BT: boolean; the hidden tokens, such as those of a view.
    """
    check_tensors(ids_BT=clean_BT, document_BT=padding_BT, hidden_BT=hidden_BT, key_B=draw.key_B)
    place_BT = columns(hidden_BT)
    order_BT = draw.uniform(place_BT, 1, RngStream.ROLLOUT)[:, 0].masked_fill(~hidden_BT, 2.0)
    filled_BT = hidden_BT & (order_BT.argsort(1).argsort(1) < count)
    ids_BT = clean_BT.clone()
    if filled_BT.any():
        inputs = forward_inputs(lm, clean_BT, padding_BT, hidden_BT[:, None], filled_BT[:, None])
        uniform_N = draw.uniform(place_BT, 1, RngStream.TOKEN)[:, 0][filled_BT]
        (ids_BT[filled_BT],) = lm.reduced(inputs, Reduction(drawn, (uniform_N,)))
    return FilledRows(clean_BT, ids_BT, hidden_BT & ~filled_BT, filled_BT, padding_BT)


def drawn(logits_NV: Tensor, uniform_N: Tensor, _: None) -> tuple[Tensor]:
    """Tokens [N], drawn at temperature 1 with these uniform numbers."""
    logits_NV = at_least_float32(logits_NV)
    return (draw_tokens(weights(logits_NV, logits_NV.amax(-1, keepdim=True)), uniform_N),)


def quality_logits(lm: DiffusionLM, rollout: FilledRows, *, trained: bool) -> Tensor:
    """The quality head's logits [N] at the filled tokens, read as in generation: a block-causal model sees
    clean blocks before the current one. With `trained` the model gets their gradient too.

    Raises:
        ModelError: the model has no quality head.
    """
    if lm.quality_head is None:
        raise ModelError("the model has none", where="quality_head", remedy="Add one with with_quality_head")
    hidden_BT, filled_BT = rollout.hidden_BT, rollout.filled_BT
    inputs = forward_inputs(lm, rollout.clean_BT, rollout.padding_BT, hidden_BT[:, None], filled_BT[:, None])
    length, width = filled_BT.shape[1], inputs.ids_BT.shape[1]
    noisy_BT = torch.where(hidden_BT, lm.mask_token_id, rollout.ids_BT)
    row_N, column_N = filled_BT.nonzero(as_tuple=True)
    inputs = replace(
        inputs, ids_BT=torch.cat([noisy_BT, inputs.ids_BT[:, length:]], 1), index_N=row_N * width + column_N
    )
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        hidden_ND = lm.hidden_states(inputs)
    return lm.quality_head(hidden_ND)


def quality_loss(logits_N: Tensor, rollout: FilledRows, items_B: Tensor) -> Tensor:
    """The mean cross-entropy of each row's filled tokens, times the row's items (its learned tokens), summed
    over rows, in nats."""
    check_tensors(filled_BT=rollout.filled_BT, items_B=items_B)
    weight_N = row_weights(rollout.filled_BT, items_B)
    check_tensors(weight_N=weight_N, logits_N=logits_N)
    loss_N = binary_cross_entropy_with_logits(logits_N.float(), rollout.right_N, reduction="none")
    return (weight_N * loss_N).sum()
