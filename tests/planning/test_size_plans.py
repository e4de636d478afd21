"""The table of docs/sizes.md is the planner's; its picture shows the figures of docs/demo.md."""

from __future__ import annotations

import runpy

import pytest

from tests.helpers import REPOSITORY


@pytest.mark.slow
def test_the_table_in_the_docs_is_the_planners() -> None:
    table = runpy.run_path(str(REPOSITORY / "scripts" / "size_plans.py"))["table"]()
    assert table in (REPOSITORY / "docs" / "sizes.md").read_text(encoding="utf-8"), table


def test_the_picture_shows_what_each_stage_of_the_demo_solves() -> None:
    stages = runpy.run_path(str(REPOSITORY / "scripts" / "demo_figure.py"))["stages"]()
    drawn = (REPOSITORY / "docs" / "demo.svg").read_text(encoding="utf-8")
    assert [name for name, *_ in stages] == ["pretrain", "convert", "sft", "dpo", "grpo"]
    assert all(f">{solved}%<" in drawn for _, solved, *_ in stages), "run scripts/demo_figure.py"
