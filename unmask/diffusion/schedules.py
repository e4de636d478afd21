"""Noise: the mask rate at time t, the distribution of times, and the weight of a hidden token.

alpha(t) is the fraction of tokens still visible, from alpha(0) = 1 to alpha(1) = 0. With the weight
-alpha'(t) / (1 - alpha(t)) the expected weighted sum of log-probabilities over t ~ U(0, 1) is the ELBO for
every schedule (Shi et al. 2024, "Simplified and generalized masked diffusion", eq. 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from unmask.errors import ConfigError

Weighting = Literal["elbo", "1/t", "uniform", "cart"]


@dataclass(frozen=True)
class Schedule:
    """A noise schedule."""

    mask_rate: Callable[[Tensor], Tensor]  # 1 - alpha(t), the probability that a token is hidden at time t
    weight: Callable[[Tensor], Tensor]  # -alpha'(t) / (1 - alpha(t))


SIGMA_MIN, SIGMA_MAX = 1e-4, 20.0


def _sigma(t: Tensor) -> Tensor:
    return SIGMA_MIN ** (1 - t) * SIGMA_MAX**t


SCHEDULES = {
    # alpha = 1 - t
    "linear": Schedule(lambda t: t, lambda t: 1 / t),
    # alpha = 1 - cos(pi/2 (1 - t))
    "cosine": Schedule(
        lambda t: torch.cos(math.pi / 2 * (1 - t)), lambda t: math.pi / 2 * torch.tan(math.pi / 2 * (1 - t))
    ),
    # alpha = exp(-sigma), sigma = SIGMA_MIN^(1 - t) SIGMA_MAX^t (Lou et al. 2024, SEDD): hides SIGMA_MIN of
    # the tokens at t = 0
    "geometric": Schedule(
        lambda t: -torch.expm1(-_sigma(t)),
        lambda t: math.log(SIGMA_MAX / SIGMA_MIN) * _sigma(t) / torch.expm1(_sigma(t)),
    ),
    # alpha = cos(pi/2 t) (MDLM, Sahoo et al. 2024; their code leaves 0.001 of the tokens visible at t = 1)
    "mdlm-cosine": Schedule(
        lambda t: 1 - torch.cos(math.pi / 2 * t), lambda t: math.pi / 2 / torch.tan(math.pi / 4 * t)
    ),
}


@dataclass(frozen=True)
class Noise:
    """A schedule, the distribution of times, and the weight of a hidden token.

    Attributes:
        schedule: alpha(t).
        low, high: times are drawn from this band; `low` keeps the weights bounded.
        timesteps: times are the multiples of 1 / timesteps in the band; None: any.
        weighting: "elbo": -alpha'(t) / (1 - alpha(t)), or its difference quotient for discrete times (Austin
            et al. 2021); "1/t"; "uniform": 1; "cart": by the visible text nearby
            (`unmask.diffusion.views.cart_weights`).
    """

    schedule: Schedule = SCHEDULES["linear"]
    low: float = 1e-3
    high: float = 1.0
    timesteps: int | None = None
    weighting: Weighting = "elbo"

    def time(self, uniform: Tensor) -> Tensor:
        """Times from uniform numbers in [0, 1)."""
        if self.timesteps is None:
            return self.low + (self.high - self.low) * uniform
        first, last = self._steps()
        return (first + (uniform * (last - first + 1)).floor()) / self.timesteps

    def weight(self, time: Tensor) -> Tensor:
        """The weight of a token hidden at this time; "cart" is applied later, when the text is known."""
        if self.weighting == "1/t":
            return 1 / time
        if self.weighting != "elbo":
            return torch.ones_like(time)
        if self.timesteps is None:
            return self.schedule.weight(time)
        rate = self.schedule.mask_rate(time)
        return (rate - self.schedule.mask_rate(time - 1 / self.timesteps)) * self.timesteps / rate

    def paired(self) -> Noise:
        """The noise of a complementary pair: no time has its complement before `low`. Refuses discrete times,
        and a `low` above 1/2."""
        if self.timesteps is not None:
            what = "discrete times have no complementary pairs: the complement's times fall between them"
            raise ConfigError(what, where="num_timesteps", remedy="Leave out num_timesteps, or complementary")
        if self.low > 1 - self.low:
            what = f"a complementary pair at times from {self.low}"
            raise ConfigError(what, where="min_time", remedy="Use at most 0.5, or leave out complementary")
        return replace(self, high=min(self.high, 1 - self.low))

    def _steps(self) -> tuple[int, int]:
        assert self.timesteps is not None
        return max(1, math.ceil(self.low * self.timesteps - 1e-9)), math.floor(
            self.high * self.timesteps + 1e-9
        )

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            remedy = "Use get_schedule, as in get_schedule('cosine')"
            raise ConfigError(f"{self.schedule!r} is not a schedule", where="schedule", remedy=remedy)
        if not 0 <= self.low <= self.high <= 1:
            what = f"times from {self.low} to {self.high}"
            raise ConfigError(what, where="min_time, max_time", remedy="Use 0 <= min_time <= max_time <= 1")
        if self.weighting not in get_args(Weighting):
            what = f"unknown weighting {self.weighting!r}"
            raise ConfigError(what, where="weighting", remedy=f"Use one of {', '.join(get_args(Weighting))}")
        if self.timesteps is not None and (self.timesteps < 1 or self._steps()[0] > self._steps()[1]):
            what = f"no multiple of 1/{self.timesteps} lies between {self.low} and {self.high}"
            raise ConfigError(what, where="num_timesteps", remedy="Use more timesteps, or a wider band")


def get_schedule(name: str) -> Schedule:
    """The schedule of this name. Raises ConfigError if there is none."""
    if name not in SCHEDULES:
        raise ConfigError(
            f"unknown schedule {name!r}", where="schedule", remedy=f"Use one of {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[name]
