"""SPG (Wang et al. 2025): a lower bound of the likelihood for completions with positive advantage, an upper
bound for the others.

Shapes: B completions, M views, T positions, K decoding blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import MaskRNG, Views, columns, hide
from unmask.generation.rollout import Rollout
from unmask.rl.methods.base import Loss, LossInputs, Method, plan_setting, register, weighted_sum


def block_by_block(rollout: Rollout, draw: MaskRNG, samples: int) -> tuple[Tensor, Tensor]:
    """The hidden tokens of the completion and the clean tokens [B, M, T]. Each view has a decoding block of
    its own, of which a random number of tokens are hidden; the prompt and the blocks before it are clean,
    those after it hidden."""
    block_BT = torch.where(rollout.completion_BT, rollout.block_BT, -1)
    blocks_B = block_BT.amax(1) + 1
    number = max(int(blocks_B.max()), 1)
    order_BK = draw.per_sequence(number, RngStream.ORDER)
    exists_BK = torch.arange(number, device=block_BT.device) < blocks_B[:, None]
    ranked_BK = torch.where(exists_BK, order_BK, torch.inf).argsort(1)
    turn_M = torch.arange(samples, device=block_BT.device)
    # starting over if there are fewer
    chosen_BM1 = ranked_BK.gather(1, turn_M % blocks_B.clamp_min(1)[:, None])[:, :, None]
    within_BMT = block_BT[:, None] == chosen_BM1
    size_BM1 = within_BMT.sum(2, keepdim=True)
    time_BM1 = draw.per_sequence(samples, RngStream.TIME)[:, :, None]
    count_BMT = (1 + (time_BM1 * size_BM1).long()).expand_as(within_BMT)
    hidden_BMT = (within_BMT & hide(block_BT, draw, count_BMT)) | (block_BT[:, None] > chosen_BM1)
    clean_BMT = (rollout.prompt_BT | rollout.completion_BT)[:, None] & (block_BT[:, None] < chosen_BM1)
    return hidden_BMT, clean_BMT


def lower_bound(inputs: LossInputs) -> Tensor:
    """The mean over views of the mean log-probability of the view's tokens [B, 1]: the ELBO per token, as
    published. Views that hide only what comes after the end are left out."""
    weight_BM = inputs.views.weight_BMT.sum(2)  # below 1 where some of what is hidden is after the end
    value_BM = (inputs.views.weight_BMT * inputs.policy_BMT).sum(2) / torch.where(weight_BM > 0, weight_BM, 1)
    return value_BM.sum(1, keepdim=True) / (weight_BM > 0).sum(1, keepdim=True).clamp_min(1)


def upper_bound(log_prob_BMT: Tensor, target_BMT: Tensor, length_B1: Tensor, beta: float) -> Tensor:
    """The mean over tokens of (1/beta) log mean_m (1[hidden in m] p^beta / t_m) [B, 1], with t_m the mask
    rate of view m (eq. 8).

    Tokens that no view hides are left out. It is only guaranteed to be a bound if beta >= the number of
    tokens.
    """
    rate_BM1 = target_BMT.sum(2, keepdim=True) / length_B1[:, :, None]
    value_BMT = torch.where(target_BMT, beta * log_prob_BMT - rate_BM1.clamp_min(1e-8).log(), -torch.inf)
    seen_BT = target_BMT.any(1)
    safe_BMT = torch.where(seen_BT[:, None], value_BMT, 0.0)
    token_BT = (safe_BMT.logsumexp(1) - torch.tensor(target_BMT.shape[1]).log()) / beta
    return torch.where(seen_BT, token_BT, 0).sum(1, keepdim=True) / seen_BT.sum(1, keepdim=True).clamp_min(1)


@register
class SPG(Method):
    """SPG: `samples` views, and a loss of two bounds of the likelihood."""

    name = "spg"
    estimator = "mean"
    partial = False
    samples: int = plan_setting(2)
    prompt_mask_rate: float = plan_setting(0.15)
    eubo_beta: float = 1.5
    eubo_share: float = 0.5

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        """Views as in sampling block by block (`block_by_block`). The weight of a target is 1 / (targets of
        its view).

        Each clean token is hidden with probability `prompt_mask_rate`, and then a target if it is the
        completion's, as published. Blocks are drawn evenly; the published code draws them unevenly, by a
        permutation of the canvas's blocks modulo the completion's.
        """
        hidden_BMT, clean_BMT = block_by_block(rollout, draw, self.samples)
        noise_BMT = (
            draw.uniform(columns(rollout.ids_BT), self.samples, RngStream.PROMPT) < self.prompt_mask_rate
        )
        hidden_BMT = hidden_BMT | (clean_BMT & noise_BMT)
        target_BMT = hidden_BMT & rollout.completion_BT[:, None]
        views = rollout.hiding(target_BMT, target_BMT / target_BMT.sum(2, keepdim=True).clamp_min(1))
        return replace(views, hidden_BMT=views.hidden_BMT | hidden_BMT)

    def loss(self, inputs: LossInputs) -> Loss:
        """-advantage times the lower bound where it is positive, times a mixture of both where it is negative
        (eq. 11)."""
        advantage_B1 = inputs.advantage_B1
        below_B1 = lower_bound(inputs)
        above_B1 = upper_bound(inputs.policy_BMT, inputs.views.target_BMT, inputs.length_B1, self.eubo_beta)
        mixed_B1 = self.eubo_share * above_B1 + (1 - self.eubo_share) * below_B1
        return weighted_sum(
            -advantage_B1 * torch.where(advantage_B1 > 0, below_B1, mixed_B1), inputs.weight_B1
        )
