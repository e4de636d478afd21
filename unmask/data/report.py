"""What was found when rows were made: how many, how long, what was left out or cut, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from unmask.console import show_table
from unmask.data.chat import EQUAL
from unmask.data.rows import naming
from unmask.errors import DataError

NAMED = 10
"""How many of the rows left out for one reason are named."""
QUANTILES = {"shortest": 0.0, "median": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}

Made = TypeVar("Made")


class Rows(list[Made]):
    """Rows of tokens, and what was found when they were made."""

    report: DataReport


def shown(rows: Any, wanted: bool) -> Any:
    """The rows, whose report is printed if they have one."""
    if wanted and isinstance(rows, Rows):
        rows.report.show()
    return rows


class DataReport:
    """Counts the rows of one data set while they are made, and decides what becomes of bad ones.

    Args:
        where: what errors call the data set.
        skip: leave bad rows out and count them, instead of raising their errors.

    Attributes:
        read: rows of the data set.
        numbers: of those of them that are trained on, from 0.
        dropped: by reason the numbers of those left out.
        truncated: by what was cut ("prompt" or "completion") how many were.
        lengths: by part of a row its tokens, of all rows that could be rendered, before anything is cut.
        packed: token rows into which the kept ones were packed; None: they were not.
    """

    def __init__(self, where: str, *, skip: bool = False):
        self.where, self.skip = where, skip
        self.read = 0
        self.numbers: list[int] = []
        self.dropped: dict[str, list[int]] = {}
        self.truncated: Counter[str] = Counter()
        self.lengths: dict[str, list[int]] = {}
        self.packed: int | None = None

    @contextmanager
    def row(self, index: int) -> Iterator[None]:
        """Where one row is made. An error that tells what is wrong with the row alone ends with it, if bad rows are left out."""
        self.read += 1
        try:
            with naming(f"{self.where}, row {index}"):
                yield
            self.numbers.append(index)
        except DataError as error:
            if not self.skip or error.reason is None:
                raise
            self.dropped.setdefault(error.reason, []).append(index)

    @property
    def kept(self) -> int:
        """How many rows are trained on."""
        return len(self.numbers)

    def measure(self, **lengths: int) -> None:
        """Note the tokens of a row's parts."""
        for name, length in lengths.items():
            self.lengths.setdefault(name, []).append(length)

    def cut(self, **cut: bool) -> None:
        """Note which of a row's parts were cut."""
        self.truncated.update(name for name, was in cut.items() if was)

    def of(self, rows: Sequence[Made]) -> Rows[Made]:
        """The rows with this report. None at all: DataError."""
        if not rows:
            reasons = ", ".join(f"{len(found):,} {reason}" for reason, found in self.dropped.items())
            raise DataError(f"no row is left ({reasons})", where=self.where, remedy="Mend the data, or set bad_rows to error to see how")
        made = Rows(rows)
        made.report = self
        return made

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        dropped = {reason: {"count": len(found), "rows": found[:NAMED]} for reason, found in self.dropped.items()}
        counts: dict[str, Any] = {"read": self.read, "kept": self.kept, "dropped": dropped, "truncated": dict(self.truncated)}
        if "chosen" in self.lengths:
            counts["chosen_equals_rejected"] = len(self.dropped.get(EQUAL, ()))
        if self.packed is not None:
            counts["packed"] = self.packed
        lengths = {name: quantiles(found) | {"histogram": histogram(found)} for name, found in self.lengths.items()}
        return counts | {"tokens": lengths}

    def show(self) -> None:
        """Print it as two tables: of rows, and of lengths."""
        counts = [("read", f"{self.read:,}"), ("kept", f"{self.kept:,}")]
        for reason, found in self.dropped.items():
            more = ", ..." if len(found) > NAMED else ""
            counts.append((f"left out: {reason}", f"{len(found):,} (row {', '.join(map(str, found[:NAMED]))}{more})"))
        if "chosen" in self.lengths and EQUAL not in self.dropped:
            counts.append((EQUAL, "0"))
        counts += [(f"{name} cut", f"{count:,}") for name, count in self.truncated.items()]
        if self.packed is not None:
            counts.append(("packed into", f"{self.packed:,}"))
        show_table(counts, f"{self.where}: rows")
        columns = [quantiles(found) | histogram(found) for found in self.lengths.values()]
        buckets = {name for column in columns for name in column} - QUANTILES.keys()
        names = [*QUANTILES, *sorted(buckets, key=lambda name: int(name.split("-")[0]))]
        lengths = [(name, *(f"{column.get(name, 0):,}" for column in columns)) for name in names]
        show_table(lengths, f"{self.where}: tokens", head=["", *self.lengths])


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Of a list that is not empty, values that are in it."""
    ordered = sorted(lengths)
    return {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in QUANTILES.items()}


def histogram(lengths: Sequence[int]) -> dict[str, int]:
    """How many lengths there are from each power of two to before the next: `{"1": 4, "2-3": 0, "4-7": 9}`, gaps filled."""
    counts = Counter(length.bit_length() for length in lengths)
    return {_bucket(bits): counts[bits] for bits in range(min(counts), max(counts) + 1)}


def _bucket(bits: int) -> str:
    first, last = (1 << bits) >> 1, (1 << bits) - 1
    return str(first) if first >= last else f"{first}-{last}"
