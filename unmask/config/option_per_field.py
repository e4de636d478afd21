"""Options of `unmask generate`, `inspect` and others, one per field of a config. Training verbs take KEY=VALUE instead (`cli/train.py`)."""

from __future__ import annotations

import functools
import inspect as introspection
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from unmask.config.base import Config


def spread_configs(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a `Config` by one option per field, with the field's own default and documentation. A
    config's `model_fields_set` are the options that were given."""
    hints = typing.get_type_hints(command, include_extras=True)
    configs = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Config)}
    signature = introspection.signature(command)
    others = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values() if p.name not in configs]
    spread = {name: {_option_name(name, field): field for field in config.model_fields} for name, config in configs.items()}

    @functools.wraps(command)
    def wrapper(invocation: typer.Context, **values: Any) -> None:
        built = {}
        for name, fields in spread.items():
            own = {option: values.pop(option) for option in fields}
            by_default = {option for option in own if getattr(invocation.get_parameter_source(option), "name", "") == "DEFAULT"}
            given = {fields[option]: value for option, value in own.items() if option not in by_default}
            built[name] = configs[name](**given)
        command(**built, **values)

    invocation = introspection.Parameter("invocation", introspection.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [
        invocation,
        *(_parameter(option, configs[name], field) for name, fields in spread.items() for option, field in fields.items()),
    ]
    wrapper.__signature__ = signature.replace(parameters=[*others, *parameters])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*others, *parameters)}
    return wrapper


def _option_name(section: str, field: str) -> str:
    """The option `block_size` is the decoding block of the sampler, so the model's attention block has another name."""
    return {("model", "path"): "model", ("model", "block_size"): "attention_block_size"}.get((section, field), field)


def _parameter(option: str, config: type[Config], field_name: str) -> introspection.Parameter:
    field = config.model_fields[field_name]
    text = " ".join((field.description or "").split())
    if field.is_required():
        info: Any = typer.Argument(help=text, show_default=False)
        return introspection.Parameter(option, introspection.Parameter.KEYWORD_ONLY, annotation=Annotated[field.annotation, info])
    choices = [choice for kind in (field.annotation, *typing.get_args(field.annotation)) for choice in _choices(kind)]
    names = [f"--{option.replace('_', '-')}"] if field.default is False else []  # without them Typer adds a --no- form
    info = typer.Option(
        *names,
        help=f"{text} One of: {', '.join(choices)}." if choices else text,
        metavar="NAME" if choices else None,
        rich_help_panel=(config.__doc__ or " ").splitlines()[0].rstrip("."),
    )
    return introspection.Parameter(
        option, introspection.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[field.annotation, info]
    )


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
