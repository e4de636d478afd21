"""The problems of a task, read from a source or generated."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import Literal

from unmask.config.run import DataConfig, DataSource
from unmask.data.sources import load_records
from unmask.errors import ConfigError
from unmask.tasks import Row, Task
from unmask.tasks.base import Style

GENERATED_ROWS = 10_000
"""Training rows of a task that generates them, unless `data.max_rows` sets another number."""


def read_problems(
    task: Task,
    source: str | list[DataSource] | None,
    count: int | None,
    *,
    split: Literal["train", "test"],
    hub_split: str | None = None,
    seed: int = 0,
) -> list[Row]:
    """The rows of a task, from a source (see `load_rows`) or generated.

    Args:
        source: a file, a folder or a hub id; None: the task generates problems, of this `split` and `seed`.
        count: at most this many; None: all of the source.
        hub_split: of a hub dataset; None: `split`.

    Raises:
        DataError: the source is missing or malformed.
        ConfigError: several sources; or none, and the task generates no problems.
    """
    if isinstance(source, list):
        raise ConfigError("a task reads one source", where="data", remedy="Give no mixture, or no task")
    if source:
        # closes the file after an error too
        with closing(load_records(source, hub_split or split)) as records:
            return list(islice(task.rows(records), count))
    return task.generate(split, count or 0, seed)


def training_problems(task: Task, data: DataConfig) -> list[Row]:
    """The problems of a task that a run trains on. Raises as `read_problems`."""
    count = data.max_rows or (None if data.train else GENERATED_ROWS)
    return read_problems(task, data.train, count, split="train", hub_split=data.split, seed=data.seed)


def held_out_problems(task: Task, data: DataConfig) -> list[Row]:
    """Held-out problems: from `data.eval`, or generated; none of a task that cannot generate. Raises as
    `read_problems`."""
    if task.needs_data and not data.eval:
        return []
    return read_problems(task, data.eval, data.eval_rows, split="test", hub_split=data.split, seed=data.seed)


def pose(task: Task, rows: list[Row], style: Style, shots: int = 0) -> list[Row]:
    """The rows with their prompts. The first `shots` rows are solved examples in the prompts of the others;
    raises ConfigError if no others are left."""
    if len(rows) <= shots:
        raise ConfigError(
            f"{shots} examples use all {len(rows)} rows",
            where="shots",
            remedy="Give fewer shots, or more rows",
        )
    return [task.posed(row, style, rows[:shots]) for row in rows[shots:]]
