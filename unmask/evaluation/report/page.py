"""A report as one HTML file that needs no network. All text is escaped, control characters are shown, and
secrets are masked."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from unmask.artifacts import plain, write_atomic
from unmask.errors import require
from unmask.evaluation.report import pictures
from unmask.evaluation.report.content import Charts, Denoising, Report, Section, Table
from unmask.redaction import masked, shown

NUMERIC = re.compile(r"([\d+[\N{MINUS SIGN}\N{EM DASH}].{,30})?", re.DOTALL)
"""The text of a cell that is not broken: a number with its unit, an interval."""
LINE_END = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


def write_page(report: Report, path: str | Path) -> None:
    """Write the report as one HTML file. An existing file is replaced atomically.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require("matplotlib", where="report")
    folder = resources.files("unmask.evaluation.report")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    numbers = itertools.count()
    environment.filters |= {
        "percent": _percent,
        "columns": column_classes,
        "curves": pictures.curves_of,
        "is_log": pictures.is_log,
        "svg": lambda content: pictures.svg_of(content, next(numbers)),
        "caption": caption,
        "kinds": cell_kinds,
        "split": _split,
        "json": lambda values: json.dumps(plain(masked(values)), indent=2, ensure_ascii=False),
    }
    html = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8")).render(
        report=report,
        sections=[section for section in report.sections if _has_content(section)],
        style=Markup(folder.joinpath("page.css").read_text(encoding="utf-8")),
        has_player=any(
            isinstance(block, Denoising) for section in report.sections for block in section.blocks
        ),
    )
    write_atomic(path, html)


def _visible(value: Any) -> Any:
    """Control characters in text, such as changes of direction, as `\\uXXXX`; applied to every value on the
    page."""
    return value if isinstance(value, Markup) else shown(value) if isinstance(value, str) else value


def _has_content(section: Section) -> bool:
    return any(
        not isinstance(block, Charts) or any(chart.has_values for chart in (*block.charts, *block.more))
        for block in section.blocks
    )


def _split(token: str) -> tuple[str, str]:
    """A token without the white space at its end, and this space; line ends are shown."""
    shown_ends = token.replace("\n", f"{LINE_END}\n")
    word = shown_ends.rstrip()
    return word, shown_ends[len(word) :]


def _percent(fraction: float) -> str:
    """A position along a bar, clipped to it, because bounds may be infinite."""
    return f"{100 * min(max(fraction, 0.0), 1.0):.2f}%"


def column_classes(table: Table) -> list[str]:
    """The class of each column: `drawn` has bars or intervals, `num` numbers aligned to the right, `words`
    the rest."""
    rows: list[Sequence[Any]] = [row for _, group in table.groups for row in group]
    classes = []
    for column in range(len(table.header)):
        cells = [row[column] for row in rows if column < len(row)]
        if any(cell.span or cell.length is not None for cell in cells):
            classes.append("drawn")
        elif column and all(NUMERIC.fullmatch(cell.text or cell.detail) for cell in cells):
            classes.append("num")
        else:
            classes.append("words")
    return classes


def caption(denoising: Denoising, number: int) -> str:
    """The step of a frame, and the confidences of what was revealed in it."""
    percents = [f"{100 * confidence:.0f}" for confidence in sorted(denoising.revealed[number].values())]
    if not percents:
        return f"Step {number}" if number else "Start"
    span = "\N{EN DASH}".join(dict.fromkeys([percents[0], percents[-1]]))
    return f"Step {number} · {span}%"


def cell_kinds(denoising: Denoising, number: int) -> list[str]:
    """The classes of the cells of a frame: what a cell holds, and the lines of boxes if the side of the grid
    is a square."""
    box, columns, texts = math.isqrt(denoising.columns), denoising.columns, denoising.frames[number]
    found = []
    for position, text in enumerate(texts):
        row, column = divmod(position, columns)
        if position in denoising.clues:
            kind = "clue"
        elif not text:
            kind = "hidden"
        else:
            kind = "new" if position in denoising.revealed[number] else "filled"
        if box * box == columns and column % box == box - 1 and column + 1 < columns:
            kind += " box-right"
        if box * box == columns and row % box == box - 1 and position + columns < len(texts):
            kind += " box-bottom"
        found.append(kind)
    return found
