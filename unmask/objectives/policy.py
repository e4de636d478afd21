"""Policy-gradient losses of the GRPO family: pure functions of log-probabilities.

Shapes: B completions, T tokens. Completions of one prompt share a group number.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

AdvantageKind = Literal["r-mean", "z-score", "leave-one-out"]


class PolicyLoss(NamedTuple):
    """A loss per token [B, T] and what to log beside it."""

    loss_BT: Tensor
    ratio_BT: Tensor
    kl_BT: Tensor
    clipped_BT: Tensor


def advantages(reward_B: Tensor, group_B: Tensor, kind: AdvantageKind = "r-mean") -> Tensor:
    """How much better each completion is than its group; NaN rewards (unscored) count for nothing and get 0.

    r-mean: reward less the group's mean (Dr. GRPO, Liu et al. 2025). z-score: divided by the group's deviation too
    (GRPO, Shao et al. 2024). leave-one-out: against the mean of the others (RLOO, Ahmadian et al. 2024).
    """
    scored_B = ~reward_B.isnan()
    value_B = torch.where(scored_B, reward_B, 0).double()
    groups, index_B = group_B.unique(return_inverse=True)

    def total(values_B: Tensor) -> Tensor:
        return torch.zeros(len(groups), dtype=torch.float64, device=values_B.device).index_add(0, index_B, values_B)[index_B]

    count_B = total(scored_B.double())
    centred_B = torch.where(scored_B, value_B - total(value_B) / count_B.clamp_min(1), 0)
    if kind == "z-score":
        deviation_B = (total(centred_B**2) / (count_B - 1).clamp_min(1)).sqrt()
        centred_B = centred_B / (deviation_B + 1e-4)
    elif kind == "leave-one-out":
        centred_B = centred_B * count_B / (count_B - 1).clamp_min(1)
    else:
        assert kind == "r-mean", kind
    return centred_B.float()


def clipped_surrogate(
    log_prob_BT: Tensor,
    old_BT: Tensor,
    reference_BT: Tensor | None,
    advantage_B: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float,
) -> PolicyLoss:
    """PPO's clipped surrogate per token, with beta times the k3 estimate of the KL to the reference (Schulman 2020).

    At the first update, where policy and old policy agree, the ratio is 1 and the loss is -advantage.
    """
    ratio_BT = (log_prob_BT - old_BT).exp()
    advantage_B1 = advantage_B[:, None]
    plain_BT = ratio_BT * advantage_B1
    bounded_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantage_B1
    kl_BT = torch.zeros_like(log_prob_BT)
    if reference_BT is not None:
        gap_BT = reference_BT - log_prob_BT
        kl_BT = gap_BT.exp() - gap_BT - 1
    loss_BT = -torch.minimum(plain_BT, bounded_BT) + beta * kl_BT
    return PolicyLoss(loss_BT, ratio_BT.detach(), kl_BT.detach(), (bounded_BT < plain_BT).detach())
