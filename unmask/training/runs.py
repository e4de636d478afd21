"""`unmask runs`: the runs in some folders, with their state, their steps, their last metrics, and the command
that resumes them."""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unmask.artifacts import MetricsLog, read_file
from unmask.errors import DataError, UnmaskWarning, first_line
from unmask.models.model_paths import RUN_MANIFEST
from unmask.training.durable.lost_process import resume_command
from unmask.training.resume.lock import is_running
from unmask.training.run_files import LOG_NAME, SHOWN, checkpoints, last_loss, numbers, step_of

TYPES: dict[str, type] = {
    "verb": str,
    "state": str,
    "command": str,
    "processes": int,
    "steps": int,
    "error": str,
}
"""The entries of a manifest that are shown."""


def find_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The runs in these folders and below, sorted by path: `folder`, `verb`, `state`, `step`, `steps`,
    `metrics`, `command`.

    The state is running, finished, failed (with `error`), or interrupted. A finished run has no command.

    Raises:
        DataError: there is no such folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise DataError(
                "no such folder", where=str(folder), remedy="Give the folder of a run, or one that holds runs"
            )
    found = dict.fromkeys(path for folder in folders for path in sorted(folder.glob(f"**/{RUN_MANIFEST}")))
    return [run for path in found if (run := _describe(path)) is not None]


def _describe(path: Path) -> dict[str, Any] | None:
    """A run by its manifest; None for a manifest of something else, or one that cannot be read."""
    try:
        manifest = json.loads(read_file(path))
        verb = manifest["verb"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    odd = [name for name, kind in TYPES.items() if not isinstance(manifest.get(name, kind()), kind)]
    try:
        words = [] if odd else shlex.split(manifest.get("command", verb))
    except ValueError:  # an open quote
        odd = ["command"]
    if odd:
        warnings.warn(
            f"the run in {path.parent} is left out: its manifest's {odd[0]} is damaged",
            UnmaskWarning,
            stacklevel=3,
        )
        return None
    folder = path.parent
    state = manifest.get("state", "finished")  # earlier versions wrote it at the end
    if state != "finished":
        state = "running" if is_running(folder) else "interrupted" if state == "running" else state
    lines = numbers(_read_log(folder / LOG_NAME))
    command = resume_command(words, manifest.get("processes", 1))
    loss = last_loss(lines)
    metrics = {name: line[name] for line in lines for name in SHOWN if name in line}
    metrics |= {"loss": loss} if "loss" not in metrics and math.isfinite(loss) else {}
    return {
        "folder": str(folder),
        "verb": verb,
        "state": state,
        "step": max(
            [line["step"] for line in lines if "step" in line]
            + [step_of(path) for path in checkpoints(folder)],
            default=0,
        ),
        "steps": manifest.get("steps"),
        "metrics": metrics,
        **({"error": manifest.get("error")} if state == "failed" else {}),
        "command": None if state in ("finished", "running") else command,
    }


def _read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log. One that cannot be read hides no other run: it is named in a warning."""
    try:
        return MetricsLog(path).read() if path.is_file() else []
    except (DataError, OSError, ValueError, RecursionError) as error:
        warnings.warn(
            f"the log of {path.parent} is left out: {first_line(error)}", UnmaskWarning, stacklevel=3
        )
        return []


def as_rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Table rows: folder, verb, state, step, and the most telling metric."""
    rows = []
    for run in runs:
        metric = next(
            ((name, run["metrics"][name]) for name in ("reward", "loss") if name in run["metrics"]), None
        )
        shown = f"{metric[0]} {metric[1]:.4g}" if metric else ""
        rows.append(
            [run["folder"], run["verb"], run["state"], f"{run['step']} of {run['steps'] or '?'}", shown]
        )
    return rows
