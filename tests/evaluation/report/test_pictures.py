"""Every chart and heat map becomes a picture of the page, and a PNG."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.errors import raises
from tests.evaluation.report.examples import convert_run, result
from unmask.errors import ConfigError
from unmask.evaluation.report.build import make_report
from unmask.evaluation.report.content import Chart, HeatMap, Series
from unmask.evaluation.report.pictures import COLORS, POINTS_DRAWN, curves_of, is_log, svg_of, write_pictures


def chart(*series: Series, **more) -> Chart:
    return Chart(title="loss", x_label="optimizer step", y_label="nats", series=series, **more)


def line(points, color=0, **more) -> Series:
    return Series(name=f"run {color}", color=color, points=points, **more)


def labels(svg: str) -> list[str]:
    return [
        re.sub(r"<!--.*?-->", "", text).strip()
        for text in re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    ]


POINTS = st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e9, 1e9)), min_size=1, max_size=40)


@given(POINTS.map(sorted))
def test_curves_hold_all_points_and_their_trend_stays_among_them(points):
    [curve] = curves_of(chart(line(points)))
    assert list(zip(curve.steps, curve.values, strict=True)) == points
    assert (curve.trend >= curve.values.min()).all() and (curve.trend <= curve.values.max()).all()


def test_long_curves_are_thinned_and_wide_ones_logarithmic():
    wide = chart(line([(step, 1000.0 * 0.999**step) for step in range(10_000)]))
    [curve] = curves_of(wide)
    assert len(curve.steps) == POINTS_DRAWN and is_log([curve])
    assert {"0", "2,000", "8,000", "0.1", "1", "10", "100"} <= set(labels(svg_of(wide, 0)))
    assert not is_log(curves_of(chart(line([(0, 1.0), (1, 40.0)])))) and not is_log(
        curves_of(chart(line([(0, -1.0), (1, 400.0)])))
    )


def test_each_run_has_its_color_and_its_summary():
    both = chart(line([(0, 1.0), (10, 2.0)]), line([(0, 3.0), (20, 5.0)], color=1))
    assert [curve.summary(percent=False) for curve in curves_of(both)] == ["1 → 2", "3 → 5"]
    svg = svg_of(both, 7)
    assert "var(--run-0)" in svg and "var(--run-1)" in svg and not re.search("|".join(COLORS), svg)
    assert all(name.startswith("picture-7-") for name in re.findall(r' id="([^"]*)"', svg))


def test_percentages_intervals_and_marks():
    series = line([(4, 0.5), (8, 0.75)], bounds=[(0.25, 0.6), (-math.inf, math.inf)])
    drawn = chart(series, marks=[(6, "stage 2"), (99, "beyond")], percent=True)
    assert curves_of(drawn)[0].summary(percent=True) == "50.0% → 75.0%"
    assert {"stage 2", "30%", "40%", "50%", "60%", "70%"} <= set(labels(svg_of(drawn, 0)))
    assert "beyond" not in svg_of(drawn, 0)


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
    assert 1 <= len(labels(svg_of(chart(line(points)), 0))) <= 30


def test_one_value_is_drawn_and_none_is_left_out():
    [curve] = curves_of(chart(line([(5, -2.0)])))
    assert curve.trend == [-2.0] and curve.summary(percent=False) == "\N{MINUS SIGN}2"
    assert not chart(line([(0, math.nan)]), line([])).has_values


def test_a_heat_map_has_a_square_for_each_cell_in_its_shade():
    svg = svg_of(HeatMap(title="t", color=1, x_label="x", y_label="y", rows=[[0.0, 1.0, None], [0.55]]), 0)
    [data] = re.findall(r"data:image/png;base64,([^\"]*)", svg)
    alpha = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA"))[:, :, 3]
    assert alpha.tolist() == [[20, 255, 0], [150, 0, 0]]
    assert "opacity: 0.08" in svg and {"first step", "last step"} <= set(labels(svg))


def report():
    runs = [
        dataclasses.replace(
            convert_run("a $x^2 \u202e _{b}", 0, 1),
            lines=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}],
        )
    ]
    return make_report(
        title="t", entries=["a", "b"], runs=runs, results=[result("b", 1, 0.9, steps) for steps in (2, 4)]
    )


def test_pictures_are_written_and_hold_more_than_one_color(tmp_path):
    paths = write_pictures(report(), tmp_path / "new" / "folder")
    names = [
        "01-stories.png",
        "02-loss.png",
        "03-b-steps-2-stories.png",
        "04-b-steps-4-stories.png",
    ]
    assert [path.name for path in paths] == names and sorted(
        path.name for path in paths[0].parent.iterdir()
    ) == names
    for path in paths:
        picture = Image.open(path)
        assert (
            picture.format == "PNG"
            and picture.width >= 900
            and len(picture.convert("RGB").getcolors(1 << 20)) > 10
        )


@pytest.mark.slow
def test_pictures_are_the_same_each_time(tmp_path):
    first, second = (write_pictures(report(), tmp_path / name)[1].read_bytes() for name in ("a", "b"))
    assert first == second


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with raises(ConfigError, where="pictures"):
        write_pictures(report(), tmp_path / "x")
    assert not (tmp_path / "x").exists()
