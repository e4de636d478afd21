"""Log-likelihoods of completions: the ELBO by low-variance views, and the exact any-order likelihood where it
is feasible.

Shapes: B batch, M views, T tokens, P differences of pairs of views; N maskable tokens of G groups of at most
L, S subsets of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.diffusion.log_probs import COPIES_AT_ONCE, noise_groups, view_log_probs
from unmask.diffusion.mixing import Mixing, RandomTokens
from unmask.diffusion.schedules import Noise
from unmask.diffusion.views import (
    MaskRNG,
    Views,
    all_masked_views,
    columns,
    elbo_views,
    exact_count_views,
    exact_views,
    group_sizes,
    mixed_views,
    place_in_group,
)
from unmask.errors import GenerationError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.tensor_checks import check_tensors

MAX_EXACT_WIDTH = 12
FROM_END = 2**31  # above the numbers that count from the beginning


class Bound(NamedTuple):
    """An estimate of a lower bound, in nats, and what its error is known from."""

    value_B: Tensor
    difference_BP: Tensor
    """Differences of independent, identically distributed parts of the estimate; NaN if there are none. Their
    squares add up to an unbiased estimate of its variance, and the products of those of two estimates with
    the same draw to one of their covariance."""

    @property
    def standard_error_B(self) -> Tensor:
        """Over the random masks, in nats; NaN if it is not known."""
        return self.difference_BP.square().sum(1).sqrt()


def elbo(
    lm: DiffusionLM,
    ids_BT: Tensor,
    attention_mask_BT: Tensor | None,
    maskable_BT: Tensor,
    draw: MaskRNG,
    *,
    samples: int,
    chunk: int | None = None,
    shared: int | None = None,
) -> Bound:
    """An unbiased estimate of the lower bound on log p(maskable tokens | the others), from at most `samples`
    views.

    The views are those of `elbo_views`: one with everything hidden, then complementary pairs, so that of an
    even number one view is left out. With random tokens all are pairs of `mixed_views`. Masks depend on the
    draw and on the positions from the first maskable token, not on what is before it: two rows with the same
    draw and equally long groups have the same masks, and others as nearly as their lengths allow
    (`_common_numbers`). `shared`: the number of first maskable tokens that a row has in common with those
    that it will be compared with, for that purpose.

    Counts are stratified over the P pairs. The pairs m and P - 1 - m hide k and L - k tokens, and L - k and
    k: they are identically distributed and independent, and the squares of their differences estimate the
    variance without bias. If P is odd, the pair in the middle has no other, and counts as an average one; a
    single pair says nothing about the error.
    """
    check_tensors(
        ids_BT=ids_BT, attention_mask_BT=attention_mask_BT, maskable_BT=maskable_BT, key_B=draw.key_B
    )
    first = int(lm.noise == "masked")  # the view with everything hidden
    samples -= samples > 1 + first and (samples - first) % 2
    group_BT = noise_groups(lm, maskable_BT, attention_mask_BT)
    relative_BT, number_BT = _common_numbers(group_BT, shared)
    views = bound_views(
        *(lm, ids_BT, relative_BT, draw), num_views=samples, complementary=samples > 1, number_BT=number_BT
    )
    part_BM = (views.weight_BMT * _log_probs(lm, ids_BT, attention_mask_BT, views, chunk)).sum(2)
    pairs = (samples - first) // 2
    part_BP = part_BM[:, first : first + pairs] + part_BM[:, first + pairs : first + 2 * pairs]
    half = pairs // 2
    difference_BP = (part_BP[:, :half] - part_BP.flip(1)[:, :half]) * math.sqrt(pairs / max(2 * half, 1))
    if half == 0:
        # the first view is the bound
        known_B1 = (group_sizes(group_BT).amax(1, keepdim=True) == 1) & (samples > 1) & (first == 1)
        difference_BP = torch.where(known_B1, 0.0, math.nan).to(part_BM)
    return Bound(part_BM.sum(1), difference_BP)


def bound_views(
    lm: DiffusionLM,
    ids_BT: Tensor,
    group_BT: Tensor,
    draw: MaskRNG,
    *,
    num_views: int,
    complementary: bool = False,
    number_BT: Tensor | None = None,
) -> Views:
    """Views of exact counts that estimate the bound of a model, whatever its noise; with `complementary` in
    pairs, with masks besides one view that hides all. `number_BT` as of `unmask.diffusion.views.hide`."""
    if lm.noise != "masked":
        return mixed_views(
            *(ids_BT, group_BT, draw, Noise(), Mixing.of(lm), RandomTokens.of(lm)),
            num_views=num_views,
            complementary=complementary,
            exact_count=True,
            number_BT=number_BT,
        )
    plan = elbo_views if complementary else exact_count_views
    return plan(group_BT, draw, num_views=num_views, number_BT=number_BT)


def _common_numbers(group_BT: Tensor, shared: int | None) -> tuple[Tensor, Tensor]:
    """The groups [B, T] counted from the first one of each row, and the numbers [B, T] that stand for
    positions in random draws: of the first `shared` tokens of a row (None: of the first half of each group)
    they count from the beginning of their group, of the others from its end. Two completions that differ in
    one word then hide the same tokens on both sides of it, however long it is."""
    maskable_BT, column_BT, length = group_BT >= 0, columns(group_BT), group_BT.shape[1]
    first_B1 = maskable_BT.long().argmax(1, keepdim=True)
    relative_BT = torch.where(maskable_BT, group_BT - group_BT.gather(1, first_B1), -1)
    place_BT, size_BT = place_in_group(group_BT), group_sizes(group_BT)
    begin_BG = torch.full_like(group_BT, length).scatter_reduce(
        1, group_BT.clamp_min(0), torch.where(maskable_BT, column_BT, length), "amin"
    )
    begin_BT = begin_BG.gather(1, group_BT.clamp_min(0)) - first_B1
    from_begin_BT = 2 * place_BT < size_BT if shared is None else column_BT - first_B1 < shared
    number_BT = begin_BT + torch.where(from_begin_BT, place_BT, size_BT - 1 - place_BT + FROM_END)
    return relative_BT, torch.where(maskable_BT, number_BT, 0)


def _log_probs(
    lm: DiffusionLM, ids_BT: Tensor, attention_mask_BT: Tensor | None, views: Views, chunk: int | None
) -> Tensor:
    """`view_log_probs` with the views of a block-causal model spread over rows: a row has room for few
    copies."""
    count = views.count
    if lm.attention != "block_causal" or count <= COPIES_AT_ONCE:
        return view_log_probs(lm, ids_BT, attention_mask_BT, views, chunk=chunk)
    rows = -(-count // COPIES_AT_ONCE)
    padding = (0, 0, 0, rows * COPIES_AT_ONCE - count)
    spread = views.of_planes(
        lambda plane_BMT: F.pad(plane_BMT, padding).unflatten(1, (rows, COPIES_AT_ONCE)).flatten(0, 1)
    )
    mask_BT = None if attention_mask_BT is None else attention_mask_BT.repeat_interleave(rows, 0)
    log_prob_RCT = view_log_probs(lm, ids_BT.repeat_interleave(rows, 0), mask_BT, spread, chunk=chunk)
    return log_prob_RCT.unflatten(0, (len(ids_BT), rows)).flatten(1, 2)[:, :count]


def exact_log_likelihood(
    lm: DiffusionLM,
    ids_BT: Tensor,
    attention_mask_BT: Tensor | None,
    maskable_BT: Tensor,
    *,
    chunk: int | None = None,
) -> Tensor:
    """log p(maskable tokens | the others) [B], in nats, exactly: one pass of a causal model, else
    `any_order`. Raises GenerationError for a group of more than 12 maskable tokens."""
    check_tensors(ids_BT=ids_BT, attention_mask_BT=attention_mask_BT, maskable_BT=maskable_BT)
    if lm.noise != "masked":
        raise GenerationError(
            f"no exact likelihood is known with {lm.noise} noise",
            where="estimator='exact'",
            remedy="Use estimator='elbo'",
        )
    if lm.autoregressive:
        views = all_masked_views(maskable_BT)
        return view_log_probs(lm, ids_BT, attention_mask_BT, views, chunk=chunk).sum((1, 2))
    group_BT = noise_groups(lm, maskable_BT, attention_mask_BT)
    total_B = torch.zeros(len(ids_BT), dtype=torch.float64, device=group_BT.device)
    for index in (group_BT >= 0).any(1).nonzero().flatten().tolist():
        row = slice(index, index + 1)
        width = int(group_sizes(group_BT[row]).max())
        if width > MAX_EXACT_WIDTH:
            raise GenerationError(
                f"an exact likelihood over {width} tokens needs 2**{width} passes",
                where="estimator='exact'",
                remedy="Use estimator='elbo', or completions (or blocks) of at most "
                f"{MAX_EXACT_WIDTH} tokens",
            )
        mask_1T = None if attention_mask_BT is None else attention_mask_BT[row]
        log_prob_1MT = _log_probs(lm, ids_BT[row], mask_1T, exact_views(group_BT[row], width), chunk)
        total_B[row] = any_order(group_BT[row], log_prob_1MT.double())
    return total_B


def any_order(group_BT: Tensor, log_prob_BMT: Tensor) -> Tensor:
    """log p(maskable tokens | the others) [B] in nats, from log-probabilities on all of `exact_views`: the
    sum over groups of the log of the mean over orders of revealing their L tokens, (1/L!) sum over orders of
    prod p(next | revealed).

    The sum over orders is a sum over the 2^L subsets S, each reached by its last token. It is differentiable.
    A group with fewer tokens than the widest is padded with tokens of probability 1, which changes no mean.
    """
    check_tensors(group_BT=group_BT, log_prob_BMT=log_prob_BMT)
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
    table_GSL = table_GSL.index_put(
        (group_N[:, None], subset_S, place_in_group(group_BT)[valid_BT][:, None]), log_prob_NS
    )
    reached = [log_prob_NS.new_zeros(len(group_G))]
    for subset in range(1, 2**width):
        last = [bit for bit in range(width) if subset >> bit & 1]
        ways = [reached[subset ^ (1 << bit)] + table_GSL[:, subset ^ (1 << bit), bit] for bit in last]
        reached.append(torch.stack(ways).logsumexp(0))
    return total_B.index_add(0, group_G // length, reached[-1] - math.lgamma(width + 1))
