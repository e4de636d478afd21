"""The problems of a task, from wherever they are."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import Literal

from unmask.config.run import DataSource
from unmask.data.sources import load_records
from unmask.errors import ConfigError
from unmask.tasks import Row, Task, as_puzzle
from unmask.tasks.base import Style


def read_problems(
    task: Task,
    source: str | list[DataSource] | None,
    count: int | None,
    *,
    split: Literal["train", "test"],
    hub_split: str | None = None,
    seed: int = 0,
) -> list[Row]:
    """The rows of a task: of a source (see `load_rows`), else generated.

    Args:
        task: whose.
        source: a file, a folder or a hub id; None: the task makes them.
        count: at most this many; None: all of the source.
        split: of generated ones.
        hub_split: of a hub data set; None: the same.
        seed: what generated ones follow from.

    Raises:
        DataError: a source that is missing or malformed.
        ConfigError: there is no source, and the task makes no problems; or there are several.
    """
    if isinstance(source, list):
        raise ConfigError("a task reads one source", where="data", remedy="Give no mixture, or no task")
    if source:
        with closing(load_records(source, hub_split or split)) as records:  # at an error, too, the file is closed
            return list(islice(task.rows(records), count))
    return as_puzzle(task).generate(split, count or 0, seed)


def pose(task: Task, rows: list[Row], style: Style, shots: int = 0) -> list[Row]:
    """The rows as a model is asked them, the first `shots` of them as solved examples before each of the others.

    Raises:
        ConfigError: no row is left.
    """
    if len(rows) <= shots:
        raise ConfigError(f"{shots} examples take all {len(rows)} rows", where="shots", remedy="Give fewer shots, or more rows")
    return [task.posed(row, style, rows[:shots]) for row in rows[shots:]]
