"""Statistics of the rows of a dataset: how many there are, how long they are, and which were skipped or
truncated and why; and rows as text in which the trained tokens are marked."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from unmask.console import for_stdout, show_line, show_table
from unmask.data.encoding import EQUAL_RESPONSES
from unmask.data.unknown_tokens import UnknownTokens
from unmask.errors import DataError, UnmaskWarning, prepending_place

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMED = 10
"""Rows listed per reason for skipping."""
TRAINED = "⟦⟧"
"""What stands before and after trained tokens."""
FEW = 1 / 3
"""A fraction of the rows: if fewer are kept, there is a warning."""
QUANTILES = {"shortest": 0.0, "median": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}


def report_of(rows: Any) -> DataReport | None:
    """The report of rows that have one (`stored_rows`)."""
    report = getattr(rows, "report", None)
    return report if isinstance(report, DataReport) else None


def print_report(rows: Any, wanted: bool, *, tables: bool = True) -> Any:
    """Prints the report of rows that have one, once, if it is wanted, and warns if few of the rows are left.
    Returns the rows.

    Args:
        tables: whether the report is printed, besides the warning.
    """
    report = report_of(rows)
    if wanted and report is not None and not report.shown:
        if tables:
            report.show()
        if report.kept < FEW * report.read:
            what = f"{report.where}: only {report.kept:,} of {report.read:,} rows are kept ({report.reasons})"
            warnings.warn(what, UnmaskWarning, stacklevel=2)
    return rows


def data_reports(trainer: Any) -> dict[str, dict[str, Any]]:
    """The reports of a trainer's datasets (`train`, `eval`) that have one, for JSON; `rows`: the training
    rows that were shown."""
    datasets = {name: getattr(trainer, f"{name}_dataset", None) for name in ("train", "eval")}
    reports = {name: report.to_dict() for name, rows in datasets.items() if (report := report_of(rows))}
    if trainer.args.show_rows:
        rows = datasets["train"] if datasets["train"] is not None else trainer.train_rows
        reports["train"] = reports.get("train", {}) | {
            "rows": marked_rows(trainer.lm.tokenizer, rows, trainer.args.show_rows)
        }
    return reports


def marked_rows(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Any], count: int) -> list[list[str]]:
    """The documents of the first rows as text, with the trained tokens between `TRAINED`. A prompt of
    reinforcement learning ends with an empty mark, where the completion will be."""
    return [_documents(tokenizer, row) for row in islice(iter(rows), count)]


def show_rows(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Any], count: int) -> None:
    """Print `marked_rows`."""
    for number, documents in enumerate(marked_rows(tokenizer, rows, count)):
        for part, text in enumerate(documents, start=1):
            name = f"row {number}" + f", part {part} of {len(documents)}" * (len(documents) > 1)
            show_line(for_stdout(f"{name}, trained on between {' and '.join(TRAINED)}:\n{text}\n"))


def _documents(tokenizer: PreTrainedTokenizerBase, row: Any) -> list[str]:
    if not isinstance(row, Mapping):  # a prompt of reinforcement learning
        return [marked_text(tokenizer, row.ids, [False] * len(row.ids)) + "".join(TRAINED)]
    row = row.get("response", row)  # of KTO
    tokens = zip(row["documents"], row["input_ids"], row["maskable"], strict=True)
    return [
        marked_text(tokenizer, *zip(*((token, trained) for _, token, trained in part), strict=True))
        for _, part in groupby(tokens, itemgetter(0))
    ]


def marked_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], trained: Sequence[bool]) -> str:
    """The text of a row, special tokens included, with the trained tokens between `TRAINED`."""
    text, before = "", ""
    for is_trained, run in groupby(range(len(ids)), trained.__getitem__):
        indices = [*run]
        whole = str(tokenizer.decode(ids[: indices[-1] + 1], clean_up_tokenization_spaces=False))
        part = (
            whole.removeprefix(before)
            if whole.startswith(before)
            else str(tokenizer.decode(ids[indices[0] : indices[-1] + 1]))
        )
        text, before = text + (part.join(TRAINED) if is_trained else part), whole
    return text


class DataReport:
    """Counts the rows of a dataset (`where` in errors) while they are tokenized.

    Args:
        skip: whether bad rows are only counted, or else raise their errors; None: they raise them, and no
            setting changes it.
        max_unknown: the fraction of the tokens that may be unknown to the tokenizer.
    """

    def __init__(self, where: str, *, skip: bool | None = None, max_unknown: float = 1.0):
        self.where, self.skip, self.unknown = where, skip, UnknownTokens(max_unknown)
        self.read = 0  # number of rows read
        self.dropped: dict[str, list[int]] = {}  # indices of skipped rows, by reason
        self.answers = 0  # number of answers that are trained on, in the rows that are kept
        # number of truncated rows, by part ("prompt" or "completion")
        self.truncated: Counter[str] = Counter()
        # how many of the rows that could be encoded have a number of tokens, before truncation, by part
        self.lengths: dict[str, Counter[int]] = {}
        self.packed: int | None = None  # number of packed rows; None without packing
        self.shown = False  # the stages of a conversion share their rows

    @contextmanager
    def row(self, index: int) -> Iterator[None]:
        """Counts the row that is tokenized inside. Its error (one with a `reason`) is counted and suppressed
        if bad rows are skipped."""
        self.read += 1
        try:
            with prepending_place(f"{self.where}, row {index}"):
                yield
        except DataError as error:
            if self.skip is False:
                raise error.skippable() from error
            if self.skip is None or error.reason is None:
                raise
            self.dropped.setdefault(error.reason, []).append(index)

    @property
    def kept(self) -> int:
        """Number of rows that are kept."""
        return self.read - sum(map(len, self.dropped.values()))

    @property
    def numbers(self) -> list[int]:
        """The indices, from 0, of the rows that are kept."""
        dropped = {*chain.from_iterable(self.dropped.values())}
        return [index for index in range(self.read) if index not in dropped]

    @property
    def reasons(self) -> str:
        """How many rows were skipped, by reason."""
        return ", ".join(f"{len(indices):,} {reason}" for reason, indices in self.dropped.items())

    def record_lengths(self, **lengths: int) -> None:
        """Record the tokens of a row's parts."""
        for name, length in lengths.items():
            self.lengths.setdefault(name, Counter())[length] += 1

    def record_cuts(self, **parts: bool) -> None:
        """Record which of a row's parts were truncated."""
        self.truncated.update(name for name, truncated in parts.items() if truncated)

    def check(self) -> None:
        """Raise DataError if there are too many unknown tokens, which may be why rows were left out, or no
        rows."""
        self.unknown.check(self.where)
        if not self.kept:
            remedy = "Fix the data: training.bad_rows=error ends at the first such row and says what is wrong"
            raise DataError(f"no row is left ({self.reasons})", where=self.where, remedy=remedy)

    def identity(self) -> bool | None:
        """What rows depend on."""
        return self.skip

    def state(self) -> dict[str, Any]:
        """The counts, of JSON types."""
        return {
            "read": self.read,
            "dropped": self.dropped,
            "answers": self.answers,
            "truncated": self.truncated,
            "lengths": {name: [*lengths.items()] for name, lengths in self.lengths.items()},
            "unknown": self.unknown.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the counts of rows that are stored, and `check` them."""
        self.read, self.dropped, self.answers = state["read"], state["dropped"], state["answers"]
        self.truncated = Counter(state["truncated"])
        self.lengths = {name: Counter(dict(lengths)) for name, lengths in state["lengths"].items()}
        self.unknown.restore(state["unknown"])
        self.check()

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        dropped = {
            reason: {"count": len(indices), "rows": indices[:NAMED]}
            for reason, indices in self.dropped.items()
        }
        counts: dict[str, Any] = {
            "read": self.read,
            "kept": self.kept,
            "dropped": dropped,
            "truncated": dict(self.truncated),
        }
        if "chosen" in self.lengths:
            counts["chosen_equals_rejected"] = len(self.dropped.get(EQUAL_RESPONSES, ()))
        if self.answers:
            counts["answers"] = self.answers
        if self.packed is not None:
            counts["packed"] = self.packed
        tokens = {
            name: quantiles(lengths) | {"histogram": histogram(lengths)}
            for name, lengths in self.lengths.items()
        }
        return counts | {
            "unknown_tokens": {"fraction": self.unknown.fraction, "examples": self.unknown.examples},
            "tokens": tokens,
        }

    def show(self) -> None:
        """Print two tables: row counts and lengths."""
        self.shown = True
        counts = [("read", f"{self.read:,}"), ("kept", f"{self.kept:,}")]
        for reason, indices in self.dropped.items():
            more = ", ..." if len(indices) > NAMED else ""
            counts.append(
                (
                    f"left out: {reason}",
                    f"{len(indices):,} (row {', '.join(map(str, indices[:NAMED]))}{more})",
                )
            )
        if "chosen" in self.lengths and EQUAL_RESPONSES not in self.dropped:
            counts.append((EQUAL_RESPONSES, "0"))
        if self.answers > self.kept:
            counts.append(("trained answers", f"{self.answers:,}"))
        counts += [(f"{name} cut", f"{count:,}") for name, count in self.truncated.items()]
        if self.packed is not None:
            counts.append(("packed into", f"{self.packed:,}"))
        counts.append(("unknown tokens", f"{self.unknown.fraction:.2%}"))
        show_table(counts, f"{self.where}: rows")
        columns = [quantiles(lengths) | histogram(lengths) for lengths in self.lengths.values()]
        buckets = {name for column in columns for name in column} - QUANTILES.keys()
        labels = {name: f"{name} have at most" if "%" in name else name for name in QUANTILES}
        labels |= {
            name: f"rows of {name}" for name in sorted(buckets, key=lambda name: int(name.split("-")[0]))
        }
        lines = [
            (label, *(f"{column.get(name, 0):,}" for column in columns)) for name, label in labels.items()
        ]
        show_table(lines, f"{self.where}: tokens", head=["", *self.lengths])


def quantiles(lengths: Counter[int]) -> dict[str, int]:
    """`QUANTILES` of numbers that are counted, at least one, without interpolation."""
    ordered, total = sorted(lengths), lengths.total()
    upto = [*accumulate(lengths[length] for length in ordered)]
    return {
        name: ordered[bisect_right(upto, min(total - 1, int(fraction * total)))]
        for name, fraction in QUANTILES.items()
    }


def histogram(lengths: Counter[int]) -> dict[str, int]:
    """Counts in buckets between powers of two, empty ones between them included: `{"1": 4, "2-3": 0, "4-7":
    9}`."""
    counts: Counter[int] = Counter()
    for length, number in lengths.items():
        counts[length.bit_length()] += number
    return {_bucket(bits): counts[bits] for bits in range(min(counts), max(counts) + 1)}


def _bucket(bits: int) -> str:
    first, last = (1 << bits) >> 1, (1 << bits) - 1
    return str(first) if first >= last else f"{first}-{last}"
