"""Where the parts of charts, heat maps and grids are drawn. Positions are fractions of the plot, from its
lower left corner.

Shapes: N points of a curve, each a step and a value (2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from unmask.evaluation.report.content import Chart, Denoising, HeatMap, Series

POINTS_DRAWN = 240
LOG_SCALE_FROM = 50  # ratio of the largest to the smallest value from which an axis is logarithmic
SHADES = 10  # of a heat map
LARGEST = 1e300  # beyond, sums and differences of two values are no longer finite
RESOLUTION = 1e-9  # of an axis: it spans at least this fraction of its largest value


class Axis:
    """The scale of an axis.

    Args:
        values: what it spans.
        log: whether it may be logarithmic, if the values are positive and differ much.
        percent: whether labels are percentages.
    """

    def __init__(self, values: Sequence[float], *, log: bool = False, percent: bool = False):
        self.log = log and min(values) > 0 and max(values) > LOG_SCALE_FROM * min(values)
        self.percent = percent
        low, high = self._scaled(min(values)), self._scaled(max(values))
        finest = RESOLUTION * max(abs(low), abs(high))
        margin = max(0.5, finest) if high - low <= finest else 0.0
        self.low, self.high = low - margin, high + margin

    def at(self, value: float) -> float:
        """The position of a value: 0 is the low end, 1 the high end."""
        return (self._scaled(value) - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Positions and labels of one to eight round numbers."""
        numbers = _decades(self.low, self.high) if self.log else _round_numbers(self.low, self.high)
        return [(self.at(number), self._label(number)) for number in numbers]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def _label(self, number: float) -> str:
        if self.percent:
            return minus(f"{100 * number:g}%")
        if 1e5 <= abs(number) < 1e9:
            return minus(f"{number / 1e6:g}M" if abs(number) >= 1e6 else f"{number / 1e3:g}k")
        return minus(f"{number:,g}")


def minus(number: str) -> str:
    """A number with a real minus sign."""
    return number.replace("-", "\N{MINUS SIGN}")


def _round_numbers(low: float, high: float) -> list[float]:
    """Two to six round numbers between two bounds."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = min(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [
        float(f"{index * step:.12g}") for index in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(low), math.floor(high)
    return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / 6)))]


class Curve(NamedTuple):
    """A series as it is drawn: thinned, and smoothed."""

    steps: np.ndarray
    values: np.ndarray
    trend: np.ndarray


def curve_of(series: Series) -> Curve | None:
    """The curve of a log: means of neighbouring steps, and their moving average. None: it has no value that
    can be drawn."""
    drawable = [point for point in series.points if all(map(_is_drawable, point))]
    if not drawable:
        return None
    points_N2 = np.asarray(sorted(drawable), dtype=np.float64)
    bins = np.array_split(points_N2, min(POINTS_DRAWN, len(points_N2)))
    steps, values = np.array([points.mean(axis=0) for points in bins]).T
    if series.bounds:
        return Curve(steps, values, values)
    window = 1 + 2 * (len(values) // 20)
    # The edges are repeated so that the trend spans the whole curve.
    trend = np.convolve(np.pad(values, window // 2, mode="edge"), np.full(window, 1 / window), mode="valid")
    # a mean may round to a value outside
    return Curve(steps, values, np.clip(trend, values.min(), values.max()))


def _is_drawable(value: float) -> bool:
    return abs(value) <= LARGEST  # not if it is NaN


class DrawnSeries(NamedTuple):
    series: Series
    line: str
    """Points of the polyline of values, in thousandths of the plot, from its upper left corner."""
    trend: str
    bars: list[tuple[float, float, float]]
    """Of a series with intervals: across, low end, high end, in thousandths."""
    summary: str


class DrawnChart(NamedTuple):
    chart: Chart
    series: list[DrawnSeries]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[tuple[float, str]]
    log: bool

    @property
    def gutter(self) -> int:
        """The characters of the longest label of the vertical axis."""
        return max((len(label) for _, label in self.y_ticks), default=1)

    @property
    def spoken(self) -> str:
        """The chart in words."""
        lines = "; ".join(f"{drawn.series.name}: {drawn.summary}" for drawn in self.series)
        return f"{self.chart.title}, {self.chart.y_label} over {self.chart.x_label}. {lines}"


def draw_chart(chart: Chart) -> DrawnChart | None:
    """Lay a chart out; None: no series has a value that can be drawn."""
    curves = [(series, curve) for series in chart.series if (curve := curve_of(series)) is not None]
    if not curves:
        return None
    ends = [end for series, _ in curves for bounds in series.bounds for end in bounds if _is_drawable(end)]
    x = Axis([float(step) for _, curve in curves for step in curve.steps])
    y = Axis(
        [*(float(value) for _, curve in curves for value in curve.values), *ends],
        log=True,
        percent=chart.percent,
    )
    drawn = [_draw_series(series, curve, x, y, chart.percent) for series, curve in curves]
    marks = [(x.at(step), name) for step, name in chart.marks if 0 <= x.at(step) <= 1]
    return DrawnChart(chart, drawn, x.ticks(), y.ticks(), marks, y.log)


def _draw_series(series: Series, curve: Curve, x: Axis, y: Axis, percent: bool) -> DrawnSeries:
    def polyline(values: np.ndarray) -> str:
        return " ".join(
            f"{1000 * x.at(step):.0f},{1000 - 1000 * y.at(value):.1f}"
            for step, value in zip(curve.steps, values, strict=True)
        )

    bars = [
        (round(1000 * x.at(step), 1), round(1000 - 1000 * y.at(low), 1), round(1000 - 1000 * y.at(high), 1))
        for (step, value), (low, high) in zip(series.points, series.bounds, strict=False)
        if all(map(_is_drawable, (step, value, low, high)))
    ]
    first, last = (f"{end:.1%}" if percent else f"{end:.3g}" for end in (curve.trend[0], curve.trend[-1]))
    summary = minus(last if len(curve.steps) == 1 else f"{first} → {last}")
    return DrawnSeries(series, polyline(curve.values), polyline(curve.trend), bars, summary)


def draw_heat(heat: HeatMap) -> list[str]:
    """A path for each shade, of unit squares."""
    shades: list[list[str]] = [[] for _ in range(SHADES)]
    for row, cells in enumerate(heat.rows):
        for column, value in enumerate(cells):
            if value is not None:
                shades[shade_of(value)].append(f"M{column} {row}h1v1h-1z")
    return ["".join(paths) for paths in shades]


def shade_of(fraction: float) -> int:
    """The shade of a fraction, from 0 to 9."""
    return min(int(SHADES * min(max(fraction, 0.0), 1.0)), SHADES - 1)


class GridCell(NamedTuple):
    text: str
    kind: str  # classes of the style sheet
    confidence: float | None


class Frame(NamedTuple):
    caption: str
    spoken: str
    cells: list[GridCell]


def draw_frames(denoising: Denoising) -> list[Frame]:
    """The frames of a grid."""
    box = math.isqrt(denoising.columns)
    if box * box != denoising.columns:
        box = 0
    frames = []
    for number, (texts, revealed) in enumerate(zip(denoising.frames, denoising.revealed, strict=True)):
        confidences = [revealed.get(position) for position in range(len(texts))]
        kinds = [
            _kinds(denoising, position, text, position in revealed, box)
            for position, text in enumerate(texts)
        ]
        cells = list(map(GridCell, texts, kinds, confidences))
        frames.append(
            Frame(_caption(number, list(revealed.values())), _spoken(texts, denoising.columns), cells)
        )
    return frames


def _caption(number: int, confidences: Sequence[float]) -> str:
    if not confidences:
        return f"Step {number}" if number else "Start"
    low, high = f"{100 * min(confidences):.0f}", f"{100 * max(confidences):.0f}"
    span = low if low == high else f"{low}\N{EN DASH}{high}"
    return f"Step {number} · {span}%"


def _kinds(denoising: Denoising, position: int, text: str, new: bool, box: int) -> str:
    kinds = [
        "clue"
        if position in denoising.clues
        else "hidden"
        if text in ("", "·")
        else "new"
        if new
        else "filled"
    ]
    if box:
        row, column = divmod(position, denoising.columns)
        if column % box == box - 1 and column + 1 < denoising.columns:
            kinds.append("box-right")
        if row % box == box - 1 and position + denoising.columns < len(denoising.frames[0]):
            kinds.append("box-bottom")
    return " ".join(kinds)


def _spoken(texts: Sequence[str], columns: int) -> str:
    """The text of a frame for screen readers."""
    words = ["hidden" if text in ("", "·") else text for text in texts]
    return "; ".join(" ".join(words[start : start + columns]) for start in range(0, len(words), columns))
