"""`unmask report`: one page of runs and results of evaluations."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unmask.artifacts import MetricsLog, read_file
from unmask.errors import DataError, UnmaskWarning, first_line
from unmask.evaluation.provenance import EVALUATION
from unmask.evaluation.report.build import make_report
from unmask.evaluation.report.content import Report
from unmask.evaluation.report.scores import Result
from unmask.evaluation.report.training import Run
from unmask.evaluation.result_file import EvaluationResult, read_result
from unmask.models.model_paths import RUN_MANIFEST
from unmask.training.run.folder import DATA_REPORT
from unmask.training.run.log import LOG_NAME
from unmask.training.runs import find_runs

MODEL_FOLDER = "model"


def report_of(paths: Sequence[Path], title: str = "Unmask: runs and evaluations") -> Report:
    """The report of folders of runs (or folders that hold some) and of result files.

    Raises:
        DataError: a path that does not exist, a folder without runs, a log or result file that cannot be
            read.
    """
    folders, results = read_sources(paths)
    runs = [_key(str(folder)) for folder in folders]
    keys = list(dict.fromkeys([*runs, *(key for key, _ in results)]))
    names, color = short_names(keys), {key: number for number, key in enumerate(keys)}
    counts = ((len(folders), "run"), (len(results), "evaluation"))
    return make_report(
        title=title,
        subtitle=" and ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count),
        entries=[names[key] for key in keys],
        runs=[read_run(folder, names[key], color[key]) for folder, key in zip(folders, runs, strict=True)],
        results=[Result(names[key], color[key], content) for key, content in results],
    )


def read_sources(paths: Sequence[Path]) -> tuple[list[Path], list[tuple[str, EvaluationResult]]]:
    """The runs in folders; their evaluations and those in result files, by the key of their model. Each is
    read once. Errors are those of `report_of`."""
    runs: dict[Path, Path] = {}
    results: dict[Path, tuple[str, EvaluationResult]] = {}
    for path in paths:
        if not path.is_dir():
            if path.resolve() not in results:
                result = read_result(path)
                results[path.resolve()] = _owner(path, result), result
            continue
        found = sorted({file.parent for file in path.glob(f"**/{LOG_NAME}")})
        if not found and not (path / EVALUATION).is_file():
            remedy = "Give the folder of a run, one that holds runs, or the result file of an evaluation"
            raise DataError(f"holds no run (no {LOG_NAME})", where=str(path), remedy=remedy)
        for folder in found or [path]:
            if found:
                runs.setdefault(folder.resolve(), folder)
            own = (folder / EVALUATION).resolve()
            if own not in results and (content := _own_evaluation(folder)) is not None:
                results[own] = _key(str(folder)), content
    return list(runs.values()), list(results.values())


def _own_evaluation(folder: Path) -> EvaluationResult | None:
    """The evaluation at the end of a run. One that cannot be read is left out, with a warning."""
    try:
        return read_result(folder / EVALUATION) if (folder / EVALUATION).is_file() else None
    except DataError as error:
        warnings.warn(f"an evaluation is left out: {first_line(error)}", UnmaskWarning, stacklevel=3)
        return None


def _owner(path: Path, content: EvaluationResult) -> str:
    """The folder of the run that a result is of, or the name of its model."""
    if (path.parent / LOG_NAME).is_file():
        return _key(str(path.parent))
    return _key(str(content.model.get("path", path)))


def _key(name: str) -> str:
    """A run and its model have one: the path of the folder, or the name of a model that is elsewhere."""
    path = Path(name)
    folder = path.parent if path.name == MODEL_FOLDER else path
    return str(folder.resolve()) if os.path.exists(folder) else name.removesuffix(f"/{MODEL_FOLDER}")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Names for a legend: paths below the folder that all have in common."""
    folders = [key for key in keys if os.path.isabs(key)]
    common = os.path.commonpath([os.path.dirname(key) for key in folders]) if folders else ""
    return {key: os.path.relpath(key, common) if key in folders else key for key in keys}


def read_run(folder: Path, name: str, color: int, description: str = "") -> Run:
    """A run by its log, and by its manifest if it has one."""
    lines = [line for line in MetricsLog(folder / LOG_NAME).read() if isinstance(line, dict)]
    known: dict[str, Any] = {"verb": folder.name}
    if (folder / RUN_MANIFEST).is_file():
        for run in find_runs([folder]):
            if Path(run["folder"]) == folder:
                settings = json.loads((folder / RUN_MANIFEST).read_text("utf-8"))
                known = {key: run[key] for key in ("verb", "state", "steps")} | {"settings": settings}
    rows = ()
    if (folder / DATA_REPORT).is_file():
        rows = json.loads(read_file(folder / DATA_REPORT))["train"].get("rows", ())
    return Run(name=name, color=color, description=description, lines=lines, rows=rows, **known)
