"""The documentation site: every page is in its menu, links stay within it, and it asks no other host for
anything."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.helpers import REPOSITORY
from unmask.config.sampler import SamplerConfig
from unmask.rl.config import GRPOConfig

DOCS = REPOSITORY / "docs"
RESOURCE = re.compile(
    r"""<(?:script|link|img|iframe|source|video)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//|@import|url\(["']?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def hook() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "scripts" / "site_pages.py"))


@pytest.fixture(scope="module")
def docstrings() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "scripts" / "site_docstrings.py"))


def pages_in(menu: Any) -> list[str]:
    """The pages of a part of the menu: text, or lists and sections of them."""
    if isinstance(menu, str):
        return [menu]
    return [page for part in (menu.values() if isinstance(menu, dict) else menu) for page in pages_in(part)]


def test_the_menu_has_every_page_once(hook):
    menu = pages_in(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])
    written = [
        path.relative_to(DOCS).with_suffix(".md").as_posix()
        for suffix in ("md", "ipynb")
        for path in DOCS.rglob(f"*.{suffix}")
    ]
    assert sorted(menu) == sorted([*written, *hook["OUTSIDE"]])


@pytest.mark.parametrize(
    "page, link, moved",
    [
        ("index.md", "[a](docs/rl.md#rollouts)", "[a](rl.md#rollouts)"),
        ("index.md", "![a](docs/report.png)", "![a](report.png)"),
        ("index.md", "[b](SECURITY.md)", "[b](security-policy.md)"),
        ("security-policy.md", "[b](docs/sandbox.md)", "[b](sandbox.md)"),
        ("rl.md", "[b](../SECURITY.md#what-is-promised)", "[b](security-policy.md#what-is-promised)"),
        ("api/index.md", "[b](../../README.md#start)", "[b](../index.md#start)"),
        ("start.md", "[b](notebooks/speed.ipynb)", "[b](notebooks/speed.md)"),
        ("notebooks/speed.md", "[b](speed.ipynb)", "[b](speed.ipynb)"),
        ("rl.md", "[`RunConfig`](../unmask/config/run.py)", "`RunConfig` (`unmask/config/run.py`)"),
        ("rl.md", "[c](results.md), [d](#below) and [e](https://example.org/docs/rl.md)", None),
        ("rl.md", "[c](nothing.md)", None),
    ],
)
def test_links_lead_to_pages_of_the_site_or_become_text(hook, page, link, moved):
    given = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert hook["on_page_markdown"](f"x {link} y", given) == f"x {moved or link} y"


def test_a_notebook_is_shown_with_what_it_printed(hook):
    code = {"cell_type": "code", "source": ["x = 1\n", "print(x)"], "outputs": [{"text": ["1\n"]}]}
    page = hook["notebook_page"](
        {"cells": [{"cell_type": "markdown", "source": ["# Title\n", "Words."]}, code]}, "a.ipynb"
    )
    assert page.startswith("# Title\n\n[Download this notebook](a.ipynb)\n") and "Words." in page
    assert "```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```" in page


@pytest.mark.parametrize(
    "config, name, says",
    [(GRPOConfig, "epsilon", "Clip range of the ratio below 1"), (SamplerConfig, "top_k", "0: all")],
)
def test_the_reference_has_what_a_setting_says_of_itself(docstrings, config, name, says):
    described = dict(docstrings["described"](config))
    assert says in described[name] and "\n" not in described[name]


def test_each_entry_of_a_docstring_has_a_line_of_its_own():
    """Sections as the site's builder reads them, which a slow test runs."""
    run_together = re.compile(r"^ +(Args|Attributes|Raises|Returns|Yields): \S", re.M)
    modules = sorted((REPOSITORY / "unmask").rglob("*.py"))
    assert len(modules) > 100
    assert not [path.name for path in modules if run_together.search(path.read_text())]


def test_names_with_one_description_are_listed_singly(docstrings):
    text = "Args:\n    low, high: inclusive\n        bounds.\n    help: other, too: here."
    split = docstrings["SHARED"].sub(docstrings["singly"], text)
    assert split == (
        "Args:\n    low: inclusive\n        bounds.\n    high: inclusive\n        bounds.\n    help: "
        "other, too: here."
    )


CLAIMS = {
    "convert": lambda names: names["after"].mean > max(0.4, names["before"].mean),
    "sudoku": lambda names: (
        names["after"][0] < names["before"][0] - 0.1 and names["after"][1] > names["before"][1]
    ),
    "speed": lambda names: (
        names["certain"][0] > 0.9 > 0.2 > names["fixed"][-1][0] and names["certain"][1] < names["fixed"][0][1]
    ),
}
"""What each notebook says, of the variables that its cells leave."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_a_notebook_runs_and_shows_what_it_says(name, tmp_path, monkeypatch):
    run = runpy.run_path(str(REPOSITORY / "scripts" / "run_notebooks.py"))["run"]
    path = DOCS / "notebooks" / f"{name}.ipynb"
    monkeypatch.chdir(tmp_path)
    notebook, names = run(path)
    assert CLAIMS[name](names)
    committed = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert [bool(cell.get("outputs")) for cell in committed] == [
        bool(cell.get("outputs")) for cell in notebook["cells"]
    ]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "Completions per prompt: the group" in (tmp_path / "api/trainers.html").read_text()
    pages = [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".css")]
    assert len(pages) > 30
    assert not [
        (str(path.relative_to(tmp_path)), found)
        for path in pages
        for found in RESOURCE.findall(without_code(path))
    ]


def without_code(path: Path) -> str:
    """The text of a page without its examples."""
    return re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.S)
