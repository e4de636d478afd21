"""The views and the loss of a method, as `GRPOTrainer` and loops of one's own call them.

Shapes: B completions, M views, T positions of the canvas.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unmask.diffusion.views import Draw, Views
from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.losses import count_items, token_weights
from unmask.rl.methods.base import DivergenceMethod, Loss, LossInputs, Method, averaging_units, loss_of
from unmask.rl.methods.masking import weighed
from unmask.rl.rollout import Rollout, learnable
from unmask.tensor_checks import check_tensors
from unmask.training.per_view_backward import Chunk


def policy_views(lm: DiffusionLM, method: Method, rollout: Rollout, draw: Draw) -> Views:
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
        return weighed(rollout, rollout.completion_BT[:, None], None, method.estimator)
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
        `total` is the loss, divided by the tokens, completions or views that the method's aggregation counts;
        the rest is for logs.

    Raises:
        ConfigError: `method` is a name or a class, or has no aggregation; or a missing reference.
    """
    _check_method(method)
    tensors = {"log_prob_BMT": log_prob_BMT, "old_BMT": old_BMT, "reference_BMT": reference_BMT}
    check_tensors(ids_BT=rollout.ids_BT, **views.tensors, **tensors, advantage_B=advantage_B, kept_B=kept_B)
    if method.aggregation is None:
        remedy = "Use method.for_attention(lm.attention), or give one"
        raise ConfigError(
            f"that of {method.name} follows from the model's attention", where="aggregation", remedy=remedy
        )
    if (
        isinstance(method, DivergenceMethod)
        and method.beta
        and method.kl_to == "reference"
        and reference_BMT is None
    ):
        what = f"{method.name} has a KL term (beta={method.beta:g}) from a reference"
        raise ConfigError(
            what, where="reference_BMT", remedy="Give its log-probabilities, or the method beta=0.0"
        )
    learnt_BT = learnable(rollout, views)
    if kept_B is not None:
        learnt_BT = learnt_BT & kept_B.to(learnt_BT.device, non_blocking=True)[:, None]
    advantage_B1 = advantage_B.to(log_prob_BMT.device, non_blocking=True)[:, None]
    inputs = loss_inputs(
        method,
        rollout,
        views,
        log_prob_BMT,
        advantage_B1,
        learnt_BT,
        old_BMT,
        reference_BMT,
        max_completion_length=max_completion_length,
    )
    loss = loss_of(method, inputs)
    return loss._replace(total=loss.total / items_of(method, rollout, views, learnt_BT).clamp_min(1))


def _check_method(method: Any) -> None:
    if not isinstance(method, Method):
        remedy = "Make one of its class, as in get_method('spg')()"
        raise ConfigError(f"{method!r} is not a method", where="method", remedy=remedy)


def loss_inputs(
    method: Method,
    rollout: Rollout,
    views: Views,
    log_prob_BMT: Tensor,
    advantage_BT: Tensor,
    learnt_BT: Tensor,
    old_BMT: Tensor | None,
    reference_BMT: Tensor | None,
    *,
    max_completion_length: int,
    chunk: Chunk | None = None,
) -> LossInputs:
    """What the method's loss reads, of all views or of a chunk, of which log_prob_BMT is. The rest is as for
    `policy_loss`.

    Args:
        advantage_BT: [B, T], or [B, 1] if all tokens of a completion have the same.
        learnt_BT: the tokens to learn from.
    """
    assert method.aggregation is not None
    rows, columns = chunk or (slice(None), slice(None))
    weight_BT = token_weights(
        learnt_BT,
        method.aggregation,
        averaging_units(rollout, views, method.aggregation),
        max_completion_length,
    )[rows]
    if chunk is not None:
        rollout, views = rollout.select(rows), views.select(rows, columns)
        weight_BT = weight_BT * views.target_BMT.any(1)
    old_BMT = log_prob_BMT.detach() if old_BMT is None else old_BMT[rows, columns]
    reference_BMT = None if reference_BMT is None else reference_BMT[rows, columns]
    if isinstance(method, DivergenceMethod) and method.beta and method.kl_to == "old":
        reference_BMT = old_BMT
    return LossInputs(log_prob_BMT, old_BMT, reference_BMT, rollout, views, advantage_BT[rows], weight_BT)


def items_of(method: Method, rollout: Rollout, views: Views, learnt_BT: Tensor) -> Tensor:
    """The divisor of the method's summed loss: see `count_items`."""
    assert method.aggregation is not None
    return count_items(learnt_BT, method.aggregation, averaging_units(rollout, views, method.aggregation))
