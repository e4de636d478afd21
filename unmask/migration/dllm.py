"""Old keys of dLLM: the flags of its scripts for text, supervised fine-tuning and reinforcement learning."""

from __future__ import annotations

import re
from typing import Any

from unmask.migration.reinforcement import D1, LORA_LEFT, LORA_OF_TRL
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
from unmask.migration.trl import TRL_GRPO, trl_defaults

SPEC = re.compile(r"(?P<name>[^\[]+?)\s*(\[(?P<parts>.*)\])?")


def data(value: str, old: Old) -> Settings:
    """Datasets as `NAME[train:5000,test:100,name:CONFIG] + NAME`."""
    sources, rows = [], []
    for spec in filter(None, map(str.strip, re.split(r"[|+]", value))):
        found = SPEC.fullmatch(spec)
        if found is None:
            raise ValueError
        parts = dict(part.strip().split(":", 1) for part in (found["parts"] or "").split(",") if part.strip())
        sources.append(found["name"] + (f":{parts['name']}" if "name" in parts else ""))
        rows.append({split: int(parts[split]) for split in ("train", "test") if split in parts})
        if unknown := parts.keys() - {"name", "train", "test"}:
            raise DroppedError(
                f"{', '.join(sorted(unknown))} of {spec!r} has no counterpart: write the rows to a file"
            )
    total = sum(counts["train"] for counts in rows) if all("train" in counts for counts in rows) else 0
    limit: Settings = {"data.max_rows": total} if total else {}
    if len(sources) > 1:
        shares = [{"weight": float(counts["train"])} if total else {} for counts in rows]
        mixture = [{"path": source, **share} for source, share in zip(sources, shares, strict=True)]
        return {"data.train": mixture} | limit
    settings: Settings = {"data.train": sources[0]} | limit
    if "test" in rows[0] and str(old.get("eval_strategy", "steps")) != "no":
        settings |= {"data.eval": [{"path": sources[0], "split": "test"}], "data.eval_rows": rows[0]["test"]}
    return settings


def too_long(value: Any, old: Old) -> Settings:
    """Rows beyond max_length."""
    return {"training.bad_rows": "skip"} if value == "filter" else {"training.truncation_mode": "keep_start"}


def weighting(value: Any, old: Old) -> Settings:
    if cart := re.fullmatch(r"cart\[geo_p:([\d.]+)\]", str(value)):
        return {"training.weighting": "cart", "training.cart_p": float(cart[1])}
    return {"training.weighting": words(scheduler="elbo", uniform="uniform")(value)}


def prompt_kept(value: Any, old: Old) -> Settings:
    if not truth(value):
        raise DroppedError(
            "prompts are not trained on in sft; give them as part of the completion, or use convert"
        )
    return {}


SHARED: RuleTable = {
    **SETTINGS_OF_MODEL,
    **lora_if(
        "lora",
        {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "target_modules"},
    ),
    **LORA_LEFT,
    **static("dllm"),
    "dataset_args": Rule(data, "rows and splits are settings of data; mixtures are lists"),
    "loss_weight_type": Rule(weighting, "the ELBO's weights by another name"),
    "eval_strategy": Rule(
        lambda value, old: {
            "training.eval_strategy": value if "test" in str(old.get("dataset_args")) else "no"
        },
        "only with held-out rows",
    ),
}
SFT: RuleTable = {
    **SHARED,
    **static("dllm-sft"),
    "loss_norm_type": to("training.loss_type", words(token="nll", sequence="sequence_nll")),
    "truncation": Rule(too_long, "rows that are too long are cut, or skipped and counted"),
    "block_size": Rule(
        lambda value, old: {"model.attention": "block_causal", "model.block_size": value},
        "the block of the attention",
    ),
    "mask_prompt_loss": Rule(prompt_kept, "the prompt is never hidden"),
}
TEXT: RuleTable = {
    **SHARED,
    **static("dllm-text"),
    "block_size": Rule(
        lambda value, old: {"training.attention": "block_causal", "training.block_size": value}
    ),
}
GRPO_FLAGS: RuleTable = {
    **TRL_GRPO,
    **lora_if(None, LORA_OF_TRL),
    **static("dllm-grpo"),
    **{key: D1[key] for key in ("p_mask_prompt", "remasking", "cfg_scale", "dataset")},
}


def defaults(old: Old, program: str | None) -> Settings:
    """Defaults of dLLM's training arguments that differ from Unmask's."""
    settings: Settings = tables()["defaults"]["dllm"] | {"training.num_train_epochs": 10}
    for pattern, values in tables()["scripts"].items():
        if re.search(pattern, program or ""):
            settings |= values
    if "max_steps" in old:
        settings.pop("training.num_train_epochs", None)
    return settings


def sft_defaults(old: Old, program: str | None) -> Settings:
    return defaults(old, program) | {"training.truncation_mode": "keep_start"}


def text_defaults(old: Old, program: str | None) -> Settings:
    """One stage that trains all weights, with bidirectional or block-causal attention."""
    return {"training.attention": "bidirectional", "training.stages": [{"share": 1.0}]} | defaults(
        old, program
    )


def grpo_defaults(old: Old, program: str | None) -> Settings:
    """Defaults of dLLM's DiffuGRPOConfig, which extends TRL's."""
    return trl_defaults(old, program) | tables()["defaults"]["dllm-grpo"]
