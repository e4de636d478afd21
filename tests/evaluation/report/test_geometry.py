"""Charts and grids are laid out within their plot."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.report.examples import sudoku
from unmask.evaluation.report import geometry
from unmask.evaluation.report.content import Answer, Chart, Denoising, HeatMap, Series


def chart(*series: Series, **more) -> Chart:
    return Chart(title="loss", x_label="optimizer step", y_label="nats", series=series, **more)


def line(points, color=0, **more) -> Series:
    return Series(name=f"run {color}", color=color, points=points, **more)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e9, 1e9)), min_size=1, max_size=40).map(sorted))
def test_curves_and_their_ticks_stay_within_the_plot(points):
    drawn = geometry.draw_chart(chart(line(points)))
    for path in (drawn.series[0].line, drawn.series[0].trend):
        placed = [tuple(map(float, pair.split(","))) for pair in path.split()]
        assert len(placed) == len(points)
        assert [x for x, _ in placed] == sorted(x for x, _ in placed)
        assert all(0 <= x <= 1000 and -0.1 <= y <= 1000.1 for x, y in placed)
    assert 1 <= len(drawn.y_ticks) <= 8
    assert all(-1e-6 <= at <= 1 + 1e-6 for at, _ in [*drawn.y_ticks, *drawn.x_ticks])


def test_long_curves_are_thinned_and_wide_ones_logarithmic():
    drawn = geometry.draw_chart(chart(line([(step, 1000.0 * 0.999**step) for step in range(10_000)])))
    assert len(drawn.series[0].line.split()) == geometry.POINTS_DRAWN
    assert drawn.log and [label for _, label in drawn.y_ticks] == ["0.1", "1", "10", "100"]
    assert [label for _, label in drawn.x_ticks] == ["2,000", "4,000", "6,000", "8,000"]
    heights = [float(pair.split(",")[1]) for pair in drawn.series[0].line.split()]
    assert heights == sorted(heights)  # a falling loss falls on the page: y counts downwards


def test_curves_of_several_runs_share_their_axes():
    drawn = geometry.draw_chart(chart(line([(0, 1.0), (10, 2.0)]), line([(0, 3.0), (20, 5.0)], color=1)))
    assert drawn.series[0].line == "0,1000.0 500,750.0" and drawn.series[1].line == "0,500.0 1000,0.0"
    assert drawn.spoken == "loss, nats over optimizer step. run 0: 1 → 2; run 1: 3 → 5"


def test_intervals_and_marks_are_placed():
    series = line([(4, 0.5), (8, 0.75)], bounds=[(0.25, 0.6), (-math.inf, math.inf)])
    drawn = geometry.draw_chart(chart(series, marks=[(6, "stage 2"), (99, "beyond")], percent=True))
    assert drawn.marks == [(0.5, "stage 2")] and drawn.series[0].summary == "50.0% → 75.0%"
    assert drawn.series[0].bars == [(0.0, 1000.0, pytest.approx(300.0))]
    assert [label for _, label in drawn.y_ticks] == ["30%", "40%", "50%", "60%", "70%"]


@pytest.mark.parametrize(
    "points",
    [
        [(1, 1e308), (2, -1e308), (3, 5.0)],  # their difference is infinite
        [(10**18, 1e17)],  # plus and minus 0.5 is the same number
        [(10**15 + step, 1 + step * 2.3e-16) for step in range(4)],  # differences are rounding errors
        [(1, 5e-324), (2, 1e-300), (3, 1e299)],
        [(0, 0.0), (0, 0.0)],
    ],
)
def test_values_of_any_size_can_be_drawn(points):
    drawn = geometry.draw_chart(chart(line(points)))
    for ticks in (drawn.x_ticks, drawn.y_ticks):
        at = [position for position, _ in ticks]
        assert (
            1 <= len(at) <= 8
            and at == sorted(set(at))
            and all(-1e-6 <= position <= 1 + 1e-6 for position in at)
        )
        assert all(right - left > 0.05 for left, right in pairwise(at))
    assert all(
        0 <= x <= 1000 and -0.1 <= y <= 1000.1
        for pair in drawn.series[0].line.split()
        for x, y in [map(float, pair.split(","))]
    )


def test_a_chart_without_a_finite_value_is_left_out():
    assert geometry.draw_chart(chart(line([(0, math.nan)]), line([]))) is None


def test_one_value_is_drawn():
    drawn = geometry.draw_chart(chart(line([(5, -2.0)])))
    assert drawn.series[0].trend == "500,500.0" and drawn.series[0].summary == "\N{MINUS SIGN}2"


def test_a_heat_map_has_a_square_for_each_cell_in_its_shade():
    heat = HeatMap(title="t", color=0, x_label="x", y_label="y", rows=[[0.0, 1.0, None], [0.55]])
    shades = geometry.draw_heat(heat)
    assert shades[0] == "M0 0h1v1h-1z" and shades[9] == "M1 0h1v1h-1z" and shades[5] == "M0 1h1v1h-1z"
    assert not any(shades[shade] for shade in (1, 2, 3, 4, 6, 7, 8))


def test_the_frames_of_a_grid():
    frames = geometry.draw_frames(sudoku())
    assert [frame.caption for frame in frames] == ["Start", "Step 1 · 88%", "Step 2 · 25\N{EN DASH}100%"]
    assert frames[1].spoken == "3 1 4 2; 2 hidden hidden hidden; hidden 2 1 hidden; hidden 3 2 hidden"
    assert [frames[1].cells[index].kind.split()[0] for index in (0, 2, 5)] == ["clue", "new", "hidden"]


@pytest.mark.parametrize(("columns", "lines"), [(4, 4), (9, 18), (5, 0)])
def test_grids_are_boxed_where_the_side_is_a_square(columns, lines):
    frames = geometry.draw_frames(
        Denoising(prompt="", frames=[["1"] * columns**2], revealed=[{}], columns=columns)
    )
    for side in ("box-right", "box-bottom"):
        assert sum(side in cell.kind for cell in frames[0].cells) == lines


def test_frames_that_do_not_fit_together_are_refused():
    with pytest.raises(AssertionError, match="2 frames, 1 sets"):
        Denoising(prompt="", frames=[[""], ["a"]], revealed=[{}], columns=1)
    with pytest.raises(AssertionError, match="different lengths"):
        Denoising(prompt="", frames=[[""], ["a", "b"]], revealed=[{}, {}], columns=1)
    with pytest.raises(AssertionError, match="1 tokens, 2 steps"):
        Answer(name="m", color=0, tokens=["a"], steps=[0, 1])
