"""The charts, heat maps and scores of a report as PNG files, by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unmask.errors import require
from unmask.evaluation.report.content import Chart, HeatMap, Report, Table
from unmask.evaluation.report.geometry import curve_of, draw_chart
from unmask.redaction import shown

COLORS = ("#2b5cab", "#b4540a", "#23784a", "#7d4bb0", "#b8325f", "#0c7585", "#7d5a18", "#56606e")
"""As in the light scheme of the page."""
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#5d6470",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e1db",
    "text.parse_math": False,  # names are no formulas
    "legend.frameon": False,
    "savefig.dpi": 150,
}


def write_pictures(report: Report, folder: str | Path) -> list[Path]:
    """Write a PNG for each chart, heat map and table of scores into a folder, which is created. Returns the
    files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require("matplotlib", "train", where="pictures")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    blocks: list[Any] = [block for section in report.sections for block in section.blocks]
    drawings: list[tuple[str, Any, Any]] = [
        (chart.title, _draw_chart, chart) for chart in report.charts() if draw_chart(chart)
    ]
    drawings += [(block.title, _draw_heat, block) for block in blocks if isinstance(block, HeatMap)]
    drawings += [
        (block.caption, _draw_spans, block) for block in blocks if isinstance(block, Table) and _spans(block)
    ]
    paths = []
    for number, (title, draw, content) in enumerate(drawings, start=1):
        path = (
            folder
            / f"{number:02}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')[:60] or 'picture'}.png"
        )
        _save(draw, content, path)
        paths.append(path)
    return paths


def _save(draw: Any, content: Any, path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        draw(figure, content)
        figure.savefig(path, metadata={"Software": None})


def _draw_chart(figure: Any, chart: Chart) -> None:
    axes = figure.subplots()
    drawn = draw_chart(chart)
    assert drawn is not None
    for series in chart.series:
        curve = curve_of(series)
        if curve is None:
            continue
        color, dashed = COLORS[series.color % len(COLORS)], series.dashed or series.color >= len(COLORS)
        line, marker = (
            "--" if dashed else "-",
            "o" if series.bounds or series.dashed or len(curve.steps) == 1 else None,
        )
        if curve.trend is not curve.values:
            axes.plot(curve.steps, curve.values, color=color, alpha=0.35, linewidth=0.8)
        axes.plot(
            curve.steps,
            curve.trend,
            line,
            color=color,
            marker=marker,
            markersize=4,
            linewidth=1.6,
            label=shown(series.name),
        )
        for (step, _), ends in zip(series.points, series.bounds, strict=False):
            if np.isfinite(ends).all():
                axes.plot([step, step], ends, color=color, linewidth=1.2)
    for step, name in chart.marks:
        axes.axvline(step, color="#b9b4aa", linestyle=":", linewidth=1)
        axes.annotate(
            shown(name),
            (step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -8),
            textcoords="offset points",
            fontsize=7,
        )
    if drawn.log:
        axes.set_yscale("log")
    if chart.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.set(title=shown(chart.title), xlabel=chart.x_label, ylabel=shown(chart.y_label))
    axes.legend(fontsize=8)


def _draw_heat(figure: Any, heat: HeatMap) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    axes = figure.subplots()
    cells = np.full((len(heat.rows), max(map(len, heat.rows))), np.nan)
    for number, row in enumerate(heat.rows):
        cells[number, : len(row)] = [np.nan if value is None else value for value in row]
    colors = LinearSegmentedColormap.from_list("order", ["#f3f4f6", COLORS[heat.color % len(COLORS)]])
    extent = (0.5, cells.shape[1] + 0.5, cells.shape[0] + 0.5, 0.5)
    image = axes.imshow(
        cells, cmap=colors, vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=extent
    )
    bar = figure.colorbar(image, ax=axes, ticks=[0, 1])
    bar.ax.set_yticklabels(["first step", "last step"])
    axes.grid(visible=False)
    axes.locator_params(integer=True)
    axes.set(title=shown(heat.title), xlabel=heat.x_label, ylabel="answer")


def _spans(table: Table) -> list[tuple[str, Sequence[Any]]]:
    """The groups whose rows have intervals."""
    return [(name, rows) for name, rows in table.groups if any(cell.span for row in rows for cell in row)]


def _draw_spans(figure: Any, table: Table) -> None:
    groups = _spans(table)
    figure.set_size_inches(6.4, 0.8 + sum(0.6 + 0.36 * len(rows) for _, rows in groups))
    panels = figure.subplots(len(groups), squeeze=False, height_ratios=[len(rows) + 1 for _, rows in groups])[
        :, 0
    ]
    for axes, (name, rows) in zip(panels, groups, strict=True):
        for number, row in enumerate(rows):
            for cell in row:
                if cell.span:
                    color = {"gain": "#1f6f43", "loss": "#a83232", "unclear": "#5d6470"}.get(
                        cell.verdict
                    ) or COLORS[(cell.color or 0) % len(COLORS)]
                    low, mean, high = np.clip(cell.span, 0, 1)
                    axes.plot(
                        [low, high],
                        [number, number],
                        color=color,
                        alpha=0.45,
                        linewidth=5,
                        solid_capstyle="butt",
                    )
                    axes.plot(mean, number, "|", color=color, markersize=11, markeredgewidth=2)
        labels = [shown(f"{row[0].text}\n{row[1].text} {row[2].detail}".rstrip()) for row in rows]
        axes.set_yticks(range(len(rows)), labels, fontsize=8)
        axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5), xticks=[], title=shown(name))
        axes.title.set_fontsize(9)
        axes.grid(visible=False)
        if table.centered:
            axes.axvline(0.5, color="#5d6470", linewidth=0.8)
    figure.suptitle(shown(table.caption), fontsize=10)
