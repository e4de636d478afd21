"""The page as Chromium lays it out: nothing overflows or is cut, text can be read, nothing is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.evaluation.report.browser import Browser, find_chromium
from tests.evaluation.report.examples import convert_run, example, result, rl_run
from tests.evaluation.report.test_page import HOSTILE, hostile
from unmask.evaluation.report.build import make_report
from unmask.evaluation.report.content import Report
from unmask.evaluation.report.page import write_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed: apt-get install chromium"),
]
OVERFLOWS = """
(() => {
  const wide = document.documentElement.clientWidth, found = [];
  for (const details of document.querySelectorAll("details")) details.open = true;
  const hidden = element => element.closest("thead, caption") && getComputedStyle(element.closest("thead, caption")).clipPath !== "none";
  for (const element of document.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect(), name = `${element.tagName} ${element.className.baseVal ?? element.className}`;
    if (hidden(element) || !box.width) continue;
    if (box.left < -0.5 || box.right > wide + 0.5) found.push(`${name} is at ${box.left} to ${box.right} of ${wide}`);
    const style = getComputedStyle(element);
    if (style.overflowX !== "visible" && element.scrollWidth > element.clientWidth + 1) found.push(`${name} hides a part`);
    const card = element.closest(".chart");
    if (card && box.right > card.getBoundingClientRect().right + 0.5) found.push(`${name} sticks out of its chart`);
  }
  return [...(document.documentElement.scrollWidth > wide ? ["the page scrolls sideways"] : []), ...found.slice(0, 20)];
})()
"""
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = text => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = color => {
    const [r, g, b] = color.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = element => {
    const below = element.parentElement ? paper(element.parentElement) : [255, 255, 255];
    return over(parse(getComputedStyle(element).backgroundColor), below);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  let least = 99, count = 0;
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || element.closest("script, style") || !element.getBoundingClientRect().width) continue;
    const below = paper(element), ink = over(parse(getComputedStyle(element).color), below);
    const [dark, bright] = [light(ink), light(below)].sort((a, b) => a - b), ratio = (bright + 0.05) / (dark + 0.05);
    least = Math.min(least, ratio); count += 1;
    const words = texts.currentNode.data.trim().slice(0, 40);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)}: ${element.tagName} ${element.className} "${words}"`);
  }
  return { least, count, found: found.slice(0, 20) };
})()
"""
OVERLAPS = """
(() => {
  const found = [];
  for (const plot of document.querySelectorAll(".plot")) {
    for (const kind of [".x", ".y"]) {
      const boxes = [...plot.querySelectorAll(kind)].map(label => label.getBoundingClientRect());
      boxes.forEach((one, at) => boxes.slice(at + 1).forEach(two => {
        if (one.left < two.right && two.left < one.right && one.top < two.bottom && two.top < one.bottom) found.push(plot.ariaLabel);
      }));
    }
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def browser():
    with Browser(str(find_chromium())) as opened:
        yield opened


def long_names() -> Report:
    """Names and values as long as they may become."""
    names = ["runs/" + "a-long-name-without-any-space-" * 6, "with some words " * 12]
    runs = [
        dataclasses.replace(
            convert_run(names[0], 8, 1),
            lines=[{"step": 10**7, "loss": 1e-12}, {"step": 2 * 10**7, "loss": -123456.789}],
        )
    ]
    runs += [dataclasses.replace(rl_run(names[1], 1, 2), verb="v" * 60)]
    results = [result(names[0], 8, 0.4), result(names[1], 1, 0.9, 123456)]
    tokens = ["x" * 300, " ", "\n", "\t", "\N{ARABIC LETTER MEEM}" * 80, "\N{FAMILY}" * 40]
    items = results[0].content.tasks[0].items
    trace = items[0].traces[0].model_copy(update={"tokens": tokens, "steps": [9999, 0, 1, 2, 3, 4]})
    items[0] = items[0].model_copy(update={"traces": [trace], "prompt": "p" * 2000})
    return make_report(title="T" * 90, subtitle="S" * 300, entries=names, runs=runs, results=results)


PAGES = {
    "example": example,
    "long names": long_names,
    "hostile": lambda: hostile(HOSTILE),
    "controls": lambda: hostile("\u202e" * 60),
}


@pytest.fixture(scope="module", params=PAGES)
def page(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(PAGES[request.param](), path)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 900, 1280])
def test_nothing_overflows_and_all_text_can_be_read(browser, page, width, scheme):
    browser.requests.clear()
    browser.messages.clear()
    browser.show(page, width, scheme)
    assert browser.run("innerWidth") == width and browser.run(
        f"matchMedia('(prefers-color-scheme: {scheme})').matches"
    )
    assert browser.run(OVERFLOWS) == []
    assert browser.run(OVERLAPS) == []
    contrast = browser.run(CONTRAST)
    assert contrast["found"] == [] and contrast["count"] > 20 and contrast["least"] >= 4.5
    fetched = [url for url in browser.requests if not url.startswith("data:image/png;base64,")]
    assert fetched == [page.as_uri()] and browser.messages == []


def test_the_checks_find_what_they_look_for(browser, tmp_path):
    """A page with a wide box, a cut text, faint text, labels over one another, a request, and an error."""
    wrong = """<body style="background: #fff; margin: 0"><p style="width: 3000px">wide</p>
        <p style="width: 9px; overflow: hidden">cut off</p><p style="color: #999">faint</p><img src="missing.png">
        <div class="plot" aria-label="p"><span class="x">1</span></div>
        <div class="plot" aria-label="q"><b class="x" style="position: fixed">1</b><b class="x" style="position: fixed">2</b></div>
        <script>throw new Error("wrong")</script>"""
    (tmp_path / "wrong.html").write_text(wrong)
    browser.requests.clear()
    browser.messages.clear()
    browser.show(tmp_path / "wrong.html", 1280)
    overflows = browser.run(OVERFLOWS)
    assert "the page scrolls sideways" in overflows and any("P  hides a part" in line for line in overflows)
    assert [line.partition(":")[0] for line in browser.run(CONTRAST)["found"]] == ["2.85"] and browser.run(
        OVERLAPS
    ) == ["q"]
    assert len(browser.requests) == 2 and any("wrong" in message for message in browser.messages)


def test_a_grid_plays_and_a_dark_page_prints_dark_on_white(browser, tmp_path):
    write_page(example(), tmp_path / "report.html")
    browser.show(tmp_path / "report.html", 1280, "dark")
    shown = "document.querySelector('.screen .grid').ariaLabel"
    assert browser.run(shown).startswith("Step 1")
    browser.run(
        "(() => { const slider = document.querySelector('input'); slider.value = 2; slider.oninput(); })()"
    )
    assert browser.run(shown).startswith("Step 2")
    browser.show(tmp_path / "report.html", 720, "dark", media="print")  # A4 and Letter without margins
    assert browser.run("getComputedStyle(document.documentElement).getPropertyValue('--card')") == "#ffffff"
    assert browser.run("getComputedStyle(document.querySelector('.controls')).display") == "none"
    assert browser.run(OVERFLOWS) == [] and browser.run(CONTRAST)["found"] == []
    assert browser.printed().startswith(b"%PDF")
