"""What `unmask compare` reads and prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unmask.errors import DataError
from unmask.evaluation.comparison import Comparison, Difference, Named
from unmask.evaluation.result_file import read_result
from unmask.redaction import shown


def read_named(files: Sequence[Path]) -> list[Named]:
    """The results of files, named by the end of their paths that tells them apart. Raises DataError for a file given twice, and as
    `read_result`."""
    resolved = [file.resolve() for file in files]
    for file in files:
        if resolved.count(file.resolve()) > 1:
            raise DataError("is given twice", where=str(file), remedy="Give each result once")
    longest = max((len(path.parts) for path in resolved), default=1)
    tails = ([_tail(path, n, suffix) for path in resolved] for n in range(1, longest + 1) for suffix in (False, True))
    short = next(names for names in tails if len(set(names)) == len(names))
    return [Named(name, read_result(file)) for name, file in zip(short, files, strict=True)]


def _tail(path: Path, parts: int, suffix: bool) -> str:
    tail = Path(*path.parts[-parts:])
    return str(tail if suffix else tail.with_suffix(""))


def difference_rows(comparison: Comparison, *, several: bool) -> list[list[str]]:
    """A row of the table for each difference; with `several` results after the first each names its own."""
    return [
        [f"{each.task}: {each.metric}", before, *([each.other] if several else []), after, change, f"{each.adjusted:.2g}", each.verdict]
        for each in comparison.differences
        for before, after, change in [_values(each)]
    ]


def _values(each: Difference) -> tuple[str, str, str]:
    """Both means and the difference."""
    spec = ".1%" if each.fraction else ".4g"
    change = each.change
    return f"{each.before:{spec}}", f"{each.after:{spec}}", f"{change.mean:+{spec}} [{change.low:+{spec}}, {change.high:+{spec}}]"


def shared_lines(comparison: Comparison, first: str) -> list[str]:
    """How many items are shared and how many are not."""
    lines = []
    for each in comparison.shared:
        line = f"{each.task}: {each.shared} items shared, {each.only_first} only in {first}, {each.only_other} only in {each.other}"
        lines.append(shown(line + (f"; {each.unscored} of the shared ones have no score in one of them" if each.unscored else "")))
    return lines


def setting_rows(comparison: Comparison) -> list[list[str]]:
    """A row for each setting in which protocols differ."""
    return [[each.task, name, before, each.other, after] for each in comparison.shared for name, before, after in each.settings]
