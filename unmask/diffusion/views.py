"""Views: noised copies of a batch, by a plan that sets the hidden tokens, the targets, and the weight of each
target.

Weights are scaled so that `(weight * log_prob).sum()` over views and tokens estimates the log-likelihood
bound of the sequence. Maskable tokens are divided into groups that are noised together: the whole completion
in a bidirectional model, one attention block in a block-causal one. The bound is the sum over groups of the
bound of each group given the clean groups before it.

Plans read `group_BT`, the group of each maskable token and -1 elsewhere
(`unmask.diffusion.log_probs.noise_groups`), and a `MaskRNG` with a key for each row. They raise ConfigError
if these differ in their numbers of rows, or no view is asked for.

Shapes: B batch, M views, T tokens, S steps. L is the number of maskable tokens in a group, k how many of
them are hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unmask.diffusion.mixing import Mixing, RandomTokens, Replaced, replaced
from unmask.diffusion.rng import RngStream, uniform
from unmask.diffusion.schedules import Noise
from unmask.errors import ConfigError
from unmask.tensor_checks import check_tensors

GOLDEN = (math.sqrt(5) - 1) / 2
CART_CUT = 1e-6  # the tail of a geometric distribution
MAX_LEVEL = 1 - 1e-6  # of random tokens, whose weights divide by what is kept


class CanvasSteps(NamedTuple):
    """The denoising steps of canvases of random tokens, counted from the first of each canvas."""

    shown_BST: Tensor  # what each step saw
    kept_BST: Tensor  # the drawn tokens that it kept, of the last step the result; -1 elsewhere
    temperature_BS: Tensor  # of their distributions; float64
    count_BT: Tensor  # the number of steps of the canvas of each position

    def select(self, rows: Tensor | slice) -> CanvasSteps:
        """The steps of some rows."""
        return CanvasSteps(*(part[rows] for part in self))


class Drawn(NamedTuple):
    """What the model saw of a canvas of random tokens, and what was drawn from its predictions."""

    ids_BMT: Tensor
    token_BMT: Tensor
    """The drawn tokens, whose log-probabilities are computed in place of the clean tokens'."""
    temperature_BMT: Tensor
    """The temperatures of the distributions that they were drawn from; float64."""
    step_BMT: Tensor
    """The step that saw this, counted from the first of the canvas."""


@dataclass(frozen=True)
class Views:
    """Noised copies of a batch."""

    hidden_BMT: Tensor  # True where the model sees the mask token, or the token of `replaced`
    target_BMT: Tensor  # True for targets, whose log-probability is computed
    weight_BMT: Tensor  # of the targets, float32; 0 elsewhere
    # whether the last view hides nothing, and each of its tokens is predicted from those before it
    causal: bool = False
    # what the model sees, if that is not masks alone
    replaced: Replaced | Drawn | None = None
    # whether targets are measured by the bound of `unmask.diffusion.mixing`, not by their log-probability
    divergence: bool = False
    # with draws, all steps of their canvases, for models that are conditioned on what they predicted last
    canvas_steps: CanvasSteps | None = None

    @property
    def count(self) -> int:
        return self.hidden_BMT.shape[1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Hidden tokens, targets, weights and what replaces tokens, by name."""
        planes = {"hidden_BMT": self.hidden_BMT, "target_BMT": self.target_BMT, "weight_BMT": self.weight_BMT}
        return planes | (self.replaced._asdict() if self.replaced is not None else {})

    def equals(self, other: Views) -> bool:
        """Whether hidden tokens, targets, weights and what replaces tokens are equal."""
        own, others = self.tensors, other.tensors
        return (
            (self.causal, self.divergence, own.keys()) == (other.causal, other.divergence, others.keys())
        ) and all(torch.equal(part, others[name]) for name, part in own.items())

    @cached_property
    def target_on_host(self) -> np.ndarray:
        """The targets, for which the host waits once: boolean [B, M, T]. What follows from them needs no
        further wait."""
        return self.target_BMT.cpu().numpy()

    @cached_property
    def hidden_on_host(self) -> np.ndarray:
        """The hidden tokens, likewise."""
        return self.target_on_host if self.hidden_BMT is self.target_BMT else self.hidden_BMT.cpu().numpy()

    def __getstate__(self) -> dict[str, Any]:
        # a checkpoint holds only tensors
        return {name: part for name, part in vars(self).items() if not name.endswith("_on_host")}

    def select(self, rows: Tensor | slice, views: slice = slice(None)) -> Views:
        """Some views of some sequences, all marked as noised (`causal` is False)."""
        steps = self.canvas_steps and self.canvas_steps.select(rows)
        return replace(self.of_planes(lambda plane_BMT: plane_BMT[rows, views]), canvas_steps=steps)

    def of_planes(self, change: Callable[[Tensor], Tensor]) -> Views:
        """These views with each of their tensors [B, M, T] changed in the same way, all marked as noised."""
        other = None if self.replaced is None else type(self.replaced)(*map(change, self.replaced))
        return Views(
            change(self.hidden_BMT),
            change(self.target_BMT),
            change(self.weight_BMT),
            replaced=other,
            divergence=self.divergence,
            canvas_steps=self.canvas_steps,
        )

    def with_causal(self, target_BT: Tensor, weight: float) -> Views:
        """These views, then a causal one with these targets."""
        target_B1T = target_BT[:, None]
        one_more = self.of_planes(lambda plane_BMT: torch.cat([plane_BMT, plane_BMT[:, -1:]], 1))
        return replace(
            one_more,
            hidden_BMT=torch.cat([self.hidden_BMT, torch.zeros_like(target_B1T)], 1),
            target_BMT=torch.cat([self.target_BMT, target_B1T], 1),
            weight_BMT=torch.cat([self.weight_BMT, weight * target_B1T.float()], 1),
            causal=True,
        )

    def split_causal(self) -> tuple[Views, Views]:
        """The noised views, and the causal one."""
        every = slice(None)
        causal = replace(self.select(every, slice(-1, None)), causal=True, replaced=None, divergence=False)
        return self.select(every, slice(-1)), causal


def joined(each: Sequence[Views]) -> Views:
    """The mean of independent draws of views of the same rows."""
    planes: Any = zip(*(views.tensors.values() for views in each), strict=True)
    hidden_BMT, target_BMT, weight_BMT, *others = (torch.cat(parts, 1) for parts in planes)
    other = Replaced(*others) if others else None
    return replace(
        each[0],
        hidden_BMT=hidden_BMT,
        target_BMT=target_BMT,
        weight_BMT=weight_BMT / len(each),
        replaced=other,
    )


@dataclass(frozen=True)
class MaskRNG:
    """The source of a plan's randomness, independent of the global generator and of the place in the batch.

    Attributes:
        seed: of the run.
        key_B: int64, one per sequence: a sample id or a hash of its tokens.
        iteration: distinguishes plans for the same sequence (epochs, inner updates).
        rows_before_B: the number of rows that training visits before each of these. With it times are spread
            evenly over successive rows and their groups, however these are batched; else they are
            independent.
    """

    seed: int
    key_B: Tensor
    iteration: int = 0
    rows_before_B: Tensor | None = None

    def uniform(self, position_BT: Tensor, num_views: int, stream: RngStream) -> Tensor:
        """[B, M, T] float64 in [0, 1): equal wherever position, view and stream are equal."""
        view_1M1 = torch.arange(num_views, device=position_BT.device)[None, :, None]
        key_B11, position_B1T = self.key_B[:, None, None], position_BT[:, None, :]
        return uniform(
            self.seed, key_B11, step=self.iteration, position=position_B1T, stream=stream, view=view_1M1
        )

    def per_sequence(self, num_views: int, stream: RngStream) -> Tensor:
        """[B, M] float64 in [0, 1): a number for each view of a sequence."""
        return self.uniform(torch.zeros_like(self.key_B[:, None]), num_views, stream).squeeze(2)


def _check(group_BT: Tensor, draw: MaskRNG, number_BT: Tensor | None = None, num_views: int = 1) -> None:
    """Refuse a draw that is not of as many rows as the groups, and fewer views than one."""
    if num_views < 1:
        raise ConfigError(f"{num_views} views", where="num_views", remedy="Give at least 1")
    check_tensors(group_BT=group_BT, key_B=draw.key_B, rows_before_B=draw.rows_before_B, number_BT=number_BT)


def random_views(group_BT: Tensor, draw: MaskRNG, noise: Noise, *, num_views: int = 1) -> Views:
    """A time per group, stratified over the views; each token is hidden independently with probability 1 -
    alpha(t) (MDLM, Sahoo et al. 2024).

    Args:
        group_BT: the group of each maskable token, numbered below T; -1 elsewhere.
    """
    _check(group_BT, draw, num_views=num_views)
    time_BMT = noise.time(stratified(draw, group_BT, num_views))
    hidden_BMT = (
        draw.uniform(columns(group_BT), num_views, RngStream.MASK) < noise.schedule.mask_rate(time_BMT)
    ) & (group_BT >= 0)[:, None]
    return _weighted(hidden_BMT, noise.weight(time_BMT) / num_views)


def complementary_pair(group_BT: Tensor, draw: MaskRNG, noise: Noise) -> Views:
    """Two views, each hiding what the other shows, so that every token is trained on in each step.

    The complement of a view at mask rate r has mask rate 1 - r. Its weight is that of the time at which the
    schedule has this rate, times the change of variables: -alpha'(t) / alpha(t) for the ELBO.
    """
    _check(group_BT, draw)
    noise = noise.paired()
    time_BMT = noise.time(stratified(draw, group_BT, 1))
    rate_BMT, weight_BMT = noise.schedule.mask_rate(time_BMT), noise.weight(time_BMT)
    hidden_BMT = _with_complement(draw.uniform(columns(group_BT), 1, RngStream.MASK) < rate_BMT, group_BT)
    other_BMT = (
        weight_BMT if noise.weighting in ("uniform", "cart") else weight_BMT * rate_BMT / (1 - rate_BMT)
    )
    return _weighted(hidden_BMT, torch.cat([weight_BMT, other_BMT], 1) / 2)


def cart_weights(views: Views, segment_BT: Tensor, document_BT: Tensor, *, p: float) -> Views:
    """Weights of hidden tokens that grow with the visible text nearby (CART: Dream 7B, Ye et al. 2025, eq.
    7).

    Each weight is multiplied by half the sum over visible tokens at distance d of the geometric distribution
    p (1 - p)^(d - 1). Visible are the shown tokens of the same segment (`unmask.models.attention.segments`:
    block or document), and all of the document's earlier segments (the clean blocks). Packed documents are
    numbered.
    """
    check_tensors(**views.tensors, segment_BT=segment_BT, document_BT=document_BT)
    hidden_BMT, length = views.hidden_BMT, segment_BT.shape[1]
    near_BMT = torch.zeros_like(views.weight_BMT)
    reach = min(length - 1, math.ceil(math.log(CART_CUT) / math.log1p(-p)))
    for distance in range(1, reach + 1):
        weight = p / 2 * (1 - p) ** (distance - 1)
        same_BT = document_BT[:, distance:] == document_BT[:, :-distance]
        together_BT = same_BT & (segment_BT[:, distance:] == segment_BT[:, :-distance])
        before_BMT, after_BMT = ~hidden_BMT[..., :-distance], ~hidden_BMT[..., distance:]
        near_BMT[..., distance:] += weight * (same_BT[:, None] & (before_BMT | ~together_BT[:, None]))
        near_BMT[..., :-distance] += weight * (together_BT[:, None] & after_BMT)
    return replace(views, weight_BMT=views.weight_BMT * near_BMT)


def exact_count_views(
    group_BT: Tensor, draw: MaskRNG, *, num_views: int, number_BT: Tensor | None = None
) -> Views:
    """Exactly k of the L tokens of a group hidden, k ~ U{1..L} stratified over the views; each has weight L/k
    (LLaDA, Nie et al. 2025). `number_BT` as of `hide`."""
    _check(group_BT, draw, number_BT, num_views)
    size_B1T = group_sizes(group_BT)[:, None]
    count_BMT = 1 + (stratified(draw, group_BT, num_views) * size_B1T).long()
    return _weighted(hide(group_BT, draw, count_BMT, number_BT), size_B1T / count_BMT / num_views)


def exact_count_pair(group_BT: Tensor, draw: MaskRNG) -> Views:
    """Two views of exact counts that between them hide every token once: k and the other L - k of the L
    tokens of a group.

    k ~ U{1..L}. For k = L the second view hides nothing and the first has weight 1; else the weights are L/k
    and L/(L - k), halved. The mean is the same ELBO as that of `complementary_pair`, with weights of at most
    L/2, instead of 1/t.
    """
    _check(group_BT, draw)
    size_B1T = group_sizes(group_BT)[:, None]
    count_B1T = 1 + (stratified(draw, group_BT, 1) * size_B1T).long()
    hidden_BMT = _with_complement(hide(group_BT, draw, count_B1T), group_BT)
    whole_B1T = count_B1T == size_B1T
    weight_B1T = torch.where(whole_B1T, 1.0, size_B1T / count_B1T / 2)
    other_B1T = size_B1T / (size_B1T - count_B1T).clamp_min(1) / 2
    return _weighted(hidden_BMT, torch.cat([weight_B1T, other_B1T], 1))


def pairs_of_counts(group_BT: Tensor, draw: MaskRNG, *, pairs: int) -> Views:
    """Pairs of views that hide x and the other L - x of the L tokens of a group, x ~ U{0..L} stratified over
    the pairs (ESPO, Ou et al. 2025). The weight in a view of k tokens is (L + 1)/k, halved; the first views
    of all pairs come before the second ones."""
    _check(group_BT, draw)
    size_B1T = group_sizes(group_BT)[:, None]
    count_BMT = (stratified(draw, group_BT, pairs) * (size_B1T + 1)).long()
    hidden_BMT = _with_complement(hide(group_BT, draw, count_BMT), group_BT)
    return _weighted(
        hidden_BMT,
        (size_B1T + 1) / torch.cat([count_BMT, size_B1T - count_BMT], 1).clamp_min(1) / (2 * pairs),
    )


def elbo_views(group_BT: Tensor, draw: MaskRNG, *, num_views: int, number_BT: Tensor | None = None) -> Views:
    """The low-variance plan of the ELBO: one all-masked view, then complementary pairs of exact counts.

    The bound is the mean over k = 1..L of the L/k-weighted log-probability. k = L needs one view and nothing
    random: its weight is 1/L. The rest, k ~ U{1..L-1}, is estimated by complementary pairs (k, L - k). If one
    view is left, it is drawn unpaired. A single view is a plain exact-count view. `number_BT` as of `hide`.
    """
    if num_views == 1:
        return exact_count_views(group_BT, draw, num_views=1, number_BT=number_BT)
    _check(group_BT, draw, number_BT, num_views)
    valid_B1T = (group_BT >= 0)[:, None]
    size_B1T = group_sizes(group_BT)[:, None].clamp_min(1)
    rest = num_views - 1
    pairs = rest // 2
    uniform_BMT = torch.cat(
        [stratified(draw, group_BT, pairs), draw.uniform(group_BT.clamp_min(0), rest % 2, RngStream.ORDER)], 1
    )
    count_BMT = 1 + (uniform_BMT * (size_B1T - 1)).long()
    hidden_BMT = hide(group_BT, draw, count_BMT, number_BT)
    weight_BMT = (size_B1T - 1) / rest / count_BMT
    complement_BMT = (size_B1T - 1) / rest / (size_B1T - count_BMT[:, :pairs]).clamp_min(1)
    possible_B1T = valid_B1T & (size_B1T > 1)
    partial_BMT = torch.cat([hidden_BMT, ~hidden_BMT[:, :pairs]], 1) & possible_B1T
    return _weighted(
        torch.cat([valid_B1T, partial_BMT], 1), torch.cat([1 / size_B1T, weight_BMT, complement_BMT], 1)
    )


def mixed_views(
    clean_BT: Tensor,
    group_BT: Tensor,
    draw: MaskRNG,
    noise: Noise,
    mixing: Mixing,
    tokens: RandomTokens,
    *,
    num_views: int = 1,
    complementary: bool = False,
    exact_count: bool = False,
    number_BT: Tensor | None = None,
) -> Views:
    """Views in which tokens are replaced by random ones and by masks (`unmask.diffusion.mixing`); all tokens
    of a group are targets.

    Args:
        noise: the schedule says how many tokens are hidden. The weighting is elbo, the bound, or uniform, the
            mean log-probability.
        num_views: views; with `complementary` half of them hide what the others show, in pairs (m, m + M/2).
        exact_count: k of the L tokens of a group are hidden, k ~ U{0..L} stratified over the views, and the
            level is drawn given k, Beta(k + 1, L - k + 1): those of an independent hiding of each token at a
            level drawn uniformly.
        number_BT: as of `hide`.
    """
    _check(group_BT, draw, number_BT, num_views)
    if complementary and num_views % 2:
        what = f"{num_views} views are no pairs"
        raise ConfigError(what, where="num_views", remedy="Give an even number, or leave complementary out")
    number_BT = columns(group_BT) if number_BT is None else number_BT
    first = num_views // 2 if complementary else num_views
    valid_B1T = (group_BT >= 0)[:, None]
    if exact_count:
        level_BMT, hidden_BMT = _counted(group_BT, draw, first, number_BT)
        speed_BMT = torch.ones_like(level_BMT)
    else:
        noise = noise.paired() if complementary else noise
        time_BMT = noise.time(stratified(draw, group_BT, first))
        level_BMT = noise.schedule.mask_rate(time_BMT).clamp_max(MAX_LEVEL)
        hidden_BMT = draw.uniform(number_BT, first, RngStream.MASK) < level_BMT
        speed_BMT = noise.schedule.weight(time_BMT) * level_BMT
    if complementary:
        level_BMT = torch.cat([level_BMT, 1 - level_BMT], 1)
        hidden_BMT, speed_BMT = torch.cat([hidden_BMT, ~hidden_BMT], 1), speed_BMT.repeat(1, 2, 1)
    hidden_BMT &= valid_B1T
    kind_BMT = draw.uniform(number_BT, num_views, RngStream.KIND)
    token_BMT = draw.uniform(number_BT, num_views, RngStream.NOISE)
    found, weight_BMT = replaced(clean_BT, hidden_BMT, level_BMT, kind_BMT, token_BMT, mixing, tokens)
    elbo = noise.weighting == "elbo"
    weight_BMT = speed_BMT * weight_BMT if elbo else torch.ones_like(weight_BMT)
    target_BMT = valid_B1T.expand_as(hidden_BMT)
    weight_BMT = torch.where(target_BMT, weight_BMT / num_views, 0).float()
    return Views(hidden_BMT, target_BMT, weight_BMT, replaced=found, divergence=elbo)


def _counted(group_BT: Tensor, draw: MaskRNG, num_views: int, number_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The levels, and the hidden tokens, of views with exact counts [B, M, T]. Of L + 1 uniform numbers the
    one of rank k is Beta(k + 1, L - k + 1): of L sorted ones, and one more that is put among them."""
    size_B1T = group_sizes(group_BT)[:, None]
    count_BMT = (stratified(draw, group_BT, num_views) * (size_B1T + 1)).long()
    uniform_BMT = draw.uniform(number_BT, num_views, RngStream.ORDER)
    more_BMT = draw.uniform(group_BT.clamp_min(0), num_views, RngStream.LEVEL)
    sorted_BMT = (group_BT[:, None] + uniform_BMT).sort(-1).values - group_BT.sort(-1).values[:, None]
    start_BMT = torch.searchsorted(group_BT.sort(-1).values, group_BT.contiguous())[:, None].expand_as(
        count_BMT
    )
    last = group_BT.shape[1] - 1
    below_BMT = sorted_BMT.gather(2, (start_BMT + count_BMT - 1).clamp(0, last))
    above_BMT = sorted_BMT.gather(2, (start_BMT + count_BMT).clamp(0, last))
    low_BMT = torch.where(count_BMT == 0, 0.0, below_BMT)
    high_BMT = torch.where(count_BMT == size_B1T, 1.0, above_BMT)
    return more_BMT.clamp(low_BMT, high_BMT), hide(group_BT, draw, count_BMT, number_BT)


def exact_views(group_BT: Tensor, width: int) -> Views:
    """A view for every set of tokens of a group that can have been revealed before another one: view s shows
    the tokens whose bit in s is set, bits being numbered in the order of positions. The views of a group of L
    tokens (at most `width`) are the first 2^L - 1.

    Their log-probabilities give the exact likelihood (`unmask.diffusion.likelihood.any_order`); they are not
    summed, and all weights are 1.
    """
    check_tensors(group_BT=group_BT)
    subset_1M1 = torch.arange(2**width - 1, device=group_BT.device)[None, :, None]
    shown_BMT = subset_1M1 >> place_in_group(group_BT)[:, None] & 1 == 1
    first_BMT = subset_1M1 < 2 ** group_sizes(group_BT)[:, None] - 1
    return _weighted(
        ~shown_BMT & first_BMT & (group_BT >= 0)[:, None], torch.ones(1, 1, 1, device=group_BT.device)
    )


def all_masked_views(
    completion_BT: Tensor,
    prompt_BT: Tensor | None = None,
    draw: MaskRNG | None = None,
    *,
    prompt_rate: float = 0.0,
) -> Views:
    """One view with the whole completion hidden, each token a target of weight 1 (diffu-GRPO, Zhao et al.
    2025). With a `prompt_rate` the prompt's tokens are hidden too, independently with this probability, but
    are no targets."""
    check_tensors(
        completion_BT=completion_BT, prompt_BT=prompt_BT, key_B=None if draw is None else draw.key_B
    )
    hidden_BMT = completion_BT[:, None].clone()
    if prompt_rate > 0:
        if prompt_BT is None or draw is None:
            raise ConfigError(
                "hides tokens of the prompt at random",
                where="prompt_rate",
                remedy="Give prompt_BT and draw, or leave it out",
            )
        hidden_BMT |= (draw.uniform(columns(prompt_BT), 1, RngStream.PROMPT) < prompt_rate) & prompt_BT[
            :, None
        ]
    target_BMT = completion_BT[:, None]
    return Views(hidden_BMT, target_BMT, target_BMT.float())


def hide(group_BT: Tensor, draw: MaskRNG, count_BMT: Tensor, number_BT: Tensor | None = None) -> Tensor:
    """`count` random tokens of each group [B, M, T]. Random numbers belong to the numbers of tokens, which
    differ within a row; None: to their positions."""
    number_BT = columns(group_BT) if number_BT is None else number_BT
    rank_BMT = _ranks(group_BT, draw.uniform(number_BT, count_BMT.shape[1], RngStream.MASK))
    return (rank_BMT < count_BMT) & (group_BT >= 0)[:, None]


def _with_complement(first_BMT: Tensor, group_BT: Tensor) -> Tensor:
    """The maskable tokens that these views hide, then those that they show."""
    return torch.cat([first_BMT, ~first_BMT], 1) & (group_BT >= 0)[:, None]


def columns(like_BT: Tensor) -> Tensor:
    """The position of every token [B, T]."""
    return torch.arange(like_BT.shape[1], device=like_BT.device).expand_as(like_BT)


def stratified(draw: MaskRNG, group_BT: Tensor, num_views: int) -> Tensor:
    """One uniform per group and view, view m in [m/M, (m+1)/M)."""
    view_1M1 = torch.arange(num_views, device=group_BT.device)[None, :, None]
    if draw.rows_before_B is None:
        within_BMT = draw.uniform(group_BT.clamp_min(0), num_views, RngStream.TIME)
    # additive recurrences, of lowest discrepancy over sequences (Kuipers and Niederreiter 1974), shifted at
    # random
    else:
        shift_1M1 = uniform(draw.seed, torch.zeros_like(view_1M1), stream=RngStream.TIME, view=view_1M1)
        place_BT = draw.rows_before_B[:, None].double() * GOLDEN + group_BT.clamp_min(0).double() * math.sqrt(
            3
        )
        within_BMT = (shift_1M1 + place_BT[:, None]) % 1.0
    return (view_1M1 + within_BMT) / max(num_views, 1)


def _weighted(hidden_BMT: Tensor, weight_BMT: Tensor) -> Views:
    return Views(hidden_BMT, hidden_BMT, torch.where(hidden_BMT, weight_BMT, 0).float())


def group_sizes(group_BT: Tensor) -> Tensor:
    """The number of maskable tokens in a token's group [B, T]; 1 where not maskable. There are at most T
    groups."""
    group_BT = group_BT + 1
    counts = torch.zeros(group_BT.shape[0], group_BT.shape[1] + 1, dtype=torch.long, device=group_BT.device)
    counts.scatter_add_(1, group_BT, torch.ones_like(group_BT))
    return torch.where(group_BT > 0, counts.gather(1, group_BT), 1)


def place_in_group(group_BT: Tensor) -> Tensor:
    """The number of tokens of the same group before each token [B, T]; tokens that are not maskable count as
    one group."""
    return _ranks(group_BT, (columns(group_BT).double() / group_BT.shape[1])[:, None])[:, 0]


def _ranks(group_BT: Tensor, uniform_BMT: Tensor) -> Tensor:
    """The rank of every token's number within its group, from 0."""
    key_BMT = group_BT[:, None] + uniform_BMT
    rank_BMT = key_BMT.argsort(-1).argsort(-1)
    sorted_BT = group_BT.sort(-1).values
    start_BT = torch.searchsorted(sorted_BT, group_BT.contiguous())
    return rank_BMT - start_BT[:, None]
