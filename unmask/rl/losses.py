"""What the losses of the GRPO family are made of: pure functions. The loss of a method
is `loss` in its own file (`methods/spg.py`), or in `methods/base.py`.

Shapes: B completions, T tokens, U averaging units (steps or views); tensors without a suffix have
any shape: of tokens [B, T] or of sequences [B, 1].
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from unmask.errors import require_known
from unmask.tensor_checks import check_tensors

Divergence = Literal["k1", "k2", "k3"]
LossType = Literal["dapo", "grpo", "dr_grpo", "step", "view", "view-constant", "sum"]


MAX_EXPONENT = 80.0
"""A logarithm whose exponential does not overflow float32."""


class Surrogate(NamedTuple):
    """A loss, its ratios, and which of them were clipped, all of one shape."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, *, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Surrogate:
    """PPO's clipped surrogate (Schulman et al. 2017). `log_ratio` is the log-probability under the policy
    minus that under the old policy.

    At the first update the two policies agree: the ratio is 1 and the loss is -advantage. `delta` bounds
    the ratio where the advantage is negative, since the loss grows with it there (Ye et al. 2020).
    """
    check_tensors(log_ratio=log_ratio, advantage=advantage)
    # Where the loss is bounded, a ratio that overflows would still have the gradient 0 * inf.
    limit = torch.where(advantage < 0, torch.inf if delta is None else MAX_EXPONENT, MAX_EXPONENT)
    ratio = log_ratio.clamp(max=limit).exp()
    plain, bounded = ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantage
    value = torch.minimum(plain, bounded)
    clipped = bounded < plain
    if delta is not None:
        floor = delta * advantage
        clipped = clipped | ((advantage < 0) & (value < floor))
        value = torch.where(advantage < 0, torch.maximum(value, floor), value)
    return Surrogate(-value, ratio.detach(), clipped.detach())


def kl_divergence(log_ratio: Tensor, kind: Divergence) -> Tensor:
    """An estimate of KL(policy || other) from a sample of the policy (Schulman 2020, "Approximating KL
    divergence"). `log_ratio` r is the log-probability under the other model minus that under the policy.
    Methods add it to their loss (`methods/base.py`: `ClippedMethod.surrogate`); `GRPOTrainer.make_updates`
    computes the log-probabilities of the other model.

    k1 = -r, with the score function's gradient added: its own is 0 in expectation, the sum is the gradient of
    the KL. k2 = r^2 / 2. k3 = exp(r) - r - 1.

    Raises:
        ConfigError: an unknown kind.
    """
    check_tensors(log_ratio=log_ratio)
    require_known(kind, get_args(Divergence), "divergence", where="kind")
    if kind == "k1":
        constant = log_ratio.detach()
        return -constant - (log_ratio - constant) * (1 - constant)
    return log_ratio**2 / 2 if kind == "k2" else log_ratio.exp() - log_ratio - 1


def token_weights(loss_mask_BT: Tensor, loss_type: LossType, unit_BT: Tensor, limit: int) -> Tensor:
    """The weight of each token in the batch's loss [B, T], before the division by `count_items`.

    dapo: equal weights. grpo: the mean over each completion's tokens. step: the mean over
    each completion's denoising steps of the mean over the step's tokens (CJ-GRPO). view: the mean over the
    views of all completions of the mean over the view's tokens (TraceRL on LLaDA); view-constant: of their
    sum / limit (TraceRL on SDAR). dr_grpo: 1 / limit. sum: the sum over tokens (wd1).

    Args:
        loss_mask_BT: the tokens that are trained on.
        unit_BT: for `step` the step that revealed a token, for `view` the view that has it as a target, below
            T; any elsewhere.
        limit: tokens of the longest possible completion.

    Raises:
        ConfigError: an unknown loss type.
    """
    check_tensors(loss_mask_BT=loss_mask_BT, unit_BT=unit_BT)
    require_known(loss_type, get_args(LossType), "loss type", where="loss_type")
    trained = loss_mask_BT.float()
    if loss_type == "grpo":
        return trained / trained.sum(1, keepdim=True).clamp_min(1)
    if loss_type in ("step", "view"):
        tokens_BU = tokens_per_unit(loss_mask_BT, unit_BT)
        weight_BT = trained / tokens_BU.gather(1, torch.where(loss_mask_BT, unit_BT, 0)).clamp_min(1)
        if loss_type == "view":
            return weight_BT
        return weight_BT / (tokens_BU > 0).sum(1, keepdim=True).clamp_min(1)
    return trained / limit if loss_type in ("dr_grpo", "view-constant") else trained


def tokens_per_unit(loss_mask_BT: Tensor, unit_BT: Tensor) -> Tensor:
    """The number of trained tokens of each step or view of a completion [B, U], U being T."""
    trained = loss_mask_BT.float()
    return torch.zeros_like(trained).scatter_add_(1, torch.where(loss_mask_BT, unit_BT, 0), trained)


def count_items(loss_mask_BT: Tensor, loss_type: LossType, unit_BT: Tensor) -> Tensor:
    """The divisor of the summed loss: for `dapo` the tokens, for `view` and `view-constant` the views, else
    the completions. ConfigError for an unknown loss type."""
    check_tensors(loss_mask_BT=loss_mask_BT, unit_BT=unit_BT)
    require_known(loss_type, get_args(LossType), "loss type", where="loss_type")
    if loss_type in ("view", "view-constant"):
        return (tokens_per_unit(loss_mask_BT, unit_BT) > 0).sum()
    return loss_mask_BT.sum() if loss_type == "dapo" else loss_mask_BT.any(1).sum()
