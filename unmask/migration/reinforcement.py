"""Old keys of reinforcement learning: those that all trainers share, and those of d1 and its successors."""

from __future__ import annotations

from typing import Any

from unmask.config.layers import read_recipe
from unmask.migration.rules import (
    SETTINGS_OF_MODEL,
    DroppedError,
    Old,
    Rule,
    RuleTable,
    Settings,
    lora_if,
    static,
    tables,
    to,
    truth,
    words,
)
from unmask.training.settings.older_variables import OLDER, Variable

TASKS = {name: name for name in ("gsm8k", "countdown", "sudoku", "math500")} | {"math": "math500"}
"""Names of datasets in d1 and its successors, and the recipes with their problems and rewards."""


def task(value: Any, old: Old) -> Settings:
    """A dataset of d1: its problems, their style and the published rewards, from the recipe."""
    if value not in TASKS:
        raise DroppedError(f"{value!r} is not built in: give --data and --task or rewards")
    recipe = read_recipe(f"grpo-{TASKS[value]}")
    return {**{f"data.{key}": part for key, part in recipe["data"].items()}, "rewards": recipe["rewards"]}


def temperature(value: Any, old: Old) -> Settings:
    """A temperature above 0: completions of a group must differ."""
    if value == 0:
        raise DroppedError("at 0 all completions of a group are equal")
    return {"training.temperature": value}


def reference(beta: float) -> RuleTable:
    """The keys of a moving reference, for a trainer with this default of beta."""

    def moves(old: Old) -> None:
        if not truth(old.get("sync_ref_model", False)):
            raise DroppedError("sync_ref_model is off: the reference is fixed")
        if not old.get("beta", beta):
            raise DroppedError("beta is 0: there is no reference")

    def steps(value: Any, old: Old) -> Settings:
        moves(old)
        return {
            "training.sync_ref_model": True,
            "training.ref_model_sync_steps": old.get("ref_model_sync_steps", 512),
        }

    def share(value: Any, old: Old) -> Settings:
        moves(old)
        return {"training.ref_model_mixup_alpha": value}

    rule = Rule(steps, "the reference moves only if both are given")
    return {"sync_ref_model": rule, "ref_model_sync_steps": rule, "ref_model_mixup_alpha": Rule(share)}


def masking_of(old: Old) -> Any:
    """The masking strategy, by its key in a section or as an argument of the trainer."""
    return old.get("masking.strategy_type", old.get("masking_strategy", "diffusion"))


def masked_rate(value: Any, old: Old) -> Settings:
    """The range of the adaptive mask rate, from two keys."""
    ends = [old.get(f"masking.{end}_p_mask") for end in ("initial", "final")]
    if masking_of(old) != "adaptive" or None in ends:
        raise DroppedError("only adaptive masking has a range of rates, with both ends")
    return {"training.masking": "adaptive", "training.mask_rate": ends}


def prompts_masked(value: Any, old: Old) -> Settings:
    """The fraction of the prompt that is hidden; masking strategies hide none of it."""
    if masking_of(old) != "diffusion":
        raise DroppedError("a masking strategy hides nothing of the prompt")
    return {"training.prompt_mask_rate": value}


def strategy(value: Any, old: Old) -> Settings:
    """A masking strategy. `diffusion` is the method's own masking."""
    if value == "diffusion":
        return {}
    return {"training.masking": words(optimized="optimized", adaptive="adaptive")(value)}


def batch_size(value: Any, old: Old) -> Settings:
    """DIFFU_BATCH_SIZE: the batch of generation if DIFFU_TRAIN_BATCH_SIZE is also set."""
    if old.get("DIFFU_TRAIN_BATCH_SIZE"):
        return {"training.rollout_batch_size": int(value)}
    return OLDER["DIFFU_BATCH_SIZE"].read(str(value))


def variable(known: Variable) -> Rule:
    """A variable that runs also read."""
    return Rule(lambda value, old: known.read(str(value)))


def performance(value: Any, old: Old) -> Settings:
    """How often performance is logged, from two keys."""
    logged = truth(old.get("enable_performance_logging", True))
    return {"training.performance_log_interval": old.get("performance_log_interval", 100) if logged else 0}


def guided(value: Any, old: Old) -> Settings:
    if not value:
        raise DroppedError("rollouts are not guided")
    return {"training.generation_kwargs.cfg_scale": float(value)}


MASKING = Rule(strategy, "diffusion is the method's own")
ADAPTIVE_LOSS = Rule(
    lambda value, old: (
        {"training.adaptive_loss": True}
        if truth(value) and masking_of(old) in ("adaptive", "optimized")
        else {}
    ),
    "only with adaptive or optimized masking",
)
GRPO: RuleTable = {
    **static("grpo"),
    "masking_strategy": MASKING,
    "adaptive_loss": ADAPTIVE_LOSS,
    "temperature": Rule(temperature),
    "log_completions": Rule(lambda value, old: {"training.log_completions": truth(value)}),
}
"""Keys that all trainers share."""

DIFFUSION: RuleTable = {
    **static("diffusion"),
    "p_mask_prompt": Rule(prompts_masked),
    "cfg_scale": Rule(guided, "a setting of the sampler"),
    "remasking": to("training.remasking", words(low_confidence="low_confidence", random="random")),
    "dataset": Rule(task, "the task's problems, style and published rewards"),
}

IMPROVED: RuleTable = {
    **static("improved-diffu-grpo"),
    "optimization.enable_mixed_precision": variable(OLDER["DIFFU_MIXED_PRECISION"]),
    "masking.strategy_type": MASKING,
    "masking.p_mask_prompt": Rule(prompts_masked),
    **dict.fromkeys(
        ("masking.initial_p_mask", "masking.final_p_mask"), Rule(masked_rate, "one setting for both ends")
    ),
    "generation.temperature": Rule(temperature),
    **{f"generation.{name}": DIFFUSION[name] for name in ("cfg_scale", "remasking", "mask_id")},
    "loss.adaptive_loss": ADAPTIVE_LOSS,
    **dict.fromkeys(
        ("performance_log_interval", "enable_performance_logging"),
        Rule(performance, "0 is never"),
    ),
}
"""Rules of ImprovedDiffuGRPOConfig, whose keys are in sections."""

DIFFU_VARIABLES: RuleTable = {
    **static("diffu-variables"),
    **{name: variable(known) for name, known in OLDER.items()},
    "DIFFU_DATASET": Rule(
        lambda value, old: task(value, old) if value in TASKS else OLDER["DIFFU_DATASET"].read(value)
    ),
    "DIFFU_BATCH_SIZE": Rule(batch_size, "the batch of generation if DIFFU_TRAIN_BATCH_SIZE is set"),
    "DIFFU_TENSOR_BATCH_SIZE": IMPROVED["optimization.tensor_batch_size"],
    "DIFFU_ENABLE_PROFILING": IMPROVED["optimization.enable_profiling"],
}

LORA_OF_TRL = {
    "r": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
}
LORA_LEFT: RuleTable = static("adapters")
D1: RuleTable = {
    **SETTINGS_OF_MODEL,
    **GRPO,
    **reference(beta=0.04),
    **DIFFUSION,
    **IMPROVED,
    **DIFFU_VARIABLES,
    **lora_if(None, LORA_OF_TRL),
    **LORA_LEFT,
    **static("d1"),
    "use_peft": Rule(lambda value, old: {}, "d1 always trains adapters"),
}


def d1_defaults(old: Old, program: str | None) -> Settings:
    """Defaults of DiffuGRPOConfig that differ from Unmask's."""
    strategies = masking_of(old) != "diffusion"
    return tables()["defaults"]["d1"] | ({} if strategies else {"training.prompt_mask_rate": 0.3})
