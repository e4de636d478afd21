"""Masking strategies choose the hidden tokens of views, in place of a method's own plan. Weights follow from
the method's loss.

Your own strategy is a class with `plan`, for `GRPOTrainer(..., masking=Growing())`:

    class Growing(MaskingStrategy):
        def plan(self, rollout, draw, config, progress):
            uniform_BMT = draw.uniform(columns(rollout.ids_BT), config.samples, RngStream.MASK)
            hidden_BMT = (uniform_BMT < 0.2 + 0.6 * progress) & rollout.completion_BT[:, None]
            return weighted_views(rollout, hidden_BMT, config)

Shapes: B completions, M views, T positions, N patterns, C completions times views; L tokens of a group, k of
them hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from unmask.config.run import NoiseName
from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import MaskRNG, Views, exact_count_views, group_sizes, hide
from unmask.errors import ConfigError, did_you_mean
from unmask.generation.rollout import Rollout
from unmask.rl.methods.base import EstimatorKind, get_method
from unmask.rl.methods.coupled import coupled_views
from unmask.rl.methods.spg import block_by_block

TABLES = 128
"""Tables of random numbers that are kept: one per inner iteration, stream and power of two of positions."""


class MaskingStrategy:
    """Plans the views of a method in its place."""

    estimators: tuple[EstimatorKind, ...] = ("token", "mean", "bound")
    """What its weighted views can estimate (`Method.estimator`)."""
    uses: tuple[str, ...] | None = ("samples",)
    """The settings that its plan reads; None: those of the method's own plan."""

    def plan(self, rollout: Rollout, draw: MaskRNG, config: Any, progress: float) -> Views:
        """The views of one inner iteration.

        They depend only on the completion and the draw, not on the rest of the batch, the global generators
        or earlier calls. Targets are hidden and belong to the completion; the canvas after its end is hidden
        (`weighted_views` does that).

        Args:
            rollout: the completions.
            draw: the source of randomness.
            config: the `GRPOConfig`.
            progress: the fraction of the optimizer steps done when the completions were sampled, from 0 to 1.
        """
        raise NotImplementedError

    def get_cache_stats(self) -> dict[str, float]:
        """Statistics of the pattern cache: hits, misses, the fraction of hits (hit_rate, also called rate; 0
        before the first look-up), and the number of patterns kept (size)."""
        return {"hits": 0, "misses": 0, "rate": 0.0, "hit_rate": 0.0, "size": 0}


def weighted_views(
    rollout: Rollout, target_BMT: Tensor, config: Any, estimator: EstimatorKind | None = None
) -> Views:
    """Views that hide some of the completion and all after its end, with the weights that the method's loss
    needs.

    token: 1 / (views that hide the token), so that the sum is its mean log-probability over these; a token
    that no view hides has sum 0 and ratio 1. mean: 1 / (tokens that the view hides). bound: L / (k M), which
    estimates the ELBO where k ~ U{1..L}.

    Args:
        target_BMT: the hidden tokens of the completion [B, M, T].
        estimator: instead of the method's.
    """
    estimator = estimator or get_method(config.method).estimator
    if estimator == "bound":
        weight_BMT = weights_by_rate(rollout, target_BMT)
    else:
        weight_BMT = target_BMT / target_BMT.sum(1 if estimator == "token" else 2, keepdim=True).clamp_min(1)
    return rollout.hiding(target_BMT, weight_BMT)


def weights_by_rate(rollout: Rollout, target_BMT: Tensor) -> Tensor:
    """L / (k M) for each hidden token [B, M, T]: the inverse mask rate of its group in that view, averaged
    over views."""
    group_BT = rollout.noised_groups_BT
    hidden_CT = torch.where(target_BMT, group_BT[:, None], -1).flatten(0, 1)
    count_BMT = group_sizes(hidden_CT).view_as(target_BMT)
    return target_BMT * group_sizes(group_BT)[:, None] / count_BMT / target_BMT.shape[1]


class Diffusion(MaskingStrategy):
    """The forward process with the linear schedule: `config.samples` views of k ~ U{1..L} hidden tokens,
    stratified.

    With t ~ U(0, 1) and each token hidden with probability t, k ~ U{0..L}: this is that distribution, given k
    > 0.
    """

    def plan(self, rollout: Rollout, draw: MaskRNG, config: Any, progress: float) -> Views:
        views = exact_count_views(rollout.noised_groups_BT, draw, num_views=config.samples)
        return weighted_views(rollout, views.target_BMT, config)


class Adaptive(MaskingStrategy):
    """`config.samples` views of round(rL) hidden tokens, at least one, with a mask rate r that follows the
    progress of training.

    Args:
        start, end: r at the first step, and at the last one; linear in the steps.
        adaptive_loss: whether hidden tokens have the weight L / (k M), about 1 / (r M): the weights of a view
            then add up to those of a completion hidden whole, at any rate. They are in the exponent of the
            ratio, which a low rate inflates.
    """

    estimators = ("token",)

    def __init__(self, start: float = 0.3, end: float = 0.9, *, adaptive_loss: bool = False):
        if not (0 < start <= 1 and 0 < end <= 1):
            raise ConfigError(
                f"{start} and {end} are not mask rates",
                where="mask_rate",
                remedy="Give two rates above 0 and up to 1",
            )
        self.start, self.end, self.adaptive_loss = start, end, adaptive_loss

    def plan(self, rollout: Rollout, draw: MaskRNG, config: Any, progress: float) -> Views:
        group_BT = rollout.noised_groups_BT
        rate = self.start + (self.end - self.start) * progress
        count_B1T = (rate * group_sizes(group_BT)[:, None]).round().long().clamp_min(1)
        hidden_BMT = hide(group_BT, draw, count_B1T.expand(-1, config.samples, -1))
        return weighted_views(rollout, hidden_BMT, config, "bound" if self.adaptive_loss else None)


class Block(MaskingStrategy):
    """SPG's views, as in sampling block by block: a random decoding block is partly hidden, earlier ones are
    clean, later ones hidden."""

    estimators = ("token", "mean")

    def plan(self, rollout: Rollout, draw: MaskRNG, config: Any, progress: float) -> Views:
        return weighted_views(rollout, block_by_block(rollout, draw, config.samples)[0], config)


class Coupled(MaskingStrategy):
    """coupled-GRPO's views and weights: all hidden, and a complementary pair."""

    estimators = ("token",)
    uses = ()

    def plan(self, rollout: Rollout, draw: MaskRNG, config: Any, progress: float) -> Views:
        return coupled_views(rollout, draw)


@dataclass(frozen=True)
class CachedDraw(MaskRNG):
    """A draw of few keys, whose numbers are looked up."""

    numbers: Callable[..., Tensor] = field(kw_only=True)

    def uniform(self, position_BT: Tensor, views: int, stream: RngStream) -> Tensor:
        length = position_BT.shape[1]
        width = 1 << (length - 1).bit_length()  # the next power of two, so that few tables cover all lengths
        cached_NMT = self.numbers(self.seed, self.iteration, stream, views, width, position_BT.device)
        return cached_NMT[self.key_B, :, :length].gather(2, position_BT[:, None].expand(-1, views, -1))


class Optimized(MaskingStrategy):
    """The method's own plans, from N patterns of random numbers that are drawn once and reused.

    A completion has the pattern of its key modulo N. Each plan keeps its distribution, but completions with
    one pattern, in a batch or in different steps, share its random numbers: a run averages over N patterns
    for each inner iteration instead of new ones in each step. The numbers follow from the seed and the
    pattern, so that no checkpoint needs to hold them.

    Args:
        patterns: N.
        adaptive_loss: whether hidden tokens have the weight L / (k M), as with `Adaptive`, in place of the
            plan's weights. If k is uniform from 1 to L, and all sets of k tokens are equally likely, the
            weighted sum is an unbiased estimate of the ELBO. A plan that hides the completion whole keeps its
            weights: the rate is 1.
    """

    uses = None

    def __init__(self, patterns: int = 64, *, adaptive_loss: bool = False):
        if patterns < 1:
            raise ConfigError(f"must be at least 1, not {patterns}", where="patterns", remedy="Use 1 or more")
        self.patterns, self.adaptive_loss = patterns, adaptive_loss
        self.numbers = lru_cache(maxsize=TABLES)(partial(drawn_patterns, patterns))

    def plan(self, rollout: Rollout, draw: MaskRNG, config: Any, progress: float) -> Views:
        cached = CachedDraw(
            draw.seed, draw.key_B % self.patterns, draw.iteration, draw.rows_before_B, numbers=self.numbers
        )
        views = config.build_method().plan(rollout, cached)
        if not self.adaptive_loss:
            return views
        return replace(views, weight_BMT=weights_by_rate(rollout, views.target_BMT))

    def get_cache_stats(self) -> dict[str, float]:
        info = self.numbers.cache_info()
        rate = info.hits / max(info.hits + info.misses, 1)
        counts = {"hits": info.hits, "misses": info.misses, "size": info.currsize}
        return counts | {"rate": rate, "hit_rate": rate}


def drawn_patterns(
    num_patterns: int,
    seed: int,
    iteration: int,
    stream: RngStream,
    num_views: int,
    length: int,
    device: torch.device,
) -> Tensor:
    """`MaskRNG.uniform` of the keys below `num_patterns` at all positions [N, M, T]."""
    draw = MaskRNG(seed, torch.arange(num_patterns, device=device), iteration)
    return draw.uniform(torch.arange(length, device=device).expand(num_patterns, -1), num_views, stream)


STRATEGIES: dict[str, type[MaskingStrategy]] = {
    "diffusion": Diffusion,
    "optimized": Optimized,
    "adaptive": Adaptive,
    "block": Block,
    "coupled": Coupled,
}


def find_masking(
    config: Any,
    given: MaskingStrategy | None = None,
    *,
    exact: bool = False,
    noise: NoiseName = "masked",
) -> MaskingStrategy | None:
    """The given strategy, or the one that the config names; None: the method's own plan.

    Args:
        exact: whether the model's likelihood is exact, so that no views are planned.
        noise: the model's.

    Raises:
        ConfigError: there is none of this name, or its views do not fit the method's loss.
    """
    named = _strategy_named(config)
    strategy = named if given is None else given
    if strategy is None:
        return None
    if not isinstance(strategy, MaskingStrategy):
        raise ConfigError(
            f"{strategy!r} is not a MaskingStrategy",
            where="masking",
            remedy="Pass an instance of a subclass of MaskingStrategy",
        )
    if named is not None and given is not None:
        raise ConfigError(
            f"is {config.masking!r}, but a strategy was passed as well",
            where="masking",
            remedy="Leave one of them out",
        )
    if noise != "masked":
        what = f"hides tokens behind masks, and the model's noise is {noise}"
        raise ConfigError(what, where="masking", remedy="Leave it out")
    if exact:
        raise ConfigError(
            "a causal model's likelihood is exact, whatever is hidden", where="masking", remedy="Leave it out"
        )
    method = get_method(config.method)
    if method.separable:  # its loss needs each token to be a target in a single view
        what = f"{config.method} sums its loss over views of its own, of which a strategy would make others"
        raise ConfigError(what, where="masking", remedy="Leave it out, or use another method")
    if isinstance(strategy, Optimized) and strategy.adaptive_loss and method.estimator != "token":
        what = f"{config.method} weights the tokens of a view by how many it hides, also without this setting"
        raise ConfigError(
            what, where="adaptive_loss", remedy="Leave it out, or use a method whose loss is of single tokens"
        )
    if method.estimator not in strategy.estimators:
        fitting = [name for name, kind in STRATEGIES.items() if method.estimator in kind.estimators]
        what = (
            f"{config.method} compares bounds on the likelihood, which the views of "
            f"{type(strategy).__name__} do not estimate"
        )
        raise ConfigError(what, where="masking", remedy=f"Use one of {', '.join(fitting)}, or leave it out")
    return strategy


def _strategy_named(config: Any) -> MaskingStrategy | None:
    name, rates = config.masking, config.mask_rate
    if name not in (None, *STRATEGIES):
        raise ConfigError(
            f"unknown strategy {name!r}", where="masking", remedy=did_you_mean(name, STRATEGIES)
        )
    if name == "adaptive":
        if rates is not None and len(rates) != 2:
            raise ConfigError(
                f"needs two rates, not {len(rates)}",
                where="mask_rate",
                remedy="Give one for the first step, and one for the last",
            )
        return Adaptive(*rates or (), adaptive_loss=config.adaptive_loss)
    if name == "optimized":
        return Optimized(adaptive_loss=config.adaptive_loss)
    return STRATEGIES[name]() if name else None
