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
    first_of,
    lora_if,
    precision,
    static,
    tables,
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
    **static("diffusion-dpo"),
    "diffusion_steps": Rule(samples, "the noise levels at which a response is scored, one pass each"),
    "use_mixed_precision": Rule(precision, "one switch for each type"),
    "mixed_precision": Rule(precision, "one switch for each type"),
}


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
    **static("trl-dpo"),
    "loss_type": Rule(loss, "ipo averages over tokens, as there"),
    "label_smoothing": Rule(smoothing),
    "precompute_ref_log_probs": Rule(
        lambda value, old: {"training.reference": "stored" if value else "frozen"},
        "how the reference is kept",
    ),
    "max_prompt_length": DIFFUSION_DPO["max_prompt_length"],
}


def trl_dpo_defaults(old: Old, program: str | None) -> Settings:
    """Defaults of TRL's DPOConfig that differ from Unmask's."""
    return tables()["defaults"]["trl-dpo"] | ({} if old.get("fp16") else {"training.bf16": True})
