"""What the losses of the GRPO family are made of: pure functions of log-probabilities. The loss of a method
is `loss` in its own file (`methods/spg.py`), or in `methods/base.py`.

Shapes: B completions, T tokens, G groups, U averaging units (steps or views); tensors without a suffix have
any shape: of tokens [B, T] or of sequences [B, 1]. Completions of one prompt share a group number.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from unmask.errors import ConfigError
from unmask.tensor_checks import check_tensors

ScaleRewards = Literal["none", "group", "population", "leave-one-out", "softmax"]
Divergence = Literal["k1", "k2", "k3"]
LossType = Literal["dapo", "grpo", "dr_grpo", "step", "view", "view-constant", "sum"]


MAX_EXPONENT = 80.0
"""A logarithm whose exponential does not overflow float32."""


EQUAL_REWARDS = 1e-6
"""Rewards are equal if they differ by at most this fraction of the largest: a weighted sum of them is rounded
to float32."""


class Surrogate(NamedTuple):
    """A loss, its ratios, and which of them were clipped, all of one shape."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def advantages(
    reward_B: Tensor, group_B: Tensor, kind: ScaleRewards = "none", *, temperature: float = 1.0
) -> Tensor:
    """How much better each completion is than its group [B]; NaN rewards (unscored) are left out and get 0.

    All are 0 in a group of equal rewards (`equal_rewards`). none: reward minus the group's mean (Dr. GRPO,
    Liu et al. 2025). group: also divided by the group's standard deviation (GRPO, Shao et al. 2024),
    population: without Bessel's correction (TraceRL, Wang et al. 2025). leave-one-out: against the mean of
    the others (RLOO, Ahmadian et al. 2024). softmax: the group's softmax of these differences / temperature,
    less that of their negatives (wd1, Tang et al. 2025, eq. 9).

    Args:
        reward_B, group_B: rewards, and the number of each completion's group, on the CPU.
        temperature: of the softmax.

    Raises:
        ConfigError: an unknown kind.
    """
    check_tensors(reward_B=reward_B, group_B=group_B)
    _check_kind(kind, ScaleRewards)
    scored_B = ~reward_B.isnan()
    value_B = torch.where(scored_B, reward_B, 0).double()
    groups, index_B = (torch.from_numpy(found) for found in np.unique(group_B.numpy(), return_inverse=True))

    def total(values_B: Tensor) -> Tensor:
        return torch.zeros(len(groups), dtype=torch.float64, device=values_B.device).index_add(
            0, index_B, values_B
        )[index_B]

    count_B = total(scored_B.double())
    centered_B = torch.where(scored_B, value_B - total(value_B) / count_B.clamp_min(1), 0)
    if kind == "group":
        deviation_B = (total(centered_B**2) / (count_B - 1).clamp_min(1)).sqrt()
        centered_B = centered_B / (deviation_B + 1e-4)
    elif kind == "population":
        deviation_B = (total(centered_B**2) / count_B.clamp_min(1)).sqrt()
        centered_B = centered_B / torch.where(deviation_B > 0, deviation_B, 1)
    elif kind == "leave-one-out":
        centered_B = centered_B * count_B / (count_B - 1).clamp_min(1)
    elif kind == "softmax":
        limits = torch.finfo(torch.float64)
        weights = []
        for sign in (1, -1):  # subtract the maximum, so that no exponential overflows at any temperature
            signed_B = torch.where(scored_B, sign * centered_B / temperature, -torch.inf)
            largest_G = torch.full_like(groups, limits.min, dtype=torch.float64).scatter_reduce(
                0, index_B, signed_B, "amax"
            )
            weight_B = (signed_B - largest_G[index_B]).exp()
            weights.append(weight_B / total(weight_B).clamp_min(limits.tiny))
        centered_B = weights[0] - weights[1]
    return torch.where(equal_rewards(reward_B, group_B), 0, centered_B).float()


def equal_rewards(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Whether the rewards of each completion's group are equal [B], up to `EQUAL_REWARDS`; NaN rewards are
    left out."""
    _, index_B = (torch.from_numpy(found) for found in np.unique(group_B.numpy(), return_inverse=True))

    def largest(value_B: Tensor) -> Tensor:
        value_B = torch.where(value_B.isnan(), -torch.inf, value_B)
        return torch.full_like(value_B, -torch.inf).scatter_reduce(0, index_B, value_B, "amax")[index_B]

    high_B, low_B = largest(reward_B.double()), -largest(-reward_B.double())
    return high_B - low_B <= EQUAL_REWARDS * torch.maximum(high_B.abs(), low_B.abs())


def _check_kind(kind: str, known: Any) -> None:
    if kind not in (kinds := get_args(known)):
        raise ConfigError(f"unknown kind {kind!r}", where="kind", remedy=f"Use one of {', '.join(kinds)}")


def kept_groups(reward_B: Tensor, group_B: Tensor, low: float, high: float, *, spread: bool) -> Tensor:
    """Which completions [B] belong to groups to learn from: mean reward in [low, high], and with `spread` not
    all rewards equal (`equal_rewards`; DAPO, Yu et al. 2025). Unscored completions are left out; a group
    without scored ones is not kept."""
    check_tensors(reward_B=reward_B, group_B=group_B)
    scored: dict[int, list[float]] = defaultdict(list)
    for group, reward in zip(group_B.tolist(), reward_B.tolist(), strict=True):
        if not math.isnan(reward):
            scored[group].append(reward)
    # compared as tensors, which rounds the bounds like the means
    kept = {group for group, rewards in scored.items() if low <= reward_B.new_tensor(rewards).mean() <= high}
    kept_B = torch.tensor([group in kept for group in group_B.tolist()], dtype=torch.bool)
    return kept_B & ~equal_rewards(reward_B, group_B) if spread else kept_B


def overlong_penalty(length_B: Tensor, limit: int, buffer: int) -> Tensor:
    """What is added to the reward of a long completion [B]: 0 up to `limit - buffer` tokens, falling to -1 at
    `limit` (DAPO, Yu et al. 2025, eq. 13). For a completion of `limit` tokens without an end token, pass a
    length above the limit."""
    check_tensors(length_B=length_B)
    return -((length_B - (limit - buffer)) / max(buffer, 1)).clamp(0, 1)


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, delta: float | None = None
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
    plain, bounded = ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
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
    Methods add it to their loss (`methods/base.py`: `ClippedMethod.surrogate`); the other model is scored in
    `GRPOTrainer.make_updates`.

    k1 = -r, with the score function's gradient added: its own is 0 in expectation, the sum is the gradient of
    the KL. k2 = r^2 / 2. k3 = exp(r) - r - 1.

    Raises:
        ConfigError: an unknown kind.
    """
    check_tensors(log_ratio=log_ratio)
    _check_kind(kind, Divergence)
    if kind == "k1":
        constant = log_ratio.detach()
        return -constant - (log_ratio - constant) * (1 - constant)
    return log_ratio**2 / 2 if kind == "k2" else log_ratio.exp() - log_ratio - 1


def token_weights(loss_mask_BT: Tensor, kind: LossType, unit_BT: Tensor, limit: int) -> Tensor:
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
        ConfigError: an unknown kind.
    """
    check_tensors(loss_mask_BT=loss_mask_BT, unit_BT=unit_BT)
    _check_kind(kind, LossType)
    trained = loss_mask_BT.float()
    if kind == "grpo":
        return trained / trained.sum(1, keepdim=True).clamp_min(1)
    if kind in ("step", "view"):
        tokens_BU = tokens_per_unit(loss_mask_BT, unit_BT)
        weight_BT = trained / tokens_BU.gather(1, torch.where(loss_mask_BT, unit_BT, 0)).clamp_min(1)
        return weight_BT / (tokens_BU > 0).sum(1, keepdim=True).clamp_min(1) if kind == "step" else weight_BT
    return trained / limit if kind in ("dr_grpo", "view-constant") else trained


def tokens_per_unit(loss_mask_BT: Tensor, unit_BT: Tensor) -> Tensor:
    """The number of trained tokens of each step or view of a completion [B, U], U being T."""
    trained = loss_mask_BT.float()
    return torch.zeros_like(trained).scatter_add_(1, torch.where(loss_mask_BT, unit_BT, 0), trained)


def count_items(loss_mask_BT: Tensor, kind: LossType, unit_BT: Tensor) -> Tensor:
    """The divisor of the summed loss: for `dapo` the tokens, for `view` and `view-constant` the views, else
    the completions. ConfigError for an unknown kind."""
    check_tensors(loss_mask_BT=loss_mask_BT, unit_BT=unit_BT)
    _check_kind(kind, LossType)
    if kind in ("view", "view-constant"):
        return (tokens_per_unit(loss_mask_BT, unit_BT) > 0).sum()
    return loss_mask_BT.sum() if kind == "dapo" else loss_mask_BT.any(1).sum()
