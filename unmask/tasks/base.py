"""What a verifiable task is: it makes or reads problems, judges answers to them, and never trusts the text that it judges.

A row is a flat dict, ready for a dataset: `prompt` and `completion` (a right answer) as text, `group` (the identity of the solution:
rows of one group are not independent, so confidence intervals are clustered by it and splits never divide it), and the task's own columns.

A task of one's own is one small subclass: give it a `name`, its class attributes, and `draw`, `read`, `verify` and `corrupt`.
"""

from __future__ import annotations

import abc
import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from unmask.config_files import did_you_mean
from unmask.errors import ConfigError
from unmask.tasks.files import require_names

Row = dict[str, Any]
Split = Literal["train", "test"]
Status = Literal["ok", "wrong", "malformed"]

TEST_SHARE = 0.28


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one completion."""

    value: float
    """The shaped reward, in [0, 1]; 1 exactly for a solved problem."""
    status: Status
    """`ok`: solved. `wrong`: an answer, but not a right one. `malformed`: not an answer at all."""

    @property
    def solved(self) -> bool:
        return self.status == "ok"


def split_of(group: str) -> Split:
    """The split a solution belongs to: a fixed function of its identity, so that no seed and no run ever trains on a test solution."""
    digest = hashlib.sha256(group.encode()).digest()
    return "test" if digest[0] < TEST_SHARE * 256 else "train"


class Task(abc.ABC):
    """A family of problems with a verifier. Subclasses that set `name` are found by `get_task`."""

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    """The columns that `verify` reads."""
    alphabet: ClassVar[str]
    """Every character that a prompt or a right completion can hold."""
    max_completion: int
    """Characters of the longest right completion, and one for the end of sequence."""

    _known: ClassVar[dict[str, type[Task]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            Task._known[cls.name] = cls

    @abc.abstractmethod
    def draw(self, split: Split, rng: random.Random) -> Row | None:
        """One random row of a split, or None where this attempt gave none."""

    @abc.abstractmethod
    def read(self, path: str | os.PathLike[str]) -> list[Row]:
        """The rows of a published file, in its order. Malformed files: DataError."""

    @abc.abstractmethod
    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Judge a completion, strictly: any string gets a verdict, in time linear in its length, and text around an answer spoils it."""

    @abc.abstractmethod
    def corrupt(self, row: Mapping[str, Any], rng: random.Random) -> str:
        """A plausible wrong completion: well formed, never right."""

    def generate(self, split: Split, count: int, seed: int) -> list[Row]:
        """`count` different rows of a split. The same seed gives the same rows, and a smaller count their beginning.

        Raises:
            ConfigError: for an unknown split, and where the task has fewer problems than asked for.
        """
        if split not in get_args(Split):
            raise ConfigError(f"unknown split {split!r}", where=self.name, remedy="Use 'train' or 'test'.")
        rng = random.Random(f"{self.name} {split} {seed}")
        rows: dict[str, Row] = {}
        for _ in range(100 * count + 10_000):
            if len(rows) >= count:
                break
            if row := self.draw(split, rng):
                rows.setdefault(row["prompt"], row)
        if len(rows) < count:
            what = f"{count} different problems asked for, {len(rows)} found"
            raise ConfigError(what, where=f"{self.name}, {split}", remedy="Ask for fewer, or widen the task's range.")
        return list(rows.values())

    def demonstrate(self, row: Mapping[str, Any], rng: random.Random, mistake_rate: float) -> str:
        """A completion as a fallible human writes it: wrong with probability `mistake_rate`, else the right one of the row."""
        return self.corrupt(row, rng) if rng.random() < mistake_rate else row["completion"]

    def reward(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
        """The value of each completion: a reward function as TRL calls it, with the dataset's columns as lists."""
        require_names(columns, self.columns, f"the reward of {self.name}")
        wanted = [columns[name] for name in self.columns]
        return [
            self.verify(completion, dict(zip(self.columns, values, strict=True))).value
            for completion, *values in zip(completions, *wanted, strict=True)
        ]


def get_task(name: str) -> Task:
    """The task of that name with its default settings. An unknown name: ConfigError that names the nearest."""
    if name not in Task._known:
        raise ConfigError(f"unknown task {name!r}", remedy=did_you_mean(name, Task._known))
    return Task._known[name]()
