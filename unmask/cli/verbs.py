"""The training verbs: the trainer and config of each, and how it makes rows from a task's problems."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unmask.config.run import DataConfig, RunConfig
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.data.sources import pose
from unmask.errors import ConfigError
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer
from unmask.records import RowSequence
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.supervised.pretrain import PretrainConfig, PretrainTrainer
from unmask.supervised.sft import SFTConfig, SFTTrainer
from unmask.tasks import Row, Task, as_puzzle
from unmask.training.config import TrainingConfig


@dataclass(frozen=True)
class Verb:
    """The differences between the training verbs."""

    trainer: Callable[..., Any]
    config_class: type[TrainingConfig]
    task_rows: Callable[[Task, list[Row], DataConfig], RowSequence]
    canvas: str | None = None
    """The setting whose default is the length of the task's longest completion."""
    trainer_arguments: Callable[[RunConfig, Task | None], dict[str, Any]] = lambda config, task: {}
    """Further arguments of the trainer, besides model, settings and rows."""


def as_text(task: Task, rows: list[Row], data: DataConfig) -> RowSequence:
    """Problems with their answers, as plain text."""
    refuse_chat(data)
    return [{"text": row["prompt"] + row["completion"]} for row in rows]


def as_pairs(task: Task, rows: list[Row], data: DataConfig) -> RowSequence:
    """Prompts and completions, in the given style."""
    return pose(task, rows, data.style)


def as_preferences(task: Task, rows: list[Row], data: DataConfig) -> RowSequence:
    """Preferences for the correct answer over a corrupted one. Raises ConfigError if the task cannot generate
    problems."""
    refuse_chat(data)
    rng, corrupt = random.Random(data.seed), as_puzzle(task).corrupt
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": corrupt(row, rng)} for row in rows
    ]


def refuse_chat(data: DataConfig) -> None:
    if data.style == "chat":
        raise ConfigError(
            "this verb takes a task's problems as text", where="data.style", remedy="Use data.style=plain"
        )


VERBS = {
    "pretrain": Verb(PretrainTrainer, PretrainConfig, as_text),
    "convert": Verb(ConvertTrainer, ConvertConfig, as_pairs, "canvas_length"),
    "sft": Verb(SFTTrainer, SFTConfig, as_pairs, "canvas_length"),
    "dpo": Verb(
        DPOTrainer,
        DPOConfig,
        as_preferences,
        "canvas_length",
        lambda config, task: {"sampler": config.sampler},  # of the completions that a judge compares
    ),
    "grpo": Verb(
        GRPOTrainer,
        GRPOConfig,
        as_pairs,
        "max_completion_length",
        lambda config, task: {"reward_funcs": config.rewards or ([task.name] if task else [])},
    ),
}
