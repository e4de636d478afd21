"""Log-likelihoods of completions: the ELBO by low-variance views, and the exact any-order likelihood where it is feasible.

Shapes: B batch, M views, T tokens; N maskable tokens of G groups of at most L, S subsets of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unmask.diffusion.log_probs import noise_groups, view_log_probs
from unmask.diffusion.views import Draw, all_masked_views, elbo_views, exact_views, group_sizes, place_in_group
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
    views = elbo_views(noise_groups(lm, maskable_BT, attention_mask_BT), draw, num_views=samples)
    return (views.weight_BMT * view_log_probs(lm, ids_BT, attention_mask_BT, views, chunk=chunk)).sum((1, 2))


def exact_log_likelihood(
    lm: DiffusionLM, ids_BT: Tensor, attention_mask_BT: Tensor | None, maskable_BT: Tensor, *, chunk: int | None = None
) -> Tensor:
    """log p(maskable tokens | the others) [B], in nats, exactly: one pass of a causal model, else `any_order`. Raises GenerationError for a
    group of more than 12 maskable tokens."""
    if lm.autoregressive:
        views = all_masked_views(maskable_BT)
        return view_log_probs(lm, ids_BT, attention_mask_BT, views, chunk=chunk).sum((1, 2))
    group_BT = noise_groups(lm, maskable_BT, attention_mask_BT)
    return torch.cat([_exact_row(lm, ids_BT, attention_mask_BT, group_BT, slice(b, b + 1), chunk) for b in range(len(ids_BT))])


def _exact_row(
    lm: DiffusionLM, ids_BT: Tensor, attention_mask_BT: Tensor | None, group_BT: Tensor, row: slice, chunk: int | None
) -> Tensor:
    group_1T = group_BT[row]
    if not (group_1T >= 0).any():
        return torch.zeros(1, dtype=torch.float64, device=group_BT.device)
    width = int(group_sizes(group_1T).max())
    if width > MAX_EXACT_WIDTH:
        remedy = f"Use estimator='elbo', or completions (or blocks) of at most {MAX_EXACT_WIDTH} tokens"
        raise GenerationError(f"an exact likelihood over {width} tokens needs 2**{width} passes", where="estimator='exact'", remedy=remedy)
    mask_1T = None if attention_mask_BT is None else attention_mask_BT[row]
    log_prob_1MT = view_log_probs(lm, ids_BT[row], mask_1T, exact_views(group_1T, width), chunk=chunk)
    return any_order(group_1T, log_prob_1MT.double())


def any_order(group_BT: Tensor, log_prob_BMT: Tensor) -> Tensor:
    """log p(maskable tokens | the others) [B] in nats, from log-probabilities on all of `exact_views`: the sum over groups of the log of
    the mean over orders of revealing their L tokens, (1/L!) sum over orders of prod p(next | revealed).

    The sum over orders is a sum over the 2^L subsets S, each reached by its last token. It is differentiable. A group with fewer tokens
    than the widest is padded with tokens of probability 1, which changes no mean.
    """
    length, num_views = group_BT.shape[1], log_prob_BMT.shape[1]
    width, valid_BT = num_views.bit_length(), group_BT >= 0
    total_B = log_prob_BMT.new_zeros(len(group_BT))
    if not valid_BT.any():
        return total_B
    row_N = valid_BT.nonzero()[:, 0]
    group_G, group_N = torch.unique(row_N * length + group_BT[valid_BT], return_inverse=True)
    subset_S = torch.arange(2**width, device=group_BT.device)
    # Only tokens of the group matter; where all of them are revealed, nothing is read.
    view_NS = (subset_S & (2 ** group_sizes(group_BT)[valid_BT] - 1)[:, None]).clamp_max(num_views - 1)
    log_prob_NS = log_prob_BMT.transpose(1, 2)[valid_BT].gather(1, view_NS)
    table_GSL = log_prob_NS.new_zeros(len(group_G), 2**width, width)
    table_GSL = table_GSL.index_put((group_N[:, None], subset_S, place_in_group(group_BT)[valid_BT][:, None]), log_prob_NS)
    reached = [log_prob_NS.new_zeros(len(group_G))]
    for subset in range(1, 2**width):
        last = [bit for bit in range(width) if subset >> bit & 1]
        ways = [reached[subset ^ (1 << bit)] + table_GSL[:, subset ^ (1 << bit), bit] for bit in last]
        reached.append(torch.stack(ways).logsumexp(0))
    return total_B.index_add(0, group_G // length, reached[-1] - math.lgamma(width + 1))
