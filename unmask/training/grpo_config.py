"""The settings of reinforcement learning: those of a method are its own unless they are given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from unmask.config import RolloutConfig, SamplerConfig, build_training_args
from unmask.config_files import did_you_mean, read_recipe, recipe_names
from unmask.errors import ConfigError
from unmask.methods import Method, get_method
from unmask.methods.base import token_loss
from unmask.methods.masking import find_masking
from unmask.objectives.policy import AdvantageKind, Aggregation, Divergence
from unmask.training.stage_config import StageConfig

DEFAULTS: dict[str, Any] = {
    "epsilon": 0.5,
    "epsilon_high": None,
    "dual_clip": None,
    "log_ratio_clamp": None,
    "ratio": "token",
    "aggregation": "token",
    "advantage": "r-mean",
    "beta": 0.0,
    "kl": "k3",
    "kl_to": "reference",
    "samples": 1,
    "stop_at_eos": True,
    "difficulty": None,
    "drop_equal_groups": False,
}
"""What a method does not say otherwise."""
CHOICES: dict[str, tuple[str, ...]] = {
    "advantage": get_args(AdvantageKind),
    "aggregation": get_args(Aggregation),
    "kl": get_args(Divergence),
    "kl_to": ("reference", "old"),
    "ratio": ("token", "sequence"),
    "reward_errors": ("unscored", "raise"),
}
RANGES: dict[str, tuple[float, float]] = {
    "beta": (0, math.inf),
    "curriculum": (-math.inf, math.inf),
    "difficulty": (-math.inf, math.inf),
    "dual_clip": (1, math.inf),
    "epsilon": (0, 1),
    "epsilon_high": (0, math.inf),
    "eubo_beta": (1e-3, math.inf),
    "eubo_share": (0, 1),
    "importance_cap": (1e-3, math.inf),
    "log_completions_steps": (0, math.inf),
    "log_ratio_clamp": (1e-3, math.inf),
    "performance_log_interval": (0, math.inf),
    "prompt_mask_rate": (0, 1),
    "reference_sync_share": (0, 1),
    "softmax_temperature": (1e-6, math.inf),
}
"""The least and the most of each; NaN is neither."""
UNSET = "; unset: the method's"


@dataclass(kw_only=True)
class GRPOConfig(StageConfig):
    """Settings of `GRPOTrainer`. `per_device_train_batch_size` counts completions, as in TRL."""

    learning_rate: float = field(default=3e-6, metadata={"help": "The peak learning rate of AdamW."})
    lr_scheduler_type: str = field(default="constant_with_warmup", metadata={"help": "How the learning rate goes."})
    method: str = field(
        default="diffu-grpo",
        metadata={"help": "The method: diffu-grpo, wd1, coupled-grpo, spg, espo, cj-grpo, trace-rl, ... (docs/rl.md)."},
    )
    num_generations: int = field(default=8, metadata={"help": "Completions per prompt: the group."})
    num_iterations: int = field(default=1, metadata={"help": "Updates per rollout batch (mu), each with masks of its own."})

    epsilon: float | None = field(default=None, metadata={"help": f"Clip range of the ratio below 1{UNSET}, or 0.5."})
    epsilon_high: float | None = field(default=None, metadata={"help": f"Clip range above 1{UNSET}, or epsilon."})
    dual_clip: float | None = field(default=None, metadata={"help": f"Bound of the ratio where the advantage is negative{UNSET}, or none."})
    log_ratio_clamp: float | None = field(default=None, metadata={"help": f"Bound of the logarithm of the ratio{UNSET}, or none."})
    ratio: str | None = field(default=None, metadata={"help": f"What a ratio is of: token, or sequence (GSPO){UNSET}, or token."})
    aggregation: Aggregation | None = field(
        default=None,
        metadata={"help": f"How tokens count: token (DAPO), sequence (GRPO), step, constant (Dr. GRPO) or sum{UNSET}, or token."},
    )
    advantage: AdvantageKind | None = field(
        default=None, metadata={"help": f"r-mean, z-score, leave-one-out or softmax{UNSET}, or r-mean."}
    )
    softmax_temperature: float = field(default=1.0, metadata={"help": "advantage softmax: divides the rewards."})
    beta: float | None = field(default=None, metadata={"help": f"Weight of the KL divergence; 0: no reference is kept{UNSET}, or 0."})
    kl: Divergence | None = field(default=None, metadata={"help": f"Estimate of the divergence: k1, k2 or k3{UNSET}, or k3."})
    kl_to: str | None = field(
        default=None, metadata={"help": f"What the policy is held to: the reference, or the old policy{UNSET}, or the reference."}
    )
    reference_model: str | None = field(
        default=None, metadata={"help": "What the policy is held to: a folder or a hub name; unset: the policy as it was given."}
    )
    reference_sync_steps: int | None = field(
        default=None, metadata={"help": "Move the reference towards the policy every so many steps; unset: never."}
    )
    reference_sync_share: float = field(default=0.6, metadata={"help": "How far the reference is moved: 1 is all the way."})

    masking: str | None = field(
        default=None, metadata={"help": f"What is hidden: diffusion, adaptive or block (in `samples` views), coupled, optimized{UNSET}."}
    )
    mask_rate: list[float] | None = field(
        default=None, metadata={"help": "masking adaptive: the mask rate at the first step and towards the last; unset: 0.3 and 0.9."}
    )
    adaptive_loss: bool = field(default=False, metadata={"help": "masking adaptive: whether hidden tokens weigh 1 / the mask rate."})
    samples: int | None = field(default=None, metadata={"help": f"spg, espo, gdpo, bgpo, agrpo: views (of espo: pairs of views){UNSET}."})
    prompt_mask_rate: float = field(default=0.15, metadata={"help": "diffu-grpo, wd1: share of the prompt's tokens that are hidden."})
    segments: int = field(default=4, metadata={"help": "step-merge: views into which the steps are merged."})
    shrink: int = field(default=1, metadata={"help": "trace-rl: steps in a view."})
    eubo_beta: float = field(default=1.5, metadata={"help": "spg: exponent of the upper bound."})
    eubo_share: float = field(default=0.5, metadata={"help": "spg: share of the upper bound in the mixture with the lower one."})

    difficulty: list[float] | None = field(
        default=None, metadata={"help": f"Only groups whose mean reward lies between these two teach{UNSET}, or all."}
    )
    drop_equal_groups: bool | None = field(
        default=None, metadata={"help": f"Whether groups of equal rewards count for nothing, also in averages{UNSET}, or not."}
    )
    dynamic_sampling: int = field(
        default=0, metadata={"help": "How often groups that teach nothing are replaced by those of other prompts (DAPO)."}
    )
    curriculum: float | None = field(
        default=None, metadata={"help": "Prefer prompts whose mean reward so far is near this; unset: all prompts in turn."}
    )
    mask_truncated: bool = field(default=False, metadata={"help": "Whether completions that do not end teach nothing."})
    overlong_buffer: int | None = field(
        default=None, metadata={"help": "Tokens before the end of the canvas within which a reward falls by up to 1 (DAPO); unset: none."}
    )

    temperature: float = field(default=1.0, metadata={"help": "Of sampling, and of the log-probabilities that are trained."})
    max_completion_length: int = field(default=128, metadata={"help": "Tokens of the canvas behind the prompt."})
    steps: int | None = field(default=None, metadata={"help": "Denoising steps of a rollout; unset: one token per step."})
    block_size: int | None = field(default=None, metadata={"help": "Decoding block of a rollout; unset: the whole completion."})
    policy: str = field(default="confidence", metadata={"help": "Unmasking policy of a rollout."})
    stop_at_eos: bool | None = field(
        default=None, metadata={"help": f"Whether decoding ends with the first end of sequence{UNSET}, or so. The completion always does."}
    )
    rollout_batch_size: int = field(default=256, metadata={"help": "Sequences per forward pass of a rollout."})

    reward_weights: list[float] | None = field(default=None, metadata={"help": "One weight per reward function; unset: all 1."})
    reward_workers: int = field(
        default=0, metadata={"help": "Processes for each reward function given by its path; 0: it runs in the training process."}
    )
    rollout: dict[str, Any] | None = field(
        default=None, metadata={"help": "Where completions come from: backend (local, server, vllm), url, sync, ... (docs/rl.md)."}
    )
    importance_cap: float | None = field(
        default=2.0, metadata={"help": "vllm: bound of the weight that corrects for the server's own numbers; unset: no correction."}
    )
    log_completions_steps: int = field(default=0, metadata={"help": "Show and keep sample completions every so many steps; 0: never."})
    log_completions_rows: int = field(default=8, metadata={"help": "Completions in such a sample."})
    performance_log_interval: int = field(default=0, metadata={"help": "Log time and tokens by phase every so many steps; 0: never."})

    reward_timeout: float = field(default=600.0, metadata={"help": "Seconds that each reward function may take for a batch."})
    reward_errors: Literal["unscored", "raise"] = field(
        default="unscored", metadata={"help": "What a reward function that fails does: leave the completion unscored, or stop the run."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        method = get_method(self.method)
        for name, value in (DEFAULTS | dict(method.defaults)).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self._check(method)
        find_masking(self)  # raises for a strategy that is not for the method
        try:
            self.rollouts = RolloutConfig(**(self.rollout or {}))
        except ConfigError as error:
            where = f"rollout.{error.where}" if error.where else "rollout"
            raise ConfigError(error.what, where=where, remedy=error.remedy) from error
        if self.corrected and "importance_cap" not in method.uses:
            what = f"the loss of {self.method} does not weigh tokens by how likely the server drew them"
            raise ConfigError(what, where="importance_cap", remedy="Set it to null, or use another method")
        self.sampler(temperature=self.temperature, seed=self.seed)  # raises for settings that cannot be sampled with

    def _check(self, method: Method) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name, None)) is not None and value not in known:
                raise ConfigError(f"unknown {name} {value!r}", where=name, remedy=f"Use one of {', '.join(known)}")
        least = {
            "num_generations": 2,
            "num_iterations": 1,
            "samples": 1,
            "segments": 1,
            "shrink": 1,
            "reference_sync_steps": 1,
            "dynamic_sampling": 0,
        }
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            for number in value if isinstance(value, list) else [value]:
                if number is not None and not low <= number <= high:
                    raise ConfigError(f"{number} is refused", where=name, remedy=f"Use {low:g} to {high:g}")
        for name, bound in least.items():
            if (value := getattr(self, name)) is not None and value < bound:
                raise ConfigError(f"{value} {name.replace('_', ' ')}", where=name, remedy=f"Give at least {bound}")
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature}", where="temperature", remedy="Explore with a temperature above 0")
        if method.on_policy and self.num_iterations > 1:
            what = f"{self.method} learns from a rollout once, and has no ratio for a second time"
            raise ConfigError(what, where="num_iterations", remedy="Use 1, or another method")
        if self.dynamic_sampling and self.difficulty is None and not self.drop_equal_groups:
            remedy = "Set drop_equal_groups, or difficulty"
            raise ConfigError("every group teaches, so that none is replaced", where="dynamic_sampling", remedy=remedy)
        if self.ratio == "sequence" and method.loss is not token_loss:
            raise ConfigError(f"the loss of {self.method} has no ratios of tokens", where="ratio", remedy="Leave it out")
        if self.beta and "beta" not in method.uses:
            raise ConfigError(f"the loss of {self.method} has no divergence", where="beta", remedy="Set it to 0, or use another method")
        if self.difficulty is not None and (len(self.difficulty) != 2 or self.difficulty[0] > self.difficulty[1]):
            raise ConfigError(f"{self.difficulty} is no range", where="difficulty", remedy="Give two rewards, the lower one first")
        if self.overlong_buffer is not None and not 0 < self.overlong_buffer <= self.max_completion_length:
            what = f"{self.overlong_buffer} tokens of {self.max_completion_length}"
            raise ConfigError(what, where="overlong_buffer", remedy="Give at least 1 and at most max_completion_length")
        for name in ("reference_sync_steps", "reference_model"):
            if getattr(self, name) is not None and not self.needs_reference:
                raise ConfigError("the policy is held to no reference", where=name, remedy="Leave it out, or set beta, and kl_to reference")
        if self.reference_sync_steps is not None and self.reference_model is not None:
            raise ConfigError("another model does not move", where="reference_sync_steps", remedy="Leave it out, or reference_model")

    @property
    def corrected(self) -> bool:
        """Whether tokens are weighed by how likely a server drew them."""
        return self.rollouts.backend == "vllm" and self.importance_cap is not None

    @property
    def needs_reference(self) -> bool:
        """Whether the policy is held to a model other than the one that sampled."""
        return bool(self.beta) and self.kl_to == "reference"

    def sampler(self, *, temperature: float, seed: int) -> SamplerConfig:
        """How rollouts are sampled."""
        return SamplerConfig(
            max_new_tokens=self.max_completion_length,
            steps=self.steps,
            block_size=self.block_size,
            policy=self.policy,  # type: ignore[arg-type]
            temperature=temperature,
            stop_at_eos=bool(self.stop_at_eos),
            seed=seed,
            batch_size=self.rollout_batch_size,
            trace=True,
        )

    @classmethod
    def for_task(cls, task: str, **settings: Any) -> Self:
        """The settings of the recipe `grpo-TASK` (d1's, where it published them), and those given.

        Raises:
            ConfigError: there is no such recipe.
        """
        known = [name.removeprefix("grpo-") for name in recipe_names() if name.startswith("grpo-")]
        if task not in known:
            raise ConfigError(f"there is no recipe for {task!r}", where="for_task", remedy=did_you_mean(task, known))
        return build_training_args(cls, read_recipe(f"grpo-{task}").get("training", {}) | settings)
