"""The settings of preference optimisation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.objectives.preference import LossType
from unmask.training.pairs import PairConfig

Bound = Literal["elbo", "exact"]
ReferenceMode = Literal["stored", "frozen", "adapter"]
WIDEST_EXACT = 4
"""Tokens of an attention block whose likelihood is exact by default: 15 passes for all blocks together. Each token more doubles them."""
CHOICES = {"loss_type": get_args(LossType), "bound": get_args(Bound), "reference": get_args(ReferenceMode)}
RANGES: dict[str, tuple[float, float]] = {
    "beta": (1e-6, math.inf),
    "label_smoothing": (0, 0.499),
    "rpo_alpha": (0, math.inf),
    "simpo_gamma": (0, math.inf),
    "desirable_weight": (0, math.inf),
    "undesirable_weight": (0, math.inf),
    "samples": (1, math.inf),
    "log_variance_steps": (0, math.inf),
}
"""The least and the most of each; NaN is neither."""
OF_LOSSES = {
    "label_smoothing": ("sigmoid", "simpo"),
    "rpo_alpha": ("sigmoid", "ipo", "hinge", "simpo"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "reference": ("sigmoid", "ipo", "hinge", "kto"),
    "reference_model": ("sigmoid", "ipo", "hinge", "kto"),
    "log_variance_steps": ("sigmoid", "ipo", "hinge", "simpo"),
    "judge": ("sigmoid", "ipo", "hinge", "simpo"),
}
"""The losses that read a setting."""


@dataclass(kw_only=True)
class DPOConfig(PairConfig):
    """Settings of `DPOTrainer`. `per_device_train_batch_size` counts pairs; with `loss_type: kto` responses."""

    learning_rate: float = field(default=5e-6, metadata={"help": "The peak learning rate of AdamW."})
    loss_type: LossType = field(default="sigmoid", metadata={"help": "sigmoid (DPO), ipo, hinge, simpo or kto (docs/preferences.md)."})
    beta: float = field(default=0.2, metadata={"help": "How strongly the policy is held to the reference; of simpo the scale."})
    label_smoothing: float = field(default=0.0, metadata={"help": "sigmoid, simpo: the share of labels taken to be wrong (cDPO)."})
    rpo_alpha: float = field(default=0.0, metadata={"help": "Weight of an SFT term: less the bound of the chosen per token (RPO)."})
    length_normalization: bool = field(
        default=False, metadata={"help": "Whether gains are divided by the response's tokens; of simpo they always are."}
    )
    simpo_gamma: float = field(default=0.5, metadata={"help": "simpo: the margin, times beta, that a pair is to have."})
    desirable_weight: float = field(default=1.0, metadata={"help": "kto: weight of the loss of desirable responses."})
    undesirable_weight: float = field(default=1.0, metadata={"help": "kto: weight of the loss of undesirable responses."})

    bound: Bound | None = field(
        default=None,
        metadata={"help": "What scores a response: elbo, or exact; unset: exact for causal models and blocks of at most 4 tokens."},
    )
    samples: int = field(default=8, metadata={"help": "elbo: views of each response: that many times, with one mask each."})
    complementary: bool = field(
        default=False, metadata={"help": "elbo: masks in pairs that hide what the other shows, beside one that hides all."}
    )
    log_variance_steps: int = field(
        default=0, metadata={"help": "Log the variance of the margin over redrawn masks every so many steps; 0: never."}
    )

    reference: ReferenceMode = field(
        default="stored",
        metadata={"help": "stored: scored before training and kept on disk; frozen: a second model; adapter: the base under the adapters."},
    )
    reference_model: str | None = field(
        default=None, metadata={"help": "What the policy is held to: a folder or a hub name; unset: the policy as it was given."}
    )
    plan_reused: bool = field(default=False, metadata={"help": "Whether every epoch has the same masks, so that stored scores are fewer."})

    judge: str | None = field(
        default=None,
        metadata={"help": "Evaluation: path.py:function, given prompts, completions and the chosen ones; tells which win (docs)."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) is not None and value not in known:
                raise ConfigError(f"unknown {name} {value!r}", where=name, remedy=f"Use one of {', '.join(known)}")
        for name, (low, high) in RANGES.items():
            if not low <= (number := getattr(self, name)) <= high:
                raise ConfigError(f"{number} is refused", where=name, remedy=f"Use {low:g} to {high:g}")
        for name, losses in OF_LOSSES.items():
            if self.loss_type not in losses and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(f"{self.loss_type} does not read it", where=name, remedy=f"Leave it out, or use {', '.join(losses)}")
        if self.complementary and self.samples < 2:
            raise ConfigError("a pair takes two views", where="samples", remedy="Use 2 or more, or leave complementary out")
        if self.reference == "adapter" and self.reference_model is not None:
            remedy = "Leave it out, or use reference stored or frozen"
            raise ConfigError("the reference is the base under the adapters", where="reference_model", remedy=remedy)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with another model."""
        return self.loss_type != "simpo"

    def exact(self, lm: DiffusionLM) -> bool:
        """Whether a model's responses are scored exactly.

        Raises:
            ConfigError: that would take too many passes, or a setting of the ELBO has no effect.
        """
        width = 1 if lm.attention == "causal" else lm.block_size or math.inf
        exact = self.bound == "exact" or (self.bound is None and width <= WIDEST_EXACT)
        if exact and width > WIDEST_EXACT:
            what = f"{lm.attention} attention{f' by {width} tokens' if lm.block_size else ''} would take 2**tokens passes"
            raise ConfigError(
                what, where="bound", remedy=f"Use elbo; exact is for causal models and blocks of at most {WIDEST_EXACT} tokens"
            )
        if self.bound == "elbo" and lm.autoregressive:
            raise ConfigError("the likelihood of a causal model is exact in one pass", where="bound", remedy="Leave it out")
        for name in ("complementary", "log_variance_steps") if exact else ():
            if getattr(self, name):
                raise ConfigError("an exact likelihood hides nothing at random", where=name, remedy="Leave it out, or use bound elbo")
        return exact
