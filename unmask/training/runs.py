"""`unmask runs`: the runs in some folders, with their state, their steps, their last metrics, and the command
that resumes them."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unmask.artifacts import MetricsLog
from unmask.errors import DataError
from unmask.models.model_paths import RUN_MANIFEST
from unmask.training.run.folder import checkpoints, step_of
from unmask.training.run.lock import is_running
from unmask.training.run.log import LOG_NAME, SHOWN, last_loss, numbers
from unmask.training.run.lost_process import resume_command


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
    """A run by its manifest; None for a manifest of something else."""
    try:
        manifest, folder = json.loads(path.read_text("utf-8")), path.parent
    except ValueError:
        return None
    if "verb" not in manifest:
        return None
    verb, state = manifest["verb"], manifest["state"]
    if state != "finished":
        state = "running" if is_running(folder) else "interrupted" if state == "running" else state
    log = folder / LOG_NAME
    lines = numbers(MetricsLog(log).read() if log.exists() else [])
    command = resume_command(shlex.split(manifest["command"]), manifest.get("processes", 1))
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
