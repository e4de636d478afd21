"""The report: the page has all content, makes no requests, escapes text and is accessible."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import resources

import pytest

from tests.evaluation.report.examples import example, sudoku
from unmask.evaluation.report.content import (
    Answer,
    Chart,
    Charts,
    Commands,
    Denoising,
    HeatMap,
    Notes,
    Problem,
    Record,
    Report,
    Section,
    Series,
    Table,
    TableCell,
)
from unmask.evaluation.report.page import cell_kinds, column_classes, write_page

VOID = {"meta", "link", "input", "br", "hr", "img"}
HOSTILE = """<script>alert(1)</script>"'><img src=x onerror=alert(1)>&amp;{{ 7 * 7 }}</style></title>"""


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
        return [
            attrs
            for kind, attrs in self.elements
            if kind == tag and name in [*(attrs.get("class") or "").split(), ""]
        ]


@pytest.fixture
def render(tmp_path):
    def write(report: Report) -> tuple[str, Page]:
        write_page(report, tmp_path / "runs" / "report.html")
        html = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
        return html, Page(html)

    return write


def section(*blocks) -> Report:
    return Report(title="t", sections=[Section(title="s", blocks=blocks)])


def test_the_page_shows_everything_in_the_report(render):
    html, page = render(example())
    assert html.startswith("<!DOCTYPE html>")
    for title in [
        "Runs",
        "Scores",
        "Speed against quality",
        "One grid, step by step",
        "Decoding order",
        "Answers",
        "Curves",
    ]:
        assert html.count(f">{title}</h2>") == html.count(f">{title}</a>") == 1
    for words in [
        "Two conversions",
        "grpo-spg, steps 4",
        "600",
        "80 of 200",
        "5:31",
        "11:22",
        "forward passes per answer",
        "rewards/format",
    ]:
        assert words in page.text
    assert (
        len(page.all("figure", "heat")) == 7
        and len(page.all("div", "answer")) == 21
        and len(page.all("div", "grid")) == 3
    )


def test_names_numbers_and_intervals_of_a_table(render):
    cells = [
        TableCell(text="grpo", detail="on rewards", color=1),
        TableCell(text="68.4%"),
        TableCell(text="", detail="[64.2, 72.3]"),
        TableCell(text="", span=(0.1, 0.2, 0.4)),
    ]
    table = Table(
        caption="Scores",
        header=["Model", "Score", "Interval", ""],
        groups=[("solved", [cells])],
        total=[TableCell(text="all")],
        note="a note",
    )
    _, page = render(section(table))
    for words in ["on rewards", "68.4%", "[64.2, 72.3]", "solved", "a note", "all"]:
        assert words in page.text
    assert column_classes(table) == ["words", "num", "num", "drawn"]
    assert {"left: 10.00%; right: 60.00%", "left: 20.00%"} == {
        attrs["style"] for tag, attrs in page.elements if tag in ("i", "b")
    }


def test_an_interval_without_bounds_stays_on_its_bar(render):
    cell = TableCell(text="", span=(float("-inf"), 0.5, float("inf")))
    _, page = render(
        section(
            Table(caption="t", header=["", ""], groups=[("", [[TableCell(text="one"), cell]])], centered=True)
        )
    )
    styles = [attrs["style"] for tag, attrs in page.elements if tag in ("i", "b")]
    assert styles == ["left: 0.00%; right: 0.00%", "left: 50.00%"]


def test_answers_have_the_step_of_each_token(render):
    answer = Answer(
        name="m", color=0, tokens=["Once ", "upon\n", "a", "hidden"], steps=[2, 0, 1, -1], facts=["solved 1"]
    )
    html, page = render(section(Problem(title="p", prompt="Tell", answers=[answer])))
    assert re.findall(r"<span class=\"token\"[^>]*>([^<]*)<sub>(\d+)</sub>(\s*)</span>", html) == [
        ("Once", "3", " "),
        ("upon\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "1", "\n"),
        ("a", "2", ""),
    ]
    assert "hidden</span>" in html and "solved 1" in page.text


def test_the_page_makes_no_network_requests(render):
    html, page = render(example())
    assert not re.search(r"https?:|url\(|@import|\bfetch\b|XMLHttp", html)
    fetched = {"src", "href", "srcset", "action", "data", "poster"}
    found = [value for _, attrs in page.elements for key, value in attrs.items() if key in fetched]
    assert found[0] == "data:," and all(re.fullmatch(r"#section-\d+", str(link)) for link in found[1:])
    policy = next(
        meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';") and "http" not in policy


def test_commands_are_lines_to_copy_each_after_what_it_does(render):
    _, page = render(
        section(Commands(lines=[("unmask sft --model 'a b'", "train it"), ("unmask serve m", "serve it")]))
    )
    assert page.texts["pre"] == "# train it\nunmask sft --model 'a b'\n\n# serve it\nunmask serve m\n"


def hostile(text: str) -> Report:
    """The text wherever a report takes one."""
    cell = TableCell(text=text, detail=text, color=0)
    blocks = [
        Table(
            caption=text,
            header=[text[:4], text[:4]],
            groups=[(text, [[cell, cell]])],
            total=[cell],
            note=text,
        ),
        Charts(
            charts=[
                Chart(
                    title=text,
                    x_label=text,
                    y_label=text,
                    series=[Series(name=text, color=0, points=[(0, 1), (1, 2)])],
                    marks=[(1, text)],
                )
            ]
        ),
        HeatMap(title=text, color=0, x_label=text, y_label=text, rows=[[0.5]], note=text),
        Problem(
            title=text,
            prompt=text,
            answers=[Answer(name=text, color=0, tokens=[text], steps=[0], facts=[text])],
        ),
        Denoising(prompt=text, frames=[[""], [text]], revealed=[{}, {0: 0.5}], columns=1),
        Notes(lines=[text]),
        Commands(lines=[(text, text)]),
        Record(title=text, values={text: text}),
    ]
    return Report(
        title=text,
        subtitle=text,
        entries=[text, text],
        sections=[Section(title=text, intro=text, blocks=blocks)] * 3,
    )


def test_text_never_becomes_markup(render):
    html, page = render(hostile(HOSTILE))
    assert (
        len(page.all("script")) == 1 and "alert" not in page.texts["script"] and len(page.all("style")) == 1
    )
    assert not page.all("img") and not any(
        key.startswith("on") for _, attrs in page.elements for key in attrs
    )
    assert "<script>alert" not in html and page.text.count(HOSTILE) >= 60 and "49" not in page.text
    labels = [
        str(attrs[key]) for _, attrs in page.elements for key in attrs if key in ("aria-label", "data-label")
    ]
    assert sum(HOSTILE in label for label in labels) == 9


def test_control_characters_are_shown_and_change_no_direction(render):
    html, page = render(hostile("a\u202eb\u2066c\x00d\udc80e\u200ff"))
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00]", html)
    assert r"a\u202eb\u2066c\u0000d\udc80e\u200ff" in page.text


def test_secrets_are_masked(render):
    html, _ = render(
        section(
            Notes(lines=["https://me:hunter2@host/x"]),
            Record(title="r", values={"api_key": "hunter3", "url": "http://a:hunter4@b"}),
        )
    )
    assert "hunter" not in html and "********" in html


@pytest.mark.slow
def test_the_page_is_accessible(render):
    _, page = render(example())
    assert page.all("html") == [{"lang": "en"}] and len(page.all("h1")) == 1
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    assert all(cell.get("scope") in ("col", "row", "rowgroup") for cell in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table")) == 6
    drawings = [
        *page.all("div", "plot"),
        *page.all("div", "grid"),
        *(svg for svg in page.all("svg") if "aria-hidden" not in svg),
    ]
    assert len(drawings) > 20 and all(
        drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings
    )
    assert all("aria-label" in control for control in page.all("input"))
    names = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(names) == len(set(names))
    assert {attrs["aria-labelledby"] for _, attrs in page.elements if "aria-labelledby" in attrs} <= set(
        names
    )
    assert {str(attrs["href"])[1:] for attrs in page.all("a")} <= set(names)


@pytest.mark.slow
def test_a_run_has_one_color_in_all_sections(render):
    html, _ = render(example())
    for number, name in enumerate(["convert-block", "convert-full", "grpo-spg", "grpo-trajectory"]):
        found = re.findall(
            rf"<(?:li|th)[^>]*class=\"c(\d)[^>]*>(?:<span[^>]*></span>|<strong>)+{name}\b", html
        )
        assert len(found) > 4 and set(found) == {str(number)}


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colors_have_enough_contrast_in_light_and_dark_mode():
    """WCAG 2.2, level AA: 4.5 to 1 for text, 3 to 1 for lines."""
    style = resources.files("unmask.evaluation.report").joinpath("page.css").read_text(encoding="utf-8")
    schemes = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(schemes) == 2 and schemes[0].keys() == schemes[1].keys()
    pairs = [
        (ink, paper, 4.5) for ink in ("ink", "muted", "accent", "gain", "loss") for paper in ("page", "card")
    ]
    pairs += [(f"run-{number}", paper, 3.0) for number in range(8) for paper in ("page", "card")]
    for scheme in schemes:
        for ink, paper, least in [*pairs, ("new-ink", "new", 4.5), ("new-ink", "card", 4.5)]:
            dark, light = sorted([luminance(scheme[ink]), luminance(scheme[paper])])
            assert (light + 0.05) / (dark + 0.05) >= least, f"{ink} {scheme[ink]} on {paper} {scheme[paper]}"


def test_a_bare_report_has_no_empty_sections(render):
    empty = Charts(
        charts=[Chart(title="t", x_label="x", y_label="y", series=[Series(name="n", color=0, points=[])])]
    )
    _, page = render(
        Report(
            title="Bare",
            sections=[
                Section(title="nothing", blocks=[empty]),
                Section(title="s", blocks=[Notes(lines=["a"])]),
            ],
        )
    )
    assert (
        len(page.all("section")) == 1
        and not page.all("script")
        and not page.all("details")
        and not page.all("nav")
    )


def test_every_frame_of_a_grid_is_shown_and_new_cells_have_their_confidence(render):
    _, page = render(section(sudoku()))
    assert page.all("div", "grid")[0]["aria-label"].startswith("Start: 3 1 hidden 2; 2 hidden")
    legend = 1  # every kind once
    counts = {kind: len(page.all("span", kind)) - legend for kind in ("clue", "hidden", "new", "filled")}
    assert counts == {"clue": 3 * 8, "hidden": 8 + 7, "new": 1 + 7, "filled": 1}
    shades = [
        float(span["style"].removeprefix("--confidence: ").removesuffix("%"))
        for span in page.all("span", "new")
        if "style" in span
    ]
    assert sorted(shades) == [25, 50, 50, 50, 50, 50, 87.5, 100]
    assert len(page.all("script")) == 1 and "hidden" in page.all("div", "player")[0]


def test_the_frames_of_a_grid(render):
    _, page = render(section(sudoku()))
    spoken = [str(grid["aria-label"]) for grid in page.all("div", "grid")]
    captions = [text.partition(": ")[0] for text in spoken]
    assert captions == ["Start", "Step 1 · 88%", "Step 2 · 25\N{EN DASH}100%"]
    assert spoken[1].endswith(": 3 1 4 2; 2 hidden hidden hidden; hidden 2 1 hidden; hidden 3 2 hidden")
    assert [cell_kinds(sudoku(), 1)[index].split()[0] for index in (0, 2, 5)] == ["clue", "new", "hidden"]


@pytest.mark.parametrize(("columns", "lines"), [(4, 4), (9, 18), (5, 0)])
def test_grids_are_boxed_where_the_side_is_a_square(columns, lines):
    grid = Denoising(prompt="", frames=[["1"] * columns**2], revealed=[{}], columns=columns)
    for side in ("box-right", "box-bottom"):
        assert sum(side in kinds for kinds in cell_kinds(grid, 0)) == lines
