"""Config fields that are declared together with their valid values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, field, fields
from functools import cache
from typing import Any, TypeVar, get_origin, get_type_hints

from unmask.config.base import OnResume, list_fields, type_args
from unmask.config.run import checked
from unmask.errors import ConfigError
from unmask.names import VALUES_ELSEWHERE, remedy_of_value

Config = TypeVar("Config", bound=type[Any])


class Metadata(dict[str, Any]):
    """What `setting` declares, by name. As a mapping it has the help alone, because the parsers of
    transformers and TRL (`HfArgumentParser`) give all of it to argparse."""

    def keys(self) -> Any:
        return self.copy().keys()

    def copy(self) -> dict[str, Any]:
        return {"help": self["help"]}


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
        needs: settings without which it has no effect: "beta" must be on, "scale_rewards=softmax" one that
            has this value (or a list with it), "loss_type=sigmoid|simpo" one that has either.
        otherwise: the default if neither a config nor a method sets it.
        on_resume: what changing it does to a run that is resumed; None: as for the field of
            TrainingArguments, and else another run.
    """
    described = f"{help}; needs {' and '.join(map(_described, needs))}." if needs else f"{help}."
    checks = {"low": low, "high": high, "choices": choices, "needs": needs, "otherwise": otherwise}
    return field(default=default, metadata=Metadata(help=described, on_resume=on_resume, **checks))


def described(config: Config) -> Config:
    """A decorator of config classes that lists in the docstring each field that is not of TrainingArguments,
    or has another default there."""
    from transformers import TrainingArguments

    stock = {each.name: each.default for each in fields(TrainingArguments)}
    own = [each for each in fields(config) if each.name not in stock or stock[each.name] != each.default]
    list_fields(config, {each.name: (each.default, each.metadata["help"]) for each in own})
    return config


RANGES: dict[str, dict[str, Any]] = {
    **{
        key: {"low": 1}
        for key in (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
        )
    },
    **{
        key: {"low": 0}
        for key in (
            "learning_rate",
            "weight_decay",
            "warmup_steps",
            "adam_epsilon",
            "max_grad_norm",
            "dataloader_num_workers",
        )
    },
    **{name: {"low": 0, "high": 0.999999} for name in ("adam_beta1", "adam_beta2")},
    "seed": {"low": 0, "high": 2**32 - 1},
}
"""The bounds of settings of transformers."""
CONVERTED = (int, float, int | None, float | None, bool, bool | None)
"""Types of settings whose values are converted, those of transformers included: "no" would be true."""


def check_types(args: Any) -> None:
    """Convert fields that were declared by `setting`, and all of `CONVERTED`, to their types. Raises
    ConfigError for a value of another type."""
    hints = _declared_types(type(args))  # type: ignore[arg-type]  # mypy takes classes for unhashable
    for each in fields(args):
        value, hint = getattr(args, each.name), hints[each.name]
        several = isinstance(value, list) and not any(get_origin(part) is list for part in type_args(hint))
        word = each.metadata.get("choices") and not several  # `check_settings` knows them
        if ("needs" in each.metadata and not word) or hint in CONVERTED:
            setattr(args, each.name, checked_value(each.name, value, hint))


def checked_value(name: str, value: Any, kind: Any, prefix: str = "") -> Any:
    """The value of a setting as in `unmask.config.run.checked`; of None in TRL it says what to write here."""
    if value is None and None in VALUES_ELSEWHERE.get(name, {}):
        raise ConfigError("None is not valid", where=prefix + name, remedy=remedy_of_value(name, None))
    return checked(value, kind, prefix + name)


@cache
def _declared_types(cls: type[Any]) -> dict[str, Any]:
    """The types of all fields: reading them takes longer than all checks."""
    return get_type_hints(cls)


def limits_of(field: Field[Any]) -> dict[str, Any] | None:
    """The arguments of `setting` that limit the values of a field, without those that do not; None: it may
    have any value."""
    if "needs" not in field.metadata:
        return RANGES.get(field.name)
    unlimited = {"low": -math.inf, "high": math.inf, "choices": (), "needs": ()}
    own = {name: field.metadata[name] for name, none in unlimited.items() if field.metadata[name] != none}
    return RANGES.get(field.name, {}) | own


def check_settings(
    settings: Mapping[str, Mapping[str, Any]], given: Collection[str], value_of: Callable[[str], Any]
) -> None:
    """Raise ConfigError for a setting that is out of its range, an unknown word, or without effect beside the
    others.

    Args:
        settings: the limits of those that have some (`limits_of`), by name.
        given: the names of those that must have an effect.
        value_of: the value of each setting, limited or not.
    """
    for name, limits in settings.items():
        value, known, low, high = (
            value_of(name),
            limits.get("choices"),
            limits.get("low", -math.inf),
            limits.get("high", math.inf),
        )
        for number in value if isinstance(value, list) else [value]:
            if known and number is not None and number not in known:
                several = isinstance(value, list) and len(value) > 1
                remedy = remedy_of_value(name, number, known, of_list=several)
                raise ConfigError(f"unknown {name} {number!r}", where=name, remedy=remedy)
            if isinstance(number, int | float) and not (low <= number <= high and math.isfinite(number)):
                bounds = [
                    f"at {end} {bound:,}"
                    for end, bound in (("least", low), ("most", high))
                    if math.isfinite(bound)
                ]
                raise ConfigError(
                    f"{number} is out of range",
                    where=name,
                    remedy=f"Use {' and '.join(bounds) or 'a finite number'}",
                )
        for needed in unmet(limits, value_of) if name in given else ():
            raise ConfigError(
                f"needs {_described(needed)}", where=name, remedy=f"Leave it out, or set {_described(needed)}"
            )


NO_METRICS = "an evaluation computes losses, not predictions that a function could read"
NOT_READ: dict[str, tuple[Any, str]] = {
    "remove_unused_columns": (False, "rewards and methods read all columns of a row"),
    "label_names": ([], "labels are made of the rows"),
    "length_column_name": ("length", "the length of a row is its number of tokens"),
    "logging_nan_inf_filter": (False, "a loss that is not finite ends the run"),
    "prediction_loss_only": (True, NO_METRICS),
    "include_for_metrics": ([], NO_METRICS),
    "batch_eval_metrics": (False, NO_METRICS),
    "eval_do_concat_batches": (True, NO_METRICS),
    "eval_accumulation_steps": (None, NO_METRICS),
    "label_smoothing_factor": (0.0, "it does not apply to a bound on the likelihood"),
    "neftune_noise_alpha": (None, "it does not apply to a bound on the likelihood"),
}
"""Settings of transformers that nothing reads: the value that says what is done anyway, and the reason."""


def check_not_read(given: Collection[str], value_of: Callable[[str], Any]) -> None:
    """Raise ConfigError for a setting of transformers that would do nothing."""
    for name, (value, reason) in NOT_READ.items():
        if name in given and value_of(name) != value:
            raise ConfigError(f"has no effect: {reason}", where=name, remedy="Leave it out")


def check_stock(value_of: Callable[[str], Any]) -> None:
    """Raise ConfigError for settings of transformers that would make no step, or have no effect here.
    `value_of`: their values by name."""
    if (steps := value_of("max_steps")) == 0 or steps < -1:
        raise ConfigError(
            f"{steps} is not valid", where="max_steps", remedy="Use 1 or more, or -1 for num_train_epochs"
        )
    if not 0 < (epochs := value_of("num_train_epochs")) < math.inf:
        raise ConfigError(f"{epochs} is not valid", where="num_train_epochs", remedy="Use a number above 0")
    for name in ("dataloader_persistent_workers", "dataloader_prefetch_factor"):
        if value_of(name) and not value_of("dataloader_num_workers"):
            remedy = "Set dataloader_num_workers to 1 or more, or leave it out"
            raise ConfigError("there are no processes that load rows", where=name, remedy=remedy)
    if value_of("eval_steps") is not None and (strategy := value_of("eval_strategy") or "no") != "steps":
        remedy = "Set eval_strategy to steps, or leave it out"
        raise ConfigError(f"has no effect with eval_strategy {strategy}", where="eval_steps", remedy=remedy)


def unmet(limits: Mapping[str, Any], value_of: Callable[[str], Any]) -> list[str]:
    """The settings that one needs and that are not set."""
    lacking = []
    for needed in limits.get("needs", ()):
        other, _, wanted = needed.partition("=")
        there = value_of(other)
        held = there if isinstance(there, list) else [there]
        if not any(each in wanted.split("|") for each in held) if wanted else not there:
            lacking.append(needed)
    return lacking


def _described(needed: str) -> str:
    return needed.replace("|", " or ")


@contextmanager
def naming_setting_too(key: str) -> Iterator[None]:
    """A context in which ConfigErrors also name this setting."""
    try:
        yield
    except ConfigError as error:
        raise error.moved(f"{key} and {error.where}") from error
