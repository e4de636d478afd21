"""Log-likelihoods of completions: the ELBO by low-variance views, and the exact any-order likelihood where it is feasible.

Shapes: B batch, V views, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unmask.diffusion.score import noise_groups, score
from unmask.diffusion.views import Draw, Views, all_masked_views, elbo_views
from unmask.errors import GenerationError
from unmask.models.diffusion_lm import DiffusionLM

MAX_EXACT_WIDTH = 12


def elbo(
    lm: DiffusionLM,
    ids_BT: Tensor,
    attention_mask_BT: Tensor | None,
    maskable_BT: Tensor,
    draw: Draw,
    *,
    samples: int,
    chunk: int | None = None,
) -> Tensor:
    """An unbiased estimate [B], in nats, of the lower bound on log p(maskable tokens | the others), from `samples` views."""
    views = elbo_views(noise_groups(lm, maskable_BT, attention_mask_BT), draw, views=samples)
    return (views.weight_BVT * score(lm, ids_BT, attention_mask_BT, views, chunk=chunk)).sum((1, 2))


def exact_log_likelihood(
    lm: DiffusionLM, ids_BT: Tensor, attention_mask_BT: Tensor | None, maskable_BT: Tensor, *, chunk: int | None = None
) -> Tensor:
    """log p(maskable tokens | the others) [B], in nats, exactly.

    A shifted causal model needs one pass. Any other model is the uniform mixture over the orders in which the tokens of
    a group can be revealed, (1/L!) sum over orders of the product of conditionals, summed by dynamic programming over the
    2^L subsets of a group; groups (blocks) follow one another.

    Raises:
        GenerationError: a group has more than 12 maskable tokens.
    """
    if lm.autoregressive:
        views = all_masked_views(maskable_BT)
        return score(lm, ids_BT, attention_mask_BT, views, chunk=chunk).sum((1, 2))
    group_BT = noise_groups(lm, maskable_BT, attention_mask_BT)
    totals = [
        _any_order(lm, ids_BT[b : b + 1], None if attention_mask_BT is None else attention_mask_BT[b : b + 1], group_BT[b], chunk)
        for b in range(len(ids_BT))
    ]
    return torch.stack(totals)


def _any_order(lm: DiffusionLM, ids_1T: Tensor, attention_mask_1T: Tensor | None, group_T: Tensor, chunk: int | None) -> Tensor:
    members = [(group_T == g).nonzero().squeeze(1) for g in group_T.unique().tolist() if g >= 0]
    width = max((len(m) for m in members), default=0)
    if width > MAX_EXACT_WIDTH:
        raise GenerationError(
            f"an exact likelihood over {width} tokens needs 2**{width} passes",
            where="estimator='exact'",
            remedy=f"Use estimator='elbo', or completions (or blocks) of at most {MAX_EXACT_WIDTH} tokens",
        )
    # View S hides the tokens of every group whose bit is not in S.
    hidden_VT = torch.zeros(2**width, len(group_T), dtype=torch.bool, device=ids_1T.device)
    subset_V = torch.arange(2**width, device=ids_1T.device)
    for positions in members:
        for bit, position in enumerate(positions):
            hidden_VT[:, position] = (subset_V >> bit) & 1 == 0
    hidden_1VT = hidden_VT[None]
    log_prob_VT = score(lm, ids_1T, attention_mask_1T, Views(hidden_1VT, hidden_1VT, hidden_1VT.float()), chunk=chunk)[0].double()
    return sum((_orders_mixture(log_prob_VT[: 2 ** len(m), m]) for m in members), torch.zeros((), dtype=torch.float64))


def _orders_mixture(log_prob_SL: Tensor) -> Tensor:
    """log (1/L!) sum over orders of prod p(next | revealed), from log p(token | revealed subset S) for all subsets."""
    length = log_prob_SL.shape[1]
    reached = [torch.zeros((), dtype=log_prob_SL.dtype)]
    for subset in range(1, 2**length):
        ways = [reached[subset ^ (1 << i)] + log_prob_SL[subset ^ (1 << i), i] for i in range(length) if subset >> i & 1]
        reached.append(torch.stack(ways).logsumexp(0))
    return reached[-1] - math.lgamma(length + 1)
