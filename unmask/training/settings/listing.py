"""All settings of a training verb: those of its sections, its own under `training`, and those of
`transformers.TrainingArguments`.

`settings.json` has those under `training`, since reading them from the configs would import torch, which
takes seconds. `scripts/list_settings.py` writes it.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from unmask.artifacts import package_version
from unmask.config.listing import Setting, settings_of
from unmask.config.run import RunConfig, refuse_unknown
from unmask.errors import ConfigError, did_you_mean
from unmask.names import NAMES_ELSEWHERE, remedy_of_trainers, remedy_of_value
from unmask.training.config_fields import check_not_read, check_settings, check_stock, checked_value

SETTINGS = Path(__file__).with_name("settings.json")
SET_BY_RUN = ("output_dir", "data_source", "resume_from_checkpoint")
"""Fields of TrainingArguments that belong to a launch, not to the section `training`."""
METHOD = "method"
"""The group of the settings in no other one."""
SAMPLING, REWARDS, MEMORY, LOGS = "sampling of completions", "rewards", "memory and speed", "logs"
GROUPS: dict[str, tuple[str, ...]] = {
    "optimization": ("learning_rate", "lr_scheduler_type", "bf16"),
    SAMPLING: (),
    REWARDS: (),
    "noise": ("schedule", "weighting", "min_time", "max_time", "num_timesteps", "exact_count", "cart_p"),
    MEMORY: ("logprob_batch_size", "flash_attention", "optimizer_offload", "fsdp", "cudnn_benchmark"),
    LOGS: (
        *("logging_steps", "report_to", "logging_dir", "log_memory_usage", "log_variance_steps"),
        "hub_merge_adapters",
    ),
    "data": (
        "max_length",
        "text_column",
        "packing",
        "dataset_num_proc",
        "canvas_length",
        "bad_rows",
        "truncation_mode",
        "learn",
    ),
}
"""The settings of each group of `--help`, in the order in which it shows the groups."""
GRPO_GROUPS: dict[str, tuple[str, ...]] = {
    SAMPLING: (
        "temperature",
        "logprob_temperature",
        *("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "chat_template_kwargs"),
        "max_completion_length",
        "steps",
        "block_size",
        "remasking",
        "stop_at_eos",
        "after_eos",
        "constraint",
        "rollout",
        "max_staleness",
    ),
    REWARDS: (
        "reward_weights",
        "reward_workers",
        "reward_timeout",
        "reward_errors",
        "max_unscored_rollouts",
        "overlong_buffer",
        "difficulty",
        "difficulty_reward",
        "filter_zero_std_groups",
        "max_resample_rounds",
        "curriculum",
        "mask_truncated_completions",
    ),
    MEMORY: ("rollout_batch_size",),
    LOGS: (
        "log_completions",
        "log_completions_steps",
        "num_completions_to_print",
        "performance_log_interval",
    ),
}
"""The same for the settings of `grpo`: `block_size` of a conversion is another setting."""
VERBS = ("pretrain", "convert", "sft", "dpo", "grpo")
BASIC = {"bool": bool, "int": int, "float": float, "str": str, "null": None}
"""Types by their names in `Setting.type`."""
WORD = re.compile(r"[\w/.-]+")


@functools.cache
def listed_settings() -> dict[str, Any]:
    """What `settings.json` holds. With another version of transformers than it was written with, that
    version's fields are among the stock ones, without type and description."""
    listed = json.loads(SETTINGS.read_text(encoding="utf-8"))
    if listed["transformers"] != package_version("transformers"):
        known = {row[0] for verb in VERBS for row in (*listed["stock"], *listed[verb])}
        keys = [f"training.{name}" for name in fields_of_training_arguments() if name not in SET_BY_RUN]
        new = [key for key in keys if key not in known]
        listed["stock"] += [[key, "Any", None, ""] for key in new]
        listed |= {verb: listed[verb] + new for verb in VERBS}
    return listed


def fields_of_training_arguments() -> list[str]:
    """The fields of the installed `transformers.TrainingArguments`, read from its source."""
    found: Any = importlib.util.find_spec("transformers")
    [folder] = found.submodule_search_locations
    tree = ast.parse(Path(folder, "training_args.py").read_text(encoding="utf-8"))
    [fields] = (
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
    )
    names = [ast.unparse(node.target) for node in fields if isinstance(node, ast.AnnAssign)]
    return [name for name in names if not name.startswith("_")]


def stock_settings() -> dict[str, Setting]:
    """The fields of `transformers.TrainingArguments` that a run may set, by key."""
    return {row[0]: replace(setting_in(row), stock=True) for row in listed_settings()["stock"]}


def setting_in(row: Sequence[Any]) -> Setting:
    """The setting of a row of `settings.json`."""
    key, kind, default, described, *limits = row
    return Setting(key, kind, default, described, limits=limits[0] if limits else None)


@functools.cache
def settings_of_verb(verb: str) -> tuple[Setting, ...]:
    """The settings of a verb: first those under `training`, in the order of their declaration."""
    stock = stock_settings()
    return (
        *(stock[row] if isinstance(row, str) else setting_in(row) for row in listed_settings()[verb]),
        *settings_of(RunConfig),
    )


def remedy_elsewhere(name: str) -> str | None:
    """What to do about a name that a verb does not know: of a setting of other trainers, or of other verbs;
    None: it is none of these."""
    verbs = [] if name in NAMES_ELSEWHERE else _verbs_by_name().get(name)
    if verbs:
        return f"It is a setting of {', '.join(verbs)}"
    return remedy_of_trainers(name)


@functools.cache
def _verbs_by_name() -> dict[str, list[str]]:
    verbs: dict[str, list[str]] = {}
    for verb in VERBS:
        for row in listed_settings()[verb]:
            key = row if isinstance(row, str) else row[0]
            verbs.setdefault(key.removeprefix("training."), []).append(verb)
    return verbs


def check_training(verb: str, training: Mapping[str, Any], *, own_methods: bool = False) -> None:
    """Raise ConfigError for a key that the section `training` does not have, a value of another type or out
    of its range, or a setting without effect beside the others. What else cannot be combined is checked by
    the verb's config. `own_methods`: whether imported modules may have added methods."""
    settings = {each.name: each for each in settings_of_verb(verb) if each.key == f"training.{each.name}"}
    refuse_unknown(training, settings, "training", SET_BY_RUN, remedy_elsewhere)
    values = {name: setting.default for name, setting in settings.items()} | {**training}
    for name, value in training.items():
        kinds = settings[name].type.split(" | ")
        words = [kind for kind in kinds if kind not in BASIC]
        is_choice = "str" not in kinds and all(map(WORD.fullmatch, words))
        if not words:
            kind = functools.reduce(operator.or_, (BASIC[kind] for kind in kinds))
            values[name] = checked_value(name, value, kind, "training.")
        elif isinstance(value, str) and value not in words and is_choice:
            remedy = remedy_of_value(name, value, words)
            raise ConfigError(f"unknown {name} {value!r}", where=f"training.{name}", remedy=remedy)
    limited = {name: setting.limits for name, setting in settings.items() if setting.limits is not None}
    # What a setting needs may be set by a method if it is unset here.
    given = [
        name
        for name, limits in limited.items()
        if name in training
        and not training[name] is settings[name].default is False
        and all(values[needed.partition("=")[0]] is not None for needed in limits.get("needs", ()))
    ]
    try:
        check_settings(limited, given, values.__getitem__)
        check_not_read(training.keys(), values.__getitem__)
        check_stock(values.__getitem__)
    except ConfigError as error:
        raise error.moved(f"training.{error.where}") from error
    method, methods = training.get("method"), listed_settings()["methods"]
    named = isinstance(method, str) and ":" not in method and not method.endswith(".py")
    if named and method not in methods and not own_methods:
        remedy = did_you_mean(str(method), methods)
        raise ConfigError(f"unknown method {method!r}", where="training.method", remedy=remedy)


def grouped(verb: str) -> dict[str, list[Setting]]:
    """The settings that the verb adds to TrainingArguments or changes there, by group."""
    tables = (GRPO_GROUPS, GROUPS) if verb == "grpo" else (GROUPS,)
    group = {name: title for table in reversed(tables) for title, names in table.items() for name in names}
    groups: dict[str, list[Setting]] = {title: [] for title in (METHOD, *GROUPS)}
    for setting in settings_of_verb(verb):
        if setting.key.startswith("training.") and not setting.stock:
            groups[group.get(setting.name, METHOD)].append(setting)
    return {title: settings for title, settings in groups.items() if settings}


def matching(settings: Iterable[Setting], pattern: str | None) -> list[Setting]:
    """The settings whose key (these first) or description contains the pattern, or whose key or name it
    matches if it has `*` or `?`; None: all."""
    if pattern is None:
        return list(settings)
    text = pattern.lower()
    name = text.lstrip("-").replace("-", "_")
    if "*" in name or "?" in name:
        return [each for each in settings if fnmatchcase(each.key, name) or fnmatchcase(each.name, name)]
    found = [each for each in settings if name in each.key or text in each.help.lower()]
    return sorted(found, key=lambda each: name not in each.key)


def near_keys(name: str, settings: Iterable[Setting]) -> list[str]:
    """The keys of the settings with the most similar names, at most three, the nearest first."""
    keys: dict[str, list[str]] = {}
    for setting in settings:
        keys.setdefault(setting.name, []).append(setting.key)
    same = name if name in keys else NAMES_ELSEWHERE.get(name)
    names = difflib.get_close_matches(name, keys) if same is None else [same]
    return [key for near in names for key in keys.get(near, ())][:3]
