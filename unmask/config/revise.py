"""Which revealed tokens are hidden again, and how many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from unmask.config.base import Config, OnResume
from unmask.errors import ConfigError


class ReviseConfig(Config):
    """Which revealed tokens of a block are hidden again, by what the present forward pass says of them, and
    how many (ReMDM, Wang et al. 2025).

    Raises:
        ConfigError: a value out of range, or two settings that contradict one another.
    """

    on_resume = OnResume.ACTS

    by: Literal["probability", "quality"] = "probability"
    """The value of a revealed token. probability: that of the token at its position in the present forward
    pass, at temperature 1. quality: the probability that it is right, of the model's quality head."""
    schedule: Literal["cap", "rescale", "conf", "loop"] = "cap"
    """How many tokens a step hides. v are visible, h will be hidden after the step: cap: min(eta v, h).
    rescale: eta min(v, h). conf: eta min(1, h / v), thus one at most. loop: the block is completed up to the
    fraction `alpha_on`, steps from time t_on to t_off hide as many as cap does and reveal the same number,
    and the last steps reveal the rest. Fractions are carried over to the next step."""
    eta: float = Field(default=0.2, gt=0, le=1)
    """The factor of `schedule`."""
    temperature: float = Field(default=0.0, ge=0, le=1e6)
    """Which tokens are hidden: drawn without replacement, in proportion to exp(-value / temperature). 0:
    those of the lowest value. (ReMDM's conf hides each token on its own, in these proportions at 1, by its
    probability when it was revealed.)"""
    below: float | None = Field(default=None, gt=0, le=1)
    """Hide only tokens whose value is below this, and so perhaps fewer than `schedule` says. Unset: any."""
    t_on: float = Field(default=0.55, gt=0, lt=1)
    """Schedule loop: the fraction of a block's steps that come after the first part."""
    t_off: float = Field(default=0.05, ge=0, lt=1)
    """Schedule loop: the fraction of a block's steps in the last part."""
    alpha_on: float = Field(default=0.9, gt=0, lt=1)
    """Schedule loop: the fraction of a block's tokens that is visible between the first and the last part."""

    def without_effect(self) -> Iterator[ConfigError]:
        if self.schedule != "loop":
            for name in ("alpha_on", "t_off", "t_on"):
                yield ConfigError(
                    f"has no effect with schedule {self.schedule!r}", where=name, remedy="Use schedule 'loop'"
                )

    def check(self) -> None:
        if self.t_off >= self.t_on:
            raise ConfigError(
                f"{self.t_off} is not below t_on, {self.t_on}", where="t_off", remedy="Lower it"
            )
        if 0 < self.temperature < 1e-6:
            raise ConfigError(
                f"{self.temperature} is not valid", where="temperature", remedy="Use 0, or 1e-6 and more"
            )
