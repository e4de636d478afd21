"""Old keys of TRL's GRPOConfig and DPOConfig and their scripts, of the config.yaml of Diffusion-DPO, and the
GRPO_* and VLLM_* variables of a program on top of TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unmask.migration.reinforcement import (
    GRPO,
    LORA_LEFT,
    LORA_OF_TRL,
    reference,
    temperature,
    variable,
)
from unmask.migration.rules import (
    SETTINGS_OF_MODEL,
    TRANSFORMERS,
    DroppedError,
    Old,
    Rule,
    RuleTable,
    Settings,
    lora_if,
    precision,
    static,
    tables,
    to,
    truth,
    words,
)
from unmask.names import VALUES_ELSEWHERE
from unmask.training.settings.older_variables import OLDER_GRPO_VARIABLES

LOSS_TYPES, SCALES = ("grpo", "dapo", "dr_grpo"), ("group", "none")
LOSSES = ("sigmoid", "ipo", "hinge", "bco_pair", "sft")


def renamed_value(name: str, value: Any, known: Sequence[str]) -> Settings:
    """The settings that do what a value of TRL does; `known`: the values that mean the same here. Raises
    DroppedError if there are none."""
    found = VALUES_ELSEWHERE[name].get(value) or {name: words(**dict(zip(known, known, strict=True)))(value)}
    if isinstance(found, str):
        raise DroppedError(found)
    return {f"training.{key}": each for key, each in found.items()}


def scaled(value: Any, old: Old) -> Settings:
    """The scaling of rewards."""
    word = str(value).lower()
    return renamed_value("scale_rewards", {"true": "group", "false": "none"}.get(word, word), SCALES)


def served(value: Any, old: Old) -> Settings:
    """Rollouts from a vLLM server; vLLM within the training process is not supported."""
    if not truth(old.get("use_vllm", False)):
        raise DroppedError("use_vllm is off: the trained model samples")
    if not served_by_vllm(old):
        raise DroppedError("vLLM is a separate server here: start `vllm serve`, and set training.rollout")
    url = (
        old.get("vllm_server_base_url")
        or f"http://{old.get('vllm_server_host', '0.0.0.0')}:{old.get('vllm_server_port', 8000)}"
    )
    timeout = old.get("vllm_server_timeout")
    settings = {"training.rollout.backend": "vllm", "training.rollout.url": url}
    return settings | ({"training.rollout.timeout": timeout} if timeout else {})


def correction(value: Any, old: Old) -> Settings:
    """The cap of the importance weight of a server's tokens."""
    if not served_by_vllm(old):
        raise DroppedError("the trained model samples")
    if not truth(old.get("vllm_importance_sampling_correction", True)):
        return {"training.vllm_importance_sampling_cap": None}
    return {
        "training.vllm_importance_sampling_cap": old.get("vllm_importance_sampling_clip_max")
        or old.get("vllm_importance_sampling_cap")
        or 3.0
    }


def served_by_vllm(old: Old) -> bool:
    return truth(old.get("use_vllm", False)) and old.get("vllm_mode", "server") == "server"


def rewards(value: Any, old: Old) -> Settings:
    """Reward functions by their paths, and a reward model."""
    names = old.get("reward_funcs") or []
    functions = [names] if isinstance(names, str) else names
    if "get_soft_overlong_punishment" in functions:
        raise DroppedError("set training.overlong_buffer for the length, and rewards for the other functions")
    model = old.get("reward_model_name_or_path")
    paths = [":".join(name.rsplit(".", 1)) if "." in name else f"trl.rewards:{name}" for name in functions]
    return {"rewards": [*([f"model:{model}"] if model else []), *paths]}


def unbiased(value: Any, old: Old) -> Settings:
    if not old.get("beta"):
        raise DroppedError("beta is 0: there is no KL term")
    return {"training.use_bias_correction_kl": truth(value)}


def named_data(value: Any, old: Old) -> Settings:
    name, config = old.get("dataset_name"), old.get("dataset_config")
    if not name:
        raise DroppedError("there is no dataset_name")
    return {"data.train": f"{name}:{config}" if config else name}


def held_out(value: Any, old: Old) -> Settings:
    """The test split, if it is used."""
    if str(old.get("eval_strategy", "no")) == "no":
        return {}
    path = named_data(value, old)["data.train"]
    return {"data.eval": [{"path": path, "split": old.get("dataset_test_split", "test")}]}


def evaluation(value: Any, old: Old) -> Settings:
    return {"training.eval_strategy": value} | (held_out(value, old) if old.get("dataset_name") else {})


DATASET: RuleTable = {
    **static("trl-data"),
    "dataset_name": Rule(named_data, "the configuration follows a colon"),
    "dataset_config": Rule(named_data, "follows the name, after a colon"),
    "dataset_test_split": Rule(held_out, "held-out rows are a separate source"),
    "eval_strategy": Rule(evaluation),
}
TRL_GRPO: RuleTable = {
    **SETTINGS_OF_MODEL,
    **GRPO,
    **reference(beta=0.0),
    **DATASET,
    **lora_if("use_peft", LORA_OF_TRL),
    **LORA_LEFT,
    **static("trl-grpo"),
    "delta": to("training.delta", why="bounds the ratio where the advantage is negative"),
    "loss_type": Rule(
        lambda value, old: renamed_value("loss_type", value, LOSS_TYPES), "losses differ in how tokens count"
    ),
    "scale_rewards": Rule(scaled, "how advantages follow from rewards"),
    "use_bias_correction_kl": Rule(unbiased),
    "top_k": to("training.top_k", lambda value: value or 0),
    "chat_template_kwargs": to("training.chat_template_kwargs"),
    **dict.fromkeys(
        (
            "use_vllm",
            "vllm_mode",
            "vllm_server_base_url",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
        ),
        Rule(served, "a server is named by its address"),
    ),
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
}


def trl_defaults(old: Old, program: str | None) -> Settings:
    """Defaults of TRL's GRPOConfig that differ from Unmask's."""
    settings: Settings = dict(tables()["defaults"]["trl-grpo"])
    settings |= {} if old.get("fp16") else {"training.bf16": True}
    return settings | (
        {"training.use_bias_correction_kl": True} if old.get("beta") else {"training.beta": 0.0}
    )


def variables_defaults(old: Old, program: str | None) -> Settings:
    """Defaults of the program with GRPO_* variables, and of its GRPOConfig."""
    settings = trl_defaults({"beta": float(old.get("GRPO_BETA", 0))}, program)
    return settings | tables()["defaults"]["grpo-variables"]


def server_address(value: Any, old: Old) -> Settings:
    if not truth(old.get("GRPO_USE_VLLM", False)):
        raise DroppedError("GRPO_USE_VLLM is off: the trained model samples")
    return OLDER_GRPO_VARIABLES["VLLM_SERVER_HOST"].read(str(value))


ROLLOUT_VARIABLES: RuleTable = {
    **static("grpo-variables"),
    **{name: variable(known) for name, known in OLDER_GRPO_VARIABLES.items()},
    "VLLM_SERVER_HOST": Rule(server_address),
    "GRPO_TEMPERATURE": Rule(lambda value, old: temperature(float(value), old)),
    "GRPO_MAX_PROMPT": GRPO["max_prompt_length"],
    "GRPO_GENERATION_BATCH_SIZE": TRANSFORMERS["generation_batch_size"],
    "LORA_TARGET_MODULES": to(
        "lora.target_modules", lambda text: [name.strip() for name in text.split(",") if name.strip()]
    ),
    "LORA_BIAS": LORA_LEFT["bias"],
}
"""The GRPO_* and VLLM_* variables, and others that their program reads."""


MOST_SAMPLES = 64
"""The largest number of noise levels read as passes; larger values are numbers of discrete times."""


def samples(value: Any, old: Old) -> Settings:
    """Noise levels at which a response is scored."""
    if value > MOST_SAMPLES:
        raise DroppedError(
            f"times are continuous; training.samples is the number of passes per response (8, not {value})"
        )
    return {"training.samples": value}


ADAPTERS = {**lora_if("use_lora", LORA_OF_TRL), **LORA_LEFT}
DIFFUSION_DPO: RuleTable = {
    **SETTINGS_OF_MODEL,
    **ADAPTERS,
    **static("diffusion-dpo"),
    "diffusion_steps": Rule(samples, "the noise levels at which a response is scored, one pass each"),
    **dict.fromkeys(("use_mixed_precision", "mixed_precision"), Rule(precision, "one switch for each type")),
}


def alpha(value: Any, old: Old) -> Settings:
    if old.get("f_divergence_type") != "alpha_divergence":
        raise DroppedError("only alpha_divergence has it")
    return {"training.f_alpha_divergence_coef": value}


def losses(old: Old) -> list[str]:
    value = old.get("loss_type") or "sigmoid"
    return [value] if isinstance(value, str) else list(value)


def loss(value: Any, old: Old) -> Settings:
    """The losses. Raises DroppedError if settings for one would act on others, too."""
    parts = [renamed_value("loss_type", name, LOSSES) for name in losses(old)]
    if len(parts) == 1:
        return parts[0]
    if any(len(part) > 1 for part in parts):
        raise DroppedError("length_normalization is of all losses of a list")
    return {"training.loss_type": [part["training.loss_type"] for part in parts]}


def smoothing(value: Any, old: Old) -> Settings:
    if "sigmoid" not in losses(old):
        raise DroppedError("only sigmoid smooths labels")
    return {"training.label_smoothing": value}


def rpo(value: Any, old: Old) -> Settings:
    """The SFT term of earlier versions."""
    if not value:
        raise DroppedError("there is no SFT term")
    return {"training.loss_type": ["sigmoid", "sft"], "training.loss_weights": [1.0, value]}


def moving(name: str) -> Rule:
    """A setting of a reference that moves, which runs beside the policy."""

    def read(value: Any, old: Old) -> Settings:
        if not truth(old.get("sync_ref_model", False)):
            raise DroppedError("sync_ref_model is off: the reference does not move")
        return {"training.reference": "frozen", f"training.{name}": value}

    return Rule(read)


TRL_DPO: RuleTable = {
    **SETTINGS_OF_MODEL,
    **DATASET,
    **lora_if("use_peft", LORA_OF_TRL),
    **LORA_LEFT,
    **static("trl-dpo"),
    "loss_type": Rule(loss),
    "label_smoothing": Rule(smoothing),
    "rpo_alpha": Rule(rpo, "the SFT term is a loss with a weight"),
    "f_alpha_divergence_coef": Rule(alpha),
    **{name: moving(name) for name in ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")},
    "precompute_ref_log_probs": Rule(
        lambda value, old: {"training.reference": "stored" if value else "frozen"},
        "how the reference is kept",
    ),
    "max_prompt_length": DIFFUSION_DPO["max_prompt_length"],
}


def trl_dpo_defaults(old: Old, program: str | None) -> Settings:
    """Defaults of TRL's DPOConfig that differ from Unmask's."""
    return tables()["defaults"]["trl-dpo"] | ({} if old.get("fp16") else {"training.bf16": True})
