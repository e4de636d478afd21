"""Pure functions of logits: which token would stand at a row, and how soon it should be revealed.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unmask.config import SamplerConfig
from unmask.diffusion.noise import Stream, uniform
from unmask.errors import GenerationError


class Decision(NamedTuple):
    """What would be revealed at each row.

    Attributes:
        token_N: the ids.
        log_prob_N: their log-probability under the model at temperature 1.
        priority_N: the policy's score, float32 so that rounding does not part equals; the highest are revealed first, ties go to
            the lower position.
    """

    token_N: Tensor
    log_prob_N: Tensor
    priority_N: Tensor


def decide(logits_NV: Tensor, config: SamplerConfig, key_N: Tensor, step_N: Tensor, position_N: Tensor) -> Decision:
    """Draw a token for each row and rank it. All randomness is keyed by (seed, key, step, position).

    Args:
        logits_NV: aligned logits at hidden positions.
        config: policy, temperature, filters, seed.
        key_N: keys of the sequences that the rows belong to.
        step_N: denoising steps that each sequence has made.
        position_N: positions counted from the start of the sequence.

    Raises:
        GenerationError: the logits are not numbers.
    """
    log_probs_NV = logits_NV.log_softmax(-1)
    if log_probs_NV[:, 0].isnan().any():  # a NaN anywhere in a row spoils all of it
        raise GenerationError("the predictions are NaN", where="model", remedy="Its weights are damaged: load an earlier checkpoint")
    if config.temperature > 0:
        noise_N = uniform(config.seed, key_N, step=step_N, position=position_N, stream=Stream.TOKEN)
        token_N = draw(filtered_probabilities(logits_NV / config.temperature, config.top_k, config.top_p), noise_N)
    else:
        token_N = logits_NV.argmax(-1)
    log_prob_N = log_probs_NV.gather(1, token_N[:, None]).squeeze(1)
    match config.policy:
        case "confidence":
            priority_N = log_prob_N
        case "margin":
            best_N2 = log_probs_NV.exp().topk(2).values
            priority_N = best_N2[:, 0] - best_N2[:, 1]
        case "entropy":
            priority_N = -torch.special.entr(log_probs_NV.exp()).sum(-1)
        case "random":
            priority_N = uniform(config.seed, key_N, step=step_N, position=position_N, stream=Stream.ORDER)
    return Decision(token_N, log_prob_N, priority_N.float())


def filtered_probabilities(logits_NV: Tensor, top_k: int, top_p: float) -> Tensor:
    """float64 probabilities, zero outside the `top_k` most likely tokens (0: all) and the smallest set of mass `top_p`."""
    prob_NV = logits_NV.double().softmax(-1)
    if top_k == 0 and top_p == 1.0:
        return prob_NV
    sorted_NV, order_NV = prob_NV.sort(dim=-1, descending=True, stable=True)
    keep_NV = sorted_NV.cumsum(-1) - sorted_NV < top_p
    if top_k > 0:
        keep_NV[:, top_k:] = False
    return prob_NV * torch.zeros_like(keep_NV).scatter(1, order_NV, keep_NV)


def draw(prob_NV: Tensor, noise_N: Tensor) -> Tensor:
    """Inverse-CDF sampling: one uniform number a row picks a token in proportion to its (unnormalised) probability."""
    cumulative_NV = prob_NV.cumsum(-1)
    total_N1 = cumulative_NV[:, -1:].contiguous()
    token_N1 = torch.searchsorted(cumulative_NV, noise_N[:, None] * total_N1, right=True)
    last_N1 = torch.searchsorted(cumulative_NV, total_N1)  # where rounding would pass the last possible token
    return torch.minimum(token_N1, last_N1).squeeze(1)


def first_by_priority(priority_BT: Tensor, count_B: Tensor) -> Tensor:
    """The `count` positions of highest priority in each row, as a boolean [B, T]; ties go to the lower position."""
    order_BT = priority_BT.sort(dim=-1, descending=True, stable=True).indices
    rank_BT = torch.zeros_like(order_BT).scatter(1, order_BT, torch.arange(order_BT.shape[1], device=order_BT.device).expand_as(order_BT))
    return (rank_BT < count_B[:, None]) & (priority_BT > -torch.inf)
