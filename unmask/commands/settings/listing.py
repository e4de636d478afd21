"""All settings of a training verb: those of its sections, its own under `training`, and those of `transformers.TrainingArguments`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, get_type_hints

from transformers import TrainingArguments

from unmask.commands.verbs import VERBS
from unmask.config.listing import Setting, one_line, plain_default, settings_of, type_name
from unmask.config.run import RunConfig
from unmask.errors import NAMES_ELSEWHERE
from unmask.training.config import TrainingConfig

SET_BY_RUN = ("output_dir", "data_source", "resume_from_checkpoint")
"""Fields of TrainingArguments that belong to a launch, not to the section `training`."""
METHOD = "method"
"""The group of the settings in no other one."""
SAMPLING, REWARDS, MEMORY, LOGS = "sampling of completions", "rewards", "memory and speed", "logs"
GROUPS: dict[str, tuple[str, ...]] = {
    "optimisation": ("learning_rate", "lr_scheduler_type", "bf16"),
    SAMPLING: (),
    REWARDS: (),
    "noise": ("schedule", "weighting", "min_time", "max_time", "num_timesteps", "exact_count", "cart_p"),
    MEMORY: ("score_chunk", "flash_attention", "optimizer_offload", "fsdp", "cudnn_benchmark"),
    LOGS: ("logging_steps", "report_to", "logging_dir", "log_memory_usage", "log_variance_steps"),
    "data": (
        *("max_length", "text_column", "packing", "token_cache", "canvas_length", "bad_rows", "truncate_prompt", "truncate_completion"),
        "learn",
    ),
}
"""The settings of each group of `--help`, in the order in which it shows the groups."""
OF_GRPO: dict[str, tuple[str, ...]] = {
    SAMPLING: (
        *("temperature", "score_temperature", "max_completion_length", "steps", "block_size", "policy", "stop_at_eos", "beyond_eos"),
        *("constraint", "rollout", "max_staleness"),
    ),
    REWARDS: (
        *("reward_weights", "reward_workers", "reward_timeout", "reward_errors", "max_unscored_rollouts", "overlong_buffer"),
        *("difficulty", "difficulty_reward", "drop_equal_groups", "dynamic_sampling", "curriculum", "mask_truncated"),
    ),
    MEMORY: ("rollout_batch_size",),
    LOGS: ("log_completions_steps", "log_completions_rows", "performance_log_interval"),
}
"""The same for the settings of `grpo`: `block_size` of a conversion is another setting."""
STOCK = {field.name: field for field in dataclasses.fields(TrainingArguments)}


@cache
def settings_of_verb(verb: str) -> tuple[Setting, ...]:
    """The settings of a verb: first those under `training`, in the order of their declaration."""
    return (*training_settings(VERBS[verb].config_class), *settings_of(RunConfig))


def training_settings(cls: type[TrainingConfig]) -> Iterator[Setting]:
    """The settings under `training`."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.init and field.name not in SET_BY_RUN:
            words = field.metadata.get("choices")
            shown = " | ".join(words) + (" | null" if field.default is None else "") if words else type_name(hints[field.name])
            described = one_line(field.metadata.get("help"))
            yield Setting(f"training.{field.name}", shown, plain_default(default_of(field)), described, stock=is_stock(field))


def is_stock(field: Field[Any]) -> bool:
    """Whether a field is of TrainingArguments, with the same default and description."""
    stock = STOCK.get(field.name)
    return stock is not None and (field.default, field.metadata.get("help")) == (stock.default, stock.metadata.get("help"))


def default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def grouped(verb: str) -> dict[str, dict[str, list[str]]]:
    """Default and one line of description of each setting that the verb adds to TrainingArguments or changes there, by group and name."""
    groups: dict[str, dict[str, list[str]]] = {title: {} for title in (METHOD, *GROUPS)}
    for setting in training_settings(VERBS[verb].config_class):
        if not setting.stock:
            name = setting.key.removeprefix("training.")
            own = OF_GRPO if verb == "grpo" else {}
            title = next((title for table in (own, GROUPS) for title, names in table.items() if name in names), METHOD)
            groups[title][name] = [setting.shown_default, setting.summary]
    return {title: settings for title, settings in groups.items() if settings}


def matching(settings: Iterable[Setting], pattern: str | None) -> list[Setting]:
    """The settings whose key (these first) or description contains the pattern, or whose key or name it matches if it has `*` or `?`; None:
    all."""
    if pattern is None:
        return list(settings)
    text = pattern.lower()
    name = text.lstrip("-").replace("-", "_")
    if "*" in name or "?" in name:
        return [setting for setting in settings if fnmatchcase(setting.key, name) or fnmatchcase(setting.name, name)]
    found = [setting for setting in settings if name in setting.key or text in setting.help.lower()]
    return sorted(found, key=lambda setting: name not in setting.key)


def near_keys(name: str, settings: Iterable[Setting]) -> list[str]:
    """The keys of the settings with the most similar names, at most three, the nearest first."""
    keys: dict[str, list[str]] = {}
    for setting in settings:
        keys.setdefault(setting.name, []).append(setting.key)
    same = name if name in keys else NAMES_ELSEWHERE.get(name)
    names = difflib.get_close_matches(name, keys) if same is None else [same]
    return [key for near in names for key in keys.get(near, ())][:3]
