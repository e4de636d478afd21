"""The items of an evaluation as they finish, in JSON lines beside its result: a killed evaluation continues
from them."""

from __future__ import annotations

import glob
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from unmask.artifacts import MetricsLog
from unmask.console import Phase, tracked
from unmask.errors import DataError
from unmask.evaluation.result_file import Item, differing


class ItemLog:
    """The log of one process of an evaluation.

    Args:
        output: the result file, which the log stands beside.
        identity: of the evaluation: model, protocol, seed. A log of another evaluation is refused.
        rank: of this process, of `processes`.
        wait: waits for all processes.

    Raises:
        DataError: a log beside `output` is of another evaluation, or is none.
    """

    def __init__(
        self,
        output: Path,
        identity: Mapping[str, Any],
        *,
        rank: int = 0,
        processes: int = 1,
        wait: Callable[[], None] = lambda: None,
    ):
        self.output, self.rank, self.processes, self.wait = output, rank, processes, wait
        self.identity = json.loads(json.dumps(identity))
        self.own = MetricsLog(
            output.with_name(f"{output.name}.items" + (f".{rank}" if rank else "") + ".jsonl")
        )
        self.known = self._read()
        self.resumed = sum(len(self.finished(task)) for task in self.known)
        wait()  # before another one writes
        if not (self.own.path.exists() and self.own.read()[1:]):
            self.own.path.unlink(missing_ok=True)
            self.own.write({"evaluation": self.identity})

    def finished(self, task: str) -> dict[str, Item]:
        """The items of a task that were finished before this process began. One that could not be scored, as
        without a sandbox, is not."""
        return {name: item for name, item in self.known.get(task, {}).items() if item.scores}

    def share(self, ids: Sequence[str]) -> list[str]:
        """This process's share of some problems."""
        return list(ids)[self.rank :: self.processes]

    def add(self, task: str, items: Sequence[Item]) -> None:
        """Keep items that have finished. When this returns they are on the disk."""
        for item in items:
            self.own.write({"task": task, "item": json.loads(item.model_dump_json())})
        with self.own.path.open("rb") as file:
            os.fsync(file.fileno())

    def gather(self, task: str) -> dict[str, Item]:
        """All items of a task, from all processes."""
        self.wait()
        found = self._read().get(task, {})
        self.wait()  # before the first process removes the logs
        return found

    def remove(self) -> None:
        """Remove the logs: the result is written."""
        for path in self._paths():
            path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        folder, name = self.output.parent, glob.escape(self.output.name)
        return sorted([*folder.glob(f"{name}.items.jsonl"), *folder.glob(f"{name}.items.[0-9]*.jsonl")])

    def _read(self) -> dict[str, dict[str, Item]]:
        found: dict[str, dict[str, Item]] = {}
        for path in self._paths():
            header, *lines = MetricsLog(path).read() or [{}]
            if lines and header != {"evaluation": self.identity}:
                raise DataError(
                    f"holds the finished items of another evaluation{self._difference(header)}",
                    where=str(path),
                    remedy="Give the command that wrote it, choose another --output, or remove the file.",
                )
            for number, line in enumerate(lines, start=2):
                try:
                    item = Item.model_validate(line["item"])
                    found.setdefault(line["task"], {})[item.id] = item
                except (KeyError, TypeError, pydantic.ValidationError) as error:
                    where, remedy = f"{path}, line {number}", "Remove the line; its problem is asked again."
                    raise DataError("is no finished item", where=where, remedy=remedy) from error
        return found

    def _difference(self, header: Mapping[str, Any]) -> str:
        """The first settings in which the evaluation of a log differs."""
        changed = list(itertools.islice(differing(header.get("evaluation", {}), self.identity), 3))
        there = ", ".join(f"{name}: {before[:40]} there, {now[:40]} here" for name, before, now in changed)
        return f" ({there})" if there else ""


def finished_items(
    log: ItemLog | None,
    task: str,
    ids: Sequence[str],
    answer: Callable[[Sequence[str]], list[Item]],
    batch_size: int,
    progress: Phase | None,
) -> list[Item]:
    """The items of a task's problems, in the order of `ids`. Those that the log does not have are answered
    batch by batch, by this process or another one.

    Args:
        log: None: there is one process, and nothing is kept.
        answer: gives the items of some problems.
    """
    found = {} if log is None else log.finished(task)
    asked = [name for name in ids if name not in found]
    size = batch_size * (1 if log is None else log.processes)
    for start in tracked(range(0, len(asked), size), math.ceil(len(asked) / size), progress):
        batch = asked[start : start + size]
        items = answer(batch if log is None else log.share(batch))
        found |= {item.id: item for item in items}
        if log is not None:
            log.add(task, items)
    if log is not None:
        found = log.gather(task)
    return [found[name] for name in ids]
