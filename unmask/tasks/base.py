"""The interface of verifiable tasks, which read or generate problems and verify answers. docs/tasks.md shows
how to add one.

A row is a flat dict: `prompt` and `completion` (a right answer) as text, `group` (the identity of the
solution: confidence intervals are clustered by it, and splits never divide it), and the columns of the task.
"""

from __future__ import annotations

import abc
import dataclasses
import difflib
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from unmask.config.user_code import failing_as, load_class, refuse_file_alone
from unmask.errors import ConfigError, DataError, did_you_mean, require_names
from unmask.records import PlacedRecord
from unmask.rewards.verdict import Verdict

Row = dict[str, Any]
Split = Literal["train", "test"]
Style = Literal["plain", "chat"]
Verify = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[Verdict]]
Component = Callable[[str, Mapping[str, Any]], float | None]
"""Returns the published value of a completion for a row; None if it cannot be verified."""

PARTS = ("prompt", "completion", "group")
"""The columns of every row."""
TEST_FRACTION = 0.28


@dataclass(frozen=True)
class Reward:
    """A reward function with TRL's signature that also reports the status of each verdict.

    Attributes:
        name: name in logs.
        columns: dataset columns that it reads.
        optional: columns that it reads where the dataset has them.
        verify: returns the verdicts on completions, from these columns of their rows.
    """

    name: str
    columns: tuple[str, ...]
    verify: Verify
    optional: tuple[str, ...] = ()

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """The value of each completion (text or messages); None if it could not be verified."""
        return [verdict.value for verdict in self.verdicts(completions, **columns)]

    def verdicts(self, completions: Sequence[Any], **columns: Any) -> list[Verdict]:
        """The verdict on each completion. Each dataset column is a list; those that the reward does not read
        are ignored."""
        require_names(columns, self.columns, f"the reward {self.name}")
        names = [*self.columns, *(name for name in self.optional if name in columns)]
        rows = [
            dict(zip(names, row, strict=True)) for row in zip(*(columns[name] for name in names), strict=True)
        ]
        return self.verify(
            [text if isinstance(text, str) else text[-1]["content"] for text in completions], rows
        )


def split_of(group: str) -> Split:
    """The split of a solution. It depends on the identity of the solution alone, so that no run trains on a
    test solution."""
    digest = hashlib.sha256(group.encode()).digest()
    return "test" if digest[0] < TEST_FRACTION * 256 else "train"


class Task(abc.ABC):
    """A family of problems with a verifier. `get_task` finds subclasses that set `name`, once imported (in
    `tasks/__init__.py`), and others by their file or module."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    """Keys that every record of a file must have."""
    columns: ClassVar[tuple[str, ...]]
    """The columns of a row that `verify` reads."""
    optional_columns: ClassVar[tuple[str, ...]] = ()
    """Columns that it also reads where there are any."""
    instructions: ClassVar[str] = "Give the answer alone, between <answer> and </answer>."
    """The instructions before the problem in the chat format."""
    published: ClassVar[Mapping[str, Component]] = {}
    """The components of the published reward (d1, Zhao et al. 2025, unless the task names another), by
    name."""
    reference: ClassVar[str | None] = None
    """The column with the text that ROUGE and BLEU compare a completion with; None: they are not computed."""
    max_completion: int | None = None
    """Tokens (of a character tokenizer) in the longest right completion and its end of sequence; None: the
    sampler's setting."""

    registered: ClassVar[dict[str, type[Task]]] = {}
    """The classes of all tasks, by name."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            _register(cls)

    @abc.abstractmethod
    def row(self, record: Mapping[str, Any], where: str) -> Row:
        """The row of one record of a file. Raises a DataError that names `where` if the record is
        malformed."""

    @abc.abstractmethod
    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The verdict on a completion, which may be any text, in bounded time. A wrong one may get partial
        credit, in [0, 1)."""

    def verify_all(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """The verdict on each completion. Tasks that run programs override this to verify in parallel."""
        verdicts = [self.verify(completion, row) for completion, row in zip(completions, rows, strict=True)]
        for verdict in verdicts:
            if not isinstance(verdict, Verdict):
                raise TypeError(
                    f"verify returned {verdict!r:.80}: return OK, WRONG or Verdict(...) of "
                    "unmask.rewards.verdict"
                )
        return verdicts

    def rows(self, records: Iterable[PlacedRecord]) -> Iterator[Row]:
        """The rows of records. DataError if a record is malformed or lacks one of `fields`, or `row`
        fails."""
        method = f"{type(self).__name__}.row"
        for where, record in records:
            require_names(record, self.fields, where)
            with failing_as(
                DataError,
                method,
                where=where,
                remedy=f"Correct the row or {method}, or name what it reads in `fields`",
            ):
                row = self.row(record, where)
                require_names(row, PARTS, f"{where}, as {method} returns it")
            yield row

    def generate(self, split: Split, count: int, seed: int) -> list[Row]:
        """At most `count` rows of a split, without a file. ConfigError if the task has no problems of its
        own."""
        raise ConfigError(
            f"{self.name} generates no problems",
            where="task",
            remedy="Give a file of problems, or a dataset on the hub",
        )

    @property
    def needs_data(self) -> bool:
        """Whether problems come from a file or dataset only."""
        return type(self).generate is Task.generate

    def question(self, row: Mapping[str, Any]) -> str:
        """The problem as a chat message."""
        return str(row.get("question", row["prompt"]))

    def answer(self, row: Mapping[str, Any]) -> str:
        """A right answer as a chat message."""
        return f"<answer>{row['completion']}</answer>"

    def posed(
        self, row: Mapping[str, Any], style: Style = "plain", examples: Sequence[Mapping[str, Any]] = ()
    ) -> Row:
        """The row with solved examples before its problem, as text separated by blank lines (plain) or as
        messages (chat)."""
        if style == "plain":
            before = "".join(f"{example['prompt']}{example['completion']}\n\n" for example in examples)
            return {**row, "prompt": before + row["prompt"]}
        messages = []
        for each in (*examples, row):
            messages.append({"role": "user", "content": f"{self.instructions}\n\n{self.question(each)}"})
            messages.append({"role": "assistant", "content": self.answer(each)})
        return {**row, "prompt": messages[:-1], "completion": messages[-1:]}

    def rewards(self, shaping: str = "strict") -> list[Reward]:
        """The reward functions of a shaping. ConfigError if the task does not have it.

        Args:
            shaping: strict: 1 for a solved problem, else 0. partial: the value of `verify`. published: one
                function for each component of the published reward. A shaping with a single function gives it
                the shaping's name: `sudoku`, `sudoku/partial`.
        """
        known = self.shapings()
        if shaping not in known:
            raise ConfigError(
                f"{self.name} has no shaping {shaping!r}",
                where="rewards",
                remedy=did_you_mean(shaping, known),
            )
        components, only = known[shaping], self.name if shaping == "strict" else f"{self.name}/{shaping}"
        return [
            Reward(name if len(components) > 1 else only, self.columns, verify, self.optional_columns)
            for name, verify in components.items()
        ]

    def shapings(self) -> dict[str, dict[str, Verify]]:
        """The components of each shaping, by name."""
        published = {name: _component(function) for name, function in self.published.items()}
        known: dict[str, dict[str, Verify]] = {
            "strict": {self.name: self._strictly},
            "partial": {self.name: self.verify_all},
        }
        return known | ({"published": published} if published else {})

    def _strictly(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        verdicts = self.verify_all(completions, rows)
        return [v if v.value is None else dataclasses.replace(v, value=float(v.solved)) for v in verdicts]


def _component(function: Component) -> Verify:
    def verify(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        values = [function(completion, row) for completion, row in zip(completions, rows, strict=True)]
        return [
            Verdict(value, "verifier_error" if value is None else "ok" if value > 0 else "wrong")
            for value in values
        ]

    return verify


class Puzzle(Task):
    """A task that generates problems."""

    alphabet: ClassVar[str]
    """Every character that a prompt or a right completion can hold."""
    max_completion: int

    @abc.abstractmethod
    def draw(self, split: Split, rng: random.Random) -> Row | None:
        """One random row of a split, or None if this attempt fails."""

    @abc.abstractmethod
    def corrupt(self, row: Mapping[str, Any], rng: random.Random) -> str:
        """A plausible wrong completion: well formed, never right."""

    def generate(self, split: Split, count: int, seed: int) -> list[Row]:
        """`count` different rows of a split. They depend on the seed; a smaller count gives the first of
        them.

        ConfigError if the split is unknown, or the task has fewer problems.
        """
        if split not in get_args(Split):
            raise ConfigError(f"unknown split {split!r}", where=self.name, remedy="Use 'train' or 'test'")
        rng = random.Random(f"{self.name} {split} {seed}")
        rows: dict[str, Row] = {}
        for _ in range(100 * count + 10_000):
            if len(rows) >= count:
                break
            if row := self.draw(split, rng):
                if not (isinstance(row, dict) and isinstance(row.get("prompt"), str)):
                    remedy = (
                        "Return self.row(...), which has a text under prompt, or None (docs/tasks.md has "
                        "an example)"
                    )
                    raise ConfigError(
                        f"draw returned {row!r:.80}, which is no row", where=self.name, remedy=remedy
                    )
                rows.setdefault(row["prompt"], row)
        if len(rows) < count:
            what = f"{count} different problems requested, {len(rows)} found"
            fewer = f"data.{'max_rows' if split == 'train' else 'eval_rows'}={len(rows)}" if rows else "fewer"
            raise ConfigError(
                what,
                where=f"{self.name}, {split}",
                remedy=f"Request fewer ({fewer}), or widen the range of the task",
            )
        return list(rows.values())

    def demonstrate(self, row: Mapping[str, Any], rng: random.Random, mistake_rate: float) -> str:
        """A completion as people write it: wrong with probability `mistake_rate`, else the right one."""
        return self.corrupt(row, rng) if rng.random() < mistake_rate else row["completion"]

    @staticmethod
    def chance(effort: float, rate: float) -> float:
        """The probability of a mistake: linear in effort (0 to 1), with mean `rate`. A rate of 0.4 gives
        probabilities from 0 to 0.8, a rate of 0.6 from 0.2 to 1."""
        return 2 * rate * effort if rate <= 0.5 else 1 - 2 * (1 - rate) * (1 - effort)


def get_task(name: str) -> Task:
    """The task of this name with default settings, or of the class that `path/to/file.py:NAME` or
    `package.module:NAME` names.

    Raises:
        ConfigError: it is unknown, with the most similar name; or the class cannot be loaded or made, lacks a
            part of a task, or has the name of a built-in one.
    """
    if ":" in name:
        return _load_task(name)
    refuse_file_alone(name, _is_task, "task")
    if name not in Task.registered:
        own = "Name a class of your own as path/to/file.py:NAME"
        remedy = f"{did_you_mean(name, Task.registered)} {own}"
        raise ConfigError(f"unknown task {name!r}", where="task", remedy=remedy)
    return _made(Task.registered[name], name)


def _load_task(target: str) -> Task:
    """A task of the user, which its own name finds from now on."""
    cls = load_class(target, Task)
    missing = [
        *sorted(cls.__abstractmethods__),
        *(name for name in ("name", "fields", "columns") if not hasattr(cls, name)),
    ]
    if missing:
        raise ConfigError(
            f"{cls.__name__} lacks {', '.join(missing)}",
            where=target,
            remedy="Define them (docs/tasks.md has an example)",
        )
    _register(cls)
    return _made(cls, target)


def _is_task(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Task)


def _register(cls: type[Task]) -> None:
    """Make a class known by its name. Raises ConfigError if a class of Unmask has the name."""
    known = Task.registered.get(cls.name)
    if known is not None and _is_built_in(known) and not _is_built_in(cls):
        raise ConfigError(
            f"{cls.name!r} is the name of a built-in task",
            where=cls.__name__,
            remedy="Give it a name of its own",
        )
    Task.registered[cls.name] = cls


def _is_built_in(cls: type[Task]) -> bool:
    return cls.__module__.startswith("unmask.")


def _made(cls: type[Task], where: str) -> Task:
    with failing_as(
        ConfigError, f"{cls.__name__}()", where=where, remedy="Correct it: a task is made without arguments"
    ):
        return cls()


def as_puzzle(task: Task) -> Puzzle:
    """The task as a `Puzzle`. ConfigError if it does not generate problems with wrong answers."""
    if not isinstance(task, Puzzle):
        remedy = "Use a task that is a Puzzle (docs/tasks.md), or for preferences a file of them"
        raise ConfigError(
            f"{task.name} generates no problems with wrong answers", where="task", remedy=remedy
        )
    return task


def get_rewards(name: str) -> list[Reward]:
    """The reward functions of `task` or `task/shaping`: `gsm8k`, `sudoku/partial`, `gsm8k/published`."""
    task, _, shaping = name.partition("/")
    if task not in Task.registered:
        remedy = did_you_mean(task, Task.registered)
        own = "Name a reward model by its folder or hub name, and a function as path/to/file.py:NAME"
        raise ConfigError(f"no task and no folder is named {name!r}", where="task", remedy=f"{remedy} {own}")
    return get_task(task).rewards(shaping or "strict")


def names_reward_model(name: str) -> bool:
    """Whether a name without a colon is that of a reward model: a folder, or a path or name on the hub that
    is not that of a task and a shaping, nor almost."""
    task, slash, shaping = name.partition("/")
    if task in Task.registered or name.endswith(".py"):
        return False
    pairs = ((task, Task.registered), (shaping, ("strict", "partial", "published")))
    misspelled = all(difflib.get_close_matches(part, known, n=1) for part, known in pairs)
    return Path(name).is_dir() or (slash == "/" and not misspelled)
