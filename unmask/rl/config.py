"""The settings of reinforcement learning. A setting that is unset has the default of the method."""
# ruff: noqa: RUF009 (the calls make fields)

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Literal, Self, get_args

from unmask.config.base import OnResume, flat_values, kinds_of
from unmask.config.layers import read_recipe, recipe_names
from unmask.config.rollout import RolloutConfig, rollout_sampler, unread_by_vllm
from unmask.config.run import NoiseName, RunConfig, build_training_args, checked_fields
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, did_you_mean
from unmask.generation.canvas import OF_MASKS
from unmask.planning.blueprint import ModelSpec
from unmask.rl.advantages import ScaleRewards
from unmask.rl.losses import Divergence, LossType
from unmask.rl.methods.base import METHODS, Method, TokenMethod, fixed_settings, get_method, settings_of
from unmask.rl.methods.diffu_grpo import DiffuGRPO
from unmask.rl.methods.masking import MaskingStrategy, find_masking
from unmask.rl.methods.spg import SPG
from unmask.rl.methods.trajectory import StepMerge, TraceRL
from unmask.training.config import ACTS, METRIC_SCHEDULERS, NEUTRAL, TrainingConfig
from unmask.training.config_fields import described, naming_setting_too, setting
from unmask.training.sharding import weight_sharding_setting

CAUSAL_RECIPE_HINT = "the recipe grpo-code-ocaml-causal is for causal models"
LOG_RATIO_CLAMP = 20.0
"""Bound of the logarithm of a ratio of whole sequences, or of tokens with large weights, whose exponential
would overflow float32."""
RewardErrors = Literal["unscored", "raise"]
SAMPLED_BY = {
    "max_new_tokens": "max_completion_length",
    "batch_size": "rollout_batch_size",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "steps", "block_size"),
            *("remasking", "constraint", "stop_at_eos", "seed"),
        )
    },
}
"""The settings of rollouts by their names in `SamplerConfig`."""
LIKELY_TOKENS = (
    *("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "top_entropy_quantile"),
)
"""Settings by which tokens are not drawn, or not trained on, in proportion to their probabilities."""


def of_method(otherwise: Any, help: str, **checks: Any) -> Any:
    """A setting whose default is the method's; `otherwise`: the default of most methods."""
    shown = "none" if otherwise is None else str(otherwise).lower()
    return setting(None, f"{help}; unset: the method's, or {shown}", otherwise=otherwise, **checks)


@described
@dataclass
class GRPOConfig(TrainingConfig):
    """Settings of `GRPOTrainer`. `per_device_train_batch_size` counts completions, as in TRL."""

    rollout_config = RolloutConfig()  # what `rollout` says

    max_length: int = setting(
        2**20, "Maximum tokens of a prompt with its completion (the model's context also limits them)", low=2
    )
    learning_rate: float = setting(3e-6, "The peak learning rate of AdamW")
    lr_scheduler_type: str = setting("constant_with_warmup", "The learning-rate schedule")
    method: str = setting(
        "diffu-grpo",
        (
            "The method: diffu-grpo, wd1, coupled-grpo, spg, espo, cj-grpo, trace-rl, ... or your own, "
            "file.py:NAME (docs/rl.md)"
        ),
    )
    method_settings: dict[str, Any] | None = setting(
        None, "The settings that only a method of your own has, by name"
    )
    num_generations: int = setting(8, "Completions per prompt: the group", low=2)
    num_generations_eval: int | None = setting(
        None,
        "Completions per prompt in an evaluation, drawn as in training; unset: one greedy one",
        low=1,
        on_resume=ACTS,
    )
    num_iterations: int = setting(1, "Updates per rollout batch (mu), each with new masks", low=1)

    epsilon: float | None = of_method(TokenMethod.epsilon, "Clip range of the ratio below 1", low=0, high=1)
    epsilon_high: float | None = of_method(
        TokenMethod.epsilon_high, "Clip range above 1 (none: epsilon)", low=0
    )
    delta: float | None = of_method(
        TokenMethod.delta, "Bound of the ratio where the advantage is negative", low=1
    )
    log_ratio_clamp: float | None = of_method(
        TokenMethod.log_ratio_clamp,
        "Bound of the logarithm of the ratio; 20 for products, k3 of bounds, and adaptive_loss",
        low=1e-3,
    )
    importance_sampling_level: str | None = of_method(
        TokenMethod.importance_sampling_level,
        (
            "Ratios of single tokens (token), their geometric mean over the completion (sequence, GSPO), "
            "or their product (product)"
        ),
        choices=("token", "sequence", "product"),
    )
    loss_type: LossType | None = of_method(
        Method.loss_type,
        (
            "How token losses are averaged: dapo (over all tokens), grpo (by completion), dr_grpo, step, "
            "view, view-constant (TraceRL) or sum"
        ),
        choices=get_args(LossType),
    )
    scale_rewards: Literal[ScaleRewards, True, False] | None = of_method(
        Method.scale_rewards,
        (
            "How advantages are scaled, all of which are less the group's mean: none, group (by the "
            "standard deviation), population (without Bessel's correction), leave-one-out or softmax; as in "
            "TRL, true is group and false none"
        ),
        choices=get_args(ScaleRewards),
    )
    top_entropy_quantile: float = setting(
        1.0,
        "Learn only from this fraction of tokens, those whose predictions had the highest entropy",
        low=0,
        high=1,
    )
    softmax_temperature: float = setting(
        1.0, "Divides the rewards", low=1e-6, needs=["scale_rewards=softmax"]
    )
    beta: float | None = of_method(
        TokenMethod.beta, "Weight of the KL divergence; 0: no reference is kept", low=0
    )
    kl: Divergence | None = of_method(
        TokenMethod.kl, "Its estimate: k1, k2 or k3", choices=get_args(Divergence), needs=["beta"]
    )
    kl_to: str | None = of_method(
        TokenMethod.kl_to,
        "The other model of the divergence: the reference, or the old policy",
        choices=("reference", "old"),
        needs=["beta"],
    )
    use_bias_correction_kl: bool = setting(
        TokenMethod.use_bias_correction_kl,
        "Whether the ratio multiplies the divergence, as in TRL (docs/rl.md)",
        needs=["beta", "kl=k3"],
    )
    ref_model: str | None = setting(
        None,
        "The reference model, as a folder or a hub name; unset: the policy before training",
        needs=["beta", "kl_to=reference"],
    )
    sync_ref_model: bool = setting(
        False, "Whether the reference moves towards the policy", needs=["beta", "kl_to=reference"]
    )
    ref_model_sync_steps: int = setting(512, "Steps between these moves", low=1, needs=["sync_ref_model"])
    ref_model_mixup_alpha: float = setting(
        0.6, "Fraction of the way that each move covers", low=0, high=1, needs=["sync_ref_model"]
    )

    masking: str | None = setting(
        None,
        (
            "Masking strategy: diffusion, adaptive or block (in `samples` views), coupled, optimized; "
            "unset: the method's own"
        ),
    )
    mask_rate: list[float] | None = setting(
        None,
        "The mask rate at the first step and towards the last; unset: 0.3 and 0.9",
        needs=["masking=adaptive"],
    )
    adaptive_loss: bool = setting(
        False, "Whether hidden tokens have the weight 1 / the mask rate", needs=["masking=adaptive|optimized"]
    )
    samples: int | None = of_method(
        1, "spg, espo, gdpo, bgpo, agrpo, masking: views (espo: pairs of views)", low=1
    )
    prompt_mask_rate: float | None = of_method(
        DiffuGRPO.prompt_mask_rate,
        (
            "diffu-grpo, wd1, step-merge, spg: probability with which a token of the prompt (spg: and of "
            "finished blocks) is hidden"
        ),
        low=0,
        high=1,
    )
    segments: int = setting(StepMerge.segments, "step-merge: views into which the steps are merged", low=1)
    shrink: int = setting(TraceRL.shrink, "trace-rl: steps in a view", low=1)
    eubo_beta: float = setting(SPG.eubo_beta, "spg: exponent of the upper bound", low=1e-3)
    eubo_share: float = setting(
        SPG.eubo_share, "spg: weight of the upper bound in its mixture with the lower one", low=0, high=1
    )

    difficulty: list[float] | None = of_method(
        Method.difficulty, "Learn only from groups whose mean reward lies between these two (none: all)"
    )
    difficulty_reward: str | None = setting(
        None,
        "The reward function that `difficulty` reads; unset: the weighted sum of all",
        needs=["difficulty"],
    )
    filter_zero_std_groups: bool | None = of_method(
        Method.filter_zero_std_groups, "Leave out groups whose rewards are all equal, also from averages"
    )
    max_resample_rounds: int = setting(
        0, "How often groups that are left out are replaced by those of other prompts (DAPO)", low=0
    )
    curriculum: float | None = setting(
        None, "Prefer prompts whose mean reward so far is near this; unset: all in turn"
    )
    mask_truncated_completions: bool = setting(False, "Whether completions without an end token are left out")
    overlong_buffer: int | None = setting(
        None, "Tokens before the maximum length over which rewards fall by up to 1 (DAPO); unset: none"
    )

    temperature: float = setting(1.0, "The sampling temperature", low=1e-6)
    top_p: float = setting(1.0, "Draw among the most probable tokens that together reach this", low=0, high=1)
    top_k: int = setting(0, "Draw among this many most probable tokens; 0: all", low=0)
    min_p: float | None = setting(
        None,
        "Draw among tokens of at least this fraction of the largest probability; unset: all",
        low=0,
        high=1,
    )
    repetition_penalty: float = setting(
        1.0, "Divides the logits of tokens that are already there (multiplies negative ones)", low=1e-3
    )
    generation_kwargs: dict[str, Any] | None = setting(
        None, "Further settings of the sampler of rollouts, by name (docs/generation.md)"
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        None, "Variables of the chat template for all prompts; those in a row's column come first"
    )
    logprob_temperature: float | None = setting(
        None,
        "The temperature of the trained log-probabilities; unset: that of sampling (docs/rl.md)",
        low=1e-6,
    )
    max_completion_length: int = setting(128, "Tokens of the canvas after the prompt")
    steps: int | None = setting(None, "Denoising steps of a rollout; unset: one token per step")
    block_size: int | None = setting(None, "Decoding block of a rollout; unset: the whole completion")
    remasking: str | None = of_method(Method.remasking, "Which hidden tokens a rollout reveals first")
    stop_at_eos: bool | None = of_method(
        Method.stop_at_eos, "Whether decoding stops at the first end token, where every completion ends"
    )
    after_eos: str | None = of_method(
        Method.after_eos,
        (
            "Treatment of tokens after the end of a completion: mask, noise (like the completion), or train "
            "(docs/rl.md)"
        ),
        choices=("mask", "noise", "train"),
    )
    constraint: dict[str, Any] | None = setting(
        None,
        (
            "What completions have to match: choice, regex, json_schema, json or grammar "
            "(docs/generation.md); unset: nothing"
        ),
    )
    rollout_batch_size: int = setting(256, "Sequences per forward pass of a rollout", on_resume=NEUTRAL)

    reward_weights: list[float] | None = setting(None, "One weight per reward function; unset: all 1")
    reward_workers: int = setting(
        0,
        "Processes for each reward function given by its path; 0: the training process runs it",
        low=0,
        on_resume=NEUTRAL,
    )
    rollout: dict[str, Any] | None = setting(
        None, "Where completions come from: backend (local, server, vllm), url, sync, ... (docs/rl.md)"
    )
    max_staleness: int = setting(
        0,
        (
            "server, vllm: the most updates by which the weights that sample the next rollout may be "
            "older; 0: training waits"
        ),
        low=0,
    )
    vllm_importance_sampling_cap: float | None = setting(
        TokenMethod.vllm_importance_sampling_cap,
        (
            "vllm: bound of the importance weights that correct for the server's log-probabilities; unset: "
            "no correction"
        ),
        low=1e-3,
    )
    log_completions: bool = setting(
        False, "Whether sample completions are shown, stored and sent to trackers", on_resume=ACTS
    )
    log_completions_steps: int | None = setting(
        None,
        "Steps between such samples; unset: logging_steps",
        low=1,
        needs=["log_completions"],
        on_resume=ACTS,
    )
    num_completions_to_print: int | None = setting(
        8, "Completions in such a sample; null: all", low=1, needs=["log_completions"], on_resume=ACTS
    )
    performance_log_interval: int = setting(
        0, "Steps between logs of time and tokens by phase; 0: never", low=0, on_resume=ACTS
    )

    reward_timeout: float = setting(
        600.0,
        "Time limit in seconds of each reward function for a batch",
        low=1e-3,
        high=1e6,
        on_resume=ACTS,
    )
    reward_errors: RewardErrors = setting(
        "unscored", "If a reward function fails", choices=get_args(RewardErrors), on_resume=ACTS
    )
    max_unscored_rollouts: int = setting(
        3, "Stop after this many rollouts in a row without any score; 0: never", low=0, on_resume=NEUTRAL
    )

    reads_rewards = True

    @property
    def generates(self) -> bool:
        return True

    @property
    def updates_per_batch(self) -> int:
        return self.num_iterations

    def __post_init__(self) -> None:
        args: Any = self  # mypy does not read the fields of TrainingArguments
        if args.metric_for_best_model is None and (
            args.load_best_model_at_end or args.lr_scheduler_type in METRIC_SCHEDULERS
        ):
            args.metric_for_best_model = "reward"  # transformers would use the loss, which evaluations lack
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        method = get_method(self.method)
        for field in fields(self):
            if field.default is None and getattr(self, field.name) is None:
                setattr(self, field.name, self._default_of(field))
        super().__post_init__()
        exponential = (
            self.importance_sampling_level == "product"
            or self.adaptive_loss
            or (method.estimator == "bound" and self.kl == "k3")
        )
        if exponential and self.log_ratio_clamp is None and "log_ratio_clamp" in settings_of(method):
            self.log_ratio_clamp = LOG_RATIO_CLAMP
        self.method_settings = self._read_method_settings(method)
        self._check(method)
        self.refuse_unread(find_masking(self), final=False)
        try:
            self.rollout_config = RolloutConfig(**(self.rollout or {}))
        except ConfigError as error:
            where = f"rollout.{error.where}" if error.where else "rollout"
            raise error.moved(where) from error
        if self.corrects_for_server and "vllm_importance_sampling_cap" not in settings_of(method):
            what = f"the loss of {self.method} has no importance weights for the server's log-probabilities"
            raise ConfigError(
                what,
                where="rollout.backend and method",
                remedy="Set vllm_importance_sampling_cap to null, or use another method",
            )
        sampler = self.sampler(self.temperature)
        check_rollouts(self, sampler.model_copy(update={"trace": False}))
        check_ahead(self, method)
        self.assigned.clear()

    def _default_of(self, field: Field[Any]) -> Any:
        """The default of a setting, which may be the method's."""
        if field.default is not None:
            return field.default
        return settings_of(get_method(self.method)).get(field.name, field.metadata.get("otherwise"))

    def _read_method_settings(self, method: type[Method]) -> dict[str, Any] | None:
        """The settings that are no keys of this class, with the method's defaults; None if it has none."""
        given, keys = self.method_settings or {}, {field.name for field in fields(self)}
        own = {name: default for name, default in settings_of(method).items() if name not in keys}
        for name in given.keys() - own.keys():
            remedy = (
                f"Set {name} itself" if name in keys else did_you_mean(name, own) if own else "Leave it out"
            )
            raise ConfigError(
                f"is no setting that only {method.name} has", where=f"method_settings.{name}", remedy=remedy
            )
        return own | checked_fields(method, given, "method_settings") or None

    def refuse_unread(
        self, strategy: MaskingStrategy | None, *, final: bool = True, exact: bool = False
    ) -> None:
        """Refuse settings that other methods read, but not this one.

        Args:
            strategy: the masking strategy, if one replaces the method's plan.
            final: False while the trainer may still be given a strategy.
            exact: whether no views are planned, because the likelihood is exact.

        Raises:
            ConfigError: such a setting is set.
        """
        method = get_method(self.method)
        if exact and self.after_eos not in ("mask", settings_of(method)["after_eos"]):
            raise ConfigError(
                "a causal model predicts nothing from what is after the end",
                where="after_eos",
                remedy="Leave it out",
            )
        uses = None if strategy is None else strategy.uses
        own_plan = uses is None
        if final and self.after_eos == "noise" and own_plan and not method.partial:
            raise ConfigError(
                f"{self.method} always hides what is after the end, or keeps it as sampled",
                where="after_eos",
                remedy="Use mask or train, or a masking strategy",
            )
        read = {*settings_of(method, plan=own_plan and not exact), *(uses or ())}
        if not final and strategy is None and not method.separable:
            read.add("samples")
        self._unread = {}
        for field in fields(self):
            readers = [name for name, other in METHODS.items() if field.name in settings_of(other)]
            if readers and field.name not in read:
                self._unread[field.name] = readers
        for name, readers in self._unread.items():
            if name in self.given:
                what = self.method if strategy is None else f"{self.method} with {type(strategy).__name__}"
                why = " for a causal model, whose likelihood is exact" if exact else ""
                remedy = f"Leave it out: it is for {', '.join(readers)}"
                raise ConfigError(f"{what} does not read it{why}", where=name, remedy=remedy)

    def unread(self) -> set[str]:
        server = set() if self.rollout_config.backend == "vllm" else {"vllm_importance_sampling_cap"}
        return super().unread() | self._unread.keys() | server

    def _check(self, method: type[Method]) -> None:
        if self.train_sampling_strategy != "random":
            raise ConfigError(
                "prompts are sampled in groups, each once per epoch",
                where="train_sampling_strategy",
                remedy="Leave it out, or set curriculum",
            )
        for field in fields(self):
            if field.name in fixed_settings(method) and getattr(self, field.name) not in (
                None,
                value := self._default_of(field),
            ):
                raise ConfigError(
                    f"must be {'unset' if value is None else value} with {self.method}",
                    where=field.name,
                    remedy="Leave it out, or use another method",
                )
        for name in method.biased_by + (LIKELY_TOKENS if method.biased_by else ()):
            if getattr(self, name) and getattr(self, name) != getattr(GRPOConfig, name):
                raise ConfigError(
                    f"the gradient of {self.method} is not exact with it", where=name, remedy="Leave it out"
                )
        if (
            method.estimator == "bound"
            and "importance_sampling_level" in settings_of(method)
            and self.importance_sampling_level == "token"
        ):
            raise ConfigError(
                f"{self.method} has one bound per sequence, and no ratios of tokens",
                where="importance_sampling_level",
                remedy="Use sequence, or product",
            )
        if (self.loss_type or "").startswith("view") and (not method.separable or self.masking):
            what = (
                f"averages by view, but {self.method}{' with masking' if self.masking else ''} predicts a "
                "token in several views"
            )
            raise ConfigError(
                what,
                where="loss_type",
                remedy="Use another one, or a method that follows the sampler's steps (docs/rl.md)",
            )
        if self.top_entropy_quantile < 1 and method.estimator != "token":
            raise ConfigError(
                f"{self.method} has no losses of tokens",
                where="top_entropy_quantile",
                remedy="Leave it out, or use another method",
            )
        if self.max_resample_rounds and self.difficulty is None and not self.filter_zero_std_groups:
            raise ConfigError(
                "no group is dropped, so none is replaced",
                where="max_resample_rounds",
                remedy="Set filter_zero_std_groups, or difficulty",
            )
        if self.difficulty is not None and (
            len(self.difficulty) != 2 or self.difficulty[0] > self.difficulty[1]
        ):
            raise ConfigError(
                f"{self.difficulty} is not a range",
                where="difficulty",
                remedy="Give two rewards, the lower first",
            )
        if self.overlong_buffer is not None and not 0 < self.overlong_buffer <= self.max_completion_length:
            what = (
                f"{self.overlong_buffer} is not between 1 and max_completion_length "
                f"({self.max_completion_length})"
            )
            raise ConfigError(
                what, where="overlong_buffer", remedy="Give a number within these, or leave it out"
            )
        if self.sync_ref_model and self.ref_model is not None:
            raise ConfigError(
                "a reference loaded from ref_model is never updated",
                where="sync_ref_model",
                remedy="Leave it out, or ref_model",
            )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"method": get_method(self.method).name}  # without the path of its file

    @classmethod
    def kinds_on_resume(cls) -> dict[str, OnResume]:
        return super().kinds_on_resume() | kinds_of(RolloutConfig, "rollout.")

    def values_on_resume(self) -> dict[str, Any]:
        rollout = flat_values(self.rollout_config, "rollout.")
        rollout.pop("rollout.api_key")
        return super().values_on_resume() | {"rollout": None} | rollout

    @classmethod
    def of_recipe(cls, settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """A recipe for another method leaves out the settings in which methods differ."""
        return for_method(settings, chosen)

    def check_run(self, run: RunConfig, *, has_adapters: bool) -> None:
        super().check_run(run, has_adapters=has_adapters)
        if has_adapters:
            return
        if shards := weight_sharding_setting(self):
            self.refuse_sharded_weights(shards)
        if self.rollout_config.backend == "vllm" and self.rollout_config.sync == "lora":
            raise ConfigError(
                "there are no adapters to send",
                where="rollout.sync and lora",
                remedy="Train with lora, or set rollout.sync to disk",
            )

    def refuse_sharded_weights(self, *shards: str) -> None:
        """Raise ConfigError for settings that exclude sharded weights. `shards`: the setting that shards
        them, if it is to be named."""
        whole = "train without FSDP and ZeRO 3 (--recipe a40-48gb-x3-ddp replicates them)"
        if self.rollout_config.backend != "local":
            raise ConfigError(
                "sharded weights cannot be sent to a server",
                where=" and ".join(["rollout.backend", *shards]),
                remedy=f"Use rollout.backend local, or {whole}",
            )
        if self.needs_reference and self.sync_ref_model:
            raise ConfigError(
                "a reference cannot follow sharded weights",
                where=" and ".join(["sync_ref_model", *shards]),
                remedy=f"Leave sync_ref_model out, or {whole}",
            )

    def check_model(self, read_attention: Callable[[], Mapping[str, Any]], run: RunConfig) -> None:
        """Refuse decoding blocks other than the attention blocks, settings of views for a causal model, and
        vllm for a diffusion model."""
        read = read_attention()
        causal = read["attention"] == "causal"
        unit = 1 if causal else read["block_size"]
        for key, size in (("sampler.block_size", run.sampler.block_size), ("block_size", self.block_size)):
            if unit is not None and size not in (None, unit):
                hint = f" ({CAUSAL_RECIPE_HINT})" if causal else ""
                raise ConfigError(
                    f"decoding blocks of {size} in a model that attends in blocks of {unit}",
                    where=f"{key} and model.path",
                    remedy=f"Set block_size to null{hint}",
                )
        if causal and read["logit_shift"] is not False:
            with naming_setting_too("model.path"):
                self.refuse_for_causal_models()
        elif self.rollout_config.backend == "vllm":
            shift = " without logit shift" if causal else ""
            raise ConfigError(
                f"vllm decodes token by token, and this model is {read['attention']}{shift}",
                where="rollout.backend and model.path",
                remedy="Use rollout.backend server or local",
            )

    def refuse_for_causal_models(self) -> None:
        """Raise ConfigError for masking strategies and settings of views, which a causal model ignores."""
        find_masking(self, exact=True)
        self.refuse_unread(None, exact=True)

    def workload(self, blueprint: ModelSpec, run: RunConfig) -> None:
        """None: a step also samples, which is not estimated."""

    def build_method(self, attention: str = "bidirectional") -> Method:
        """The method with these settings, for a model of this attention."""
        method = get_method(self.method)
        own = self.method_settings or {}
        shared = settings_of(method).keys() - fixed_settings(method) - own.keys()
        return method(**{name: getattr(self, name) for name in shared}, **own).for_attention(attention)

    @property
    def corrects_for_server(self) -> bool:
        """Whether importance weights correct for a server's log-probabilities."""
        return self.rollout_config.backend == "vllm" and self.vllm_importance_sampling_cap is not None

    @property
    def log_prob_temperature(self) -> float:
        """The temperature of the trained log-probabilities."""
        return self.temperature if self.logprob_temperature is None else self.logprob_temperature

    @property
    def needs_reference(self) -> bool:
        """Whether the KL term is to another model than the old policy."""
        return bool(self.beta) and self.kl_to == "reference"

    def sampler(self, temperature: float, noise: NoiseName = "masked") -> SamplerConfig:
        """The sampler settings of rollouts, for a model of this noise. Canvases of random tokens have
        temperatures of their own (`t_min` and `t_max`), and none at which they are greedy."""
        own: dict[str, Any] = {field: getattr(self, name) for field, name in SAMPLED_BY.items()}
        own |= {"temperature": temperature, "min_p": self.min_p or 0.0}
        if noise == "uniform":
            del own["temperature"]
        return rollout_sampler(own, SAMPLED_BY, self.generation_kwargs)

    def check_trained_noise(self, noise: NoiseName) -> None:
        """Refuse methods and settings that need masks for a model of random tokens, and hybrid noise."""
        if noise == "hybrid":
            what = "its noise is hybrid, and rollouts have masks or random tokens alone"
            raise ConfigError(what, where="model", remedy="Use DPO, or a model of masked or uniform noise")
        if noise == "masked":
            return
        method = get_method(self.method)
        if not method.random_tokens:
            what = f"{self.method} hides tokens behind masks, and the model's noise is {noise}"
            fitting = ", ".join(name for name, other in METHODS.items() if other.random_tokens)
            raise ConfigError(what, where="method", remedy=f"Use one of {fitting}")
        sampler = self.sampler(self.temperature, noise)
        for name in (*sampler.of_texts, *(self.given & {"temperature"})):
            if name in OF_MASKS:
                where = SAMPLED_BY.get(name, f"generation_kwargs.{name}")
                what = "needs masks, and rollouts are canvases of random tokens"
                remedy = OF_MASKS[name].replace("Use ", "Use generation_kwargs with ")
                raise ConfigError(what, where=where, remedy=remedy)
        if "prompt_mask_rate" in settings_of(method) and self.prompt_mask_rate:
            what = f"hides tokens behind masks, and the model's noise is {noise}"
            raise ConfigError(what, where="prompt_mask_rate", remedy="Leave it out")
        if (self.method_settings or {}).get("exact_counts") is False:
            what = "counts hidden tokens, and random tokens are hidden one by one"
            raise ConfigError(what, where="method_settings.exact_counts", remedy="Leave it out")
        if method.estimator == "token" and self.logprob_temperature is not None:
            what = "draws from canvases have the temperature of the step that drew them"
            raise ConfigError(what, where="logprob_temperature", remedy="Leave it out")

    def refuse_for_canvas_models(self) -> None:
        """Raise ConfigError for settings that change what a canvas model's steps are conditioned on: draws
        are replayed given whole predictions."""
        if get_method(self.method).estimator != "token":
            return
        sampler = self.sampler(self.temperature, "uniform")
        for name in (*LIKELY_TOKENS[:4], "constraint", "allowed_tokens", "forbidden_tokens"):
            if name in sampler.of_texts:
                what = "changes the last prediction, on which each step of this model is conditioned"
                where = SAMPLED_BY.get(name, f"generation_kwargs.{name}")
                raise ConfigError(what, where=where, remedy="Leave it out, or use espo, gdpo or bgpo")

    @classmethod
    def for_task(cls, task: str, **settings: Any) -> Self:
        """The settings of the recipe `grpo-TASK` (d1's, where published), overridden by `settings`.

        Raises:
            ConfigError: there is no such recipe.
        """
        known = [name.removeprefix("grpo-") for name in recipe_names() if name.startswith("grpo-")]
        if task not in known:
            raise ConfigError(
                f"there is no recipe for {task!r}", where="for_task", remedy=did_you_mean(task, known)
            )
        recipe = read_recipe(f"grpo-{task}").get("training", {})
        return build_training_args(cls, for_method(recipe, settings) | settings)


def for_method(recipe: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The `training` section of a recipe that the chosen settings override. From a recipe for another method,
    settings in which methods differ are dropped, so that this method's defaults apply. What has no effect
    because a setting that it needs is off is dropped too."""
    dropped: set[str] = set()
    if (method := chosen.get("method")) not in (None, recipe.get("method", method)):
        defaults = [settings_of(other) for other in METHODS.values()]
        names = {name for values in defaults for name in values}
        dropped = {
            name
            for name in names
            if any(name not in values or values[name] != defaults[0][name] for values in defaults)
        }
        dropped |= {"method", "method_settings", *get_method(method).biased_by} | fixed_settings(
            get_method(method)
        )
    off = {name for name, value in chosen.items() if not value}
    for field in fields(GRPOConfig):  # a field is declared after the fields that it needs
        if any(needed.partition("=")[0] in dropped | off for needed in field.metadata.get("needs", ())):
            dropped.add(field.name)
    return {name: value for name, value in recipe.items() if name not in dropped}


def check_rollouts(args: GRPOConfig, sampler: SamplerConfig) -> None:
    """Refuse settings that the backend of the rollouts ignores.

    Args:
        args: the GRPOConfig.
        sampler: its sampler settings.

    Raises:
        ConfigError: such a setting is set.
    """
    # for causal models: nothing is denoised, and the likelihood is exact
    if args.rollout_config.backend == "vllm":
        if (name := unread_by_vllm(sampler)) is not None:
            what = f"vllm decodes a causal model token by token, and ignores {name}"
            remedy = (
                f"Leave {name} out ({CAUSAL_RECIPE_HINT}), or sample a diffusion model with "
                "rollout.backend local or server"
            )
            raise ConfigError(what, where=f"rollout.backend and {name}", remedy=remedy)
        with naming_setting_too("rollout.backend"):
            args.refuse_for_causal_models()
        if args.rollout_config.sync == "nccl" and args.use_cpu:
            raise ConfigError(
                "NCCL needs a GPU on both sides",
                where="rollout.sync and use_cpu",
                remedy="Use disk or lora, or leave use_cpu out",
            )
        if args.corrects_for_server and (sampler.filters or sampler.repetition_penalty != 1):
            raise ConfigError(
                "the server's log-probabilities are of the filtered distribution",
                where="rollout.backend and top_p, top_k, min_p, repetition_penalty",
                remedy="Leave them out, or set vllm_importance_sampling_cap to null",
            )
        if args.corrects_for_server and args.log_prob_temperature != args.temperature:
            what = (
                f"the server's log-probabilities are of temperature {args.temperature:g}, not of "
                f"{args.log_prob_temperature:g}"
            )
            raise ConfigError(
                what,
                where="rollout.backend and logprob_temperature",
                remedy="Leave it out, or set vllm_importance_sampling_cap to null",
            )
    elif "vllm_importance_sampling_cap" in args.given:
        what = (
            f"{args.rollout_config.backend} samples from the trained model itself, so there is nothing to "
            "correct"
        )
        raise ConfigError(
            what,
            where="rollout.backend and vllm_importance_sampling_cap",
            remedy="Leave vllm_importance_sampling_cap out, or set rollout.backend to vllm",
        )


def check_ahead(args: GRPOConfig, method: type[Method]) -> None:
    """Refuse rollouts ahead of training (`max_staleness`) where nothing can sample them, or nothing corrects
    for their age.

    Raises:
        ConfigError: they are refused.
    """
    if not args.max_staleness:
        return
    if args.rollout_config.backend == "local":
        raise ConfigError(
            "only a server can sample while the model trains",
            where="rollout.backend and max_staleness",
            remedy="Set rollout.backend to server or vllm, or leave max_staleness out",
        )
    if not method.has_ratio:
        what = (
            f"the loss of {args.method} has no ratio to the policy that sampled, which corrects for older "
            "weights"
        )
        remedy = (
            "Leave it out, or use one of "
            f"{', '.join(name for name, other in METHODS.items() if other.has_ratio)}"
        )
        raise ConfigError(what, where="method and max_staleness", remedy=remedy)
    if args.rollout_config.sync == "nccl":
        raise ConfigError(
            "a restarted server would get the weights as they are being trained",
            where="rollout.sync and max_staleness",
            remedy="Use disk or lora",
        )
    if args.rollout_config.sync_steps > 1:
        raise ConfigError(
            "the server would sample from older weights than max_staleness allows",
            where="rollout.sync_steps and max_staleness",
            remedy="Leave one of them out",
        )
