"""Options that several verbs have."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from unmask.variables import ACCEPT_UNSANDBOXED

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
OverwriteFolder = Annotated[
    bool, typer.Option("--overwrite", help="Write into an output folder that is not empty.")
]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace the output file if it exists.")]


def accept_unsandboxed_code(accepted: bool) -> bool:
    """Let this process and those that it starts run programs without isolation."""
    if accepted:
        os.environ[ACCEPT_UNSANDBOXED] = "1"
    return accepted


Unsandboxed = Annotated[
    bool,
    typer.Option(
        "--i-accept-unsandboxed-code",
        is_eager=True,  # before `--rerun`
        callback=accept_unsandboxed_code,
        help="Run model-written programs even if no sandbox isolates them.",
    ),
]
