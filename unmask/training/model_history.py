"""The record of a training run in the history of its model, which the model card shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import TrainerState, TrainingArguments

from unmask.artifacts import package_version

if TYPE_CHECKING:
    from unmask.training.config import TrainingConfig

PACKAGES = ("unmask", "torch", "transformers")
RESULT_FIELDS = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "weight_decay",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "fp16",
}
"""The fields of TrainingArguments that affect the result."""
WITHOUT_EFFECT = {
    "cudnn_benchmark",
    "data_source",
    "dataset_num_proc",
    "flash_attention",
    "hub_merge_adapters",
    "judge",
    "log_memory_usage",
    "log_variance_steps",
    "logging_dir",
    "logprob_batch_size",
}
"""The fields of a trainer's own config that do not affect the result."""
NOT_METRICS = (
    "epoch",
    "step",
    "learning_rate",
    "grad_norm",
    "memory_gb",
    "train_loss",
    "num_input_tokens_seen",
)


def history_entry(
    args: TrainingConfig,
    settings: dict[str, Any],
    state: TrainerState,
    *,
    rows: int | None,
    changes: Sequence[Any] = (),
) -> dict[str, Any]:
    """One entry of a model's history, of JSON types only.

    Args:
        settings: the settings that affect the result.
        state: has the steps, the training tokens without padding, and the log, oldest first.
        rows: the number of rows of training data; None for a stream.
        changes: the settings that were changed when the run was resumed: step, setting, and earlier value.
    """
    return {
        "verb": type(args).__name__.removesuffix("Config").lower(),
        **({"data": args.data_source} if args.data_source else {}),
        **({"rows": rows} if rows is not None else {}),
        "steps": state.global_step,
        "tokens": state.num_input_tokens_seen,
        "seed": args.seed,
        "settings": settings,
        **({"changes": list(changes)} if changes else {}),
        "metrics": last_metrics(state.log_history),
        "versions": {package: version for package in PACKAGES if (version := package_version(package))},
    }


def result_fields(args: TrainingConfig) -> list[dataclasses.Field[Any]]:
    """The learning rate, and the other fields that affect the result."""
    left_out = {field.name for field in dataclasses.fields(TrainingArguments)} - RESULT_FIELDS - {
        "learning_rate"
    } | WITHOUT_EFFECT
    return [field for field in dataclasses.fields(args) if field.name not in left_out]


def chosen_settings(args: TrainingConfig) -> dict[str, Any]:
    """The learning rate, and all settings that affect the result and differ from their defaults."""
    relevant = [field for field in result_fields(args) if field.name != "learning_rate"]
    factories = {
        field.name: field.default_factory()
        for field in relevant
        if field.default_factory is not dataclasses.MISSING
    }
    values = args.to_dict()
    defaults = factories | {"bf16": False}  # None means chosen at runtime: recorded if it was turned on
    chosen = {
        field.name: values[field.name]
        for field in relevant
        if getattr(args, field.name) != defaults.get(field.name, field.default)
    }
    return {"learning_rate": args.learning_rate} | chosen


def last_metrics(log: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The last value of each metric, without those of speed and memory and the summary of the run."""
    lines = [line for line in log if "train_loss" not in line]
    merged = {name: value for line in lines for name, value in line.items()}
    speed = ("_runtime", "_per_second")
    return {
        n: v
        for n, v in merged.items()
        if n not in NOT_METRICS and not n.endswith(speed) and not n.startswith("memory/")
    }
