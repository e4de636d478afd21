"""The settings of a conversion."""
# ruff: noqa: RUF009 (`setting` returns a dataclass field)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from unmask.config.base import OnResume
from unmask.config.layers import read_recipe
from unmask.config.rollout import rollout_sampler
from unmask.config.run import AttentionName, RunConfig
from unmask.config.sampler import DENOISING_FIELDS, SamplerConfig
from unmask.convert.distillation import TokenDivergence, forward_kl, generalized_divergence
from unmask.convert.stages import STAGES, ConversionStage
from unmask.errors import ConfigError
from unmask.models.attention import DEFAULT_BLOCK, check_pattern
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import Workload
from unmask.training.config import NEUTRAL, Part
from unmask.training.config_fields import described, setting
from unmask.training.noising import TIME_FIELDS, NoisingConfig
from unmask.training.text_config import TextConfig

OF_RANDOM_STATES = (*TIME_FIELDS, "exact_count", "complementary", "attention_annealing", "alignment")
"""Settings of rows whose tokens are hidden at random."""
SAMPLED_BY = {name: name for name in ("max_new_tokens", "temperature", "seed")}
"""The settings of rollouts by their names in `SamplerConfig`."""


@described
@dataclass
class ConvertConfig(NoisingConfig, TextConfig):
    """Settings of `ConvertTrainer`. `ConvertConfig.for_recipe("block")` returns those of a recipe."""

    learning_rate: float = setting(
        5e-4, "The base learning rate; the default stages use 0.5, 1 and 0.3 times it"
    )
    attention: AttentionName = field(
        default="bidirectional", metadata={"help": "The pattern to convert to: bidirectional or block_causal"}
    )
    block_size: int | None = setting(None, f"The attention block, for block_causal; unset: {DEFAULT_BLOCK}")
    logit_shift: bool | None = setting(None, "Keep predicting token i + 1 at position i; unset: no")
    causal_context: bool = setting(
        False,
        (
            "block_causal: attend causally within finished blocks, as the causal model does; `lm_loss` "
            "then needs no extra forward pass"
        ),
    )
    time_embedding: bool = setting(False, "Give the model the fraction of hidden tokens as an input")
    complementary: bool = setting(
        False, "Use two views of each row; each hides the tokens that the other shows"
    )
    attention_annealing: float = setting(
        0.0,
        (
            "The fraction of the steps over which later tokens gradually become visible; 0: all from the "
            "first step"
        ),
        low=0,
        high=1,
    )
    distillation: float = setting(
        0.0,
        "The weight of the KL divergence from the frozen causal model, where no later token is visible",
        low=0,
        high=1,
    )
    teacher_top_k: int = setting(
        16,
        "Most probable tokens of the causal model that are compared one by one; the others count as one "
        "(sampler: as none); 0: all",
        low=0,
        needs=("distillation",),
    )
    states: Literal["random", "sampler"] = setting(
        "random",
        "What is learned: rows whose tokens are hidden at random, or, of prompts alone, the states that the "
        "model's own sampler visits (OPDLM)",
        choices=("random", "sampler"),
    )
    lmbda: float | None = setting(
        None,
        "The fraction of rows whose end the model itself writes; the others keep theirs (sampler: the causal "
        "model writes it). Unset: 0 (sampler: 1)",
        low=0,
        high=1,
    )
    max_new_tokens: int = setting(128, "Tokens that are written at most", low=1, needs=("lmbda",))
    start_new_tokens: int | None = setting(
        None,
        "The same at the first step, from which it grows linearly; unset: as later",
        low=1,
        needs=("states=sampler",),
    )
    ramp_steps: int = setting(20, "Steps over which it grows", low=1, needs=("start_new_tokens",))
    temperature: float = setting(1.0, "The temperature of what is written", low=0, needs=("lmbda",))
    generation_kwargs: dict[str, Any] | None = setting(
        None,
        "Further settings of the model's sampler, by name (docs/generation.md)",
        needs=("lmbda",),
    )
    beta: float = setting(
        0.0,
        "0: the KL divergence from the causal model; 1: its reverse; between them: the generalized "
        "Jensen-Shannon divergence",
        low=0,
        high=1,
        needs=("states=sampler",),
    )
    reverse_kl_weight: float = setting(
        0.0,
        "The weight of the reverse KL divergence in a sum of both",
        low=0,
        high=1,
        needs=("states=sampler",),
    )
    exclude_im_end: bool = setting(
        False, "Leave the end token of an answer out of the loss", needs=("states=sampler",)
    )
    alignment: float = setting(
        0.0, "The weight of the cosine distance to the hidden states of the frozen causal model", low=0
    )
    stages: list[ConversionStage] = field(
        default_factory=lambda: list(STAGES),
        metadata={"help": "The stages, trained one after another: share, rate, train, lm_loss, ..."},
    )
    recipe: str | None = setting(None, "The name of these settings in the model card", on_resume=NEUTRAL)
    canvas_length: int | None = setting(None, "The canvas of rows with prompt and completion; see SFT")

    @classmethod
    def for_recipe(cls, recipe: str, **settings: Any) -> ConvertConfig:
        """The `training` settings of a recipe (block, full, growing, distilled, on-policy, ...), overridden
        by `settings`."""
        return cls(**read_recipe(recipe).get("training", {}) | settings)

    def __post_init__(self) -> None:
        stages: Any = self.stages  # of any type, if Python gives them
        if not isinstance(stages, list | tuple) or not all(
            isinstance(stage, ConversionStage | Mapping) for stage in stages
        ):
            remedy = (
                'Give the settings of each, such as [{"share": 0.2, "train": ["attention"]}, {"share": '
                "0.8}], or leave the setting out"
            )
            raise ConfigError(f"{stages!r} is no list of stages", where="stages", remedy=remedy)
        self.stages = [
            stage if isinstance(stage, ConversionStage) else ConversionStage(**stage) for stage in stages
        ]
        if self.states == "sampler" and "stages" not in self.given:
            self.stages = [stage.model_copy(update={"lm_loss": 0.0}) for stage in self.stages]
        if not self.stages:
            raise ConfigError(
                "there are no stages", where="stages", remedy="Give at least one, or leave the setting out"
            )
        if self.attention == "causal":
            raise ConfigError(
                "a model cannot be converted to causal attention",
                where="attention",
                remedy="Use bidirectional or block_causal",
            )
        if self.attention_annealing and self.attention != "bidirectional":
            raise ConfigError(
                "only bidirectional attention can be annealed",
                where="attention_annealing",
                remedy="Use stages of growing block_size",
            )
        if self.attention == "block_causal" and self.block_size is None:
            self.block_size = DEFAULT_BLOCK
        check_pattern(self.attention, self.block_size, self.causal_context)
        if self.lmbda is None:
            self.lmbda = 1.0 if self.states == "sampler" else 0.0
        super().__post_init__()
        if self.complementary:
            self.noising.paired()
        if self.states == "sampler":
            self._check_sampler_states()
        if self.lmbda:
            self.rollout_sampler(0)  # raises ConfigError for settings that cannot be sampled with

    def _check_sampler_states(self) -> None:
        """Raise ConfigError for what has no meaning in states that the model's sampler visits."""
        if self.distillation != 1:
            what = "in the visited states the causal model alone teaches"
            raise ConfigError(what, where="distillation", remedy="Set it to 1.0, or use states: random")
        if not self.lmbda:
            what, remedy = "the model's sampler writes no row", "Use a value above 0, or states: random"
            raise ConfigError(what, where="lmbda", remedy=remedy)
        for name in OF_RANDOM_STATES:
            if name in self.given and getattr(self, name):
                what = "is about tokens that are hidden at random"
                raise ConfigError(what, where=name, remedy="Leave it out, or use states: random")
        if number := next((n for n, stage in enumerate(self.stages, start=1) if stage.lm_loss), None):
            what = "the model would learn its own text token by token"
            raise ConfigError(what, where=f"stages, stage {number}, lm_loss", remedy="Leave it out")
        if self.beta and self.reverse_kl_weight:
            what = "weights the reverse divergence, as beta does"
            raise ConfigError(what, where="reverse_kl_weight", remedy="Leave one of the two out")
        if self.start_new_tokens is not None and self.start_new_tokens > self.max_new_tokens:
            what = f"{self.start_new_tokens} is above max_new_tokens ({self.max_new_tokens})"
            raise ConfigError(what, where="start_new_tokens", remedy="Lower it, or leave it out")

    def unread(self) -> set[str]:
        return super().unread() | ({*OF_RANDOM_STATES} if self.states == "sampler" else set())

    @property
    def generates(self) -> bool:
        return bool(self.lmbda)

    @property
    def needing_masks(self) -> str | None:
        return next((name for name in ("distillation", "alignment", "lmbda") if getattr(self, name)), None)

    @property
    def divergence(self) -> TokenDivergence:
        """What is measured between the causal model's predictions and the model's."""
        if self.states == "random":
            return forward_kl
        return partial(generalized_divergence, beta=self.beta, reverse_kl_weight=self.reverse_kl_weight)

    def new_tokens(self, step: int | None) -> int:
        """The most tokens that are written at an optimizer step of the run (None: in an evaluation), in whole
        blocks while their number grows."""
        first, last, unit = self.start_new_tokens, self.max_new_tokens, self.block_size or 1
        if first is None or step is None or step >= self.ramp_steps:
            return last
        return min(last, max(unit, round((first + (last - first) * step / self.ramp_steps) / unit) * unit))

    def rollout_sampler(self, step: int | None) -> SamplerConfig:
        """The settings of the model's own sampler at an optimizer step of the run; None: in an
        evaluation."""
        args: Any = self  # mypy does not read the fields of TrainingArguments
        own = {
            "max_new_tokens": self.new_tokens(step),
            "temperature": self.temperature,
            "seed": args.seed,
        }
        return rollout_sampler(own, SAMPLED_BY, self.generation_kwargs)

    def teacher_sampler(self, step: int | None) -> SamplerConfig:
        """The same of the causal model, which writes from left to right."""
        fields = SamplerConfig.model_fields
        unset = {name: fields[name].default for name in (*DENOISING_FIELDS, "num_speculative_tokens")}
        return self.rollout_sampler(step).model_copy(update=unset)

    def shortened(self, steps: int) -> dict[str, Any]:
        even = [stage.model_copy(update={"share": 1.0}).model_dump() for stage in self.stages]
        grown = {} if self.start_new_tokens is None else {"start_new_tokens": self.max_new_tokens}
        return super().shortened(steps) | {"stages": even} | grown

    def parts(self) -> list[Part]:
        whole = sum(stage.share for stage in self.stages)
        return [Part(stage.share / whole, stage.rate, self._described(stage)) for stage in self.stages]

    def _described(self, stage: ConversionStage) -> dict[str, str]:
        size = stage.block_size or (self.block_size if stage.attention in (None, self.attention) else None)
        trains = stage.train if isinstance(stage.train, str) else ", ".join(stage.train)
        return {"attention": f"{stage.attention or self.attention} {size or ''}".strip(), "trains": trains}

    def patterns(self) -> list[AttentionName]:
        return [stage.attention or self.attention for stage in self.stages]

    def trained_pattern(self, run: RunConfig) -> AttentionName:
        return self.attention

    @classmethod
    def kinds_on_resume(cls) -> dict[str, OnResume]:
        """The stages share the steps, so that another number makes other stages."""
        return super().kinds_on_resume() | dict.fromkeys(("max_steps", "num_train_epochs"), OnResume.OTHER)

    @property
    def noised_copies(self) -> int:
        return 2 if self.complementary else 1

    def workload(self, blueprint: ModelSpec, run: RunConfig) -> Workload | None:
        work = super().workload(blueprint, run)
        return work and replace(work, teacher=bool(self.distillation or self.alignment))

    @property
    def excludes_adapters(self) -> str | None:
        args: Any = self  # mypy does not read the fields of TrainingArguments
        return next((name for name in ("time_embedding", "fsdp", "deepspeed") if getattr(args, name)), None)

    def check_run(self, run: RunConfig, *, has_adapters: bool) -> None:
        super().check_run(run, has_adapters=has_adapters)
        if run.lora:
            self.refuse_adapters(timed=self.time_embedding)

    def refuse_adapters(self, *, timed: bool) -> None:
        """Raise ConfigError if adapters cannot be trained. `timed`: whether the model has a time
        embedding."""
        if timed:
            raise ConfigError(
                "adapters cannot train a time embedding, which is new",
                where="time_embedding and lora",
                remedy="Set time_embedding: false, or convert without lora",
            )
        if key := self.excludes_adapters:
            what = (
                "a conversion with adapters cannot go from one stage to the next where processes share out "
                "the training's state"
            )
            remedy = (
                f"Leave {key} out ({key}=null): each process then holds the whole model. Or convert "
                "without adapters (lora=null)"
            )
            raise ConfigError(what, where=f"{key} and lora", remedy=remedy)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"stages": [stage.model_dump() for stage in self.stages]}
