"""Old keys of TRL's GRPOConfig and its scripts, and the GRPO_* and VLLM_* variables of a program on top of
it."""

from __future__ import annotations

from typing import Any

from unmask.migration.reinforcement import (
    GRPO,
    LORA_LEFT,
    LORA_OF_TRL,
    number,
    reference,
    temperature,
    variable,
)
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
from unmask.training.settings.older_variables import OLDER_OF_GRPO

AGGREGATION = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant"}


def scaled(value: Any, old: Old) -> Settings:
    """The scaling of rewards."""
    word = str(value).lower()
    if word == "batch":
        raise DroppedError("rewards are scaled within their group or not at all")
    return {"training.advantage": "z-score" if word in ("true", "group") else "r-mean"}


def served(value: Any, old: Old) -> Settings:
    """Rollouts from a vLLM server; vLLM within the training process is not supported."""
    if not truth(old.get("use_vllm", False)):
        raise DroppedError("use_vllm is off: the trained model samples")
    if old.get("vllm_mode", "server") != "server":
        raise DroppedError("vLLM is a separate server here: start `vllm serve`, and set training.rollout")
    url = (
        old.get("vllm_server_base_url")
        or f"http://{old.get('vllm_server_host', '0.0.0.0')}:{old.get('vllm_server_port', 8000)}"
    )
    settings = {"training.rollout.backend": "vllm", "training.rollout.url": url}
    return settings | (
        {"training.rollout.timeout": old["vllm_server_timeout"]} if old.get("vllm_server_timeout") else {}
    )


def correction(value: Any, old: Old) -> Settings:
    """The cap of the importance weight of a server's tokens."""
    if not served_by_vllm(old):
        raise DroppedError("the trained model samples")
    if not truth(old.get("vllm_importance_sampling_correction", True)):
        return {"training.importance_cap": None}
    return {
        "training.importance_cap": old.get("vllm_importance_sampling_clip_max")
        or old.get("vllm_importance_sampling_cap")
        or 3.0
    }


def served_by_vllm(old: Old) -> bool:
    return truth(old.get("use_vllm", False)) and old.get("vllm_mode", "server") == "server"


def rewards(value: Any, old: Old) -> Settings:
    """Reward functions by their paths, and a reward model."""
    names = old.get("reward_funcs") or []
    functions = [names] if isinstance(names, str) else list(names)
    if "get_soft_overlong_punishment" in functions:
        raise DroppedError("set training.overlong_buffer for the length, and rewards for the other functions")
    model = old.get("reward_model_name_or_path")
    paths = [":".join(name.rsplit(".", 1)) if "." in name else f"trl.rewards:{name}" for name in functions]
    return {"rewards": [*([f"model:{model}"] if model else []), *paths]}


def unbiased(value: Any, old: Old) -> Settings:
    if not old.get("beta"):
        raise DroppedError("beta is 0: there is no KL term")
    return {"training.kl_unbiased": truth(value)}


SERVED = Rule(served, "a server is named by its address")
DATASET: Table = {
    "dataset_name": Rule(lambda value, old: named_data(old), "the configuration follows a colon"),
    "dataset_config": Rule(lambda value, old: named_data(old), "follows the name, after a colon"),
    "dataset_train_split": to("data.split"),
    "dataset_test_split": Rule(lambda value, old: held_out(old), "held-out rows are a separate source"),
    "eval_strategy": Rule(
        lambda value, old: (
            {"training.eval_strategy": value} | (held_out(old) if old.get("dataset_name") else {})
        )
    ),
    "dataset_streaming": switch("data.streaming"),
    "dataset_text_field": to("data.text_column"),
    "dataset_num_proc": drop("rows are read in one process"),
}


def named_data(old: Old) -> Settings:
    name, config = old.get("dataset_name"), old.get("dataset_config")
    if not name:
        raise DroppedError("there is no dataset_name")
    return {"data.train": f"{name}:{config}" if config else name}


def held_out(old: Old) -> Settings:
    """The test split, if it is used."""
    if str(old.get("eval_strategy", "no")) == "no":
        return {}
    return {
        "data.eval": [{"path": named_data(old)["data.train"], "split": old.get("dataset_test_split", "test")}]
    }


TRL_GRPO: Table = {
    **SETTINGS_OF_MODEL,
    **GRPO,
    **reference(beta=0.0),
    **DATASET,
    **lora_if("use_peft", LORA_OF_TRL),
    **LORA_LEFT,
    **same("epsilon_high"),
    "delta": to("training.dual_clip", why="bounds the ratio where the advantage is negative"),
    "importance_sampling_level": to("training.ratio"),
    "loss_type": to("training.aggregation", words(**AGGREGATION), "losses differ in how tokens count"),
    "scale_rewards": Rule(scaled, "how advantages follow from rewards"),
    "mask_truncated_completions": switch("training.mask_truncated"),
    "use_bias_correction_kl": Rule(unbiased),
    "use_vllm": SERVED,
    "vllm_mode": SERVED,
    "vllm_server_base_url": SERVED,
    "vllm_server_host": SERVED,
    "vllm_server_port": SERVED,
    "vllm_server_timeout": SERVED,
    **dict.fromkeys(
        (
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_cap",
        ),
        Rule(correction, "tokens count by the ratio of trainer to server"),
    ),
    "reward_funcs": Rule(rewards, "paths have a colon before the function"),
    "reward_model_name_or_path": Rule(rewards, "reward models are listed among the rewards"),
    "num_completions_to_print": to("training.log_completions_rows"),
    **drop_keys(
        "generation_batch_size",
        "steps_per_generation",
        why="a rollout is learnt from at once; rollout_batch_size bounds memory",
    ),
    **drop_keys(
        *[
            "vllm_gpu_memory_utilization",
            "vllm_max_model_length",
            "vllm_tensor_parallel_size",
            "vllm_enable_sleep_mode",
            "vllm_model_impl",
        ],
        *[
            "vllm_group_port",
            "vllm_structured_outputs_regex",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_min",
        ],
        why="is an option of the vLLM server",
    ),
    **drop_keys(
        *[
            "top_entropy_quantile",
            "entropy_coef",
            "use_adaptive_entropy",
            "off_policy_mask_threshold",
            "multi_objective_aggregation",
        ],
        why="has no counterpart",
    ),
    **drop_keys("num_generations_eval", why="an evaluation answers greedily, once"),
    **drop_keys("cast_lm_head_to_fp32", why="log-probabilities are taken in float32"),
    **drop_keys(
        "use_transformers_paged",
        "use_transformers_continuous_batching",
        "use_liger_loss",
        why="rollouts are batched",
    ),
    **drop_keys(
        "wandb_log_unique_prompts",
        "log_unique_prompts",
        "log_completions_hub_repo",
        "log_multimodal",
        why="has no counterpart",
    ),
}


def trl_defaults(old: Old, program: str | None) -> Settings:
    """Defaults of TRL's GRPOConfig that differ from Unmask's."""
    learning: Settings = {
        "training.learning_rate": 1e-6,
        "training.lr_scheduler_type": "linear",
        "training.activation_checkpointing": True,
    }
    learning |= {} if old.get("fp16") else {"training.bf16": True}
    loss: Settings = {
        "training.method": "diffu-grpo",
        "training.epsilon": 0.2,
        "training.advantage": "z-score",
        "training.aggregation": "token",
    }
    kl: Settings = {"training.kl_unbiased": True} if old.get("beta") else {"training.beta": 0.0}
    return learning | loss | kl | {"training.max_completion_length": 512}


def variables_defaults(old: Old, program: str | None) -> Settings:
    """Defaults of the program with GRPO_* variables, and of its GRPOConfig."""
    settings = trl_defaults({"beta": float(old.get("GRPO_BETA", 0))}, program)
    learning: Settings = {
        "training.learning_rate": 5e-6,
        "training.lr_scheduler_type": "cosine",
        "training.warmup_steps": 0.03,
    }
    learning |= {
        "training.weight_decay": 0.01,
        "training.num_train_epochs": 1,
        "training.optim": "adamw_8bit",
    }
    groups: Settings = {
        "training.num_generations": 4,
        "training.per_device_train_batch_size": 4,
        "training.temperature": 0.7,
    }
    adapters: Settings = {"lora.r": 32, "lora.alpha": 64, "lora.dropout": 0.05}
    return settings | learning | groups | adapters | {"training.logging_steps": 1, "training.save_steps": 100}


ROLLOUT_VARIABLES: Table = {
    **{name: variable(known) for name, known in OLDER_OF_GRPO.items()},
    "VLLM_SERVER_HOST": Rule(lambda value, old: server_address(value, old)),
    "GRPO_LEARNING_RATE": number("training.learning_rate"),
    "GRPO_NUM_EPOCHS": number("training.num_train_epochs"),
    "GRPO_BETA": number("training.beta"),
    "GRPO_TEMPERATURE": Rule(lambda value, old: temperature(float(value), old)),
    "GRPO_MAX_COMPLETION": number("training.max_completion_length"),
    "GRPO_MAX_GRAD_NORM": number("training.max_grad_norm"),
    "GRPO_LOGGING_STEPS": number("training.logging_steps"),
    "GRPO_SAVE_STEPS": number("training.save_steps"),
    "GRPO_SAVE_TOTAL_LIMIT": number("training.save_total_limit"),
    "GRPO_OUTPUT_DIR": to("output_dir", str),
    "GRPO_MAX_PROMPT": GRPO["max_prompt_length"],
    "GRPO_GENERATION_BATCH_SIZE": TRL_GRPO["generation_batch_size"],
    "GRPO_TOP_ENTROPY_QUANTILE": TRL_GRPO["top_entropy_quantile"],
    "LORA_R": number("lora.r"),
    "LORA_ALPHA": number("lora.alpha"),
    "LORA_DROPOUT": number("lora.dropout"),
    "LORA_TARGET_MODULES": to(
        "lora.target_modules", lambda text: [name.strip() for name in text.split(",") if name.strip()]
    ),
    "LORA_BIAS": LORA_LEFT["bias"],
}
"""The GRPO_* and VLLM_* variables, and others that their program reads."""


def server_address(value: Any, old: Old) -> Settings:
    if not truth(old.get("GRPO_USE_VLLM", False)):
        raise DroppedError("GRPO_USE_VLLM is off: the trained model samples")
    return OLDER_OF_GRPO["VLLM_SERVER_HOST"].read(str(value))
