"""A self-contained HTML report of a run: a table of the verbs, their curves, a sequence being denoised, the manifest.

Shapes: N points of a curve, each a step and a value (2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from unmask.artifacts import write_atomic
from unmask.console import format_duration
from unmask.evaluation.statistics import Interval

CHART_WIDTH, CHART_HEIGHT = 320, 170  # in SVG units; the page scales it
PLOT_LEFT, PLOT_RIGHT, PLOT_TOP, PLOT_BOTTOM = 44, 310, 10, 144
POINTS_DRAWN = 240
LOG_SCALE_FROM = 50  # ratio of the largest to the smallest value from which an axis is logarithmic


@dataclass(frozen=True, kw_only=True)
class VerbResult:
    """The result of one verb of the pipeline."""

    name: str
    description: str = ""
    metrics: Mapping[str, Interval | float] = field(default_factory=dict)  # an Interval is shown in percent, a float unchanged
    seconds: float
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)  # by name ("loss"): (step, value), steps ascending


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """The frames of one sequence while it is denoised. A cell is a token or a square of a grid."""

    prompt: str
    frames: Sequence[Sequence[str]]  # from the first canvas to the last, of equal length; "" or "·" is hidden
    revealed: Sequence[Mapping[int, float]]  # per frame: the positions revealed since the previous one, with their confidence (0 to 1)
    columns: int | None = None  # of a grid, which has boxes if this is a square number; None: a line of text
    clues: AbstractSet[int] = frozenset()  # positions that the prompt fills

    def __post_init__(self) -> None:
        assert self.frames and len(self.frames) == len(self.revealed), f"{len(self.frames)} frames, {len(self.revealed)} sets of reveals"
        assert len({len(frame) for frame in self.frames}) == 1, "frames of different lengths"


class Table(NamedTuple):
    """An additional table. The first cell of a row is its name. Cells: text, numbers, `Interval`s (in percent) or None."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of the page. All text is escaped."""

    title: str
    subtitle: str = ""
    verbs: Sequence[VerbResult]
    comparisons: Sequence[tuple[str, Interval]] = ()  # (description, paired difference as a fraction)
    denoising: Denoising | None = None
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)


def write_report(report: Report, path: str | Path) -> None:
    """Write the report as one HTML file without network requests. An existing file is replaced atomically."""
    page = resources.files("unmask.evaluation")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.tests["interval"] = lambda value: isinstance(value, Interval)
    environment.filters |= {"figure": _figure, "duration": format_duration, "points": _points, "percent": _percent, "range": _range}
    template = environment.from_string(page.joinpath("report_template.html").read_text(encoding="utf-8"))
    differences = [abs(bound) for _, interval in report.comparisons for bound in (interval.low, interval.high) if math.isfinite(bound)]
    html = template.render(
        report=report,
        style=page.joinpath("report.css").read_text(encoding="utf-8"),
        scales=interval_scales(report.verbs),
        total_seconds=sum(verb.seconds for verb in report.verbs),
        largest_difference=max(differences, default=0.0) or 1.0,
        charts=draw_charts(report.verbs),
        frames=draw_frames(report.denoising) if report.denoising else [],
        chart_box=(CHART_WIDTH, CHART_HEIGHT, PLOT_LEFT, PLOT_RIGHT, PLOT_TOP, PLOT_BOTTOM),
        manifest=json.dumps(report.manifest, indent=2, ensure_ascii=False, default=str),
    )
    write_atomic(path, html)


def _figure(value: Any) -> str:
    """A cell of a table as text."""
    if value is None:
        return "—"
    return _minus(f"{value:.4g}") if isinstance(value, float) else str(value)


def _minus(number: str) -> str:
    return number.replace("-", "\N{MINUS SIGN}")


def _points(fraction: float) -> str:
    return _minus(f"{100 * fraction:+.1f}")


def _range(ends: tuple[float, float]) -> str:
    return f"{100 * ends[0]:.0f} to {100 * ends[1]:.0f}%"


def interval_scales(verbs: Sequence[VerbResult]) -> dict[str, tuple[float, float] | None]:
    """The scale of each metric's interval bars, in tenths, over all verbs; None without intervals."""
    scales: dict[str, tuple[float, float] | None] = {}
    for name in dict.fromkeys(name for verb in verbs for name in verb.metrics):
        values = [verb.metrics[name] for verb in verbs if name in verb.metrics]
        intervals = [value for value in values if isinstance(value, Interval)]
        low = math.floor(10 * min((min(max(interval.low, 0.0), 0.95) for interval in intervals), default=0.0))
        high = math.ceil(10 * max((min(interval.high, 1.0) for interval in intervals), default=1.0))
        scales[name] = (low / 10, max(high, low + 1) / 10) if intervals else None
    return scales


def _percent(fraction: float) -> str:
    """A position along a bar, clipped to it, because bounds may be infinite."""
    return f"{100 * min(max(fraction, 0.0), 1.0):.2f}%"


@dataclass(frozen=True, kw_only=True)
class _Chart:
    """One curve of one verb, in SVG units."""

    verb: str
    summary: str
    log_scale: bool
    line: str  # points of the polyline: means of neighbouring steps
    trend: str  # the same, smoothed
    y_ticks: list[tuple[float, str]]
    x_ticks: list[tuple[float, str]]


def draw_charts(verbs: Sequence[VerbResult]) -> dict[str, list[_Chart]]:
    """Charts by the name of the curve, in the order of the verbs. Each has a separate scale, because losses of verbs differ."""
    charts: dict[str, list[_Chart]] = {}
    for verb in verbs:
        for name, points in verb.curves.items():
            finite = [point for point in points if math.isfinite(point[1])]
            if finite:
                charts.setdefault(name, []).append(_chart(verb.name, np.asarray(finite, dtype=np.float64)))
    return charts


def _chart(verb: str, points_N2: np.ndarray) -> _Chart:
    bins = np.array_split(points_N2, min(POINTS_DRAWN, len(points_N2)))
    steps, values = np.array([points.mean(axis=0) for points in bins]).T
    window = 1 + 2 * (len(values) // 20)
    # The edges are repeated so that the trend spans the whole curve.
    trend = np.convolve(np.pad(values, window // 2, mode="edge"), np.full(window, 1 / window), mode="valid")
    log_scale = bool(values.min() > 0 and values.max() > LOG_SCALE_FROM * values.min())
    scale = np.log10 if log_scale else np.asarray
    low, high = float(scale(values).min()), float(scale(values).max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def y(value: Any) -> Any:
        return PLOT_BOTTOM - (scale(value) - low) / (high - low) * (PLOT_BOTTOM - PLOT_TOP)

    def polyline(heights: np.ndarray) -> str:
        across = PLOT_LEFT + (steps - first) / (last - first) * (PLOT_RIGHT - PLOT_LEFT)
        return " ".join(f"{x:.1f},{height:.1f}" for x, height in zip(across, y(heights), strict=True))

    ticks = _decades(low, high) if log_scale else _round_numbers(low, high)
    return _Chart(
        verb=verb,
        summary=_minus(f"{trend[0]:.3g} → {trend[-1]:.3g}"),
        log_scale=log_scale,
        line=polyline(values),
        trend=polyline(trend),
        y_ticks=[(round(float(y(tick)), 1), _minus(f"{tick:g}")) for tick in ticks],
        x_ticks=[(PLOT_LEFT, f"{points_N2[0, 0]:g}"), (PLOT_RIGHT, f"{points_N2[-1, 0]:g}")],
    )


def _round_numbers(low: float, high: float) -> list[float]:
    """Three to five round numbers between two bounds."""
    rough = (high - low) / 3
    unit = 10.0 ** math.floor(math.log10(rough))
    step = max(unit * factor for factor in (1, 2, 5) if unit * factor <= rough)
    return [float(f"{index * step:.12g}") for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(low), math.floor(high)
    return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 6))]


class _Cell(NamedTuple):
    text: str
    kind: str  # classes of the style sheet
    confidence: float | None


class _Frame(NamedTuple):
    caption: str
    spoken: str
    cells: list[_Cell]


def draw_frames(denoising: Denoising) -> list[_Frame]:
    box = math.isqrt(denoising.columns or 0)
    if box * box != denoising.columns:
        box = 0
    frames = []
    for number, (texts, revealed) in enumerate(zip(denoising.frames, denoising.revealed, strict=True)):
        confidences = [revealed.get(position) for position in range(len(texts))]
        kinds = [_kinds(denoising, position, text, position in revealed, box) for position, text in enumerate(texts)]
        cells = list(map(_Cell, texts, kinds, confidences))
        frames.append(_Frame(_caption(number, list(revealed.values())), _spoken(texts, denoising.columns), cells))
    return frames


def _caption(number: int, confidences: Sequence[float]) -> str:
    if not confidences:
        return f"Step {number}" if number else "Start"
    low, high = f"{100 * min(confidences):.0f}", f"{100 * max(confidences):.0f}"
    span = low if low == high else f"{low}\N{EN DASH}{high}"
    return f"Step {number} · {span}%"


def _kinds(denoising: Denoising, position: int, text: str, new: bool, box: int) -> str:
    kinds = ["clue" if position in denoising.clues else "hidden" if text in ("", "·") else "new" if new else "filled"]
    if box and denoising.columns:
        row, column = divmod(position, denoising.columns)
        if column % box == box - 1 and column + 1 < denoising.columns:
            kinds.append("box-right")
        if row % box == box - 1 and position + denoising.columns < len(denoising.frames[0]):
            kinds.append("box-bottom")
    return " ".join(kinds)


def _spoken(texts: Sequence[str], columns: int | None) -> str:
    """The text of a frame for screen readers."""
    words = ["hidden" if text in ("", "·") else text for text in texts]
    if columns is None:
        return " ".join(words)
    return "; ".join(" ".join(words[start : start + columns]) for start in range(0, len(words), columns))
