"""The known formats, and how the format of a file is recognized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unmask.config.run import RunConfig
from unmask.errors import ConfigError, require_known
from unmask.migration import dllm
from unmask.migration.conversion import BATCHES, CONVERTER
from unmask.migration.earlier import SECTIONS, earlier_names
from unmask.migration.files import MAPPINGS, OldFile, read_old
from unmask.migration.launchers import ACCELERATE
from unmask.migration.reinforcement import D1, DIFFU_VARIABLES, DIFFUSION, IMPROVED, d1_defaults
from unmask.migration.rules import Old, RuleTable, Settings, static, tables
from unmask.migration.trl import (
    DIFFUSION_DPO,
    ROLLOUT_VARIABLES,
    TRL_DPO,
    TRL_GRPO,
    trl_defaults,
    trl_dpo_defaults,
    variables_defaults,
)
from unmask.names import EARLIER_NAMES

Defaults = Callable[[Old, str | None], Settings]
"""The defaults of a format that differ from Unmask's, by dotted key, from the old values and the script."""


class Format(NamedTuple):
    """A format of old configurations. The fields of tables.yaml, which explains them, and its rules."""

    title: str
    verb: str | None
    table: RuleTable
    defaults: Defaults
    marks: frozenset[str]
    program: str = r"(?!)"


EARLIER = earlier_names()
TABLES: dict[str, tuple[RuleTable, Defaults]] = {
    "diffu-grpo": (D1, d1_defaults),
    "d1-sft": (BATCHES | static("d1-sft"), lambda old, program: tables()["defaults"]["d1-sft"]),
    "diffusion-dpo": (DIFFUSION_DPO, lambda old, program: {}),
    "converter": (CONVERTER, lambda old, program: {"training.attention": "bidirectional"}),
    "grpo-variables": (ROLLOUT_VARIABLES, variables_defaults),
    "dllm-sft": (dllm.SFT, dllm.sft_defaults),
    "dllm-text": (dllm.TEXT, dllm.text_defaults),
    "dllm-grpo": (dllm.GRPO_FLAGS, dllm.grpo_defaults),
    "trl-grpo": (TRL_GRPO, trl_defaults),
    "trl-dpo": (TRL_DPO, trl_dpo_defaults),
    "accelerate": (ACCELERATE, lambda old, program: {}),
    "unmask": (EARLIER, lambda old, program: {}),
}
MARKS = {
    "diffu-grpo": (DIFFUSION.keys() | IMPROVED.keys() | DIFFU_VARIABLES.keys())
    - {"log_memory_usage", "mode"},
    "unmask": {f"{section}.{name}" for section in SECTIONS for name in EARLIER_NAMES} & EARLIER.keys(),
    "grpo-variables": {name for name in ROLLOUT_VARIABLES if name.startswith(("GRPO_", "VLLM_"))},
}
"""The keys of a format that no other has, besides the marks in tables.yaml."""


def _format(name: str, *, marks: Iterable[str] = (), **described: Any) -> Format:
    table, defaults = TABLES[name]
    return Format(
        table=table, defaults=defaults, marks=frozenset({*marks, *MARKS.get(name, ())}), **described
    )


FORMATS = {name: _format(name, **described) for name, described in tables()["formats"].items()}


def flat(values: Old) -> dict[str, Any]:
    """Values by key, or by `section.key` for sections in a table; unset values are left out."""
    sections = {key.partition(".")[0] for form in FORMATS.values() for key in form.table if "." in key}
    found: dict[str, Any] = {}
    for key, value in values.items():
        parts = (
            {f"{key}.{name}": part for name, part in value.items()}
            if key in sections and isinstance(value, dict)
            else {key: value}
        )
        found |= {name: part for name, part in parts.items() if part is not None}
    return found


def is_ours(values: Old) -> bool:
    """Whether a mapping, of sections or of dotted keys, is a config of Unmask, possibly with a misspelt
    key."""
    fields = RunConfig.model_fields
    return (bool(values) and values.keys() <= fields.keys()) or any(
        key.partition(".")[0] in fields and ("." in key or isinstance(value, dict))
        for key, value in values.items()
    )


def candidates(values: Old, program: str | None) -> list[str]:
    """The names of the formats that a configuration may have: among those with a mark in it, the ones that
    know most of its keys."""
    by_program = [name for name, form in FORMATS.items() if program and re.search(form.program, program)]
    keys = set(values) | {f"{key}={value}" for key, value in values.items() if isinstance(value, str)}
    marked = [name for name in by_program or FORMATS if by_program or keys & FORMATS[name].marks]
    known = {
        name: len(values.keys() & FORMATS[name].table.keys()) + len(keys & FORMATS[name].marks)
        for name in marked
    }
    return [name for name in marked if known[name] == max(known.values())]


def recognize(values: Old, program: str | None, where: str) -> str:
    """The name of the format.

    Raises:
        ConfigError: it is a config of Unmask, has no known format, or may have several.
    """
    found = candidates(values, program)
    if not found and is_ours(values):
        raise ConfigError(
            "is a config of Unmask already", where=where, remedy="Use it as it is: unmask VERB --config FILE"
        )
    if not found:
        titles = "; ".join(form.title for form in FORMATS.values())
        raise ConfigError("is of no known format", where=where, remedy=f"Known: {titles}")
    if len(found) > 1:
        named = " or ".join(f"{name} ({FORMATS[name].title})" for name in found)
        raise ConfigError(f"may be {named}", where=where, remedy=f"Say which: --format {found[0]}")
    return found[0]


def format_named(name: str) -> Format:
    """A format by its name. Raises ConfigError if there is none."""
    require_known(name, FORMATS, "format", where="--format")
    return FORMATS[name]


def merged(files: Iterable[OldFile]) -> dict[str, Any]:
    """The values of several files; later ones override earlier ones."""
    values: dict[str, Any] = {}
    for file in files:
        values |= flat(file.values)
    return values


def refuse_old(paths: Sequence[Path]) -> None:
    """Refuse old configurations where Unmask's are expected, with a ConfigError that names the command to
    convert them."""
    for path in paths:
        try:
            old = read_old(path)
        except ConfigError:  # reading it as a config of Unmask will say what is wrong
            continue
        values = flat(old.values)
        found = (
            candidates(values, old.program) if path.suffix not in MAPPINGS or not is_ours(old.values) else []
        )
        if found:
            titles = " or ".join(FORMATS[name].title.split(" (")[0] for name in found)
            remedy = f"Convert it first: unmask migrate {path} --output NEW.yaml"
            raise ConfigError(
                f"is a configuration of {titles}, not of Unmask", where=str(path), remedy=remedy
            )
