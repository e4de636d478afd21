"""coupled-GRPO (Gong et al. 2025, DiffuCoder): each token is a target where all are hidden, and in one of two
complementary views."""

from __future__ import annotations

import torch

from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import MaskRNG, Views, columns
from unmask.generation.rollout import Rollout
from unmask.rl.advantages import ScaleRewards
from unmask.rl.methods.base import TokenMethod, register

LOW, HIGH = 0.2, 0.8


def coupled_views(rollout: Rollout, draw: MaskRNG) -> Views:
    """All hidden, weight 1/2; a fraction rho ~ U(.2, .8) of the tokens, and the others, weights 1/rho and
    1/(1 - rho), halved.

    A token's weighted sum is not a log-probability: a small rho inflates its ratio.
    """
    completion_B1T = rollout.completion_BT[:, None]
    rate_B11 = LOW + (HIGH - LOW) * draw.per_sequence(1, RngStream.TIME)[:, :, None]
    chosen_B1T = draw.uniform(columns(rollout.ids_BT), 1, RngStream.MASK) < rate_B11
    target_BMT = torch.cat([completion_B1T, completion_B1T & chosen_B1T, completion_B1T & ~chosen_B1T], 1)
    weight_BM1 = torch.cat([torch.ones_like(rate_B11), 1 / rate_B11, 1 / (1 - rate_B11)], 1) / 2
    return rollout.hiding(target_BMT, torch.where(target_BMT, weight_BM1, 0))


@register
class CoupledGRPO(TokenMethod):
    """coupled-GRPO."""

    name = "coupled-grpo"
    scale_rewards: ScaleRewards = "leave-one-out"
    beta: float = 0.01

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        return coupled_views(rollout, draw)
