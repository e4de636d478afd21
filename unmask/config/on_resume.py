"""What changing a setting does to a run that is resumed. Every setting is of one of three kinds, declared
where it is defined."""

from __future__ import annotations

import typing
from functools import reduce
from typing import Any

from pydantic_core import to_jsonable_python

from unmask.config.base import Config, OnResume


def kinds_of(cls: type[Config], prefix: str = "") -> dict[str, OnResume]:
    """The kind of every setting of a config and its sections, by dotted name."""
    kinds: dict[str, OnResume] = {}
    for name, field in cls.model_fields.items():
        if section := section_of(field.annotation):
            kinds |= kinds_of(section, f"{prefix}{name}.")
        else:
            kinds[prefix + name] = next(
                (mark for mark in field.metadata if isinstance(mark, OnResume)), cls.on_resume
            )
    return kinds


def flat_values(config: Config, prefix: str = "") -> dict[str, Any]:
    """The value of every setting of a config, by dotted name; None for all settings of a section that is
    unset."""
    whole: Any = config
    found = {
        name: reduce(lambda held, key: getattr(held, key, None), name.split("."), whole)
        for name in kinds_of(type(config))
    }
    return {prefix + name: to_jsonable_python(value) for name, value in found.items()}


def section_of(annotation: Any) -> type[Config] | None:
    """The config class of a field that is a section or None; a list of configs is a single setting."""
    parts = typing.get_args(annotation) if type(None) in typing.get_args(annotation) else [annotation]
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Config)), None)
