"""The settings of preference optimization."""
# ruff: noqa: RUF009 (the calls make fields)

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sized
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, get_args

from unmask.config.base import OnResume
from unmask.config.run import NoiseName, RunConfig
from unmask.diffusion.log_probs import passes
from unmask.errors import ConfigError
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import Workload
from unmask.preference.losses import FDivergence, PreferenceLoss
from unmask.training.config import rows_per_step, steps_per_epoch
from unmask.training.config_fields import described, naming_setting_too, setting
from unmask.training.pair_config import PairConfig
from unmask.training.sharding import weight_sharding_setting

BoundKind = Literal["elbo", "exact"]
ReferenceMode = Literal["stored", "frozen", "adapter"]
MAX_EXACT_BLOCK = 4
"""Largest attention block, in tokens, whose likelihood is exact by default. It takes 15 passes; each further
token doubles them."""
TOKENS_TOGETHER = 1024
"""Views whose rows have at most this many tokens together share a forward pass. Smaller passes do not fill a
GPU."""
MASK_FIELDS = ("samples", "complementary", "log_variance_steps", "plan_reused")
"""Settings without effect on an exact likelihood."""
ALONE, WITHOUT_REFERENCE = ("simpo", "kto"), ("simpo", "sft")
"""Losses that are not combined with others, and losses that compare the policy with no reference."""
PAIRED, COMPARED, COMBINED = (
    f"loss_type={'|'.join(name for name in get_args(PreferenceLoss) if name not in others)}"
    for others in (("kto",), WITHOUT_REFERENCE, ALONE)
)


@described
@dataclass
class DPOConfig(PairConfig):
    """Settings of `DPOTrainer`. `per_device_train_batch_size` counts pairs; with `loss_type: kto`
    responses."""

    learning_rate: float = setting(1e-6, "The peak learning rate of AdamW")
    loss_type: PreferenceLoss | str | list[PreferenceLoss] = setting(
        "sigmoid",
        "sigmoid (DPO), ipo, hinge, bco_pair, sft, simpo or kto, or a list of them (docs/preferences.md)",
        choices=get_args(PreferenceLoss),
    )
    loss_weights: list[float] | None = setting(
        None, "The weight of each loss of the list; unset: all 1", needs=[COMBINED]
    )
    beta: float = setting(
        0.1, "Strength of the pull towards the reference; for simpo the scale of the margin", low=1e-6
    )
    f_divergence_type: FDivergence = setting(
        "reverse_kl",
        "The divergence from the reference: reverse_kl, forward_kl, js_divergence or alpha_divergence",
        choices=get_args(FDivergence),
        needs=["loss_type=sigmoid|ipo|hinge"],
    )
    f_alpha_divergence_coef: float = setting(
        0.5, "The alpha of the divergence", needs=["f_divergence_type=alpha_divergence"]
    )
    label_smoothing: float = setting(
        0.0, "Assumed fraction of wrong labels (cDPO)", low=0, high=0.499, needs=["loss_type=sigmoid|simpo"]
    )
    length_normalization: bool | None = setting(
        None,
        "Whether log-ratios are per token (for simpo they always are); unset: for ipo, as in TRL",
        needs=[COMPARED],
    )
    simpo_gamma: float = setting(0.5, "The target margin, times beta", low=0, needs=["loss_type=simpo"])
    desirable_weight: float = setting(
        1.0, "Weight of the loss of desirable responses", low=0, needs=["loss_type=kto"]
    )
    undesirable_weight: float = setting(
        1.0, "Weight of the loss of undesirable responses", low=0, needs=["loss_type=kto"]
    )

    bound: BoundKind | None = setting(
        None,
        (
            "Log-likelihood of a response: elbo (a lower bound) or exact; unset: exact for causal models "
            "and blocks of at most 4 tokens"
        ),
        choices=get_args(BoundKind),
    )
    samples: int = setting(8, "elbo: views of each response, each with one mask", low=1)
    complementary: bool = setting(False, "elbo: complementary pairs of masks, and one that hides all")
    log_variance_steps: int = setting(
        0,
        "Steps between logs of the margin's variance over redrawn masks; 0: never",
        low=0,
        needs=[PAIRED],
        on_resume=OnResume.ACTS,
    )

    reference: ReferenceMode = setting(
        "stored",
        (
            "stored: computed before training and kept on disk; frozen: a second model; adapter: the base "
            "under the adapters"
        ),
        choices=get_args(ReferenceMode),
        needs=[COMPARED],
    )
    ref_model: str | None = setting(
        None, "The reference (folder or hub name); unset: the policy before training", needs=[COMPARED]
    )
    sync_ref_model: bool = setting(
        False, "Whether the reference moves towards the policy", needs=["reference=frozen"]
    )
    ref_model_sync_steps: int = setting(512, "Steps between these moves", low=1, needs=["sync_ref_model"])
    ref_model_mixup_alpha: float = setting(
        0.6, "Fraction of the way that each move covers", low=0, high=1, needs=["sync_ref_model"]
    )
    stale_reference: str = setting(
        "error",
        (
            "If the output folder holds log-probabilities of another model, tokenizer, data or settings: "
            "error, or replace"
        ),
        choices=("error", "replace"),
        needs=[COMPARED, "reference=stored"],
        on_resume=OnResume.NEUTRAL,
    )
    plan_reused: bool = setting(False, "elbo: whether every epoch has the same masks, so that less is stored")

    judge: str | None = setting(
        None,
        (
            "Evaluation: path.py:function of (prompts, completions, chosen) that returns which completions "
            "win (docs)"
        ),
        needs=[PAIRED],
        on_resume=OnResume.ACTS,
    )

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, list) and len(self.loss_type) == 1 and self.loss_weights is None:
            [self.loss_type] = self.loss_type
        super().__post_init__()
        losses = self.losses
        if not losses:
            raise ConfigError("names no loss", where="loss_type", remedy="Leave it out, or name one")
        if self.f_divergence_type != "reverse_kl" and "bco_pair" in losses:
            raise ConfigError(
                "bco_pair has only the reverse KL divergence",
                where="f_divergence_type and loss_type",
                remedy="Leave one of them out",
            )
        if len(losses) > 1 and (alone := {*losses} & {*ALONE}):
            raise ConfigError(
                f"{min(alone)} is not combined with other losses", where="loss_type", remedy="Give it alone"
            )
        if len(self.loss_weights or losses) != len(losses):
            raise ConfigError(
                f"{len(self.loss_weights or ())} weights for {len(losses)} losses",
                where="loss_weights",
                remedy="Give one for each loss of loss_type",
            )
        if self.sync_ref_model and self.ref_model is not None:
            raise ConfigError(
                "a reference loaded from ref_model is never updated",
                where="sync_ref_model",
                remedy="Leave it out, or ref_model",
            )
        if self.complementary and self.samples < 2:
            raise ConfigError(
                "a complementary pair is two views",
                where="samples",
                remedy="Use 2 or more, or leave out complementary",
            )
        if self.loss_type == "kto" and self.train_sampling_strategy == "group_by_length":
            raise ConfigError(
                "a row of kto has two responses, of two lengths",
                where="train_sampling_strategy",
                remedy="Leave it out, or use another loss_type",
            )
        if self.reference == "adapter" and self.ref_model is not None:
            raise ConfigError(
                "the reference is the base under the adapters",
                where="ref_model",
                remedy="Leave it out, or use reference stored or frozen",
            )

    @classmethod
    def kinds_on_resume(cls) -> dict[str, OnResume]:
        """The stored log-probabilities of the reference are of one precision."""
        return super().kinds_on_resume() | dict.fromkeys(("bf16", "fp16"), OnResume.OTHER)

    def overwriting(self, given: Collection[str]) -> None:
        if self.reference == "stored" and "stale_reference" not in given:
            self.stale_reference = "replace"  # the file of the overwritten run

    def shortened(self, steps: int) -> dict[str, Any]:
        variance = {"log_variance_steps": 0} if self.log_variance_steps else {}
        return super().shortened(steps) | {"judge": None} | variance

    def shortened_arguments(self, steps: int) -> dict[str, Any]:
        return {"first_rows": steps * rows_per_step(self)}

    def check_run(self, run: RunConfig, *, has_adapters: bool) -> None:
        super().check_run(run, has_adapters=has_adapters)
        self.check_reference(has_adapters=has_adapters)

    def check_reference(self, *, has_adapters: bool, sharded: bool = False) -> None:
        """Raise ConfigError for a reference under adapters, of a policy without them, and for one that moves
        towards `sharded` weights."""
        shards = weight_sharding_setting(self)
        if self.reference == "adapter" and not has_adapters:
            stored = "se reference stored or frozen"
            remedy = f"U{stored}" if shards else f"Set lora (in Python: peft_config), or u{stored}"
            raise ConfigError("the policy has no adapters", where="reference and lora", remedy=remedy)
        if self.sync_ref_model and (sharded or shards):
            raise ConfigError(
                "a reference cannot follow sharded weights",
                where=" and ".join(filter(None, ("sync_ref_model", shards))),
                remedy="Leave it out, or train without FSDP and ZeRO 3",
            )

    def check_trained_noise(self, noise: NoiseName) -> None:
        if noise != "masked" and self.bound == "exact":
            what = f"no exact likelihood is known with {noise} noise"
            raise ConfigError(what, where="bound", remedy="Use elbo")
        if noise != "masked" and self.complementary and self.samples % 2:
            what = f"{self.samples} views are no pairs"
            raise ConfigError(what, where="samples", remedy="Use an even number, or leave complementary out")

    def check_model(self, read_attention: Callable[[], Mapping[str, Any]], run: RunConfig) -> None:
        model = read_attention()
        autoregressive = model["attention"] == "causal" and model["logit_shift"] is not False
        with naming_setting_too("model.path"):
            self.exact(SimpleNamespace(**model, autoregressive=autoregressive))

    def workload(self, blueprint: ModelSpec, run: RunConfig) -> Workload | None:
        """The largest forward pass of a step, and the number of passes. A chosen and a rejected response
        share a row. With more than one pass, every pass is computed twice: once for the loss, once with
        gradients. A reference that is not stored adds one pass each. KTO also passes the mismatched responses
        through the policy and such a reference."""
        work = super().workload(blueprint, run)
        assert work is not None
        model: Any = work  # `passes` reads only `attention`, which a workload has too
        views = 1 if work.attention == "causal" else self.samples
        if work.attention == "block_causal":
            block = blueprint.settings_for("block_causal")["block_size"]
            views = 2**block - 1 if self._wants_exact(block) else views
        paired, compared = self.loss_type != "kto", self.needs_reference and self.reference != "stored"
        length = work.sequence_length * (2 if paired else 1)
        chunk = self.logprob_batch_size or max(work.batch, TOKENS_TOGETHER // length)
        all_passes = list(passes(model, work.batch, views, chunk))
        rows, copies = all_passes[0]
        count = len(all_passes)
        forward_only_passes = (count if count > 1 else 0) + (count if compared else 0)
        if not paired:
            forward_only_passes += 2 * count if compared else count
        return replace(
            work,
            batch=min(work.batch, rows.stop),
            copies=copies.stop,
            sequence_length=length,
            documents=2 if paired else 1,
            reference=compared and self.reference == "frozen",
            stored_reference=self.needs_reference and self.reference == "stored",
            plans=1 if paired else 2,
            passes=count,
            forward_only_passes=forward_only_passes,
        )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with another model."""
        return not {*self.losses} <= {*WITHOUT_REFERENCE}

    @property
    def losses(self) -> list[PreferenceLoss]:
        """The losses that are added up."""
        every: Any = self.loss_type  # which are `choices`
        return every if isinstance(every, list) else [every]

    def per_token(self, loss: PreferenceLoss) -> bool:
        """Whether a loss reads log-ratios per token."""
        return loss == "simpo" or (
            loss == "ipo" if self.length_normalization is None else self.length_normalization
        )

    def num_plans(self, rows: Sized, *, exact: bool) -> int:
        """View plans of a run: one per epoch, or a single one if it is reused or the likelihood is exact."""
        epochs = self.max_steps / steps_per_epoch(self, rows) if self.max_steps > 0 else self.num_train_epochs
        return 1 if self.plan_reused or exact else math.ceil(epochs)

    def exact(self, lm: Any) -> bool:
        """Whether the likelihood of a model's responses is computed exactly. `lm`: has its `attention`,
        `block_size` and `autoregressive`.

        Raises:
            ConfigError: it would need too many passes, or a setting of the ELBO would have no effect.
        """
        width = exact_block_size(lm)
        exact = self._wants_exact(width)
        if getattr(lm, "noise", "masked") != "masked":
            return False
        if exact and width > MAX_EXACT_BLOCK:
            what = (
                f"{lm.attention} attention{f' with blocks of {width} tokens' if lm.block_size else ''} "
                "would need 2**tokens passes"
            )
            remedy = f"Use elbo; exact is for causal models and blocks of at most {MAX_EXACT_BLOCK} tokens"
            raise ConfigError(what, where="bound", remedy=remedy)
        if self.bound == "elbo" and lm.autoregressive:
            raise ConfigError(
                "the likelihood of a causal model is exact in one pass", where="bound", remedy="Leave it out"
            )
        chosen = [name for name in MASK_FIELDS if name in self.given]
        # a record of a run names all with their defaults, as it knows no model
        if {*MASK_FIELDS} <= self.given | self.unread():
            chosen = [name for name in chosen if getattr(self, name) != getattr(DPOConfig, name)]
        if exact and chosen:
            raise ConfigError(
                "an exact likelihood draws no masks",
                where=chosen[0],
                remedy="Leave it out" if lm.autoregressive else "Leave it out, or use bound elbo",
            )
        return exact

    def _wants_exact(self, block: float) -> bool:
        """Whether the likelihood with attention blocks of this size is exact: if `bound` says so, or by
        default if they are small."""
        return self.bound == "exact" or (self.bound is None and block <= MAX_EXACT_BLOCK)


def exact_block_size(lm: Any) -> float:
    """The block size in tokens; the exact likelihood takes 2**size - 1 passes. 1 for a causal model, infinite
    for a bidirectional one."""
    return 1 if lm.attention == "causal" else lm.block_size or math.inf
