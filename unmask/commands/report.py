"""`unmask report`: one page of runs and results of evaluations."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.artifacts import MetricsLog, read_file
from unmask.commands.runs import find_runs
from unmask.errors import DataError, UnmaskWarning, first_line
from unmask.evaluation.provenance import EVALUATION
from unmask.evaluation.report.build import make_report
from unmask.evaluation.report.content import Report
from unmask.evaluation.report.scores import Result
from unmask.evaluation.report.training import Run
from unmask.evaluation.result_file import EvaluationResult, read_result
from unmask.models.model_paths import RUN_MANIFEST
from unmask.training.run_files import DATA_REPORT, LOG_NAME

MODEL_FOLDER = "model"


@dataclass(frozen=True)
class Sources:
    """What a report is about, in the order given: folders of runs, and results with the path or name of their
    model."""

    runs: list[Path]
    results: list[tuple[str, EvaluationResult]]


def report_of(paths: Sequence[Path], title: str = "Unmask: runs and evaluations") -> Report:
    """The report of folders of runs (or folders that hold some) and of result files.

    Raises:
        DataError: a path that does not exist, a folder without runs, a log or result file that cannot be
            read.
    """
    sources = read_sources(paths)
    of_runs = [_key(str(folder)) for folder in sources.runs]
    keys = list(dict.fromkeys([*of_runs, *(key for key, _ in sources.results)]))
    names = short_names(keys)
    color = {key: number for number, key in enumerate(keys)}
    runs = [
        read_run(folder, names[key], color[key]) for folder, key in zip(sources.runs, of_runs, strict=True)
    ]
    results = [Result(names[key], color[key], content) for key, content in sources.results]
    return make_report(
        title=title,
        subtitle=_subtitle(sources),
        entries=[names[key] for key in keys],
        runs=runs,
        results=results,
    )


def _subtitle(sources: Sources) -> str:
    counts = ((len(sources.runs), "run"), (len(sources.results), "evaluation"))
    return " and ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count)


def read_sources(paths: Sequence[Path]) -> Sources:
    """Find the runs in folders, with their evaluations, and read result files, each once. Errors are those of
    `report_of`."""
    runs: list[Path] = []
    results: list[tuple[str, EvaluationResult]] = []
    seen: set[Path] = set()
    for path in paths:
        if path.is_dir():
            found = (
                sorted({file.parent for file in path.glob(f"**/{LOG_NAME}")})
                or [path][: (path / EVALUATION).is_file()]
            )
            if not found:
                remedy = "Give the folder of a run, one that holds runs, or the result file of an evaluation"
                raise DataError(f"holds no run (no {LOG_NAME})", where=str(path), remedy=remedy)
            runs += [
                folder for folder in found if folder.resolve() not in seen and (folder / LOG_NAME).is_file()
            ]
            own = [folder for folder in found if (folder / EVALUATION).resolve() not in seen]
            results += [
                (_key(str(folder)), content)
                for folder in own
                if (content := _own_evaluation(folder)) is not None
            ]
            seen |= {place.resolve() for folder in found for place in (folder, folder / EVALUATION)}
        elif path.resolve() not in seen:
            results.append((_owner(path, content := read_result(path)), content))
            seen.add(path.resolve())
    return Sources(runs, results)


def _own_evaluation(folder: Path) -> EvaluationResult | None:
    """The evaluation at the end of a run. One that cannot be read hides nothing else: it is named in a
    warning."""
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
    manifest = folder / RUN_MANIFEST
    found = (
        [run for run in find_runs([folder]) if Path(run["folder"]) == folder] if manifest.is_file() else []
    )
    known: dict[str, Any] = {"verb": folder.name}
    if found:
        known = {key: found[0][key] for key in ("verb", "state", "steps")} | {
            "settings": json.loads(manifest.read_text("utf-8"))
        }
    rows = (
        json.loads(read_file(folder / DATA_REPORT))["train"].get("rows", ())
        if (folder / DATA_REPORT).is_file()
        else ()
    )
    return Run(name=name, color=color, description=description, lines=lines, rows=rows, **known)
