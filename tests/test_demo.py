"""A small version of the demo: every stage runs, is measured and saved, and the report shows all of it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

import unmask
from unmask.demo import DESCRIPTIONS, Demo, DemoSettings, run_demo
from unmask.errors import TrainingError
from unmask.evaluation.report.content import Table
from unmask.evaluation.result_file import read_result
from unmask.evaluation.tasks import evaluate_task
from unmask.tasks import get_task

TINY = DemoSettings(rows=64, test_rows=6, hidden=16, layers=1, batch=16, pretrain=5, convert=10, sft=5, dpo=5, grpo=2)


@pytest.mark.parametrize("task", ["sudoku", pytest.param("countdown", marks=pytest.mark.slow)])
def test_all_stages_run_and_leave_what_they_made(task, tmp_path):
    output = tmp_path / "demo"
    report = run_demo(task=task, output=output, seed=3, settings=TINY)
    names = list(DESCRIPTIONS)
    assert list(report.entries) == names
    charts = [(series.name, chart.title) for chart in report.charts() for series in chart.series]
    losses = [
        ("pretrain", "pretrain: cross entropy"),
        ("convert", "convert: cross entropy"),
        ("dpo", "dpo: loss"),
        ("grpo", "grpo: reward"),
    ]
    assert set(losses) <= set(charts)
    tables = {block.caption: block for section in report.sections for block in section.blocks if isinstance(block, Table)}
    assert [row[0].text for row in tables["What was run"].groups[0][1]] == names
    differences = next(table for caption, table in tables.items() if caption.endswith("what made a difference"))
    assert [row[0].text for row in differences.groups[0][1]] == [f"{after} against {before}" for before, after in pairwise(names)]

    page = (output / "report.html").read_text()
    assert all(f"</span>{name}<" in page for name in names) and "<svg" in page
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["config"]["seed"] == 3 and manifest["config"]["settings"]["rows"] == 64

    test_rows = get_task(task).generate("test", TINY.test_rows, 4)
    for name in names:
        lm = unmask.load(output / name)
        assert lm.attention == ("causal" if name == "pretrain" else "bidirectional")
        evaluation = read_result(output / name / "evaluation.json")
        assert evaluation.tasks[0].items == evaluate_task(lm, get_task(task), test_rows).items


def test_no_solution_is_both_trained_on_and_tested(tmp_path):
    demo = Demo(get_task("sudoku"), tmp_path, 0, TINY)
    assert not {row["group"] for row in demo.train} & {row["group"] for row in demo.test}
    mistakes = sum(row["completion"] != shown["completion"] for row, shown in zip(demo.train, demo.demonstrations, strict=True))
    assert 0.1 < mistakes / TINY.rows < 0.5


def test_an_existing_output_is_refused_and_left_alone(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(TrainingError, match=r"not empty.*--overwrite"):
        run_demo(output=tmp_path, settings=TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "mine"
