"""What a run leaves in its folder: its log and its checkpoints. Nothing here imports torch."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unmask.artifacts import read_file
from unmask.config.run import LOCK_FILE
from unmask.errors import TrainingError
from unmask.models.model_paths import RUN_CONFIG, RUN_MANIFEST

LOG_NAME = "training_logs.json"
DATA_REPORT = "data_report.json"
OF_A_RUN = (
    RUN_CONFIG,
    RUN_MANIFEST,
    LOG_NAME,
    LOCK_FILE,
    "checkpoint-*",
    "stage-*",
    "*_reference_scores.safetensors",
)
"""What a run has left in a folder. dpo stores the reference's scores before all else."""
SHOWN = ("reward", "loss", "accuracy", "margin", "tokens_per_second", "cross_entropy", "learning_rate")
"""The metrics on the progress display, those first that matter most: a narrow one has room for some."""
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def refuse_nothing(folder: Path) -> None:
    """Raise TrainingError if no run began in the output folder. One that ended before its first checkpoint
    left other files."""
    if not any(any(folder.glob(pattern)) for pattern in OF_A_RUN):
        remedy = "Check the path, or start a new run without --resume (resume_from_checkpoint)"
        raise TrainingError("holds no run: there is nothing to resume", where=str(folder), remedy=remedy)


def is_run(folder: Path) -> bool:
    """Whether a run has written into a folder: it has a log of one, or a manifest with its verb."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        return (folder / LOG_NAME).is_file() or "verb" in json.loads(read_file(folder / RUN_MANIFEST))
    return False


def numbers(lines: Iterable[Any]) -> list[dict[str, float]]:
    """The numbers of each line of a log: null stands for one that was not finite, and a damaged log may hold
    anything."""
    return [
        {name: value for name, value in line.items() if _is_number(value)}
        for line in lines
        if isinstance(line, dict)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def last_loss(lines: Sequence[Mapping[str, float]]) -> float:
    """The last loss that was logged, of a conversion in its last stage; if that ended before, the mean over
    its steps. NaN: none."""
    stage = lines[-1].get("stage") if lines else None
    losses = [
        line[name]
        for name in ("train_loss", "loss")
        for line in lines
        if name in line and line.get("stage") == stage
    ]
    return losses[-1] if losses else math.nan


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, latest first."""
    found = [
        path for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint, or of what a link points to."""
    found = CHECKPOINT.fullmatch(checkpoint.name) or CHECKPOINT.fullmatch(checkpoint.resolve().name)
    assert found is not None, checkpoint
    return int(found[1])
