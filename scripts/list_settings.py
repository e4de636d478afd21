"""Write the list of the settings under `training`, which the command line could not read from the configs
without importing torch.

python scripts/list_settings.py
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import MISSING, Field
from enum import Enum
from typing import Any, Union, get_args, get_type_hints

from transformers import TrainingArguments

from unmask.artifacts import package_version
from unmask.cli.verbs import VERBS
from unmask.config.listing import Setting, one_line, plain_default, type_name
from unmask.rl.methods import METHODS
from unmask.training.config_fields import limits_of
from unmask.training.settings.listing import SET_BY_RUN, SETTINGS

STOCK = {field.name: field for field in dataclasses.fields(TrainingArguments)}


def listed_settings() -> dict[str, Any]:
    """What `settings.json` holds.

    That is the version of transformers, the settings of its TrainingArguments, and those of each verb in the
    order of their declaration: `[key, type, default, help]`, with its limits if it has any, or the key alone
    of one that the verb leaves as it is.
    """
    stock = [_row(setting) for setting in training_settings(TrainingArguments)]
    listed: dict[str, Any] = {
        "transformers": package_version("transformers"),
        "methods": [*METHODS],
        "stock": stock,
    }
    for verb, entry in VERBS.items():
        listed[verb] = [
            each.key if each.stock else _row(each) for each in training_settings(entry.config_class)
        ]
    return listed


def _row(setting: Setting) -> list[Any]:
    return [
        setting.key,
        setting.type,
        setting.default,
        setting.help,
        *([] if setting.limits is None else [setting.limits]),
    ]


def training_settings(cls: type[TrainingArguments]) -> Iterator[Setting]:
    """The settings under `training`."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.init and field.name not in SET_BY_RUN:
            words = field.metadata.get("choices")
            shown = (
                " | ".join(words) + (" | null" if field.default is None else "")
                if words
                else type_name(_named(hints[field.name]))
            )
            described = one_line(field.metadata.get("help"))
            limits = limits_of(field)
            if limits is not None:
                limits.pop("choices", None)  # those of the type
            default = plain_default(default_of(field))
            yield Setting(f"training.{field.name}", shown, default, described, is_stock(field), limits)


def _named(hint: Any) -> Any:
    """A type without the plain text beside an enumeration, which takes the same words."""
    kinds = get_args(hint)
    named = any(isinstance(kind, type) and issubclass(kind, Enum) for kind in kinds)
    return Union[tuple(kind for kind in kinds if kind is not str)] if named else hint  # noqa: UP007


def is_stock(field: Field[Any]) -> bool:
    """Whether a field is of TrainingArguments, with the same default and description."""
    stock = STOCK.get(field.name)
    return stock is not None and (field.default, field.metadata.get("help")) == (
        stock.default,
        stock.metadata.get("help"),
    )


def default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def as_json() -> str:
    """One setting a line."""
    version, *lists = listed_settings().items()
    parts = [json.dumps(dict([version]))[1:-1]]
    for name, rows in lists:
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    SETTINGS.write_text(as_json(), encoding="utf-8")
