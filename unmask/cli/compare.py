"""`unmask compare`, and the tables that show how one result differs from another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unmask.config.run import refuse_existing
from unmask.console import show_table
from unmask.errors import DataError
from unmask.redaction import shown

if TYPE_CHECKING:
    from unmask.cli.retention import Retention
    from unmask.evaluation.comparison import Comparison


def compare(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="A.json B.json...", help="Results of unmask evaluate; A is what others are compared with."
        ),
    ],
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the differences, as .png or .svg.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the picture if it exists.")] = False,
) -> None:
    """Compare results on the items that they share: paired differences with 95% intervals, and p-values
    corrected for their number."""
    if picture:
        remedy = "Choose another, or replace it with --overwrite"
        refuse_existing(picture, remedy, overwrite=overwrite, inputs=files)
    from unmask.evaluation.comparison import Named
    from unmask.evaluation.comparison import compare as compare_results
    from unmask.evaluation.forest_plot import check_picture, write_forest_plot
    from unmask.evaluation.result_file import read_result

    if picture:
        check_picture(picture)
    results = [Named(name, read_result(file)) for name, file in zip(short_names(files), files, strict=True)]
    first = results[0].name if results else ""
    comparison = compare_results(results)
    several = len(results) > 2
    others = ["other result", "its value"] if several else [results[1].name]
    head = ["", first, *others, "difference", "p (Holm)", ""]
    show_table(difference_rows(comparison, several=several), title=f"differences from {first}", head=head)
    for each in comparison.shared:
        line = (
            f"{each.task}: {each.shared} items shared, {each.only_first} only in {first}, "
            f"{each.only_other} only in {each.other}"
        )
        if each.unscored:
            line += f"; {each.unscored} of the shared ones have no score in one of them"
        typer.echo(shown(line))
    show_settings(comparison, [first, *others])
    if picture:
        write_forest_plot(comparison, first, picture)


def short_names(files: Sequence[Path]) -> list[str]:
    """The ends of paths that tell them apart. Raises DataError for a file given twice."""
    resolved = [file.resolve() for file in files]
    for file, path in zip(files, resolved, strict=True):
        if resolved.count(path) > 1:
            raise DataError("is given twice", where=str(file), remedy="Give each result once")
    ends = ([str(Path(*path.parts[-parts:])) for path in resolved] for parts in itertools.count(1))
    names = next(names for names in ends if len(set(names)) == len(names))
    short = [name.removesuffix(".json") for name in names]
    return short if len(set(short)) == len(names) else names


def difference_rows(comparison: Comparison, *, several: bool = False) -> list[list[str]]:
    """A row of the table for each difference; with `several` results after the first each names its own."""
    rows = []
    for each in comparison.differences:
        spec = ".1%" if each.fraction else ".4g"
        before, after, change = f"{each.before:{spec}}", f"{each.after:{spec}}", f"{each.change:+{spec}}"
        name, other = f"{each.task}: {each.metric}", [each.other] if several else []
        rows.append([name, before, *other, after, change, f"{each.adjusted:.2g}", each.verdict])
    return rows


def show_settings(comparison: Comparison, results: Sequence[str]) -> None:
    """Print the settings in which protocols differ; `results` names the columns of their values."""
    rows = [
        [each.task, name, before, *([each.other] if len(results) > 2 else []), after]
        for each in comparison.shared
        for name, before, after in each.settings
    ]
    if rows:
        show_table(rows, title="settings that differ", head=["task", "setting", *results])


def show_retention(found: Retention, title: str) -> None:
    """Print the differences between two models, and the settings in which their evaluations differ."""
    from unmask.cli.retention import AFTER, BEFORE, speed_rows

    rows = [*difference_rows(found.comparison), *speed_rows(found)]
    show_table(rows, title=title, head=["", BEFORE, AFTER, "difference", "p (Holm)", ""])
    show_settings(found.comparison, [BEFORE, AFTER])
