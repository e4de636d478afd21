"""Pure functions of mode self-speculative: draft tokens from the denoising reading of a model, verify them by
its causal reading.

A verified token has the distribution p of the causal reading, whatever the drafts are. A draft x, drawn from
q, is kept with probability min(1, p(x) / q(x)); else p becomes (p - q)+, normalized (Leviathan et al. 2023),
and the position's next candidate is tried, which is drawn without those before it (Jeon et al. 2024). If none
is kept, the token is drawn from what p has become. At temperature 0 all are one-hot, so the tokens are those
of greedy decoding. The noise is keyed by (seed, key, position, candidate) alone: of a position's drafts only
those count that follow kept ones, and these are of one pass.

Shapes: N positions, M some of them, K candidates of a position, J nodes of a tree, V vocabulary, T tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import RngStream, uniform
from unmask.generation.policies import (
    Decision,
    GivenTokens,
    best,
    decide,
    draw,
    keep_likely,
    penalize_and_ban,
    refuse_nan,
    weights,
)
from unmask.models.attention import AttentionMask, Layout, hidden_fraction
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs

# unless `drafts` says otherwise: with one candidate a pass has about (drafts + 1)(drafts + 2) queries
MOST_DRAFTS = 7


class Tree(NamedTuple):
    """The drafts that a pass verifies (Miao et al. 2024, "SpecInfer"). Node 0 is the text before them, each
    other node a candidate for the token after its parent's. Nodes are sorted by depth: a sequence near its
    end has the first ones."""

    depth_J: Tensor
    rank_J: Tensor  # of the candidate that was drawn first: 0
    path_JJ: Tensor  # the nodes that lead to each one, itself included, without node 0
    children: list[list[int]]  # of each node, by rank

    @property
    def width(self) -> int:
        """The most candidates of a position."""
        return int(self.rank_J.max()) + 1

    def num_drafts(self, depth: int) -> int:
        """The number of drafts of the first `depth` tokens."""
        return int((self.depth_J <= depth).sum()) - 1

    def ranked(self, rank: int, count: int) -> list[tuple[int, int]]:
        """The nodes of a rank among the first `count`, each after its parent."""
        pairs = [(parent, nodes[rank]) for parent, nodes in enumerate(self.children) if rank < len(nodes)]
        return [pair for pair in pairs if pair[1] < count]


def num_drafts(lm: DiffusionLM, config: SamplerConfig) -> int:
    """The number of tokens drafted ahead. A block of one mask more predicts them: its first position is the
    causal reading's."""
    return config.num_speculative_tokens or min((lm.block_size or 1) - 1, MOST_DRAFTS)


def num_columns(lm: DiffusionLM, config: SamplerConfig) -> int:
    """The most cache columns of a pass beyond those of the sequence: of drafts, and of masks after each
    node."""
    drafts, tree = num_drafts(lm, config), tree_of(lm, config)
    counts = [(tree.num_drafts(depth), depth) for depth in range(drafts + 1)]  # at this distance from the end
    return max(count - depth + (count + 1) * (drafts + 1) for count, depth in counts)


def tree_of(lm: DiffusionLM, config: SamplerConfig) -> Tree:
    """The drafts of a pass."""
    return draft_tree(num_drafts(lm, config), config.num_branches)


@cache
def draft_tree(drafts: int, candidates: int) -> Tree:
    """The `drafts * candidates` likeliest nodes, where the r-th candidate of a position is kept with a chance
    of 1 / (3r): roughly what was measured (docs/results.md). A position has at most 2 * candidates - 1, so
    that with one candidate the tree is a chain."""
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[int, tuple[int, ...]]] = [(3, (1,))]
    while len(paths) < drafts * candidates:
        path = heapq.heappop(heap)[1]
        paths.append(path)
        following = [(*path[:-1], path[-1] + 1)] * (path[-1] < 2 * candidates - 1) + [(*path, 1)] * (
            len(path) < drafts
        )
        for other in following:
            heapq.heappush(heap, (prod(3 * number for number in other), other))
    paths = [(), *sorted(paths, key=lambda path: (len(path), path))]
    node_of = {path: node for node, path in enumerate(paths)}
    children: list[list[int]] = [[] for _ in paths]
    path_JJ = torch.eye(len(paths), dtype=torch.bool)
    path_JJ[0, 0] = False
    for node, path in enumerate(paths[1:], start=1):
        parent = node_of[path[:-1]]
        children[parent].append(node)
        path_JJ[node] |= path_JJ[parent]
    depth_J, rank_J = torch.tensor([(len(path), path[-1] - 1 if path else 0) for path in paths]).unbind(1)
    return Tree(depth_J, rank_J, path_JJ, children)


def probabilities(logits_NV: Tensor, config: SamplerConfig, present_NV: Tensor | None) -> Tensor:
    """The distribution [N, V] that tokens are drawn from: after penalty, bans, temperature and filters; at
    temperature 0 one-hot. If no token is left, zero. Raises GenerationError for NaN."""
    refuse_nan(logits_NV.amax(-1))
    logits_NV = penalize_and_ban(logits_NV, config, present_NV)
    if config.temperature == 0:
        return F.one_hot(best(logits_NV), logits_NV.shape[1]).to(logits_NV.dtype)
    weight_NV = weights(logits_NV, logits_NV.amax(-1, keepdim=True), config.temperature)
    weight_NV = keep_likely(weight_NV, config.top_k, config.top_p, config.min_p)
    return (weight_NV / weight_NV.sum(-1, keepdim=True)).nan_to_num(0.0)


def draw_drafts(
    logits_NV: Tensor,
    count: int,
    config: SamplerConfig,
    key_N: Tensor,
    position_N: Tensor,
    present_NV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`count` different candidates [N, K] for each position, in the order in which they were drawn, and the
    distribution [N, K, V] of each."""
    view_K = torch.arange(count, device=key_N.device)
    uniform_NK = uniform(
        config.seed, key_N[:, None], position=position_N[:, None], stream=RngStream.DRAFT, view=view_K
    )
    drafts, drafted = [], []
    for uniform_N in uniform_NK.unbind(1):
        drafted.append(probabilities(logits_NV, config, present_NV))
        drafts.append(draw(drafted[-1], uniform_N))
        logits_NV = logits_NV.scatter(1, drafts[-1][:, None], -torch.inf)
    return torch.stack(drafts, 1), torch.stack(drafted, 1)


def verify(
    logits_NV: Tensor,
    candidates: Sequence[tuple[Tensor, Tensor, Tensor]],
    config: SamplerConfig,
    key_N: Tensor,
    position_N: Tensor,
    present_NV: Tensor | None = None,
) -> tuple[Decision, Tensor]:
    """The token of the causal reading at each position, if those before it are the drafts, and the rank of
    the candidate that it is; -1: of none.

    Args:
        logits_NV: of the causal reading.
        candidates: by rank, the positions [M] that have one, the tokens [M], and the distribution [M, V] of
            each; zero where there is none.
    """
    rest_NV = probabilities(logits_NV, config, present_NV)
    token_N, rank_N = torch.zeros_like(position_N), torch.full_like(position_N, -1)
    view_K = torch.arange(len(candidates), device=key_N.device)
    accept_NK = uniform(
        config.seed, key_N[:, None], position=position_N[:, None], stream=RngStream.ACCEPT, view=view_K
    )
    for rank, (index_M, draft_M, drafted_MV) in enumerate(candidates):
        prob_MV = rest_NV[index_M]
        if rank:
            prob_MV = prob_MV / prob_MV.sum(-1, keepdim=True)
        chance_M, drafted_M = (
            each_MV.gather(1, draft_M[:, None]).squeeze(1).double() for each_MV in (prob_MV, drafted_MV)
        )
        accepted_M = (
            (accept_NK[index_M, rank] * drafted_M < chance_M) & (drafted_M > 0) & (rank_N[index_M] < 0)
        )
        rank_N[index_M] = torch.where(accepted_M, rank, rank_N[index_M])
        token_N[index_M] = torch.where(accepted_M, draft_M, token_N[index_M])
        left_MV = (prob_MV - drafted_MV).clamp_min(0)
        # equal but for their last bits
        rest_NV[index_M] = torch.where(left_MV.sum(-1, keepdim=True) > 0, left_MV, prob_MV)
    other_N = draw(rest_NV, uniform(config.seed, key_N, position=position_N, stream=RngStream.TOKEN))
    token_N = torch.where(rank_N < 0, other_N, token_N)
    drawn_from_NV = penalize_and_ban(logits_NV, config, present_NV) if config.trace else None
    given = GivenTokens(token_N, None, None, drawn_from_NV)
    return decide(
        logits_NV, config, key_N, torch.zeros_like(position_N), position_N, present_NV, given
    ), rank_N


def draft_inputs(lm: DiffusionLM, ids: list[int], num_masks: int) -> ForwardInputs:
    """The inputs of a pass over a clean text, read from left to right, and a block of masks after it. Such a
    block may begin anywhere, and is all hidden: in training, blocks begin at multiples of their size, but
    attention and rotary positions do not see that."""
    ids_1T = torch.tensor([[*ids, *[lm.mask_token_id] * num_masks]], device=lm.device)
    layout, index_T = Layout.full(ids_1T.shape[1], lm.device), torch.arange(ids_1T.shape[1], device=lm.device)
    hidden_1T = (index_T >= len(ids))[None]
    layout = Layout(layout.document_BT, layout.position_BT, hidden_1T.long())
    allowed_1TT = (index_T <= index_T[:, None])[None] | hidden_1T[:, :, None]
    mask = AttentionMask(allowed_1TT[:, None], (layout.position_BT, layout.position_BT))
    fraction_1T = (
        hidden_fraction(hidden_1T, layout, lm.attention, lm.block_size) if lm.has_time_embedding else None
    )
    return ForwardInputs(ids_1T, layout, mask, fraction_BT=fraction_1T)
