"""A report as one HTML file that needs no network. All text is escaped, control characters are shown, and
secrets are masked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from unmask.artifacts import plain, write_atomic
from unmask.evaluation.report import geometry
from unmask.evaluation.report.content import Charts, Denoising, Report, Section, Table
from unmask.redaction import masked, shown

NUMERIC = re.compile(r"([\d+[\N{MINUS SIGN}\N{EM DASH}].{,30})?", re.DOTALL)
"""The text of a cell that is not broken: a number with its unit, an interval."""
LINE_END = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


def write_page(report: Report, path: str | Path) -> None:
    """Write the report as one HTML file. An existing file is replaced atomically."""
    folder = resources.files("unmask.evaluation.report")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.filters |= {
        "percent": _percent,
        "columns": column_classes,
        "drawn": lambda charts: [
            drawn for chart in charts if (drawn := geometry.draw_chart(chart)) is not None
        ],
        "shades": geometry.draw_heat,
        "shade": geometry.shade_of,
        "frames": geometry.draw_frames,
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
        not isinstance(block, Charts) or any(map(geometry.draw_chart, [*block.charts, *block.more]))
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
        drawn = any(cell.span or cell.length is not None for cell in cells)
        classes.append(
            "drawn"
            if drawn
            else "num"
            if column and all(NUMERIC.fullmatch(cell.text or cell.detail) for cell in cells)
            else "words"
        )
    return classes
