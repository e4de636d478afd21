"""The charts and heat maps of a report, drawn by matplotlib: as SVG for the page, as PNG for files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup

from unmask.errors import require
from unmask.evaluation.report.content import LARGEST, Chart, HeatMap, Report, Series
from unmask.redaction import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#2b5cab", "#b4540a", "#23784a", "#7d4bb0", "#b8325f", "#0c7585", "#7d5a18", "#56606e")
MUTED, RULE, FAINT = "#5d6470", "#e4e1db", "#b9b4aa"
VARIABLES = {MUTED: "muted", RULE: "rule", FAINT: "faint"} | {
    color: f"run-{number}" for number, color in enumerate(COLORS)
}
"""The variables of the style sheet that have these colors in the light scheme, and others in the dark one."""
STYLE = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "grid.color": RULE,
    "text.parse_math": False,  # names are no formulas
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.fonttype": "none",
    "svg.hashsalt": "unmask",
} | dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED)
ON_PAGE, IN_FILE = (3.6, 2.2), (6.4, 3.8)  # inches
POINTS_DRAWN = 240
LOG_SCALE_FROM = 50  # ratio of the largest to the smallest value from which an axis is logarithmic
SHADES = 10  # of a heat map


class Curve(NamedTuple):
    """A series as it is drawn: thinned, and smoothed."""

    series: Series
    steps: np.ndarray
    values: np.ndarray
    trend: np.ndarray

    def summary(self, *, percent: bool) -> str:
        """The first and the last value of the trend."""
        ends = [f"{end:.1%}" if percent else f"{end:.3g}" for end in (self.trend[0], self.trend[-1])]
        return minus(" → ".join(ends[-1:] if len(self.steps) == 1 else ends))


def curves_of(chart: Chart) -> list[Curve]:
    """The curves of the series that have a value that can be drawn: means of neighboring steps, and their
    moving average."""
    curves = []
    for series in chart.series:
        if not (drawable := series.drawable):
            continue
        bins = np.array_split(np.asarray(drawable, dtype=np.float64), min(POINTS_DRAWN, len(drawable)))
        steps, values = np.array([points.mean(axis=0) for points in bins]).T
        window = 1 if series.bounds else 1 + 2 * (len(values) // 20)
        # The edges are repeated so that the trend spans the whole curve.
        padded = np.pad(values, window // 2, mode="edge")
        trend = np.convolve(padded, np.full(window, 1 / window), mode="valid")
        # a mean may round to a value outside
        curves.append(Curve(series, steps, values, np.clip(trend, values.min(), values.max())))
    return curves


def is_log(curves: Sequence[Curve]) -> bool:
    """Whether the vertical axis of these curves is logarithmic: their values are positive and differ much."""
    ends = [end for curve in curves for pair in curve.series.bounds for end in pair if math.isfinite(end)]
    values = [*ends, *(float(value) for curve in curves for value in curve.values)]
    return min(values) > 0 and LOG_SCALE_FROM < max(values) / min(values) < LARGEST


def minus(number: str) -> str:
    """A number with a real minus sign."""
    return number.replace("-", "\N{MINUS SIGN}")


def write_pictures(report: Report, folder: str | Path) -> list[Path]:
    """Write a PNG for each chart and heat map into a folder, which is created. Returns the files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require("matplotlib", where="pictures")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [block for section in report.sections for block in section.blocks]
    contents: list[Chart | HeatMap] = [chart for chart in report.charts() if chart.has_values]
    contents += [block for block in blocks if isinstance(block, HeatMap)]
    paths: list[Path] = []
    for content in contents:
        name = re.sub(r"[^a-z0-9]+", "-", content.title.lower()).strip("-")[:60] or "picture"
        paths.append(folder / f"{len(paths) + 1:02}-{name}.png")
        _draw(content, paths[-1])
    return paths


def svg_of(content: Chart | HeatMap, number: int) -> Markup:
    """A picture as part of a page, in its colors. Title, legend and labels are left to the page.

    Args:
        number: of the picture on the page, which makes its ids different from those of others.
    """
    file = io.StringIO()
    _draw(content, file, on_page=True)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (xmlns(:xlink)?|clip-path)="[^"]*"|<style.*?</style>', "", svg, flags=re.DOTALL)
    svg = re.sub(r'( id="|"#)(?=[A-Za-z])', rf"\g<1>picture-{number}-", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var(--{variable})")
    return Markup(svg.replace("<svg", '<svg aria-hidden="true"', 1))


def _draw(content: Chart | HeatMap, file: Path | io.StringIO, *, on_page: bool = False) -> None:
    """Draw a picture; in a file of its own it has title, labels and legend."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=ON_PAGE if on_page else IN_FILE, layout="constrained")
        axes = figure.subplots()
        if isinstance(content, Chart):
            _draw_chart(axes, content)
        else:
            _draw_heat(axes, content)
        if on_page:
            about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(file, format="svg", transparent=True, metadata=about)
            return
        figure.suptitle(shown(content.title))
        axes.set(xlabel=shown(content.x_label), ylabel=shown(content.y_label))
        if isinstance(content, Chart):
            axes.legend(fontsize=8)
        figure.savefig(file, metadata={"Software": None})


def _draw_chart(axes: Axes, chart: Chart) -> None:
    curves = curves_of(chart)
    for curve in curves:
        series = curve.series
        color = COLORS[series.color % len(COLORS)]
        dashed = series.dashed or series.color >= len(COLORS)
        marked = series.bounds or series.dashed or len(curve.steps) == 1
        if curve.trend.tolist() != curve.values.tolist():
            axes.plot(curve.steps, curve.values, color=color, alpha=0.35, linewidth=0.8)
        axes.plot(
            curve.steps,
            curve.trend,
            "--" if dashed else "-",
            marker="o" if marked else None,
            markersize=4,
            linewidth=1.6,
            label=shown(series.name),
            color=color,
        )
        for (step, _), ends in zip(series.points, series.bounds, strict=False):
            if np.isfinite(ends).all():
                axes.plot([step, step], ends, color=color, linewidth=1.2)
    first, last = axes.get_xlim()
    for step, name in chart.marks:
        if first <= step <= last:
            axes.axvline(step, color=FAINT, linestyle=":", linewidth=1)
            side = "left" if 2 * step < first + last else "right"
            label = axes.text(step, 1, f" {shown(name)[:20]} ", ha=side, fontsize=7, color=MUTED)
            label.set(transform=axes.get_xaxis_transform(), in_layout=False)
    axes.set_xlim(first, last)
    if is_log(curves):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: _label(value, percent=False))
    axes.yaxis.set_major_formatter(lambda value, _: _label(value, percent=chart.percent))


def _label(number: float, *, percent: bool) -> str:
    if percent:
        return minus(f"{100 * number:g}%")
    if 1e5 <= abs(number) < 1e9:
        return minus(f"{number / 1e6:g}M" if abs(number) >= 1e6 else f"{number / 1e3:g}k")
    return minus(f"{number:,g}")


def _draw_heat(axes: Axes, heat: HeatMap) -> None:
    from matplotlib.colors import LinearSegmentedColormap, to_rgba
    from matplotlib.patches import Patch

    cells = np.full((len(heat.rows), max(map(len, heat.rows))), np.nan)
    for number, row in enumerate(heat.rows):
        cells[number, : len(row)] = [math.nan if value is None else value for value in row]
    color = COLORS[heat.color % len(COLORS)]
    shades = LinearSegmentedColormap.from_list("order", [to_rgba(color, 0.08), to_rgba(color)], N=SHADES)
    extent = (0.5, cells.shape[1] + 0.5, cells.shape[0] + 0.5, 0.5)
    axes.imshow(cells, cmap=shades, vmin=0, vmax=1, aspect="auto", interpolation="none", extent=extent)
    axes.grid(visible=False)
    axes.locator_params(integer=True)
    ends = [Patch(color=color, alpha=0.08, label="first step"), Patch(color=color, label="last step")]
    axes.legend(handles=ends, ncols=2, fontsize=7, labelcolor=MUTED, loc="lower right", bbox_to_anchor=(1, 1))
