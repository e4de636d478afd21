"""The settings of the training verbs: those that `unmask VERB --help` shows, and `unmask config`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from unmask.config.listing import settings_of
from unmask.config.run import RunConfig
from unmask.errors import ConfigError, did_you_mean
from unmask.redaction import shown
from unmask.training.settings.listing import VERBS, grouped, matching, near_keys, settings_of_verb

IN_HELP = ("data", "model", "sampler", "lora")
"""The sections whose settings help lists one by one."""
MOST_SET = (
    "learning_rate",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "logging_steps",
    "save_steps",
    "eval_strategy",
    "seed",
)
MOST_SET_OF_GRPO = (
    "method",
    "learning_rate",
    "max_steps",
    "num_generations",
    "per_device_train_batch_size",
    "max_completion_length",
    "steps",
    "beta",
    "logging_steps",
    "save_steps",
)
"""The ten settings with which help begins."""
IN_PIPE = 10_000
"""The width of lines that are not for a terminal, so that each setting is one."""
MIN_TEXT = 30
"""The least width of descriptions beside other columns."""
MAX_CELL = 32
"""Characters of a type or a default."""


def as_lines(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Rows in columns. The last one, of descriptions, is wrapped; if there is no room for it, it is on lines
    of its own."""
    cells = [
        [name, *(word if len(word) <= MAX_CELL else f"{word[: MAX_CELL - 3]}..." for word in words)]
        for name, *words, _ in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row, (*_, text) in zip(cells, rows, strict=True):
        head = "".join(cell.ljust(room + 2) for cell, room in zip(row, widths, strict=True))
        beside = width - len(head) >= MIN_TEXT
        indent = " " * (len(head) if beside else 4)
        wrapped = textwrap.wrap(
            text,
            width,
            initial_indent=head if beside else indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
        if not beside or not wrapped:
            yield head.rstrip()
        yield from wrapped


def most_set(verb: str) -> str:
    """The settings that most runs set, as options with their defaults, in lines."""
    known = {
        setting.name: setting for setting in settings_of_verb(verb) if setting.key.startswith("training.")
    }
    names = MOST_SET_OF_GRPO if verb == "grpo" else MOST_SET
    rows = [(f"--{name.replace('_', '-')}", known[name].shown_default, known[name].summary) for name in names]
    return "\n".join(as_lines(rows, shutil.get_terminal_size().columns - 2))


def show_help(verb: str) -> None:
    """Print the verb's own settings, in groups."""
    width = shutil.get_terminal_size().columns
    typer.echo(" `--max-length 256`, `max_length=256` and `training.max_length=256` set the same.")
    for title, rows in groups_of_help(verb).items():
        typer.secho(f"\n {title}", bold=True)
        for line in as_lines(rows, width - 1):
            typer.echo(f" {line}")
    typer.echo(
        f"\n `unmask config {verb}` lists all settings, also those of transformers.TrainingArguments.\n"
    )


def groups_of_help(verb: str) -> dict[str, list[tuple[str, str, str]]]:
    """Name, default and one line of description of each setting in the help of a verb, by group."""
    groups = {
        title: [(each.name, each.shown_default, each.summary) for each in own]
        for title, own in grouped(verb).items()
    }
    for section in IN_HELP:
        groups.setdefault(section, [])
    for setting in settings_of(RunConfig):
        section, _, name = setting.key.partition(".")
        row = setting.key, setting.shown_default, setting.summary
        if section in IN_HELP and name and "." not in name:
            groups[section].append(row)
        elif not name and section not in (*IN_HELP, "training"):
            groups.setdefault("run", []).append(row)
    return groups


def config(
    verb: Annotated[str, typer.Argument(metavar="VERB", help="pretrain, convert, sft, dpo or grpo.")],
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATTERN]", help="A part of a name or a description, or a name with * and ?."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON list, with whole descriptions.")
    ] = False,
) -> None:
    """List the settings of a training verb: type, default, description.

    Those of transformers.TrainingArguments are among them. Exits with status 1 if none matches."""
    if verb not in VERBS:
        raise ConfigError(f"{verb} is not a training verb", where="config", remedy=did_you_mean(verb, VERBS))
    settings = settings_of_verb(verb)
    found = matching(settings, pattern)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(setting) for setting in found]))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else IN_PIPE
        for line in as_lines(
            [(setting.key, setting.type, setting.shown_default, setting.summary) for setting in found], width
        ):
            typer.echo(line)
    if not found:
        near = " or ".join(near_keys(str(pattern), settings))
        remedy = f"Did you mean {near}?" if near else "Leave the pattern out to list all."
        typer.echo(f"no setting of {verb} matches {shown(repr(pattern))}. {remedy}", err=True)
        raise typer.Exit(1)
