"""Checks of a trainer's arguments, before a model is loaded or a row is read."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, ClassVar, Self

from unmask.data.rows import require_rows
from unmask.errors import ConfigError, did_you_mean
from unmask.names import METHODS_ELSEWHERE, NAMES_ELSEWHERE
from unmask.training.config import TrainingConfig

WITHOUT_PREDICTIONS = "is never called, because the logits of a row depend on which tokens are hidden"
OWN_LOSS = "Leave it out; a subclass may override measure and micro_loss"


class TrainerArguments:
    """Base of the trainers, which refuses unknown arguments with the name that is meant, and a subclass with
    methods that are not called."""

    config_class: ClassVar[type[TrainingConfig]] = TrainingConfig

    def __new__(cls, *_: Any, **given: Any) -> Self:
        refuse_uncalled(cls)
        known = inspect.signature(cls.__init__).parameters
        if all(each.kind is not each.VAR_KEYWORD for each in known.values()):
            refuse_unknown_arguments(cls.config_class, given, known)
        return super().__new__(cls)

    @classmethod
    def checked_args(cls, args: Any, model: Any) -> Any:
        """The settings that were given, or as in TRL the defaults, in a folder named by the model. Raises
        ConfigError for the config of another trainer or library."""
        config, name = cls.config_class, cls.config_class.__name__
        if args is None:
            path = model if isinstance(model, str | Path) else getattr(model, "name_or_path", "")
            return config(output_dir=f"{Path(path).name or 'model'}-{name.removesuffix('Config')}")
        if not isinstance(args, config):
            what = f"is a {type(args).__module__.partition('.')[0]}.{type(args).__name__}, not a {name}"
            remedy = f"Give unmask.{name}(...), which takes the fields of TrainingArguments, too"
            raise ConfigError(what, where="args", remedy=remedy)
        args.check_assigned()
        return args


def refuse_unknown_arguments(
    config: type[TrainingConfig], given: Iterable[str], known: Collection[str]
) -> None:
    """Raise ConfigError for an argument that a trainer does not have, with the setting that is meant."""
    settings = {each.name for each in dataclasses.fields(config)}
    for name in given:
        if name not in known:
            near = name if name in settings else NAMES_ELSEWHERE.get(name)
            of_args = f"It is a setting: {config.__name__}({near}=...), the trainer's args"
            remedy = of_args if near in settings else did_you_mean(name, known, "Leave it out")
            raise ConfigError("is no argument of the trainer", where=name, remedy=remedy)


def refuse_uncalled(trainer: type) -> None:
    """Raise ConfigError for a method of a user's trainer that only transformers' or TRL's trainer calls."""
    for name, ours in METHODS_ELSEWHERE.items():
        method = getattr(trainer, name, None)
        library = str(getattr(method, "__module__", "unmask")).partition(".")[0]
        if hasattr(trainer, ours) and library != "unmask":
            raise ConfigError(
                "is never called", where=f"{trainer.__name__}.{name}", remedy=f"Override {ours}"
            )


def refuse_given(given: Mapping[str, Any], what: str, remedy: str) -> None:
    """Raise ConfigError for the first of these arguments that is not None."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(what, where=name, remedy=remedy)


def refuse_foreign_collator(collator: Any) -> None:
    """Raise ConfigError for a collator of transformers or TRL, whose batches name no documents and no tokens
    that may be hidden, or for something else, such as the rows."""
    if collator is not None and not callable(collator):
        what = f"a {type(collator).__name__} makes no batches"
        raise ConfigError(what, where="data_collator", remedy="Give rows by name: train_dataset=...")
    library = str(getattr(collator, "__module__", "")).partition(".")[0]
    if library in ("transformers", "trl"):
        what = f"{library}'s collators do not mark documents and the tokens that are trained on"
        remedy = "Leave it out, or give a function that calls unmask.data.rows.Collator"
        raise ConfigError(what, where="data_collator", remedy=remedy)


def by_place(held_out: Any) -> dict[str, Any]:
    """Held-out datasets by their place in errors: `eval_dataset`, or `eval_dataset NAME` if there are several
    by name."""
    if isinstance(held_out, Mapping):
        return {f"eval_dataset {name}": rows for name, rows in held_out.items()}
    return {"eval_dataset": held_out}


def map_held_out(held_out: Any, make_rows: Callable[[Any, str], Any]) -> Any:
    """The rows that are made of held-out rows and their place: of one dataset, or of each by its name. A
    stream is read to its end."""
    made = [
        make_rows(rows if isinstance(rows, Sized | None) else _read(rows, place), place)
        for place, rows in by_place(held_out).items()
    ]
    return dict(zip(held_out, made, strict=True)) if isinstance(held_out, Mapping) else made[0]


def _read(rows: Any, place: str) -> list[Any]:
    require_rows(rows, place)
    return list(rows)
