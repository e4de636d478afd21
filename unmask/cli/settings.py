"""The settings of the training verbs: those that `unmask VERB --help` shows, and `unmask config`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from unmask.config.listing import settings_of
from unmask.config.run import RunConfig
from unmask.errors import ConfigError, did_you_mean
from unmask.redaction import shown

OWN_SETTINGS = Path(__file__).with_name("own_settings.json")
"""The settings under `training` that each verb adds to transformers.TrainingArguments or changes there, by group. Reading them from the
configs would import torch. `scripts/own_settings.py` writes the file."""
IN_HELP = ("data", "model", "sampler", "lora")
"""The sections whose settings help lists one by one."""
IN_PIPE = 10_000
"""The width of a table that is not for a terminal, so that each setting is one line."""
MAX_CELL = 32
"""Characters of a type or a default in a table."""


def grid(rows: Iterable[Sequence[str]]) -> Table:
    """A table without lines, whose last column takes the width that is left."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        *words, text = row
        if not table.columns:
            table.add_column(no_wrap=True)
            for _ in row[2:]:
                table.add_column(overflow="fold")
            table.add_column(ratio=1, overflow="fold")
        shortened = [word if len(word) <= MAX_CELL else f"{word[: MAX_CELL - 3]}..." for word in words[1:]]
        table.add_row(*map(Text, [words[0], *shortened, text]))
    return table


def show_help(verb: str) -> None:
    """Print the verb's own settings, in panels."""
    console, flag = Console(), "--max-length 256"
    console.print(Text(f" Settings: `{flag}`, `max_length=256` and `training.max_length=256` mean the same.\n", end=""))
    for title, rows in groups_of_help(verb).items():
        console.print(Panel(grid(rows), title=Text(title), title_align="left", border_style="dim"))
    more = f" `unmask config {verb}` lists all, also those of transformers.TrainingArguments; `unmask config {verb} rate` searches them.\n"
    console.print(Text(more))


def groups_of_help(verb: str) -> dict[str, list[tuple[str, str, str]]]:
    """Name, default and one line of description of each setting in the help of a verb, by group."""
    own = json.loads(OWN_SETTINGS.read_text(encoding="utf-8"))[verb]
    groups = {title: [(name, *described) for name, described in settings.items()] for title, settings in own.items()}
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
        str | None, typer.Argument(metavar="[PATTERN]", help="A part of a name or a description, or a name with * and ?.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, with whole descriptions.")] = False,
) -> None:
    """List the settings of a training verb with type, default and description, also those of transformers.TrainingArguments. Exits with
    status 1 if none matches."""
    from unmask.commands.settings.listing import matching, near_keys, settings_of_verb
    from unmask.commands.verbs import VERBS

    if verb not in VERBS:
        raise ConfigError(f"{verb} is not a training verb", where="config", remedy=did_you_mean(verb, VERBS))
    settings = settings_of_verb(verb)
    found = matching(settings, pattern)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(setting) for setting in found]))
    else:
        console = Console(width=None if sys.stdout.isatty() else IN_PIPE)
        with console.capture() as captured:
            console.print(grid((setting.key, setting.type, setting.shown_default, setting.summary) for setting in found))
        typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
    if not found:
        near = " or ".join(near_keys(str(pattern), settings))
        remedy = f"Did you mean {near}?" if near else "Leave the pattern out to list all."
        typer.echo(f"no setting of {verb} matches {shown(repr(pattern))}. {remedy}", err=True)
        raise typer.Exit(1)
