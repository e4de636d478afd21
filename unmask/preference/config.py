"""The settings of preference optimisation."""
# ruff: noqa: RUF009 (the calls make fields)

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, Protocol, get_args

from unmask.config.run import RunConfig
from unmask.diffusion.log_probs import passes
from unmask.errors import ConfigError
from unmask.planning.blueprint import Blueprint
from unmask.planning.cost_model import Workload
from unmask.preference.losses import LossType
from unmask.training.config import Conflict, rows_per_step
from unmask.training.config_fields import beside, setting
from unmask.training.pair_config import PairConfig

Bound = Literal["elbo", "exact"]
ReferenceMode = Literal["stored", "frozen", "adapter"]
WIDEST_EXACT = 4
"""Tokens of an attention block whose likelihood is exact by default: 15 passes for all blocks together. Each token more doubles them."""
PAIRED, COMPARED = "loss_type=sigmoid|ipo|hinge|simpo", "loss_type=sigmoid|ipo|hinge|kto"
"""Losses of pairs, and of a policy beside a reference."""


class Scored(Protocol):
    """What the likelihood of a response hangs on: a model, or how one will be read."""

    attention: Any
    block_size: int | None

    @property
    def autoregressive(self) -> bool: ...


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

    def overwriting(self, given: Collection[str]) -> None:
        if "stale_reference" not in given:
            self.stale_reference = "replace"  # scores of the run that is overwritten

    def shortened(self, steps: int) -> dict[str, Any]:
        return super().shortened(steps) | {"judge": None, "log_variance_steps": 0}

    def rehearsal(self, steps: int) -> dict[str, Any]:
        return {"rehearsed": steps * rows_per_step(self)}

    def conflicts(self, run: RunConfig) -> Iterator[Conflict]:
        yield from super().conflicts(run)
        what, remedy = "the policy has no adapters", "Set lora, or use reference stored or frozen"
        yield Conflict("reference and lora", self.reference == "adapter" and run.lora is None, what, remedy)

    def check_model(self, pattern: Callable[[], Mapping[str, Any]], run: RunConfig) -> None:
        read = pattern()
        autoregressive = read["attention"] == "causal" and read["logit_shift"] is not False
        with beside("model.path"):
            self.exact(SimpleNamespace(attention=read["attention"], block_size=read["block_size"], autoregressive=autoregressive))

    def workload(self, blueprint: Blueprint, run: RunConfig) -> Workload | None:
        """The largest pass of a step, and how many there are: chosen and rejected response stand in one row, and each view is gone through
        by itself, once for the loss and once for its gradient. Where the reference is not stored, it scores every view too; KTO's baseline
        scores as many other responses."""
        work = super().workload(blueprint, run)
        assert work is not None
        block = (work.attention == "block_causal" and blueprint.pattern(work.attention)["block_size"]) or None
        exact = self.bound == "exact" or (self.bound is None and (work.attention == "causal" or (block or math.inf) <= WIDEST_EXACT))
        views = 1 if work.attention == "causal" else 2**block - 1 if exact and block else self.samples
        pattern: Any = work  # of a model the passes read nothing else
        made = list(passes(pattern, work.batch, views, self.score_chunk or work.batch))
        rows, copies = made[0]
        paired, compared = self.loss_type != "kto", self.needs_reference and self.reference != "stored"
        scorings = (len(made) if len(made) > 1 else 0) + compared * len(made)
        return replace(
            work,
            batch=min(work.batch, rows.stop),
            copies=copies.stop,
            sequence_length=work.sequence_length * (2 if paired else 1),
            documents=2 if paired else 1,
            reference=compared and self.reference == "frozen",
            passes=len(made),
            scorings=scorings if paired else scorings + (1 + compared) * len(made),
        )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with another model."""
        return self.loss_type != "simpo"

    def exact(self, lm: Scored) -> bool:
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


def exact_width(lm: Scored) -> float:
    """Tokens of a block, whose exact likelihood takes 2**width - 1 passes: 1 of a causal model, no bound of a bidirectional one."""
    return 1 if lm.attention == "causal" else lm.block_size or math.inf
