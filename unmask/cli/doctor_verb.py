"""`unmask doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    network: Annotated[
        bool, typer.Option("--network", help="Also ask whether the hub answers, for a few seconds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Describe this installation and machine for a bug report, without secrets or names.

    Exits with 2 if Unmask cannot work here."""
    from unmask.cli.doctor.examine import examine
    from unmask.cli.doctor.findings import as_dict, as_text, is_broken

    groups = examine(network=network)
    typer.echo(json.dumps(as_dict(groups)) if as_json else as_text(groups))
    if is_broken(groups):
        raise typer.Exit(2)
