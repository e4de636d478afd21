"""What changing a setting does to a run that is resumed. Every setting is of one of three kinds, declared where it is defined."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from unmask.config.base import Config, OnResume


def sections(cls: type[Config], prefix: str = "") -> Iterator[tuple[str, type[Config] | None, OnResume]]:
    """The dotted name of every setting of a config and its sections, with its kind. The second item is the class of a section, which comes
    before the settings in it, and None for a setting."""
    for name, field in cls.model_fields.items():
        declared = next((mark for mark in field.metadata if isinstance(mark, OnResume)), cls.on_resume)
        section = _section(field.annotation)
        yield prefix + name, section, declared
        if section is not None:
            yield from sections(section, f"{prefix}{name}.")


def kinds_of(cls: type[Config], prefix: str = "") -> dict[str, OnResume]:
    """The kind of every setting of a config, by dotted name."""
    return {name: kind for name, section, kind in sections(cls, prefix) if section is None}


def flat_values(config: Config, prefix: str = "") -> dict[str, Any]:
    """The value of every setting of a config, by dotted name; None for all settings of a section that is unset."""
    values: dict[str, Any] = {}
    found: dict[str, Any] = {"": config.model_dump(mode="json")}
    for name, section, _ in sections(type(config)):
        parent, _, key = name.rpartition(".")
        value = (found[parent] or {}).get(key)
        (found if section is not None else values)[name] = value
    return {prefix + name: value for name, value in values.items()}


def _section(annotation: Any) -> type[Config] | None:
    """The config class of a field that is a section or None; a list of configs is a single setting."""
    parts = typing.get_args(annotation) if type(None) in typing.get_args(annotation) else [annotation]
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Config)), None)
