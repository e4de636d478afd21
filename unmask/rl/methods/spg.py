"""SPG (Wang et al. 2025): the likelihood from below where a completion is to become likelier, from above where less likely.

Shapes: B completions, M views, T positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unmask.diffusion.rng import Stream
from unmask.diffusion.views import Draw, Views, columns, hide
from unmask.rl.methods.base import Loss, Method, Rollout, Scores, of_elements


def plan(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """Views of what block by block sampling sees (`block_by_block`), whose hidden tokens weigh 1 over their number.

    Of what is clean, the prompt and finished blocks, each token is hidden with probability `config.prompt_mask_rate`, and scored where it
    is the completion's, as published. The published code draws blocks unevenly: it takes a permutation of all blocks of the canvas modulo
    those of the completion.
    """
    hidden_BMT, clean_BMT = block_by_block(rollout, draw, config.samples)
    noise_BMT = draw.uniform(columns(rollout.ids_BT), config.samples, Stream.PROMPT) < config.prompt_mask_rate
    hidden_BMT = hidden_BMT | (clean_BMT & noise_BMT)
    target_BMT = hidden_BMT & rollout.completion_BT[:, None]
    views = rollout.hiding(target_BMT, target_BMT / target_BMT.sum(2, keepdim=True).clamp_min(1))
    return replace(views, hidden_BMT=views.hidden_BMT | hidden_BMT)


def block_by_block(rollout: Rollout, draw: Draw, samples: int) -> tuple[Tensor, Tensor]:
    """What is hidden of the completion, and what is clean [B, M, T]: in each view another decoding block, in which a random number of
    tokens are hidden; the prompt and the blocks before are clean, those behind are hidden."""
    block_BT = torch.where(rollout.completion_BT, rollout.block_BT, -1)
    blocks_B = block_BT.amax(1) + 1
    number = max(int(blocks_B.max()), 1)
    order_BK = draw.per_sequence(number, Stream.ORDER)
    exists_BK = torch.arange(number, device=block_BT.device) < blocks_B[:, None]
    ranked_BK = torch.where(exists_BK, order_BK, torch.inf).argsort(1)
    turn_M = torch.arange(samples, device=block_BT.device)
    chosen_BM1 = ranked_BK.gather(1, turn_M % blocks_B.clamp_min(1)[:, None])[:, :, None]  # again from the first where there are fewer
    within_BMT = block_BT[:, None] == chosen_BM1
    size_BM1 = within_BMT.sum(2, keepdim=True)
    time_BM1 = draw.per_sequence(samples, Stream.TIME)[:, :, None]
    count_BMT = (1 + (time_BM1 * size_BM1).long()).expand_as(within_BMT)
    hidden_BMT = (within_BMT & hide(block_BT, draw, count_BMT)) | (block_BT[:, None] > chosen_BM1)
    clean_BMT = (rollout.prompt_BT | rollout.completion_BT)[:, None] & (block_BT[:, None] < chosen_BM1)
    return hidden_BMT, clean_BMT


def lower_bound(scores: Scores) -> Tensor:
    """The mean over views of the mean log-probability of the view's tokens [B, 1]: the ELBO per token, as published. Views in which all
    that is hidden stands behind the end are left out."""
    weight_BM = scores.views.weight_BMT.sum(2)  # below 1 where some of what is hidden stands behind the end
    value_BM = (scores.views.weight_BMT * scores.policy_BMT).sum(2) / torch.where(weight_BM > 0, weight_BM, 1)
    return value_BM.sum(1, keepdim=True) / (weight_BM > 0).sum(1, keepdim=True).clamp_min(1)


def upper_bound(log_prob_BMT: Tensor, target_BMT: Tensor, length_B1: Tensor, beta: float) -> Tensor:
    """The mean over tokens of (1/beta) log mean_v [p^beta if hidden / t_v], t_v the share that view v hides [B, 1] (eq. 8).

    Tokens that no view hides are left out. Above the likelihood for sure only for beta >= the number of tokens; else a surrogate.
    """
    share_BM1 = target_BMT.sum(2, keepdim=True) / length_B1[:, :, None]
    value_BMT = torch.where(target_BMT, beta * log_prob_BMT - share_BM1.clamp_min(1e-8).log(), -torch.inf)
    seen_BT = target_BMT.any(1)
    safe_BMT = torch.where(seen_BT[:, None], value_BMT, 0.0)
    token_BT = (safe_BMT.logsumexp(1) - torch.tensor(target_BMT.shape[1]).log()) / beta
    return torch.where(seen_BT, token_BT, 0).sum(1, keepdim=True) / seen_BT.sum(1, keepdim=True).clamp_min(1)


def sandwich(scores: Scores, config: Any) -> Loss:
    """-advantage times the lower bound where it is positive, times a mixture of both where it is negative (eq. 11)."""
    advantage_B1 = scores.advantage_B1
    below_B1 = lower_bound(scores)
    above_B1 = upper_bound(scores.policy_BMT, scores.views.target_BMT, scores.length_B1, config.eubo_beta)
    mixed_B1 = config.eubo_share * above_B1 + (1 - config.eubo_share) * below_B1
    return of_elements(-advantage_B1 * torch.where(advantage_B1 > 0, below_B1, mixed_B1), scores.share_B1)


SPG = Method(
    "spg",
    plan,
    loss=sandwich,
    weighs="mean",
    uses=("eubo_beta", "eubo_share"),
    plan_uses=("samples", "prompt_mask_rate"),
    partial=False,
    defaults={"samples": 2},
)
