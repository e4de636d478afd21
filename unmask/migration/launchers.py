"""Old keys of accelerate's configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unmask.migration.rules import (
    DroppedError,
    Old,
    Rule,
    RuleTable,
    Settings,
    precision,
    static,
)


def deepspeed(value: Mapping[str, Any], old: Old) -> Settings:
    """ZeRO by its stage, or by a mapping if it offloads to host memory."""
    if old.get("distributed_type") != "DEEPSPEED":
        raise DroppedError("distributed_type is not DEEPSPEED")
    if value.get("deepspeed_config_file"):
        return {"training.deepspeed": value["deepspeed_config_file"]}
    stage = int(value.get("zero_stage", 2))
    devices = {name: value.get(f"offload_{name}_device", "none") for name in ("optimizer", "param")}
    if stage == 0:
        raise DroppedError("ZeRO 0 shards nothing")
    if set(devices.values()) == {"none"}:
        return {"training.deepspeed": f"zero{stage}"}
    zero: dict[str, Any] = {"stage": stage} | {
        f"offload_{name}": {"device": device}
        for name, device in devices.items()
        if device != "none" and (name != "param" or stage == 3)
    }
    zero |= {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    auto = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    types = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
    return {
        "training.deepspeed": {
            **auto,
            **types,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
    }


def fsdp(value: Mapping[str, Any], old: Old) -> Settings:
    """FSDP, in version 2."""
    if old.get("distributed_type") != "FSDP":
        raise DroppedError("distributed_type is not FSDP")
    sharding = value.get("fsdp_reshard_after_forward", value.get("fsdp_sharding_strategy", "FULL_SHARD"))
    settings: dict[str, Any] = {
        "reshard_after_forward": str(sharding) in ("True", "true", "FULL_SHARD", "HYBRID_SHARD", "1")
    }
    names = {
        "fsdp_activation_checkpointing": "activation_checkpointing",
        "fsdp_offload_params": "cpu_offload",
    }
    settings |= {ours: value[theirs] for theirs, ours in names.items() if value.get(theirs) is not None}
    if layers := value.get("fsdp_transformer_layer_cls_to_wrap"):
        settings["transformer_layer_cls_to_wrap"] = layers.split(",") if isinstance(layers, str) else layers
    return {"training.fsdp": True, "training.fsdp_config": settings}


ACCELERATE: RuleTable = {
    **static("accelerate"),
    "mixed_precision": Rule(precision, "one switch for each type"),
    "deepspeed_config": Rule(deepspeed, "set here, so that the launcher needs no file"),
    "fsdp_config": Rule(fsdp, "set here, so that the launcher needs no file"),
}
