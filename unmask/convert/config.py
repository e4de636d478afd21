"""The settings of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unmask.config.base import OnResume
from unmask.config.layers import read_recipe
from unmask.config.run import AttentionName, RunConfig
from unmask.convert.stages import STAGES, ConversionStage
from unmask.errors import ConfigError
from unmask.models.attention import DEFAULT_BLOCK, check_pattern
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import Workload
from unmask.training.config import NEUTRAL, Part
from unmask.training.config_fields import described, setting
from unmask.training.noising import NoisingConfig
from unmask.training.text_config import TextConfig


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
        64,
        "Most probable tokens of the causal model that are compared one by one; the others count as one",
        low=1,
        needs=("distillation",),
    )
    on_policy: float = setting(
        0.0, "The fraction of rows whose end is replaced by the model's own continuation", low=0, high=1
    )
    rollout_tokens: int = setting(
        32, "Tokens that the model generates for each row", low=1, needs=("on_policy",)
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
        """The `training` settings of a recipe (block, full, growing, distilled, tiny, ...), overridden by
        `settings`."""
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
        super().__post_init__()
        if self.complementary:
            self.noising.paired()

    @property
    def needing_masks(self) -> str | None:
        return next(
            (name for name in ("distillation", "alignment", "on_policy") if getattr(self, name)), None
        )

    def shortened(self, steps: int) -> dict[str, Any]:
        even = [stage.model_copy(update={"share": 1.0}).model_dump() for stage in self.stages]
        return super().shortened(steps) | {"stages": even}

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
