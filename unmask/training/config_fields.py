"""Config fields that are declared together with their valid values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, field, fields
from functools import cache
from typing import Any, get_type_hints

from unmask.config.base import OnResume
from unmask.config.run import checked
from unmask.errors import ConfigError


def setting(
    default: Any,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: Sequence[str] = (),
    needs: Sequence[str] = (),
    otherwise: Any = None,
    on_resume: OnResume | None = None,
) -> Any:
    """A config field with its valid values.

    Args:
        help: its description.
        low, high: inclusive bounds of a number; NaN is refused.
        choices: the valid words.
        needs: settings without which it has no effect: "beta" must be on, "advantage=softmax" one that has this value,
            "loss_type=sigmoid|simpo" one that has either.
        otherwise: the default if neither a config nor a method sets it.
        on_resume: what changing it does to a run that is resumed; None: as for the field of TrainingArguments, and else another run.
    """
    described = f"{help}; needs {' and '.join(map(_described, needs))}." if needs else f"{help}."
    checks = {"low": low, "high": high, "choices": choices, "needs": needs, "otherwise": otherwise}
    return field(default=default, metadata={"help": described, "on_resume": on_resume, **checks})


NUMBERS = (int, float, int | None, float | None)
"""The types of settings that are numbers, those of transformers included."""


def check_types(args: Any) -> None:
    """Convert fields that were declared by `setting`, and all numbers, to their declared types. Raises ConfigError for a value of another
    type."""
    hints = _declared_types(type(args))  # type: ignore[arg-type]  # mypy takes classes for unhashable
    for each in fields(args):
        if ("needs" in each.metadata and not each.metadata["choices"]) or hints[each.name] in NUMBERS:  # choices are words
            setattr(args, each.name, checked(getattr(args, each.name), hints[each.name], each.name))


@cache
def _declared_types(cls: type[Any]) -> dict[str, Any]:
    """Of all fields: reading them takes longer than all checks."""
    return get_type_hints(cls)


def check_settings(args: Any, is_set: Callable[[Field[Any]], bool]) -> None:
    """Raise ConfigError for a field declared by `setting` that is out of its range, an unknown word, or without effect.

    Args:
        is_set: whether a setting was set.
    """
    for each in fields(args):
        if "needs" not in each.metadata:
            continue
        name, value, known = each.name, getattr(args, each.name), each.metadata["choices"]
        low, high = each.metadata["low"], each.metadata["high"]
        if known and value is not None and value not in known:
            raise ConfigError(f"unknown {name} {value!r}", where=name, remedy=f"Use one of {', '.join(known)}")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not (low <= number <= high and math.isfinite(number)):
                bounds = [f"at {end} {bound:g}" for end, bound in (("least", low), ("most", high)) if math.isfinite(bound)]
                raise ConfigError(f"{number} is out of range", where=name, remedy=f"Use {' and '.join(bounds) or 'a finite number'}")
        for needed in unmet(args, each) if is_set(each) else ():
            raise ConfigError(f"needs {_described(needed)}", where=name, remedy=f"Leave it out, or set {_described(needed)}")


def unmet(args: Any, field: Field[Any]) -> list[str]:
    """The settings that a field needs and that are not set."""
    lacking = []
    for needed in field.metadata.get("needs", ()):
        other, _, wanted = needed.partition("=")
        there = getattr(args, other)
        if there not in wanted.split("|") if wanted else not there:
            lacking.append(needed)
    return lacking


def _described(needed: str) -> str:
    return needed.replace("|", " or ")


@contextmanager
def naming_setting_too(key: str) -> Iterator[None]:
    """Inside, ConfigErrors also name this setting."""
    try:
        yield
    except ConfigError as error:
        raise error.moved(f"{key} and {error.where}") from error
