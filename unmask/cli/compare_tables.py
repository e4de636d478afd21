"""What `unmask compare` reads and prints."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from unmask.errors import DataError
from unmask.evaluation.comparison import Comparison, Named
from unmask.evaluation.result_file import read_result
from unmask.redaction import shown


def read_named(files: Sequence[Path]) -> list[Named]:
    """The results of files, named by the end of their paths that tells them apart. Raises DataError for a
    file given twice, and as `read_result`."""
    resolved = [file.resolve() for file in files]
    for file, path in zip(files, resolved, strict=True):
        if resolved.count(path) > 1:
            raise DataError("is given twice", where=str(file), remedy="Give each result once")
    ends = ([str(Path(*path.parts[-parts:])) for path in resolved] for parts in itertools.count(1))
    names = next(names for names in ends if len(set(names)) == len(names))
    short = [name.removesuffix(".json") for name in names]
    names = short if len(set(short)) == len(names) else names
    return [Named(name, read_result(file)) for name, file in zip(names, files, strict=True)]


def difference_rows(comparison: Comparison, *, several: bool) -> list[list[str]]:
    """A row of the table for each difference; with `several` results after the first each names its own."""
    rows = []
    for each in comparison.differences:
        spec = ".1%" if each.fraction else ".4g"
        before, after, change = f"{each.before:{spec}}", f"{each.after:{spec}}", f"{each.change:+{spec}}"
        name, other = f"{each.task}: {each.metric}", [each.other] if several else []
        rows.append([name, before, *other, after, change, f"{each.adjusted:.2g}", each.verdict])
    return rows


def shared_lines(comparison: Comparison, first: str) -> list[str]:
    """How many items are shared and how many are not."""
    lines = []
    for each in comparison.shared:
        line = (
            f"{each.task}: {each.shared} items shared, {each.only_first} only in {first}, "
            f"{each.only_other} only in {each.other}"
        )
        lines.append(
            shown(
                line
                + (
                    f"; {each.unscored} of the shared ones have no score in one of them"
                    if each.unscored
                    else ""
                )
            )
        )
    return lines


def setting_rows(comparison: Comparison, *, several: bool) -> list[list[str]]:
    """A row for each setting in which protocols differ; `several` as of `difference_rows`."""
    return [
        [each.task, name, before, *([each.other] if several else []), after]
        for each in comparison.shared
        for name, before, after in each.settings
    ]
