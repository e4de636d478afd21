"""Files, links and figures that the docs name exist."""

from __future__ import annotations

import ast
import re
import runpy

import pytest

from tests.helpers import REPOSITORY, shared_path
from unmask.records import read_records

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
PATH = re.compile(
    r"`((?:unmask|tests|scripts|benchmarks|docs)/[\w./-]+\.\w+|(?:unmask|tests|scripts|docs)/[\w/-]+)`"
)


def anchors(text: str) -> set[str]:
    """What a page's headings are linked as."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        linked = (page.parent / target) if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), (
            f"{page.name} links to {target}#{anchor}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_ours_that_pages_name_are_there(page):
    missing = [
        path for path in PATH.findall(page.read_text(encoding="utf-8")) if not (REPOSITORY / path).exists()
    ]
    assert not missing


def test_names_that_pages_give_with_a_file_are_in_it():
    """`file.py`: `Class.method` in the table of contributing.md."""
    pairs = re.findall(
        r"`(unmask/[\w/]+\.py)`: `([\w.]+)`",
        (REPOSITORY / "docs/contributing.md").read_text(encoding="utf-8"),
    )
    assert len(pairs) > 8
    for path, name in pairs:
        source = (REPOSITORY / path).read_text(encoding="utf-8")
        assert all(re.search(rf"^\s*(def|class) {part}\b", source, re.M) for part in name.split(".")), (
            f"{path} has no {name}"
        )


def test_the_page_on_recipes_names_each_of_them():
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`([\w-]+)`", row)
    }
    assert named == {
        path.stem for path in (REPOSITORY / "unmask/recipes").rglob("*.yaml") if path.parent.name != "modes"
    }


def wordings() -> set[str]:
    """The texts in the source; `...` stands for a value in them."""
    nodes = [
        node
        for path in (REPOSITORY / "unmask").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    joined = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    whole = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return whole | {
        "".join(part.value if isinstance(part, ast.Constant) else "..." for part in parts) for parts in joined
    }


def test_messages_that_pages_quote_are_in_the_source():
    """The first column of tables that begin with "message"."""
    tables = [
        table
        for page in PAGES
        for table in re.findall(r"^\| message \|.*\n((?:\|.*\n?)+)", page.read_text(encoding="utf-8"), re.M)
    ]
    quoted = {
        quote
        for table in tables
        for row in table.splitlines()
        for quote in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    }
    assert len(quoted) > 30
    known = wordings()
    assert not [quote for quote in quoted if not any(quote in wording for wording in known)]


def test_the_figure_shows_the_masks_of_today():
    drawn = runpy.run_path(str(REPOSITORY / "scripts" / "attention_figure.py"))["figure"]()
    assert drawn == (REPOSITORY / "docs" / "attention.svg").read_text(encoding="utf-8"), (
        "run scripts/attention_figure.py"
    )


def test_the_page_of_tests_not_shown_is_that_of_today():
    records = (record for _, record in read_records(shared_path("data", "humaneval", "HumanEval.jsonl.gz")))
    written = runpy.run_path(str(REPOSITORY / "scripts" / "shown_tests.py"))["page"](records)
    assert written == (REPOSITORY / "docs" / "humaneval.md").read_text(encoding="utf-8"), (
        "run scripts/shown_tests.py"
    )
