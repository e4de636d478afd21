"""The views and the loss of a method, as `GRPOTrainer` and loops of one's own call them.

Shapes: B completions, M views, T positions of the canvas.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unmask.diffusion.views import Drawn, MaskRNG, Views
from unmask.errors import ConfigError
from unmask.generation.rollout import Rollout
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.losses import count_items, token_weights
from unmask.rl.methods.base import (
    DivergenceMethod,
    Loss,
    LossInputs,
    Method,
    averaging_units,
    loss_of,
    per_token,
)
from unmask.rl.methods.masking import weighted_views
from unmask.rl.updates import Update, learnable
from unmask.tensor_checks import check_tensors


def policy_views(lm: DiffusionLM, method: Method, rollout: Rollout, draw: MaskRNG) -> Views:
    """The views whose log-probabilities the method's loss reads. A causal model has one view: its predictions
    do not depend on what is hidden, and its likelihood is exact.

    Args:
        lm: the policy.
        method: of `unmask.rl.methods.get_method`, for the model's attention.
        rollout: the completions.
        draw: the source of randomness, with a key for each completion; `iteration` is the number of the
            update on this rollout.

    Raises:
        ConfigError: `method` is a name or a class.
    """
    _check_method(method)
    check_tensors(ids_BT=rollout.ids_BT, key_B=draw.key_B)
    if lm.autoregressive:
        return weighted_views(rollout, rollout.completion_BT[:, None], None, method.estimator)
    return method.plan(rollout, draw)


def policy_loss(
    method: Method,
    rollout: Rollout,
    views: Views,
    log_prob_BMT: Tensor,
    advantage_B: Tensor,
    *,
    max_completion_length: int,
    old_BMT: Tensor | None = None,
    reference_BMT: Tensor | None = None,
    kept_B: Tensor | None = None,
) -> Loss:
    """The loss of a method for a batch of completions (a paper for each in docs/rl.md).

    Args:
        method, rollout, views: as for `policy_views`.
        log_prob_BMT: log-probabilities of the views under the policy, with gradients (`view_log_probs`).
        advantage_B: of each completion (`advantages`), on any device.
        max_completion_length: the tokens of the longest possible completion: the divisor of the constant
            aggregations.
        old_BMT: as log_prob_BMT, under the policy that sampled; None: the weights have not changed since.
        reference_BMT: likewise under the reference of the KL term; None: there is none.
        kept_B: boolean; the completions to learn from (`kept_groups`), on any device. None: all.

    Returns:
        `total` is the loss, divided by the tokens, completions or views that the method's loss_type counts;
        the rest is for logs.

    Raises:
        ConfigError: `method` is a name or a class, or has no loss_type; or a missing reference.
    """
    _check_method(method)
    check_tensors(
        ids_BT=rollout.ids_BT,
        **views.tensors,
        log_prob_BMT=log_prob_BMT,
        old_BMT=old_BMT,
        reference_BMT=reference_BMT,
        advantage_B=advantage_B,
        kept_B=kept_B,
    )
    if method.loss_type is None:
        raise ConfigError(
            f"that of {method.name} follows from the model's attention",
            where="loss_type",
            remedy="Use method.for_attention(lm.attention), or give one",
        )
    if (
        isinstance(method, DivergenceMethod)
        and method.beta
        and method.kl_to == "reference"
        and reference_BMT is None
    ):
        raise ConfigError(
            f"{method.name} has a KL term (beta={method.beta:g}) from a reference",
            where="reference_BMT",
            remedy="Give its log-probabilities, or the method beta=0.0",
        )
    loss_mask_BT = learnable(rollout, views)
    if kept_B is not None:
        loss_mask_BT = loss_mask_BT & kept_B.to(loss_mask_BT.device, non_blocking=True)[:, None]
    advantage_B1 = advantage_B.to(log_prob_BMT.device, non_blocking=True)[:, None]
    update = Update(rollout, views, advantage_B1, loss_mask_BT, old_BMT, reference_BMT)
    loss = loss_of(method, loss_inputs(method, update, log_prob_BMT, max_completion_length))
    return loss._replace(total=loss.total / items_of(method, update).clamp_min(1))


def _check_method(method: Any) -> None:
    if not isinstance(method, Method):
        raise ConfigError(
            f"{method!r} is not a method",
            where="method",
            remedy="Make one of its class, as in get_method('spg')()",
        )


def loss_inputs(
    method: Method,
    update: Update,
    log_prob_BMT: Tensor,
    max_completion_length: int,
    chunk: tuple[slice, slice] | None = None,
) -> LossInputs:
    """What the method's loss reads, of all views or of a chunk, of which log_prob_BMT is. The rest is as for
    `policy_loss`."""
    assert method.loss_type is not None
    unit_BT = averaging_units(update.rollout, update.views, method.loss_type)
    loss_mask_BT = per_token(update.views, update.loss_mask_BT)
    weight_BT = token_weights(loss_mask_BT, method.loss_type, unit_BT, max_completion_length)
    if chunk is not None:
        drawn, whole = isinstance(update.views.replaced, Drawn), update.views.target_BMT.shape
        update = update.select_rows(*chunk)
        if drawn:
            weight_BT = weight_BT.view(whole)[chunk].flatten(1)
        else:
            weight_BT = weight_BT[chunk[0]] * update.views.target_BMT.any(1)
    advantage_BT = update.advantage_BT
    if advantage_BT.shape[1] > 1:
        advantage_BT = per_token(update.views, advantage_BT)
    old_BMT = log_prob_BMT.detach() if update.old_BMT is None else update.old_BMT
    reference_BMT = update.reference_BMT
    if isinstance(method, DivergenceMethod) and method.beta and method.kl_to == "old":
        reference_BMT = old_BMT
    return LossInputs(
        log_prob_BMT, old_BMT, reference_BMT, update.rollout, update.views, advantage_BT, weight_BT
    )


def items_of(method: Method, update: Update) -> Tensor:
    """The divisor of the method's summed loss: see `count_items`."""
    assert method.loss_type is not None
    unit_BT = averaging_units(update.rollout, update.views, method.loss_type)
    return count_items(per_token(update.views, update.loss_mask_BT), method.loss_type, unit_BT)
