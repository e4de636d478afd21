"""The content of a report: sections of tables, charts, heat maps and answers, independent of how they are
drawn.

Each run or model has a color, a number from 0, which is the same in all sections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

LARGEST = 1e300
Point = tuple[float, float]
Trend = Literal["", "gain", "loss", "unclear"]


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """A cell of a table. Fractions are of the width of the column."""

    text: str
    detail: str = ""
    """In small: the bounds of an interval, a description."""
    span: tuple[float, float, float] | None = None
    """Draws an interval: its low end, mean and high end as fractions."""
    length: float | None = None
    """Draws a bar of this fraction."""
    color: int | None = None
    """The color of the bar or interval; a cell with neither gets a colored mark before its text."""
    verdict: Trend = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first cell of each row is its name. Rows are in groups; a group named "" has no heading."""

    kind: ClassVar = "table"
    caption: str
    header: Sequence[str]
    groups: Sequence[tuple[str, Sequence[Sequence[TableCell]]]]
    total: Sequence[TableCell] = ()
    note: str = ""
    centered: bool = False
    """Whether intervals are of differences: their scale has 0 in the middle."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart, or a curve of points with intervals."""

    name: str
    color: int
    points: Sequence[Point]
    bounds: Sequence[tuple[float, float]] = ()
    """An interval for each point, whose values are then not smoothed; without, the points are those of a
    log."""
    dashed: bool = False

    @property
    def drawable(self) -> list[Point]:
        """The points in order, without NaN and values so large that their differences are not finite."""
        return sorted(point for point in self.points if all(abs(value) <= LARGEST for value in point))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one another."""

    kind: ClassVar = "chart"
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines with a name: where the stages of a conversion begin."""
    percent: bool = False
    """Whether values are fractions that are shown in percent."""

    @property
    def has_values(self) -> bool:
        """Whether there is anything to draw."""
        return any(series.drawable for series in self.series)


@dataclass(frozen=True, kw_only=True)
class Charts:
    """Charts beside one another; `more` are folded away."""

    kind: ClassVar = "charts"
    charts: Sequence[Chart]
    more: Sequence[Chart] = ()


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Rows of cells from 0 (first) to 1 (last); None: there is no cell."""

    kind: ClassVar = "heat"
    title: str
    color: int
    x_label: str
    y_label: str
    rows: Sequence[Sequence[float | None]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A completion of a model, token by token."""

    name: str
    color: int
    tokens: Sequence[str]
    steps: Sequence[int]
    """The denoising step at which each token came, from 0; -1: it never came."""
    facts: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt, and the answers to it."""

    kind: ClassVar = "problem"
    title: str
    prompt: str
    answers: Sequence[Answer]


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """The frames of one grid while it is denoised."""

    kind: ClassVar = "grid"
    prompt: str
    frames: Sequence[Sequence[str]]
    """From the first canvas to the last, of equal length; "" is hidden."""
    revealed: Sequence[Mapping[int, float]]
    """Per frame: the cells revealed since the previous one, with their confidence (0 to 1)."""
    columns: int
    """If this is a square number, the grid has boxes."""
    clues: AbstractSet[int] = frozenset()
    """Cells that the prompt fills."""


@dataclass(frozen=True, kw_only=True)
class Notes:
    """A list of remarks."""

    kind: ClassVar = "notes"
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts as they are, one below the other."""

    kind: ClassVar = "texts"
    texts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Command lines to copy, each with what it does."""

    kind: ClassVar = "commands"
    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Settings, folded away."""

    kind: ClassVar = "record"
    title: str
    values: Mapping[str, Any]


PageBlock = Table | Charts | HeatMap | Problem | Denoising | Notes | Texts | Commands | Record


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, and what is below it."""

    title: str
    blocks: Sequence[PageBlock]
    intro: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of the page. All text is escaped where it is drawn."""

    title: str
    subtitle: str = ""
    entries: Sequence[str] = ()
    """The runs and models by their color."""
    sections: Sequence[Section] = field(default=())

    def charts(self) -> list[Chart]:
        """All charts, also those that are folded away."""
        blocks = [block for section in self.sections for block in section.blocks]
        return [
            chart for block in blocks if isinstance(block, Charts) for chart in (*block.charts, *block.more)
        ]
