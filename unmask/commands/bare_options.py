"""Settings that were mistaken for options of the command line (`--learning-rate`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unmask.commands.verbs import VERBS
from unmask.config.base import Config
from unmask.config.run import DataConfig, LoraSettings, ModelConfig, SamplerConfig
from unmask.errors import ConfigError
from unmask.redaction import masked_argument

SECTIONS: dict[str, type[Config]] = {"data": DataConfig, "model": ModelConfig, "sampler": SamplerConfig, "lora": LoraSettings}


def refuse_bare_flag(verb: str, option: str, args: Sequence[str]) -> None:
    """Refuse an unknown option of a training verb that is the name of one of its settings.

    Args:
        option: with its dashes, as in `args`.
        args: the command line after the verb.

    Raises:
        ConfigError: the option is a setting; the remedy shows how to write it.
    """
    if not option.startswith("--"):
        return
    name = option.removeprefix("--").replace("-", "_")
    section = _section_of(verb, name)
    if section is None:
        return
    place = next(at for at, word in enumerate(args) if word.partition("=")[0] == option)
    following = [word for word in args[place + 1 : place + 2] if not word.startswith("--")]
    value = args[place].partition("=")[2] or next(iter(following), "VALUE")
    raise ConfigError("is a setting, not an option", where=option, remedy=f"Write `{masked_argument(f'{section}.{name}={value}')}`")


def _section_of(verb: str, name: str) -> str | None:
    """The section that has a setting of this name: training before data, and those before the others."""
    if name in {field.name for field in dataclasses.fields(VERBS[verb].config_class) if field.init}:
        return "training"
    return next((section for section, config in SECTIONS.items() if name in config.model_fields), None)
