"""Advantages: how much better each completion is than the others of its prompt, and which groups of
completions are learned from. Pure functions of rewards.

Shapes: B completions, G groups. Completions of one prompt share a group number.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Literal, assert_never, get_args

import numpy as np
import torch
from torch import Tensor

from unmask.errors import require_known
from unmask.tensor_checks import check_tensors

ScaleRewards = Literal["none", "group", "population", "leave-one-out", "softmax"]
"""How `advantages` scales them. After a change: `python scripts/list_settings.py`."""
EQUAL_REWARDS = 1e-6
"""Rewards are equal if they differ by at most this fraction of the largest: a weighted sum of them is rounded
to float32."""


def advantages(
    reward_B: Tensor, group_B: Tensor, scale_rewards: ScaleRewards = "none", *, temperature: float = 1.0
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
        ConfigError: an unknown value of `scale_rewards`.
    """
    check_tensors(reward_B=reward_B, group_B=group_B)
    require_known(scale_rewards, get_args(ScaleRewards), "scaling", where="scale_rewards")
    scored_B = ~reward_B.isnan()
    value_B = torch.where(scored_B, reward_B, 0).double()
    groups, index_B = (torch.from_numpy(found) for found in np.unique(group_B.numpy(), return_inverse=True))

    def total(values_B: Tensor) -> Tensor:
        return torch.zeros(len(groups), dtype=torch.float64, device=values_B.device).index_add(
            0, index_B, values_B
        )[index_B]

    count_B = total(scored_B.double())
    centered_B = torch.where(scored_B, value_B - total(value_B) / count_B.clamp_min(1), 0)
    match scale_rewards:
        case "none":
            pass
        case "group":
            deviation_B = (total(centered_B**2) / (count_B - 1).clamp_min(1)).sqrt()
            centered_B = centered_B / (deviation_B + 1e-4)
        case "population":
            deviation_B = (total(centered_B**2) / count_B.clamp_min(1)).sqrt()
            centered_B = centered_B / torch.where(deviation_B > 0, deviation_B, 1)
        case "leave-one-out":
            centered_B = centered_B * count_B / (count_B - 1).clamp_min(1)
        case "softmax":
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
        case _:
            assert_never(scale_rewards)
    return torch.where(equal_rewards(reward_B, group_B), 0, centered_B).float()


def equal_rewards(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Whether the rewards of each completion's group are equal [B], up to `EQUAL_REWARDS`; NaN rewards are
    left out."""
    index_B = torch.from_numpy(np.unique(group_B.numpy(), return_inverse=True)[1])

    def largest(value_B: Tensor) -> Tensor:
        value_B = torch.where(value_B.isnan(), -torch.inf, value_B)
        return torch.full_like(value_B, -torch.inf).scatter_reduce(0, index_B, value_B, "amax")[index_B]

    high_B, low_B = largest(reward_B.double()), -largest(-reward_B.double())
    return high_B - low_B <= EQUAL_REWARDS * torch.maximum(high_B.abs(), low_B.abs())


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
