"""A picture of a comparison: each difference with its interval on a line, in a panel for each metric (by
matplotlib)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from unmask.errors import ConfigError, require
from unmask.evaluation.comparison import Comparison, Difference
from unmask.redaction import shown

BETTER, WORSE, UNCLEAR = "#23784a", "#b4540a", "#56606e"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
    "svg.hashsalt": "unmask",
}
ROW, MARGIN = 0.32, 0.8  # inches: a difference, and the title and axis of a panel


def check_picture(path: Path) -> None:
    """Raise a ConfigError if matplotlib is missing or the file is neither PNG nor SVG."""
    require("matplotlib", where="--picture")
    if path.suffix.lower() not in (".png", ".svg"):
        what, remedy = f"{path.name} is neither a PNG nor an SVG", "End its name with .png or .svg"
        raise ConfigError(what, where="--picture", remedy=remedy)


def write_forest_plot(comparison: Comparison, first: str, path: Path) -> None:
    """Draw the differences from the result `first`. Colored ones are significant after the correction. Call
    `check_picture` before."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels: dict[str, list[Difference]] = {}
    for each in comparison.differences:
        panels.setdefault(each.metric, []).append(each)
    heights = [MARGIN + ROW * len(panel) for panel in panels.values()]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, sum(heights)), layout="constrained")
        axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
        for axis, (metric, panel) in zip(axes, panels.items(), strict=True):
            axis.set_title(shown(metric), loc="left")
            _draw(axis, panel, first)
        figure.savefig(
            path, dpi=150, metadata={"Date" if path.suffix.lower() == ".svg" else "Software": None}
        )


def _draw(axis: Any, panel: list[Difference], first: str) -> None:
    several = len({each.other for each in panel}) > 1
    axis.axvline(0, color="#b9b4aa", linewidth=1)
    for row, each in enumerate(panel):
        color = {"better": BETTER, "worse": WORSE, "": UNCLEAR}[each.verdict]
        ends = [each.change.low, each.change.high]
        if all(map(math.isfinite, ends)):
            axis.plot(ends, [row, row], color=color, linewidth=1.8, solid_capstyle="butt")
        fill = color if each.significant else "white"
        axis.plot([each.change.mean], [row], "o", color=color, markersize=5, markerfacecolor=fill)
    names = [shown(f"{each.task}: {each.other}" if several else each.task) for each in panel]
    axis.set_yticks(range(len(panel)), names)
    axis.set_ylim(len(panel) - 0.5, -0.5)
    better = "higher" if panel[0].higher_is_better else "lower"
    what = f"difference from {first}" if several else f"{panel[0].other} - {first}"
    axis.set_xlabel(shown(f"{what} ({better} is better)"))
    if all(each.fraction for each in panel):
        axis.xaxis.set_major_formatter(lambda value, _: f"{100 * value:+g}%" if abs(value) > 1e-9 else "0")
