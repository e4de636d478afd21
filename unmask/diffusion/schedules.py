"""Noise schedules: alpha(t) is the share of tokens still visible at time t, from alpha(0) = 1 to alpha(1) = 0.

The weight -alpha'(t) / (1 - alpha(t)) of a masked token's log-probability makes the expected weighted sum over t ~ U(0, 1)
equal to the ELBO for every schedule (Shi et al. 2024, "Simplified and generalized masked diffusion", eq. 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """A noise schedule.

    Attributes:
        name: as in a config.
        mask_rate: 1 - alpha(t), the probability that a token is hidden at time t.
        weight: -alpha'(t) / (1 - alpha(t)).
    """

    name: str
    mask_rate: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]


SCHEDULES = {
    # alpha = 1 - t
    "linear": Schedule("linear", lambda t: t, lambda t: 1 / t),
    # alpha = 1 - cos(pi/2 (1 - t))
    "cosine": Schedule(
        "cosine",
        lambda t: torch.cos(math.pi / 2 * (1 - t)),
        lambda t: math.pi / 2 * torch.tan(math.pi / 2 * (1 - t)),
    ),
}


def get_schedule(name: str) -> Schedule:
    """The schedule of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {name!r}", where="schedule", remedy=f"Use one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
