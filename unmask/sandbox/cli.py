"""`unmask sandbox`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from unmask.console import show_table
from unmask.sandbox.isolation import LAYERS
from unmask.sandbox.isolation import probe as probe_host

app = typer.Typer(help="The sandbox for programs that models write.", no_args_is_help=True)


@app.command()
def probe(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show what isolates programs on this host, and the risk where a layer is missing. Exits with 2 if
    nothing isolates."""
    host = probe_host()
    if as_json:
        typer.echo(
            json.dumps({"isolated": host.isolated, "python": host.python, "missing": dict(host.missing)})
        )
    else:
        lines = [
            (name, host.missing.get(name, "works"), risk if name in host.missing else "")
            for name, risk in LAYERS.items()
        ]
        show_table(lines, title=f"sandboxes of {host.python}", head=["layer", "here", "risk"])
    if not host.isolated:
        raise typer.Exit(2)
