"""The report: the page has all content, makes no requests, escapes text and is accessible."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.evaluation import report as module
from unmask.evaluation.report import Denoising, Report, Table, VerbResult, write_report
from unmask.evaluation.statistics import Interval

VOID = {"meta", "link", "input", "br", "hr", "img", "line", "polyline"}
HOSTILE = """<script>alert(1)</script>"'><img src=x onerror=alert(1)>&amp;"""


class Page(HTMLParser):
    """Elements, their attributes and the text of a page; fails on tags that do not nest."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, str] = {}  # by the tag that holds them
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        tag = self.open[-1] if self.open else ""
        self.texts[tag] = self.texts.get(tag, "") + data

    @property
    def text(self) -> str:
        return "\n".join(text for tag, text in self.texts.items() if tag not in ("style", "script"))

    def all(self, tag: str, name: str = "") -> list[dict[str, str | None]]:
        return [attrs for kind, attrs in self.elements if kind == tag and name in [*(attrs.get("class") or "").split(), ""]]


def sudoku() -> Denoising:
    start = ["3", "1", "", "2", "2", "·", "", "", "", "2", "1", "", "", "3", "2", ""]
    middle = [*start[:2], "4", *start[3:]]
    return Denoising(
        prompt="310220000210 0320",
        frames=[start, middle, list("3142243142131324")],
        revealed=[{}, {2: 0.875}, {5: 0.5, 6: 0.25, 7: 1.0, 8: 0.5, 11: 0.5, 12: 0.5, 15: 0.5}],
        columns=4,
        clues={0, 1, 3, 4, 9, 10, 13, 14},
    )


def example() -> Report:
    return Report(
        title="The demo",
        subtitle="on two cores",
        verbs=[
            VerbResult(
                name="pretrain",
                description="a causal model",
                metrics={"solved": Interval(0.684, 0.642, 0.723), "nll": 1.25},
                seconds=75.0,
                curves={"loss": [(step, 60 * 0.9**step + 1) for step in range(100)]},
            ),
            VerbResult(
                name="grpo",
                metrics={"solved": Interval(0.978, 0.961, 0.988)},
                seconds=3600.0,
                curves={"loss": [(0, 0.5), (10, math.nan), (20, 0.25)], "reward": [(5, 0.75)]},
            ),
        ],
        comparisons=[("grpo over pretrain", Interval(0.294, 0.25, 0.33)), ("nothing", Interval(-0.001, -0.02, 0.02))],
        denoising=sudoku(),
        notes=["bootstrap over solutions"],
        tables=[Table("Real puzzles", ["set", "count", "solved"], [["unseen", 231, Interval(0.961, 0.932, 0.985)], ["seen", None, 0.5]])],
        manifest={"seed": 7, "packages": {"torch": "2.13.0"}},
    )


@pytest.fixture
def render(tmp_path):
    def write(report: Report) -> tuple[str, Page]:
        write_report(report, tmp_path / "runs" / "report.html")
        html = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
        return html, Page(html)

    return write


def test_the_page_shows_everything_in_the_report(render):
    html, page = render(example())
    assert html.startswith("<!DOCTYPE html>")
    for words in ["The demo", "on two cores", "pretrain", "a causal model", "grpo", "solved", "nll", "1.25", "1:15", "1:00:00", "1:01:15"]:
        assert words in page.text
    for words in ["68.4%", "[64.2, 72.3]", "97.8%", "[96.1, 98.8]", "unseen", "231", "96.1%", "—"]:
        assert words in page.text
    assert "bootstrap over solutions" in page.text and '"torch": "2.13.0"' in page.text
    assert page.text.index("grpo over pretrain") < page.text.index("nothing")
    assert "+29.4" in page.text and "[\N{MINUS SIGN}2.0, +2.0]" in page.text
    assert page.text.count("excludes 0") == page.text.count("includes 0") == 1
    assert len(page.all("figure", "chart")) == 3 and [figure["aria-label"][:16] for figure in page.all("svg")][2] == "reward of grpo, "


def test_every_frame_is_shown_and_new_cells_have_their_confidence(render):
    _, page = render(example())
    boards = page.all("div", "board")
    assert [board["aria-label"] for board in boards] == [
        "Start: 3 1 hidden 2; 2 hidden hidden hidden; hidden 2 1 hidden; hidden 3 2 hidden",
        "Step 1 · 88%: 3 1 4 2; 2 hidden hidden hidden; hidden 2 1 hidden; hidden 3 2 hidden",
        "Step 2 · 25\N{EN DASH}100%: 3 1 4 2; 2 4 3 1; 4 2 1 3; 1 3 2 4",
    ]
    legend = 1  # every kind once
    counts = {kind: len(page.all("span", kind)) - legend for kind in ("clue", "hidden", "new", "filled")}
    assert counts == {"clue": 3 * 8, "hidden": 8 + 7, "new": 1 + 7, "filled": 1}
    shades = [float(span["style"].removeprefix("--confidence: ").removesuffix("%")) for span in page.all("span", "new") if "style" in span]
    assert sorted(shades) == [25, 50, 50, 50, 50, 50, 87.5, 100]


@pytest.mark.parametrize(("columns", "lines"), [(4, 4), (9, 18), (5, 0)])
def test_grids_are_boxed_where_the_side_is_a_square(columns, lines):
    frames = module.draw_frames(Denoising(prompt="", frames=[["1"] * columns**2], revealed=[{}], columns=columns))
    for side in ("box-right", "box-bottom"):
        assert sum(side in cell.kind for cell in frames[0].cells) == lines


def test_text_is_denoised_as_a_line(render):
    denoising = Denoising(prompt="Once", frames=[["", ""], ["upon", ""], ["upon", "a"]], revealed=[{}, {0: 0.9}, {1: 0.4}])
    _, page = render(replace(example(), denoising=denoising))
    spoken = [board["aria-label"] for board in page.all("div", "text")]
    assert spoken == ["Start: hidden hidden", "Step 1 · 90%: upon hidden", "Step 2 · 40%: upon a"]
    assert not page.all("div", "grid")


def test_the_page_makes_no_network_requests(render):
    html, page = render(example())
    assert not re.search(r"https?:|url\(|@import|\bfetch\b|XMLHttp", html)
    fetched = {"src", "href", "srcset", "action", "data", "poster"}
    assert [value for _, attrs in page.elements for key, value in attrs.items() if key in fetched] == ["data:,"]
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "http" not in policy


def test_text_never_becomes_markup(render):
    solved, curve = Interval(0.5, 0.4, 0.6), [(0, 1.0), (1, 2.0)]
    verb = VerbResult(name=HOSTILE, description=HOSTILE, metrics={HOSTILE: solved}, seconds=1.0, curves={HOSTILE: curve})
    denoising = Denoising(prompt=HOSTILE, frames=[[""], [HOSTILE]], revealed=[{}, {0: 0.5}])
    hostile = Report(
        title=HOSTILE,
        subtitle=HOSTILE,
        verbs=[verb],
        comparisons=[(HOSTILE, Interval(0.1, 0.0, 0.2))],
        denoising=denoising,
        notes=[HOSTILE],
        tables=[Table(HOSTILE, [HOSTILE], [[HOSTILE, HOSTILE]])],
        manifest={HOSTILE: HOSTILE},
    )
    html, page = render(hostile)
    assert len(page.all("script")) == 1 and "alert" not in page.texts["script"]
    assert not page.all("img") and not any(key.startswith("on") for _, attrs in page.elements for key in attrs)
    assert "<script>alert" not in html and page.text.count(HOSTILE) >= 11


def test_the_page_is_accessible(render):
    _, page = render(example())
    assert page.all("html") == [{"lang": "en"}] and len(page.all("h1")) == 1
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    assert all(cell.get("scope") in ("col", "row") for cell in page.all("th"))
    drawings = page.all("svg") + page.all("div", "board")
    assert drawings and all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)
    assert all("aria-label" in control for control in page.all("input"))
    names = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(names) == len(set(names))
    assert {attrs["aria-labelledby"] for _, attrs in page.elements if "aria-labelledby" in attrs} <= set(names)


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_enough_contrast_in_light_and_dark_mode():
    """WCAG 2.2, level AA: 4.5 to 1."""
    style = resources.files("unmask.evaluation").joinpath("report.css").read_text(encoding="utf-8")
    schemes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)]
    assert len(schemes) == 2 and schemes[0].keys() == schemes[1].keys()
    pairs = [(ink, paper) for ink in ("ink", "muted", "accent", "gain", "loss") for paper in ("page", "card")]
    for scheme in schemes:
        for ink, paper in [*pairs, ("new-ink", "new"), ("new-ink", "card"), ("muted", "rule")]:
            dark, light = sorted([luminance(scheme[ink]), luminance(scheme[paper])])
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{ink} {scheme[ink]} on {paper} {scheme[paper]}"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e9, 1e9)), min_size=1, max_size=40).map(sorted))
def test_curves_and_their_ticks_stay_within_the_plot(points):
    (chart,) = module.draw_charts([VerbResult(name="s", seconds=1, curves={"loss": points})])["loss"]
    for line in (chart.line, chart.trend):
        drawn = [tuple(map(float, pair.split(","))) for pair in line.split()]
        assert len(drawn) == len(points)
        assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
        assert all(module.PLOT_LEFT <= x <= module.PLOT_RIGHT and module.PLOT_TOP - 0.1 <= y <= module.PLOT_BOTTOM + 0.1 for x, y in drawn)
    assert 1 <= len(chart.y_ticks) <= 12
    assert all(module.PLOT_TOP - 0.1 <= y <= module.PLOT_BOTTOM + 0.1 for y, _ in chart.y_ticks)


def test_long_curves_are_thinned_and_wide_ones_logarithmic():
    points = [(step, 1000.0 * 0.999**step) for step in range(10_000)]
    (chart,) = module.draw_charts([VerbResult(name="s", seconds=1, curves={"loss": points})])["loss"]
    assert len(chart.line.split()) == module.POINTS_DRAWN
    assert chart.log_scale and [label for _, label in chart.y_ticks] == ["0.1", "1", "10", "100"]
    assert [label for _, label in chart.x_ticks] == ["0", "9999"]
    heights = [float(pair.split(",")[1]) for pair in chart.line.split()]
    assert heights == sorted(heights)  # a falling loss falls on the page: y counts downwards


def test_a_curve_without_a_finite_value_is_left_out():
    assert module.draw_charts([VerbResult(name="s", seconds=1, curves={"loss": [(0, math.nan)], "reward": []})]) == {}


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5))
def test_the_scale_of_a_column_holds_all_its_intervals(bounds):
    verbs = [VerbResult(name="s", seconds=1, metrics={"solved": Interval(min(b), min(b), max(b)), "nll": 3.0}) for b in bounds]
    scales = module.interval_scales(verbs)
    low, high = scales["solved"]
    assert 0 <= low <= min(map(min, bounds)) and max(map(max, bounds)) <= high <= 1 and high - low >= 0.0999
    assert scales["nll"] is None


def test_an_interval_without_bounds_stays_on_its_bar(render):
    unbounded = Interval(0.5, -math.inf, math.inf)
    verb = VerbResult(name="one puzzle", seconds=1, metrics={"solved": unbounded})
    _, page = render(Report(title="t", verbs=[verb], comparisons=[("change", unbounded)]))
    styles = [attrs["style"] for tag, attrs in page.elements if tag in ("i", "b")]
    assert styles[:2] == ["left: 0.00%; right: 0.00%", "left: 50.00%"] and all(re.fullmatch(r"[\w:;% .]+", style) for style in styles)
    assert "includes 0" in page.text


def test_a_bare_report_has_no_empty_sections(render):
    _, page = render(Report(title="Bare", verbs=[VerbResult(name="sft", seconds=1.0)]))
    assert len(page.all("section")) == 1 and not page.all("script") and not page.all("details")


def test_frames_that_do_not_fit_together_are_refused():
    with pytest.raises(AssertionError, match="2 frames, 1 sets"):
        Denoising(prompt="", frames=[[""], ["a"]], revealed=[{}])
    with pytest.raises(AssertionError, match="different lengths"):
        Denoising(prompt="", frames=[[""], ["a", "b"]], revealed=[{}, {}])
