"""`unmask compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unmask.config.run import refuse_existing
from unmask.console import show_table


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
        refuse_existing(
            picture, "Choose another, or replace it with --overwrite", overwrite=overwrite, inputs=files
        )
    from unmask.cli.compare_tables import difference_rows, read_named, setting_rows, shared_lines
    from unmask.evaluation.comparison import compare as compare_results
    from unmask.evaluation.forest_plot import check_picture, write_forest_plot

    if picture:
        check_picture(picture)
    results = read_named(files)
    first = results[0].name if results else ""
    comparison = compare_results(results)
    several = len(results) > 2
    others = ["other result", "its value"] if several else [results[1].name]
    head = ["", first, *others, "difference", "p (Holm)", ""]
    show_table(difference_rows(comparison, several=several), title=f"differences from {first}", head=head)
    for line in shared_lines(comparison, first):
        typer.echo(line)
    if settings := setting_rows(comparison, several=several):
        show_table(settings, title="settings that differ", head=["task", "setting", first, *others])
    if picture:
        write_forest_plot(comparison, first, picture)
