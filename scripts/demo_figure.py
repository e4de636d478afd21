"""Draw docs/demo.svg: how many puzzles each stage of the demo solves, from the table of docs/demo.md.

python scripts/demo_figure.py
"""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent.parent / "docs"
FIGURE = DOCS / "demo.svg"
ROW = re.compile(r"^\| (\w+) \| ([\d.]+)% \[([\d.]+), ([\d.]+)\] \| ([\d.]+)% \[[^|]+\| ([\d.]+)% \|", re.M)


def stages() -> list[tuple[str, float, float, float, float, float]]:
    """Of each stage its name, what is solved with the ends of its interval, right cells, and unfinished
    grids, in %."""
    found = ROW.findall((DOCS / "demo.md").read_text(encoding="utf-8"))
    return [(name, *map(float, values)) for name, *values in found]


def figure() -> Figure:
    """The curve, with the 95% intervals of what is solved."""
    names, solved, low, high, cells, unfinished = zip(*stages(), strict=True)
    drawn = Figure(figsize=(7, 3.6), layout="constrained")
    axes = drawn.subplots()
    below = [value - end for value, end in zip(solved, low, strict=True)]
    above = [end - value for value, end in zip(solved, high, strict=True)]
    axes.errorbar(
        names, solved, yerr=[below, above], color="#3b6ea8", marker="o", capsize=4, label="puzzles solved"
    )
    axes.plot(names, cells, color="#888", marker=".", linestyle="--", label="cells that are right")
    axes.plot(names, unfinished, color="#c0504d", marker=".", linestyle=":", label="grids left unfinished")
    for place, value in enumerate(solved):
        axes.annotate(
            f"{value}%", (place, value), xytext=(8, -14), textcoords="offset points", color="#3b6ea8"
        )
    axes.set(ylim=(-3, 105), ylabel="%, held-out puzzles", xlabel="after the stage")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.35))
    return drawn


if __name__ == "__main__":
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "demo", "font.family": "sans-serif"}):
        figure().savefig(FIGURE, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
