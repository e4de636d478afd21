"""The settings of a config as a list, with the type, default and description of each."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

from unmask.config.base import Config, section_of

SENTENCE_END = re.compile(r"(?<!\.)(?<!e\.g)(?<!i\.e)(?<!Dr)(?<! al)\.(?:\s|$)")
SECTION = "section"
"""The type of a setting that holds others."""


@dataclass(frozen=True)
class Setting:
    """A setting of a run."""

    key: str
    """Dotted, as in `training.learning_rate`."""
    type: str
    """The type in words (`type_name`)."""
    default: Any
    """A value of a JSON type; None: unset."""
    help: str
    stock: bool = False
    """Whether it is a field of `transformers.TrainingArguments` that Unmask leaves as it is."""
    limits: Mapping[str, Any] | None = None
    """Its least and highest value (`low`, `high`), and the settings that it needs (`needs`), of those that
    have such."""

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return SENTENCE_END.split(self.help, maxsplit=1)[0]

    @property
    def is_switch(self) -> bool:
        """Whether it may be true or false."""
        return "bool" in self.type.split(" | ")

    @property
    def shown_default(self) -> str:
        """The default as it is written on the command line."""
        return (
            "unset"
            if self.default is None
            else self.default
            if isinstance(self.default, str)
            else json.dumps(self.default)
        )


def settings_of(cls: type[Config], prefix: str = "") -> Iterator[Setting]:
    """The settings of a config, each section before those inside it."""
    for name, field in cls.model_fields.items():
        inner = section_of(field.annotation)
        # pydantic 2.10 asks for validated data even where no factory reads it
        found = (
            None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        )
        yield Setting(
            prefix + name,
            SECTION if inner else type_name(field.annotation),
            plain_default(found),
            one_line(field.description),
        )
        if inner:
            yield from settings_of(inner, f"{prefix}{name}.")


def type_name(annotation: Any) -> str:
    """A type as words for YAML: `int | null`, `even | dream | ancestral`, `list[str]`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        both = any(word is True for word in arguments) and any(word is False for word in arguments)
        words = ("bool" if both and isinstance(word, bool) else str(word) for word in arguments)
        return " | ".join(dict.fromkeys(words))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(type_name, sorted(arguments, key=lambda one: one is type(None)))))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_name, arguments))}]"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation)
    return "null" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def plain_default(value: Any) -> Any:
    """A default in JSON types. Of a section: None if it is unset, else an empty mapping."""
    if isinstance(value, Config):
        return value.model_dump(exclude_defaults=True)
    if isinstance(value, list):
        return [plain_default(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def one_line(text: str | None) -> str:
    """A description without its line breaks."""
    return " ".join((text or "").split())
