"""Settings that are declared with what is refused of them: the fields of a config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, field, fields
from typing import Any, get_type_hints

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
) -> Any:
    """A field that knows what is refused.

    Args:
        default: its default.
        help: what it is.
        low, high: the least and the most of a number; NaN is neither.
        choices: all that a word can be.
        needs: settings without which it means nothing: "beta" is one that is on, "advantage=softmax" one that has this value,
            "loss_type=sigmoid|simpo" one that has either.
        otherwise: the default where neither a config nor a method gives it.
    """
    told = f"{help}; needs {' and '.join(map(_told, needs))}." if needs else f"{help}."
    return field(
        default=default, metadata={"help": told, "low": low, "high": high, "choices": choices, "needs": needs, "otherwise": otherwise}
    )


def changed(args: Any, each: Field[Any]) -> bool:
    """Whether a setting is there, and other than by default."""
    return getattr(args, each.name) not in (None, each.default)


def check_types(args: Any) -> None:
    """Refuse settings of another type than declared, where these were made by `setting`, and bring the others into it.

    Raises:
        ConfigError: one is refused.
    """
    hints = get_type_hints(type(args))
    for each in fields(args):
        if "needs" in each.metadata and not each.metadata["choices"]:  # those are words
            setattr(args, each.name, checked(getattr(args, each.name), hints[each.name], each.name))


def check_settings(args: Any, given: Callable[[Field[Any]], bool] | None = None) -> None:
    """Refuse settings of a config that are out of their range, unknown words, or without effect.

    Args:
        args: whose settings were made by `setting`; other fields are left alone.
        given: whether a setting is other than by itself; None: than its default.

    Raises:
        ConfigError: one is refused.
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
                raise ConfigError(f"{number} is refused", where=name, remedy=f"Use {' and '.join(bounds) or 'a number'}")
        for needed in each.metadata["needs"] if (given(each) if given else changed(args, each)) else ():
            other, _, wanted = needed.partition("=")
            there = getattr(args, other)
            if there not in wanted.split("|") if wanted else not there:
                raise ConfigError(f"needs {_told(needed)}", where=name, remedy=f"Leave it out, or set {_told(needed)}")


def _told(needed: str) -> str:
    return needed.replace("|", " or ")


@contextmanager
def beside(key: str) -> Iterator[None]:
    """Inside, an error about a setting names this one too."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.what, where=f"{key} and {error.where}", remedy=error.remedy) from error
