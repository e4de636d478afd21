"""Options of `unmask generate`, `inspect` and others, one per field of a config. Training verbs take
KEY=VALUE instead (`cli/train.py`)."""

from __future__ import annotations

import functools
import inspect as introspection
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import typer

from unmask.artifacts import read_file
from unmask.config.base import Config, section_of
from unmask.errors import ConfigError

TEXTS = {"json_schema": "{", "grammar": "start:"}
"""Fields whose options take a text, which holds this, or a file with the text."""


def spread_configs(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a `Config` by one option per field, with the field's own
    default and documentation. A config's `model_fields_set` are the options that were given."""
    hints = typing.get_type_hints(command, include_extras=True)
    configs = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Config)
    }
    signature = introspection.signature(command)
    others = [
        p.replace(annotation=hints[p.name]) for p in signature.parameters.values() if p.name not in configs
    ]
    spread = {name: dict(_options(name, config)) for name, config in configs.items()}

    @functools.wraps(command)
    def wrapper(invocation: typer.Context, **values: Any) -> None:
        built = {}
        for name, fields in spread.items():
            own = {option: values.pop(option) for option in fields}
            by_default = {
                option
                for option in own
                if getattr(invocation.get_parameter_source(option), "name", "") == "DEFAULT"
            }
            given: dict[str, Any] = {}
            for option in own.keys() - by_default:
                *section, field = fields[option]
                inside = given.setdefault(section[0], {}) if section else given
                inside[field] = _text_of(own[option], TEXTS[field]) if field in TEXTS else own[option]
            built[name] = configs[name](**given)
        command(**built, **values)

    invocation = introspection.Parameter(
        "invocation", introspection.Parameter.KEYWORD_ONLY, annotation=typer.Context
    )
    parameters = [
        invocation,
        *(
            _parameter(option, configs[name], path)
            for name, fields in spread.items()
            for option, path in fields.items()
        ),
    ]
    wrapper.__signature__ = signature.replace(parameters=[*others, *parameters])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*others, *parameters)}
    return wrapper


def _options(section: str, config: type[Config]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each option, and the path of its field in the config. The fields of a config inside it follow its name:
    `--constraint-regex`."""
    for name, field in config.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield _option_name(section, name), (name,)
        else:
            yield from ((f"{name}_{each}", (name, each)) for each in inner.model_fields)


def _text_of(value: str, holds: str) -> str:
    """A text as it is, or that of the file that a path names. Raises ConfigError for a file that cannot be
    read."""
    if holds in value:
        return value
    try:
        return read_file(value)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"is neither a text with {holds!r} nor a file: {error}", where=value, remedy="Give one of them"
        ) from None


def _option_name(section: str, field: str) -> str:
    """The option `block_size` is the decoding block of the sampler, so the model's attention block has
    another name."""
    return {("model", "path"): "model", ("model", "block_size"): "attention_block_size"}.get(
        (section, field), field
    )


def _parameter(option: str, config: type[Config], path: tuple[str, ...]) -> introspection.Parameter:
    for section in path[:-1]:
        config = section_of(config.model_fields[section].annotation) or config
    field = config.model_fields[path[-1]]
    annotation = str | None if path[-1] in TEXTS else field.annotation
    text = " ".join((field.description or "").split())
    if field.is_required():
        info: Any = typer.Argument(help=text, show_default=False)
        return introspection.Parameter(
            option, introspection.Parameter.KEYWORD_ONLY, annotation=Annotated[field.annotation, info]
        )
    choices = [
        choice for kind in (field.annotation, *typing.get_args(field.annotation)) for choice in _choices(kind)
    ]
    # without them Typer adds a --no- form
    names = [f"--{option.replace('_', '-')}"] if field.default is False else []
    info = typer.Option(
        *names,
        help=f"{text} One of: {', '.join(choices)}." if choices else text,
        metavar="NAME" if choices else None,
        rich_help_panel=(config.__doc__ or " ").splitlines()[0].rstrip("."),
    )
    return introspection.Parameter(
        option,
        introspection.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[annotation, info],
    )


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
