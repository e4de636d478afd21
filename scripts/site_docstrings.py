"""An extension of griffe, which reads docstrings for the API reference: settings are listed with their
descriptions and defaults."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import pydantic

SHARED = re.compile(r"^( {4,})(\w+(?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.M)


def singly(entry: re.Match[str]) -> str:
    """An entry of several names as one for each."""
    return "\n".join(entry[1] + name + entry[3] for name in entry[2].split(", "))


class Settings(griffe.Extension):
    """Writes the settings of a config into the docstring of its class, from what it says of itself when it is
    imported."""

    def on_module_instance(self, *, mod: griffe.Module, **_: Any) -> None:
        """Let folders without an __init__.py be packages too, as they are for Python."""
        folder = mod.filepath
        if isinstance(folder, Path) and folder.name == "__init__.py":
            add_packages(mod, folder.parent)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give each name of an entry such as "low, high: bounds" an entry of its own, which the format
        needs."""
        if obj.docstring:
            obj.docstring.value = SHARED.sub(singly, obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if not cls.name.endswith(("Config", "Stage")) or not cls.docstring:
            return
        config = getattr(importlib.import_module(cls.module.path), cls.name)
        lines = [f"    {name}: {text}" for name, text in described(config) if name in cls.members]
        if lines:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)
        for name, _ in described(config):
            if name in cls.members:
                cls.members[name].docstring = None


def add_packages(parent: griffe.Module, folder: Path) -> None:
    """Add the folders of a folder that hold modules but no __init__.py."""
    for inner in sorted(folder.iterdir()):
        if any(inner.glob("*.py")) and not (inner / "__init__.py").exists():
            package = griffe.Module(
                inner.name, filepath=[inner], modules_collection=parent.modules_collection
            )
            parent.set_member(inner.name, package)
            add_packages(package, inner)


def described(config: type[Any]) -> Iterator[tuple[str, str]]:
    """The settings of a config that have a description, each with it and with the default."""
    if issubclass(config, pydantic.BaseModel):
        for name, info in config.model_fields.items():
            if info.description:
                yield name, described_with(info.description, info.default)
    elif dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            if text := field.metadata.get("help"):
                yield field.name, described_with(text, field.default)


def described_with(text: str, default: Any) -> str:
    """A description on one line, with the default if it is a plain value."""
    plain = isinstance(default, str | int | float)
    return " ".join(text.split()) + (f" Default: `{default!r}`." if plain else "")
