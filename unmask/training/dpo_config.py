"""The settings of preference optimisation."""
# ruff: noqa: RUF009 (the calls make fields)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.objectives.preference import LossType
from unmask.training.pairs import PairConfig
from unmask.training.settings import setting

Bound = Literal["elbo", "exact"]
ReferenceMode = Literal["stored", "frozen", "adapter"]
WIDEST_EXACT = 4
"""Tokens of an attention block whose likelihood is exact by default: 15 passes for all blocks together. Each token more doubles them."""
PAIRED, COMPARED = "loss_type=sigmoid|ipo|hinge|simpo", "loss_type=sigmoid|ipo|hinge|kto"
"""Losses of pairs, and of a policy beside a reference."""


@dataclass(kw_only=True)
class DPOConfig(PairConfig):
    """Settings of `DPOTrainer`. `per_device_train_batch_size` counts pairs; with `loss_type: kto` responses."""

    learning_rate: float = setting(5e-6, "The peak learning rate of AdamW")
    loss_type: LossType = setting("sigmoid", "sigmoid (DPO), ipo, hinge, simpo or kto (docs/preferences.md)", choices=get_args(LossType))
    beta: float = setting(0.2, "How strongly the policy is held to the reference; of simpo the scale", low=1e-6)
    label_smoothing: float = setting(
        0.0, "The share of labels taken to be wrong (cDPO)", low=0, high=0.499, needs=["loss_type=sigmoid|simpo"]
    )
    rpo_alpha: float = setting(0.0, "Weight of an SFT term: less the bound of the chosen per token (RPO)", low=0, needs=[PAIRED])
    length_normalization: bool = setting(
        False, "Whether gains are divided by the response's tokens; of simpo they always are", needs=[COMPARED]
    )
    simpo_gamma: float = setting(0.5, "The margin, times beta, that a pair is to have", low=0, needs=["loss_type=simpo"])
    desirable_weight: float = setting(1.0, "Weight of the loss of desirable responses", low=0, needs=["loss_type=kto"])
    undesirable_weight: float = setting(1.0, "Weight of the loss of undesirable responses", low=0, needs=["loss_type=kto"])

    bound: Bound | None = setting(
        None,
        "What scores a response: elbo, or exact; unset: exact for causal models and blocks of at most 4 tokens",
        choices=get_args(Bound),
    )
    samples: int = setting(8, "elbo: views of each response: that many times, with one mask each", low=1)
    complementary: bool = setting(False, "elbo: masks in pairs that hide what the other shows, beside one that hides all")
    log_variance_steps: int = setting(
        0, "Log the variance of the margin over redrawn masks every so many steps; 0: never", low=0, needs=[PAIRED]
    )

    reference: ReferenceMode = setting(
        "stored",
        "stored: scored before training and kept on disk; frozen: a second model; adapter: the base under the adapters",
        choices=get_args(ReferenceMode),
        needs=[COMPARED],
    )
    reference_model: str | None = setting(
        None, "What the policy is held to: a folder or a hub name; unset: the policy as it was given", needs=[COMPARED]
    )
    stale_reference: str = setting(
        "error",
        "What is done where the output folder holds scores of another model, tokenizer or data: error, or replace",
        choices=("error", "replace"),
        needs=["reference=stored"],
    )
    plan_reused: bool = setting(False, "elbo: whether every epoch has the same masks, so that stored scores are fewer")

    judge: str | None = setting(
        None, "Evaluation: path.py:function, given prompts, completions and the chosen ones; tells which win (docs)", needs=[PAIRED]
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.complementary and self.samples < 2:
            raise ConfigError("a pair takes two views", where="samples", remedy="Use 2 or more, or leave complementary out")
        if self.loss_type == "kto" and self.train_sampling_strategy == "group_by_length":
            remedy = "Leave it out, or use another loss_type"
            raise ConfigError("its rows are two responses, of two lengths", where="train_sampling_strategy", remedy=remedy)
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
        width = exact_width(lm)
        exact = self.bound == "exact" or (self.bound is None and width <= WIDEST_EXACT)
        if exact and width > WIDEST_EXACT:
            what = f"{lm.attention} attention{f' by {width} tokens' if lm.block_size else ''} would take 2**tokens passes"
            raise ConfigError(
                what, where="bound", remedy=f"Use elbo; exact is for causal models and blocks of at most {WIDEST_EXACT} tokens"
            )
        if self.bound == "elbo" and lm.autoregressive:
            raise ConfigError("the likelihood of a causal model is exact in one pass", where="bound", remedy="Leave it out")
        for name in ("samples", "complementary", "log_variance_steps", "plan_reused") if exact else ():
            if getattr(self, name) != getattr(DPOConfig, name):
                remedy = "Leave it out" if lm.autoregressive else "Leave it out, or use bound elbo"
                raise ConfigError("an exact likelihood hides nothing at random", where=name, remedy=remedy)
        return exact


def exact_width(lm: DiffusionLM) -> float:
    """Tokens of a block, whose exact likelihood takes 2**width - 1 passes: 1 of a causal model, no bound of a bidirectional one."""
    return 1 if lm.attention == "causal" else lm.block_size or math.inf
