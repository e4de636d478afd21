"""Views: noised copies of a batch. Every objective is a way to plan them.

A plan says which tokens are hidden, which of them are scored, and what each weighs. Weights are scaled so that
`(weight * log_prob).sum()` over views and tokens estimates the log-likelihood bound of the sequence.

Maskable tokens are divided into groups that are noised together: the whole completion in a bidirectional model, one
attention block in a block-causal one. A bound is then the sum over groups of the bound of each group given the clean
groups before it.

Shapes: B batch, V views, T tokens. L is the number of maskable tokens in a group, k how many of them are hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.diffusion.noise import Stream, uniform
from unmask.diffusion.schedules import Schedule


@dataclass(frozen=True)
class Views:
    """Noised copies of a batch.

    Attributes:
        hidden_BVT: True where the model sees the mask token.
        scored_BVT: True where the log-probability of the real token is asked for.
        weight_BVT: float32, 0 where not scored.
    """

    hidden_BVT: Tensor
    scored_BVT: Tensor
    weight_BVT: Tensor

    @property
    def count(self) -> int:
        return self.hidden_BVT.shape[1]

    def one(self, index: int) -> Views:
        """A single view, to go through them one at a time."""
        at = slice(index, index + 1)
        return Views(self.hidden_BVT[:, at], self.scored_BVT[:, at], self.weight_BVT[:, at])

    def rows(self, index: Tensor | slice) -> Views:
        """The views of some sequences of the batch."""
        return Views(self.hidden_BVT[index], self.scored_BVT[index], self.weight_BVT[index])


@dataclass(frozen=True)
class Draw:
    """Where the randomness of a plan comes from: never the global generator, never the place in the batch.

    Attributes:
        seed: of the run.
        key_B: int64, one per sequence: a sample id or a hash of its tokens.
        iteration: tells apart plans for the same sequence (epochs, inner updates).
    """

    seed: int
    key_B: Tensor
    iteration: int = 0

    def uniform(self, position_BT: Tensor, views: int, stream: Stream) -> Tensor:
        """[B, V, T] float64 in [0, 1): equal wherever position, view and stream are equal."""
        view_1V1 = torch.arange(views, device=position_BT.device)[None, :, None]
        return uniform(
            self.seed, self.key_B[:, None, None], step=self.iteration, position=position_BT[:, None, :], stream=stream, view=view_1V1
        )


def random_views(group_BT: Tensor, draw: Draw, schedule: Schedule, *, views: int = 1, low: float = 1e-3, high: float = 1.0) -> Views:
    """Time t ~ U(low, high) per group, stratified over the views; each token is hidden independently with 1 - alpha(t).

    Args:
        group_BT: the group of each maskable token, numbered below T; -1 elsewhere.
        draw: the source of randomness.
        schedule: alpha(t) and its weight.
        views: number of views.
        low, high: the range of t; `low` keeps the weight 1/t bounded.
    """
    time_BVT = low + (high - low) * _stratified(draw, group_BT, views)
    hidden_BVT = (draw.uniform(_columns(group_BT), views, Stream.MASK) < schedule.mask_rate(time_BVT)) & (group_BT >= 0)[:, None]
    return _weighted(hidden_BVT, schedule.weight(time_BVT) / views)


def complementary_pair(group_BT: Tensor, draw: Draw, schedule: Schedule, *, low: float = 1e-3) -> Views:
    """Two views, each hiding what the other shows, so that every token is learnt from in each step."""
    time_BVT = low + (1 - 2 * low) * _stratified(draw, group_BT, 1)
    rate_BVT, weight_BVT = schedule.mask_rate(time_BVT), schedule.weight(time_BVT)
    first_BVT = draw.uniform(_columns(group_BT), 1, Stream.MASK) < rate_BVT
    # The complement hides at the rate alpha(t), so that its weight is -alpha'(t) / alpha(t).
    hidden_BVT = torch.cat([first_BVT, ~first_BVT], 1) & (group_BT >= 0)[:, None]
    return _weighted(hidden_BVT, torch.cat([weight_BVT, weight_BVT * rate_BVT / (1 - rate_BVT)], 1) / 2)


def exact_count_views(group_BT: Tensor, draw: Draw, *, views: int) -> Views:
    """Exactly k of the L tokens of a group hidden, k ~ U{1..L} stratified over the views; each weighs L/k."""
    size_BT = _group_sizes(group_BT)
    count_BVT = 1 + (_stratified(draw, group_BT, views) * size_BT[:, None]).long()
    hidden_BVT = _ranks(group_BT, draw.uniform(_columns(group_BT), views, Stream.MASK)) < count_BVT
    return _weighted(hidden_BVT & (group_BT >= 0)[:, None], size_BT[:, None] / count_BVT / views)


def elbo_views(group_BT: Tensor, draw: Draw, *, views: int) -> Views:
    """The low-variance plan of the ELBO: one all-masked view, then complementary pairs of exact counts.

    The bound is the mean over k = 1..L of the L/k-weighted score. k = L needs one view and no chance: it weighs 1/L. The
    rest, k ~ U{1..L-1}, is estimated by pairs (k, L - k) that are complements of each other. A view left over is drawn
    alone. One view in all is a plain exact-count view.
    """
    if views == 1:
        return exact_count_views(group_BT, draw, views=1)
    valid_B1T = (group_BT >= 0)[:, None]
    size_B1T = _group_sizes(group_BT)[:, None].clamp_min(1)
    rest = views - 1
    pairs = rest // 2
    order_BVT = _ranks(group_BT, draw.uniform(_columns(group_BT), pairs + rest % 2, Stream.MASK))
    time_BVT = torch.cat([_stratified(draw, group_BT, pairs), draw.uniform(group_BT.clamp_min(0), rest % 2, Stream.ORDER)], 1)
    count_BVT = 1 + (time_BVT * (size_B1T - 1)).long()
    hidden_BVT = order_BVT < count_BVT
    weight_BVT = (size_B1T - 1) / rest / count_BVT
    complement_BVT = (size_B1T - 1) / rest / (size_B1T - count_BVT[:, :pairs]).clamp_min(1)
    possible_B1T = valid_B1T & (size_B1T > 1)
    partial_BVT = torch.cat([hidden_BVT, ~hidden_BVT[:, :pairs]], 1) & possible_B1T
    return _weighted(torch.cat([valid_B1T, partial_BVT], 1), torch.cat([1 / size_B1T, weight_BVT, complement_BVT], 1))


def all_masked_views(
    completion_BT: Tensor, prompt_BT: Tensor | None = None, draw: Draw | None = None, *, prompt_rate: float = 0.0
) -> Views:
    """One view with the whole completion hidden and scored, each token with weight 1 (diffu-GRPO, Zhao et al. 2025).

    With a `prompt_rate` the prompt's tokens are hidden too, independently with this probability, but never scored.
    """
    hidden_BVT = completion_BT[:, None].clone()
    if prompt_rate > 0:
        assert prompt_BT is not None and draw is not None
        hidden_BVT |= (draw.uniform(_columns(prompt_BT), 1, Stream.PROMPT) < prompt_rate) & prompt_BT[:, None]
    scored_BVT = completion_BT[:, None]
    return Views(hidden_BVT, scored_BVT, scored_BVT.float())


def _columns(like_BT: Tensor) -> Tensor:
    return torch.arange(like_BT.shape[1], device=like_BT.device).expand_as(like_BT)


def _stratified(draw: Draw, group_BT: Tensor, views: int) -> Tensor:
    """One uniform per group and view, view v in [v/V, (v+1)/V)."""
    view_1V1 = torch.arange(views, device=group_BT.device)[None, :, None]
    return (view_1V1 + draw.uniform(group_BT.clamp_min(0), views, Stream.TIME)) / max(views, 1)


def _weighted(hidden_BVT: Tensor, weight_BVT: Tensor) -> Views:
    return Views(hidden_BVT, hidden_BVT, torch.where(hidden_BVT, weight_BVT, 0).float())


def _group_sizes(group_BT: Tensor) -> Tensor:
    """How many maskable tokens share a token's group [B, T]; 1 where not maskable. There are at most T groups."""
    group_BT = group_BT + 1
    counts = torch.zeros(group_BT.shape[0], group_BT.shape[1] + 1, dtype=torch.long, device=group_BT.device)
    counts.scatter_add_(1, group_BT, torch.ones_like(group_BT))
    return torch.where(group_BT > 0, counts.gather(1, group_BT), 1)


def _ranks(group_BT: Tensor, noise_BVT: Tensor) -> Tensor:
    """The rank of every token's noise within its group, from 0."""
    key_BVT = group_BT[:, None] + noise_BVT
    rank_BVT = key_BVT.argsort(-1).argsort(-1)
    sorted_BT = group_BT.sort(-1).values
    start_BT = torch.searchsorted(sorted_BT, group_BT.contiguous())
    return rank_BVT - start_BT[:, None]
