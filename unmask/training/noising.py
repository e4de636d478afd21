"""How training hides tokens: the settings that conversion and SFT share, and the view plan that they
describe."""
# ruff: noqa: RUF009 (`setting` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import get_args

from torch import Tensor

from unmask.config.run import NoiseName, RunConfig
from unmask.diffusion.mixing import P_UNIFORM, Mixing, RandomTokens
from unmask.diffusion.schedules import SCHEDULES, Noise, Weighting, get_schedule
from unmask.diffusion.views import (
    MaskRNG,
    Views,
    cart_weights,
    complementary_pair,
    exact_count_pair,
    exact_count_views,
    mixed_views,
    random_views,
)
from unmask.errors import ConfigError
from unmask.models.attention import Layout, segments
from unmask.models.diffusion_lm import DiffusionLM, check_noise
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import Workload
from unmask.training.config import TrainingConfig
from unmask.training.config_fields import setting

TIME_FIELDS = ("schedule", "weighting", "min_time", "max_time", "num_timesteps")
"""Settings of times, which exact counts have not."""
NOISING_FIELDS = {"noise", "p_uniform", *TIME_FIELDS, "exact_count", "cart_p"}
"""Settings of noise, which causal models have not."""


@dataclass
class NoisingConfig(TrainingConfig):
    """A config of a trainer that hides tokens at random."""

    noise: NoiseName | None = setting(
        None,
        "What stands for hidden tokens: masked (the mask token), uniform (random tokens) or hybrid (both); "
        "unset: the model's kind",
        choices=get_args(NoiseName),
    )
    p_uniform: float | None = setting(
        None, "The greatest probability of a random token, as in GIDD; unset: 0.1", needs=("noise=hybrid",)
    )
    schedule: str = setting(
        "linear", "The noise schedule: linear, cosine, geometric or mdlm-cosine", choices=(*SCHEDULES,)
    )
    weighting: Weighting = field(
        default="elbo",
        metadata={
            "help": (
                "The weight of a hidden token: elbo (-alpha'/(1-alpha)), 1/t, uniform, or cart (by the "
                "visible text near it)."
            )
        },
    )
    min_time: float = field(default=1e-3, metadata={"help": "The lowest time t; bounds the weight 1/t."})
    max_time: float = field(default=1.0, metadata={"help": "The highest time t."})
    num_timesteps: int | None = field(
        default=None, metadata={"help": "Discrete times, multiples of 1/num_timesteps; unset: any."}
    )
    exact_count: bool = field(
        default=False,
        metadata={
            "help": (
                "Hide exactly k of the L tokens of a group, k uniform, instead of each with a probability; "
                "weights are at most L."
            )
        },
    )
    cart_p: float = setting(
        0.1, "How fast the influence of a token falls with its distance", needs=("weighting=cart",)
    )

    def __post_init__(self) -> None:
        if not 0 < self.cart_p < 1:
            raise ConfigError(f"{self.cart_p} is not between 0 and 1", where="cart_p", remedy="Use 0.1")
        super().__post_init__()
        if not self.min_time > 0:
            raise ConfigError(
                f"{self.min_time} is not above 0", where="min_time", remedy="Use a small time, such as 1e-3"
            )
        if self.noise == "hybrid" and self.p_uniform is None:
            self.p_uniform = P_UNIFORM
        if self.noise is not None:
            check_noise(self.noise, self.p_uniform, "bidirectional")
            self.check_trained_noise(self.noise)
        _ = self.noising  # raises ConfigError for invalid settings
        if self.exact_count and not self.given.isdisjoint(TIME_FIELDS):
            what = "exact counts have no schedule, band of times or weighting"
            raise ConfigError(
                what, where="exact_count", remedy="Leave out the other noise settings, or exact_count"
            )

    def unread(self) -> set[str]:
        return super().unread() | ({*TIME_FIELDS} if self.exact_count else set())

    @property
    def needing_masks(self) -> str | None:
        """A given setting that works with masks only; None: there is none."""
        return None

    def check_trained_noise(self, noise: NoiseName) -> None:
        """Raise ConfigError for settings that this kind of noise does not have."""
        if noise == "masked":
            return
        if name := self.needing_masks:
            what = f"needs masks, and the noise is {noise}"
            raise ConfigError(what, where=name, remedy="Leave it out, or use noise: masked")
        if self.weighting not in ("elbo", "uniform"):
            what = f"{self.weighting} weights hidden tokens, and {noise} noise does not show which they are"
            raise ConfigError(what, where="weighting", remedy="Use elbo, or uniform")
        if self.num_timesteps is not None:
            what = f"{noise} noise has no discrete times here"
            raise ConfigError(what, where="num_timesteps", remedy="Leave it out")

    def workload(self, blueprint: ModelSpec, run: RunConfig) -> Workload | None:
        work = super().workload(blueprint, run)
        return work and replace(work, noise=self.noise or work.noise)

    @property
    def noising(self) -> Noise:
        """The schedule, times and weights that the settings describe."""
        return Noise(
            get_schedule(self.schedule), self.min_time, self.max_time, self.num_timesteps, self.weighting
        )


def noised_views(
    args: NoisingConfig,
    lm: DiffusionLM,
    ids_BT: Tensor,
    group_BT: Tensor,
    document_BT: Tensor,
    draw: MaskRNG,
    *,
    views: int = 1,
    complementary: bool = False,
) -> Views:
    """`views` random views of each row, or a complementary pair, with the noise of a config and a model."""
    if lm.noise != "masked":
        return mixed_views(
            *(ids_BT, group_BT, draw, args.noising, Mixing.of(lm), RandomTokens.of(lm)),
            num_views=2 if complementary else views,
            complementary=complementary,
            exact_count=args.exact_count,
        )
    if args.exact_count:
        if complementary:
            return exact_count_pair(group_BT, draw)
        return exact_count_views(group_BT, draw, num_views=views)
    if complementary:
        plan = complementary_pair(group_BT, draw, args.noising)
    else:
        plan = random_views(group_BT, draw, args.noising, num_views=views)
    if args.weighting != "cart":
        return plan
    segment_BT = segments(Layout.of(document_BT), lm.attention, lm.block_size)
    return cart_weights(plan, segment_BT, document_BT, p=args.cart_p)
