"""Old keys of reinforcement learning: those that all trainers share, and those of d1 and its successors."""

from __future__ import annotations

from typing import Any

from unmask.config.layers import read_recipe
from unmask.migration.rules import (
    SETTINGS_OF_MODEL,
    DroppedError,
    Old,
    Rule,
    Settings,
    Table,
    drop,
    drop_keys,
    lora_if,
    same,
    switch,
    to,
    truth,
    words,
)
from unmask.training.settings.older_variables import OLDER, Variable

TASKS = {
    "gsm8k": "gsm8k",
    "countdown": "countdown",
    "sudoku": "sudoku",
    "math": "math500",
    "math500": "math500",
}
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


def reference(beta: float) -> Table:
    """The keys of a moving reference, for a trainer with this default of beta."""

    def moves(old: Old) -> None:
        if not truth(old.get("sync_ref_model", False)):
            raise DroppedError("sync_ref_model is off: the reference is fixed")
        if not old.get("beta", beta):
            raise DroppedError("beta is 0: there is no reference")

    def steps(value: Any, old: Old) -> Settings:
        moves(old)
        return {"training.reference_sync_steps": old.get("ref_model_sync_steps", 512)}

    def share(value: Any, old: Old) -> Settings:
        moves(old)
        return {"training.reference_sync_share": value}

    rule = Rule(steps, "the reference moves if its steps are set")
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


def number(key: str) -> Rule:
    """A variable that holds a number."""
    return to(key, lambda text: float(text) if set(str(text).lower()) & set(".e") else int(text))


def performance(old: Old) -> Settings:
    """How often performance is logged, from two keys."""
    interval = old.get("performance_log_interval", 100)
    return {
        "training.performance_log_interval": interval
        if truth(old.get("enable_performance_logging", True))
        else 0
    }


def log_completions(value: Any, old: Old) -> Settings:
    """Sample completions, as often as losses are logged."""
    steps = int(old.get("logging_steps") or 10)
    return {"training.log_completions_steps": steps if truth(value) else 0}


WHOLE_DISTRIBUTION = "rollouts draw from the whole distribution, whose log-probabilities are trained"
MASKING = Rule(strategy, "diffusion is the method's own")
ADAPTIVE_LOSS = Rule(
    lambda value, old: (
        {"training.adaptive_loss": True}
        if truth(value) and masking_of(old) in ("adaptive", "optimized")
        else {}
    ),
    "only with adaptive or optimized masking",
)
GRPO: Table = {
    "masking_strategy": MASKING,
    "adaptive_loss": ADAPTIVE_LOSS,
    **same("num_generations", "num_iterations", "epsilon", "beta", "max_completion_length", "reward_weights"),
    "temperature": Rule(temperature),
    "log_completions": Rule(log_completions, "how often, in steps"),
    **drop_keys(
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "generation_kwargs",
        "cache_implementation",
        why=WHOLE_DISTRIBUTION,
    ),
    **drop_keys(
        "max_prompt_length",
        why="prompts are not cut; training.max_length bounds a prompt with its completion",
    ),
    **drop_keys("ds3_gather_for_generation", why="shards are gathered when needed"),
    **drop_keys("chat_template_kwargs", "pad_to_multiple_of", "shuffle_dataset", why="not needed here"),
}
"""Keys that all trainers share."""

DIFFUSION: Table = {
    "p_mask_prompt": Rule(prompts_masked),
    "remasking": to("training.policy", words(low_confidence="confidence", random="random")),
    "cfg_scale": drop("rollouts are not guided"),
    "mask_id": drop("found in the model"),
    "dataset": Rule(task, "the task's problems, style and published rewards"),
}

IMPROVED: Table = {
    "optimization.enable_mixed_precision": variable(OLDER["DIFFU_MIXED_PRECISION"]),
    "optimization.enable_gradient_checkpointing": switch("training.activation_checkpointing"),
    "optimization.generation_batch_size": to("training.rollout_batch_size"),
    "optimization.per_device_train_batch_size": to("training.per_device_train_batch_size"),
    **drop_keys("optimization.enable_profiling", "enable_profiling", why="use `unmask profile grpo`"),
    "optimization.memory_efficient_attention": drop("the fastest exact kernel is used"),
    **drop_keys(
        "optimization.cache_size",
        "masking.cache_size",
        "generation.enable_caching",
        why="caches bound themselves",
    ),
    "optimization.tensor_batch_size": drop("training.score_chunk sets the rows of a pass"),
    "masking.strategy_type": MASKING,
    "masking.p_mask_prompt": Rule(prompts_masked),
    "masking.initial_p_mask": Rule(masked_rate, "one setting for both ends"),
    "masking.final_p_mask": Rule(masked_rate, "one setting for both ends"),
    **drop_keys(
        "masking.num_precomputed",
        "masking.total_steps",
        "loss.total_steps",
        why="follows from the steps of the run",
    ),
    "generation.steps": to("training.steps"),
    "generation.gen_length": to("training.max_completion_length"),
    "generation.block_length": to("training.block_size"),
    "generation.temperature": Rule(temperature),
    "generation.cfg_scale": DIFFUSION["cfg_scale"],
    "generation.remasking": DIFFUSION["remasking"],
    "generation.mask_id": DIFFUSION["mask_id"],
    "loss.epsilon": to("training.epsilon"),
    "loss.beta": to("training.beta"),
    "loss.adaptive_loss": ADAPTIVE_LOSS,
    **drop_keys(
        "loss.initial_epsilon",
        "loss.final_epsilon",
        "loss.initial_beta",
        "loss.final_beta",
        why="epsilon and beta are constant",
    ),
    "loss.length_penalty_weight": drop("training.overlong_buffer bounds the length"),
    "reward.reward_weights": to("training.reward_weights"),
    **drop_keys(
        "reward.use_new_rewards",
        "reward.correct_reward",
        "reward.format_reward",
        why="rewards are those published for the task",
    ),
    **drop_keys(
        "reward.enable_logging", "reward.log_probability", why="every reward is logged at every logged step"
    ),
    "log_memory_usage": switch("training.log_memory_usage"),
    **dict.fromkeys(
        ("performance_log_interval", "enable_performance_logging"),
        Rule(lambda value, old: performance(old), "0 is never"),
    ),
    "save_performance_stats": drop("they are in the logs"),
    "_metadata": drop("a manifest is written with every run"),
}
"""Rules of ImprovedDiffuGRPOConfig, whose keys are in sections."""

DIFFU_VARIABLES: Table = {
    **{name: variable(known) for name, known in OLDER.items()},
    "DIFFU_DATASET": Rule(
        lambda value, old: task(value, old) if value in TASKS else OLDER["DIFFU_DATASET"].read(value)
    ),
    "DIFFU_BATCH_SIZE": Rule(batch_size, "the batch of generation if DIFFU_TRAIN_BATCH_SIZE is set"),
    "DIFFU_TRAIN_BATCH_SIZE": number("training.per_device_train_batch_size"),
    "DIFFU_NUM_ITERATIONS": number("training.num_iterations"),
    "DIFFU_P_MASK_PROMPT": number("training.prompt_mask_rate"),
    "DIFFU_GENERATION_STEPS": number("training.steps"),
    "DIFFU_EPSILON": number("training.epsilon"),
    "DIFFU_BETA": number("training.beta"),
    "DIFFU_ENABLE_GRADIENT_CHECKPOINTING": switch("training.activation_checkpointing"),
    "DIFFU_TENSOR_BATCH_SIZE": IMPROVED["optimization.tensor_batch_size"],
    "DIFFU_ENABLE_PROFILING": IMPROVED["optimization.enable_profiling"],
    "mode": drop("give --mode on the command line: it depends on the machine"),
}

LORA_OF_TRL = {
    "r": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
}
LORA_LEFT = drop_keys(
    *[
        "lora_task_type",
        "peft_task_type",
        "lora_modules_to_save",
        "lora_target_parameters",
        "use_rslora",
        "use_dora",
        "bias",
        "modules_to_save",
    ],
    why="adapters are plain LoRA on linear layers",
)
D1: Table = {
    **SETTINGS_OF_MODEL,
    **GRPO,
    **reference(beta=0.04),
    **DIFFUSION,
    **IMPROVED,
    **DIFFU_VARIABLES,
    **lora_if(None, LORA_OF_TRL),
    **LORA_LEFT,
    "use_peft": Rule(lambda value, old: {}, "d1 always trains adapters"),
    "model_path": to("model.path", str),
    "block_length": to("training.block_size"),
    "diffusion_steps": to("training.steps"),
    "generation_batch_size": to("training.rollout_batch_size"),
    "random_masking": drop("every update draws new masks"),
    **drop_keys(
        *[
            "use_vllm",
            "vllm_device",
            "vllm_gpu_memory_utilization",
            "vllm_dtype",
            "vllm_max_model_len",
            "vllm_enable_prefix_caching",
        ],
        *["vllm_guided_decoding_regex"],
        why="a diffusion model samples in process, or from `unmask serve`",
    ),
}


def d1_defaults(old: Old, program: str | None) -> Settings:
    """Defaults of DiffuGRPOConfig that differ from Unmask's."""
    adapters: Settings = {"lora.r": 16, "lora.alpha": 32, "lora.dropout": 0.05}
    learning: Settings = {"training.learning_rate": 1e-6, "training.lr_scheduler_type": "linear"}
    sampling: Settings = {
        "training.max_completion_length": 256,
        "training.steps": 64,
        "training.block_size": 64,
        "training.temperature": 0.9,
        "training.score_temperature": 1.0,
    }
    loss: Settings = {"training.method": "diffu-grpo", "training.beta": 0.04, "training.epsilon": 0.2}
    strategies = masking_of(old) != "diffusion"
    return learning | adapters | sampling | loss | ({} if strategies else {"training.prompt_mask_rate": 0.3})
