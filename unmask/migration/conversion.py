"""Old keys of the three-stage converter: its model, training and hardware configurations."""

from __future__ import annotations

from typing import Any

from unmask.migration.rules import (
    DroppedError,
    Old,
    Rule,
    RuleTable,
    Settings,
    lora_if,
    static,
    to,
    truth,
    words,
)
from unmask.migration.rules import precision as mixed

CONVERTER_STAGES: tuple[dict[str, Any], ...] = (
    {"rate": 0.5, "train": ["attention", "time_embedding", "mask_token"]},
    {"rate": 1.0},
    {"rate": 0.3, "lm_loss": 0.1},
)
"""The stages of that converter: attention at half the rate, then all weights, then all at a low rate with a
next-token loss."""
HEADROOM_GB = 3.0
EPOCHS = tuple(f"stage{number}_epochs" for number in range(1, len(CONVERTER_STAGES) + 1))


def stages(value: Any, old: Old) -> Settings:
    """Epochs of the stages: their sum, and each stage's fraction."""
    counts = [old.get(name) or 0 for name in EPOCHS]
    staged = zip(counts, CONVERTER_STAGES, strict=True)
    parts = [{"share": float(epochs), **stage} for epochs, stage in staged if epochs]
    if not parts:
        raise DroppedError("no stage has an epoch")
    return {"training.num_train_epochs": sum(counts), "training.stages": parts}


def optimizer(value: Any, old: Old) -> Settings:
    """8-bit Adam, and paging of its state to host memory."""
    eight, paged = truth(old.get("use_8bit_adam", False)), truth(old.get("cpu_offload", False))
    if paged:
        return {"training.optim": "paged_adamw_8bit" if eight else "paged_adamw_32bit"}
    return {"training.optim": "adamw_bnb_8bit" if eight else "adamw_torch_fused"}


def data(value: Any, old: Old) -> Settings:
    config = old.get("dataset_config") or old.get("dataset_config_name")
    return {"data.train": f"{old['dataset_name']}:{config}" if config else old["dataset_name"]}


def precision(value: Any, old: Old) -> Settings:
    """Mixed precision with float32 weights: in 16 bits small updates would be lost."""
    return {"model.dtype": "float32"} | mixed(str(value).removeprefix("torch."), old)


def timesteps(value: Any, old: Old) -> Settings:
    return {"training.num_timesteps": value, "training.time_embedding": not truth(old.get("use_lora", False))}


def hardware(value: Any, old: Old) -> Settings:
    """The machine to plan for: the device, its usable memory, and the headroom of the converter's
    configurations."""
    device = old.get("device")
    if not device:
        raise DroppedError(
            "there is no device that it limits: give --recipe a6000-48gb, or a section `hardware`"
        )
    devices = [{"name": str(device), "memory_gb": float(value) + HEADROOM_GB}]
    return {"hardware.name": str(device), "hardware.devices": devices, "hardware.max_memory_gb": float(value)}


def deepspeed(value: Any, old: Old) -> Settings:
    if not truth(old.get("use_deepspeed", old.get("deepspeed_config") is not None)):
        raise DroppedError("use_deepspeed is off")
    return {"training.deepspeed": old.get("deepspeed_config") or "zero2"}


def output(value: Any, old: Old) -> Settings:
    return {"output_dir": str(old.get("output_dir") or f"outputs/{value}")}


EIGHT_BIT = Rule(optimizer, "the optimizer is one setting; paged ones move their state to host memory")
STAGE_EPOCHS = Rule(stages, "stages are data: fractions of the steps, rates, trained weights")
BATCHES: RuleTable = static("batches")
CONVERTER: RuleTable = {
    **lora_if(
        "use_lora",
        {
            "r": "lora_r",
            "alpha": "lora_alpha",
            "dropout": "lora_dropout",
            "target_modules": "lora_target_modules",
        },
    ),
    **BATCHES,
    **static("converter"),
    "num_timesteps": Rule(
        timesteps, "the model has a time embedding, as there; not with adapters, which cannot train it"
    ),
    "noise_schedule": to("training.schedule", words(linear="linear", cosine="cosine", geometric="geometric")),
    "use_bidirectional_attention": to(
        "training.attention", lambda value: "bidirectional" if truth(value) else "block_causal"
    ),
    **dict.fromkeys(EPOCHS, STAGE_EPOCHS),
    "use_8bit_adam": EIGHT_BIT,
    "dataset_name": Rule(data, "a dataset with configurations is NAME:CONFIGURATION"),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), Rule(data, "follows the name, after a colon")),
    "use_wandb": to("training.report_to", lambda value: "wandb" if truth(value) else "none"),
    "experiment_name": Rule(output, "runs have different folders"),
    "max_memory_gb": Rule(hardware, "in 1e9 bytes; what the run is planned for"),
    "dtype": Rule(precision, "mixed precision: weights in 16 bits lose small updates"),
    "mixed_precision": Rule(precision, "one switch for each type"),
    "cpu_offload": EIGHT_BIT,
    **dict.fromkeys(
        ("use_deepspeed", "deepspeed_config"),
        Rule(deepspeed, "zero1, zero2, zero3 or a file; start it with a launcher"),
    ),
}
