"""`unmask new`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from unmask.config.run import check_output_folder
from unmask.console import for_stdout
from unmask.errors import ConfigError
from unmask.redaction import shell_line


def new(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to write.")],
    kind: Annotated[
        Literal["sft", "preferences", "rewards", "conversion"],
        typer.Option(
            metavar="KIND",
            help="sft (chats), preferences (DPO), rewards (GRPO with a reward of your own) or conversion.",
        ),
    ] = "sft",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_ID",
            help="The model to train, for config.yaml; unset: a tiny one that stands in for yours.",
        ),
    ] = None,
) -> None:
    """Write a folder to begin with: a commented config, sample data, a Makefile and a README."""
    if model is not None and not model.strip():
        raise ConfigError(
            "is empty",
            where="--model",
            remedy="Give a folder or the name of a model on the hub, or leave it out",
        )
    check_output_folder(name)
    from unmask.cli.new.folder import write_templates

    write_templates(name, kind, model)
    if model is None:
        from unmask.cli.new.tiny_model import write_tiny_model

        write_tiny_model(name, kind)
    for path in sorted(name.iterdir()):
        typer.echo(for_stdout(f"{path}{'/' * path.is_dir()}"))
    typer.echo(for_stdout(f"next: cd {shell_line([str(name)])} && make train  (README.md has the rest)"))
