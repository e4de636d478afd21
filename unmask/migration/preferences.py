"""Old keys of preference optimisation: an earlier trainer's config.yaml, and TRL's DPOConfig."""

from __future__ import annotations

from typing import Any

from unmask.migration.reinforcement import LORA_LEFT, LORA_OF_TRL
from unmask.migration.rules import (
    SETTINGS_OF_MODEL,
    DroppedError,
    Old,
    Rule,
    Settings,
    Table,
    drop,
    drop_keys,
    first_of,
    lora_if,
    precision,
    same,
    to,
    words,
)
from unmask.migration.trl import DATASET

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
DIFFUSION_DPO: Table = {
    **SETTINGS_OF_MODEL,
    **ADAPTERS,
    **same("beta", "max_length"),
    "preference_data_path": to("data.train", str),
    "eval_data_path": to("data.eval", str),
    "max_samples": to("data.max_rows"),
    "diffusion_steps": Rule(samples, "the noise levels at which a response is scored, one pass each"),
    "use_mixed_precision": Rule(precision, "one switch for each type"),
    "mixed_precision": Rule(precision, "one switch for each type"),
    "max_seq_length": to("training.max_length"),
    "reference_model_name_or_path": to("training.reference_model"),
    "max_prompt_length": drop("training.truncate_prompt cuts a prompt that leaves no room"),
    "mask_token_id": drop("found in the model"),
    "num_workers": to("training.dataloader_num_workers"),
}


def dpo_defaults(old: Old, program: str | None) -> Settings:
    """The defaults of that trainer are not known."""
    return {}


def loss(value: Any, old: Old) -> Settings:
    kind = words(sigmoid="sigmoid", ipo="ipo", hinge="hinge")(first_of(value))
    return {"training.loss_type": kind} | ({"training.length_normalization": True} if kind == "ipo" else {})


def smoothing(value: Any, old: Old) -> Settings:
    if first_of(old.get("loss_type") or "sigmoid") != "sigmoid":
        raise DroppedError("only sigmoid smooths labels")
    return {"training.label_smoothing": value}


TRL_DPO: Table = {
    **SETTINGS_OF_MODEL,
    **DATASET,
    **lora_if("use_peft", LORA_OF_TRL),
    **LORA_LEFT,
    **same("beta", "max_length", "rpo_alpha"),
    "loss_type": Rule(loss, "ipo averages over tokens, as there"),
    "label_smoothing": Rule(smoothing),
    "ref_model_name_or_path": to("training.reference_model"),
    "precompute_ref_log_probs": Rule(
        lambda value, old: {"training.reference": "stored" if value else "frozen"},
        "how the reference is kept",
    ),
    "max_prompt_length": DIFFUSION_DPO["max_prompt_length"],
    **drop_keys("precompute_ref_batch_size", why="training.per_device_eval_batch_size sets it"),
    **drop_keys(
        "truncation_mode",
        "max_completion_length",
        "padding_free",
        "pad_to_multiple_of",
        "pad_token",
        why="rows are packed",
    ),
    **drop_keys(
        "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha", why="the reference of dpo is fixed"
    ),
    **drop_keys(
        "f_divergence_type", "f_alpha_divergence_coef", why="the divergence is the reverse KL, TRL's default"
    ),
    **drop_keys("ld_alpha", "loss_weights", "use_weighting", "discopop_tau", why="has no counterpart"),
    **drop_keys("activation_offloading", why="training.activation_checkpointing saves the same memory"),
    **drop_keys(
        "reference_free",
        "force_use_ref_model",
        "model_adapter_name",
        "ref_adapter_name",
        why="set training.reference",
    ),
}


def trl_dpo_defaults(old: Old, program: str | None) -> Settings:
    """Defaults of TRL's DPOConfig that differ from Unmask's."""
    settings: Settings = {"training.beta": 0.1, "training.learning_rate": 1e-6, "training.max_length": 1024}
    return (
        settings
        | {"training.activation_checkpointing": True}
        | ({} if old.get("fp16") else {"training.bf16": True})
    )
