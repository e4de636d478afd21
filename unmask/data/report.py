"""Statistics of the rows of a dataset: how many there are, how long they are, and which were skipped or truncated and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from unmask.console import show_table
from unmask.data.encoding import EQUAL_RESPONSES
from unmask.data.rows import prepending_place
from unmask.data.unknown_tokens import UnknownTokens
from unmask.errors import DataError

NAMED = 10
"""Rows listed per reason for skipping."""
QUANTILES = {"shortest": 0.0, "median": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}

RowType = TypeVar("RowType")


class Rows(list[RowType]):
    """Token rows with their report."""

    report: DataReport


def print_report(rows: Any, wanted: bool) -> Any:
    """Prints the report of rows that have one, once, if it is wanted. Returns the rows."""
    if wanted and isinstance(rows, Rows) and not rows.report.shown:
        rows.report.show()
    return rows


def data_reports(trainer: Any) -> dict[str, DataReport]:
    """The reports of a trainer's datasets (`train`, `eval`) that have one."""
    datasets = {name: getattr(trainer, f"{name}_dataset", None) for name in ("train", "eval")}
    return {name: rows.report for name, rows in datasets.items() if isinstance(rows, Rows)}


class DataReport:
    """Counts the rows of a dataset (`where` in errors) while they are tokenised.

    Args:
        skip: whether bad rows are only counted, or else raise their errors; None: they raise them, and no setting changes it.
        max_unknown: the fraction of the tokens that may be unknown to the tokenizer.
    """

    def __init__(self, where: str, *, skip: bool | None = None, max_unknown: float = 1.0):
        self.where, self.skip, self.unknown = where, skip, UnknownTokens(max_unknown)
        self.read = 0  # number of rows read
        self.numbers: list[int] = []  # indices, from 0, of the rows that are kept
        self.dropped: dict[str, list[int]] = {}  # indices of skipped rows, by reason
        self.truncated: Counter[str] = Counter()  # number of truncated rows, by part ("prompt" or "completion")
        self.lengths: dict[str, list[int]] = {}  # tokens before truncation of all rows that could be encoded, by part
        self.packed: int | None = None  # number of packed rows; None without packing
        self.shown = False  # the stages of a conversion share their rows

    @contextmanager
    def row(self, index: int) -> Iterator[None]:
        """Counts the row that is tokenised inside. Its error (one with a `reason`) is counted and suppressed if bad rows are skipped."""
        self.read += 1
        try:
            with prepending_place(f"{self.where}, row {index}"):
                yield
            self.numbers.append(index)
        except DataError as error:
            if self.skip is False:
                raise error.skippable() from error
            if self.skip is None or error.reason is None:
                raise
            self.dropped.setdefault(error.reason, []).append(index)

    @property
    def kept(self) -> int:
        """Number of rows that are kept."""
        return len(self.numbers)

    def record_lengths(self, **lengths: int) -> None:
        """Record the tokens of a row's parts."""
        for name, length in lengths.items():
            self.lengths.setdefault(name, []).append(length)

    def record_cuts(self, **parts: bool) -> None:
        """Record which of a row's parts were truncated."""
        self.truncated.update(name for name, truncated in parts.items() if truncated)

    def attach(self, rows: Sequence[RowType]) -> Rows[RowType]:
        """The rows with this report. Raises DataError if there are too many unknown tokens, which may be why rows were left out, or no
        rows."""
        self.unknown.check(self.where)
        if not rows:
            reasons = ", ".join(f"{len(indices):,} {reason}" for reason, indices in self.dropped.items())
            remedy = "Fix the data: training.bad_rows=error ends at the first such row and says what is wrong"
            raise DataError(f"no row is left ({reasons})", where=self.where, remedy=remedy)
        reported = Rows(rows)
        reported.report = self
        return reported

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        dropped = {reason: {"count": len(indices), "rows": indices[:NAMED]} for reason, indices in self.dropped.items()}
        counts: dict[str, Any] = {"read": self.read, "kept": self.kept, "dropped": dropped, "truncated": dict(self.truncated)}
        if "chosen" in self.lengths:
            counts["chosen_equals_rejected"] = len(self.dropped.get(EQUAL_RESPONSES, ()))
        if self.packed is not None:
            counts["packed"] = self.packed
        tokens = {name: quantiles(lengths) | {"histogram": histogram(lengths)} for name, lengths in self.lengths.items()}
        return counts | {"unknown_tokens": {"fraction": self.unknown.fraction, "examples": self.unknown.examples}, "tokens": tokens}

    def show(self) -> None:
        """Print two tables: row counts and lengths."""
        self.shown = True
        counts = [("read", f"{self.read:,}"), ("kept", f"{self.kept:,}")]
        for reason, indices in self.dropped.items():
            more = ", ..." if len(indices) > NAMED else ""
            counts.append((f"left out: {reason}", f"{len(indices):,} (row {', '.join(map(str, indices[:NAMED]))}{more})"))
        if "chosen" in self.lengths and EQUAL_RESPONSES not in self.dropped:
            counts.append((EQUAL_RESPONSES, "0"))
        counts += [(f"{name} cut", f"{count:,}") for name, count in self.truncated.items()]
        if self.packed is not None:
            counts.append(("packed into", f"{self.packed:,}"))
        counts.append(("unknown tokens", f"{self.unknown.fraction:.2%}"))
        show_table(counts, f"{self.where}: rows")
        columns = [quantiles(lengths) | histogram(lengths) for lengths in self.lengths.values()]
        buckets = {name for column in columns for name in column} - QUANTILES.keys()
        labels = {name: f"{name} have at most" if "%" in name else name for name in QUANTILES}
        labels |= {name: f"rows of {name}" for name in sorted(buckets, key=lambda name: int(name.split("-")[0]))}
        lines = [(label, *(f"{column.get(name, 0):,}" for column in columns)) for name, label in labels.items()]
        show_table(lines, f"{self.where}: tokens", head=["", *self.lengths])


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """`QUANTILES` of a non-empty list, without interpolation."""
    ordered = sorted(lengths)
    return {name: ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] for name, fraction in QUANTILES.items()}


def histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Counts in buckets between powers of two, empty ones between them included: `{"1": 4, "2-3": 0, "4-7": 9}`."""
    counts = Counter(length.bit_length() for length in lengths)
    return {_bucket(bits): counts[bits] for bits in range(min(counts), max(counts) + 1)}


def _bucket(bits: int) -> str:
    first, last = (1 << bits) >> 1, (1 << bits) - 1
    return str(first) if first >= last else f"{first}-{last}"
