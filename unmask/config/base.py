"""The base of every config: typed, frozen, strict. An invalid value raises a `ConfigError` that names the key
and the remedy."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import reduce
from inspect import cleandoc
from types import NoneType
from typing import Any, ClassVar

import pydantic
from pydantic import ConfigDict, model_serializer
from pydantic_core import to_jsonable_python

from unmask.errors import ConfigError, did_you_mean
from unmask.redaction import SECRET_KEY, masked, masked_argument

PLAIN = (bool, int, float, str, NoneType)


class OnResume(StrEnum):
    """The kinds of settings. A setting that declares none is of the kind of its section, and else OTHER."""

    ACTS = "takes effect from here on"
    NEUTRAL = "does not change what is trained"
    OTHER = "makes another run"


def list_fields(config: type, described: Mapping[str, tuple[Any, str]]) -> None:
    """Add fields to the docstring of a config: their names, defaults (of plain types) and descriptions."""
    lines = [
        f"    {name}{f' ({default!r})' if type(default) in PLAIN else ''}: {' '.join(description.split())}"
        for name, (default, description) in described.items()
    ]
    config.__doc__ = "\n".join([cleandoc(config.__doc__ or ""), "\nFields and their defaults:\n", *lines])


class Config(pydantic.BaseModel):
    """Base of every config: keyword-only, frozen, unknown keys refused.

    Raises:
        ConfigError: at construction; `where` is the dotted key.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    on_resume: ClassVar[OnResume] = OnResume.OTHER
    """The kind of those of its settings that declare none; another is declared by `Annotated[TYPE,
    OnResume.KIND]`."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise _config_error(error, values, type(self)) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        list_fields(
            cls, {name: (each.default, each.description or "") for name, each in cls.model_fields.items()}
        )

    def without_effect(self) -> Iterator[ConfigError]:
        """An error for each setting that the others leave without effect. It is raised if the setting is
        given, also with the value of its default, unless it asks for nothing (0, False, None). Dumps and
        records leave these settings out, so that they are accepted again."""
        return iter(())

    def check(self) -> None:
        """Raise ConfigError for settings that contradict one another."""

    def model_post_init(self, _: object) -> None:
        for error in self.without_effect():
            if error.where in self.model_fields_set and getattr(self, error.where):
                raise error
        self.check()

    # not dict[str, Any]: pydantic 2.10 looks the names up in the modules of the subclasses
    @model_serializer(mode="wrap")
    def _leave_out_without_effect(self, dump: pydantic.SerializerFunctionWrapHandler) -> dict[str, object]:
        left_out = {error.where for error in self.without_effect()}
        return {name: value for name, value in dump(self).items() if name not in left_out}

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            known = name in type(self).model_fields
            remedy = (
                f"Make another: {type(self).__name__}({name}=...)"
                if known
                else did_you_mean(name, type(self).model_fields)
            )
            raise ConfigError(
                "cannot be set later" if known else "is not a known key", where=name, remedy=remedy
            )
        super().__setattr__(name, value)

    # Makes pydantic validate nested configs in place, so that an error keeps its whole path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


OPTIONS = {"model.path": "--model PATH_OR_ID", "output_dir": "--output DIR"}
"""The options of training verbs that set what is required."""


def listed(value: Any) -> Any:
    """A single text as a list of it."""
    return [value] if isinstance(value, str) else value


def _config_error(error: pydantic.ValidationError, values: dict[str, Any], cls: type[Config]) -> ConfigError:
    """The first of pydantic's errors in Unmask's words. Unknown keys come first, since a misspelt key also
    leaves another one missing; then the most deeply nested errors, since the alternatives of a section
    include single values."""
    errors = sorted(
        error.errors(),
        key=lambda one: (one["type"] != "extra_forbidden", -len(_locate(one["loc"], values)[0])),
    )
    path, value = _locate(errors[0]["loc"], values)
    cause = errors[0].get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # raised by the config itself
        return cause.moved(".".join([*path, cause.where] if cause.where else path))
    if errors[0]["type"] == "extra_forbidden":
        return ConfigError(
            "is not a known key",
            where=".".join(path),
            remedy=did_you_mean(path[-1], _fields_at(cls, path[:-1])),
        )
    if errors[0]["type"] == "missing":
        key = ".".join([*path, str(errors[0]["loc"][-1])])
        option = OPTIONS.get(MEANT.get(key, key), f"{key}=VALUE")
        return ConfigError("is required and not set", where=key, remedy=f"Set it, for example with {option}")
    return refused([one for one in errors if _locate(one["loc"], values)[0] == path], value, ".".join(path))


def refused(errors: Sequence[Any], value: Any, where: str) -> ConfigError:
    """The error for a value; several errors of pydantic are the alternatives of a union."""
    wanted = " or ".join(
        dict.fromkeys(re.sub(r"^Input should be |^Value error, ", "", one["msg"]) for one in errors)
    )
    wanted = re.sub(r"a valid list$", "a valid list, such as '[A, B]'", wanted)
    found = (
        masked_argument(value)
        if isinstance(value, str) and not SECRET_KEY.search(where)
        else masked(value, where)
    )
    kinds = {one["type"] for one in errors}
    if kinds == {"model_type"}:
        return valued_section(found, where, where.rpartition(".")[2])
    example = (
        f", in quotes: '\"{value}\"'" if kinds == {"string_type"} and isinstance(value, int | float) else ""
    )
    return ConfigError(f"{found!r} is not valid", where=where, remedy=f"It should be {wanted}{example}")


MEANT = {"model": "model.path", "data": "data.train"}
"""What is meant by a section that is given a value: `model=gpt2`."""


def valued_section(value: Any, where: str, name: str) -> ConfigError:
    """The error for a section that is given a value."""
    remedy = f"Set {MEANT[name]}, or another of its keys" if name in MEANT else f"Set its keys, {name}.NAME"
    return ConfigError(f"is a section of settings, not the value {value!r}", where=where, remedy=remedy)


def _locate(loc: Sequence[str | int], values: Any) -> tuple[list[str], Any]:
    """The keys of an error's location that are in the input (it also contains names of union members), and
    the value at them."""
    path = []
    for part in loc:
        inside = (
            part in values if isinstance(values, dict) else isinstance(values, list) and isinstance(part, int)
        )
        if inside:
            values = values[part]
            path.append(str(part))
    return path, values


def _fields_at(cls: type[Config], path: Sequence[str]) -> list[str]:
    """The keys of the section `path` of a config."""
    for part in path:
        if not part.isdecimal():  # a place in a list
            cls = next(
                one
                for one in type_args(cls.model_fields[part].annotation)
                if isinstance(one, type) and issubclass(one, Config)
            )
    return list(cls.model_fields)


def type_args(annotation: Any) -> Iterator[Any]:
    """An annotation and its nested arguments."""
    yield annotation
    for inner in typing.get_args(annotation):
        yield from type_args(inner)


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
