"""`unmask report`: what it finds, how it names and colors it, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.errors import raises
from tests.evaluation.report.examples import convert_run, result, rl_run
from unmask.cli.entry import app
from unmask.errors import DataError
from unmask.evaluation.report.content import Record, Table
from unmask.evaluation.report.sources import report_of, short_names
from unmask.training.run.log import LOG_NAME


def write_run(folder: Path, run, **manifest) -> Path:
    folder.mkdir(parents=True)
    (folder / LOG_NAME).write_text("".join(json.dumps(line) + "\n" for line in run.lines))
    if manifest:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def write_result(path: Path, model: str, **more) -> Path:
    content = result("", 0, 0.9, **more).content
    content.model_copy(update={"model": {"path": model}}).write(path)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(
        tmp_path / "runs/convert",
        convert_run("", 0, 1),
        verb="convert",
        state="finished",
        steps=600,
        command="unmask convert",
        seed=5,
    )
    write_run(
        tmp_path / "runs/deep/grpo",
        rl_run("", 0, 2),
        verb="grpo",
        state="failed",
        steps=200,
        error="why",
        command="unmask grpo",
    )
    write_run(tmp_path / "runs/plain", convert_run("", 0, 3))
    return tmp_path


def rows(report) -> list[list[str]]:
    table = next(block for section in report.sections for block in section.blocks if isinstance(block, Table))
    return [[cell.text for cell in row] for _, group in table.groups for row in group]


def test_runs_are_found_below_a_folder_and_described_by_their_manifests(folder):
    report = report_of([Path("runs")])
    assert report.entries == ["convert", "deep/grpo", "plain"] and report.subtitle == "3 runs"
    assert [row[:4] for row in rows(report)] == [
        ["convert", "convert", "finished", "600"],
        ["deep/grpo", "grpo", "failed", "80 of 200"],
        ["plain", "plain", "\N{EM DASH}", "600"],
    ]
    records = [block for section in report.sections for block in section.blocks if isinstance(block, Record)]
    assert [record.title for record in records] == ["Run convert", "Run deep/grpo"] and records[0].values[
        "seed"
    ] == 5


def test_a_result_has_the_name_and_color_of_the_run_that_made_its_model(folder):
    """By the path of the model, by the folder of the file, and of a model that is elsewhere."""
    (folder / "runs/convert/model").mkdir()
    one = write_result(folder / "one.json", "runs/convert/model")
    two = write_result(folder / "runs/plain/scores.json", "moved/elsewhere", steps=4)
    three = write_result(folder / "three.json", "maker/model-8b", steps=9)
    report = report_of([Path("runs"), one, two, three])
    assert (
        report.entries == ["convert", "deep/grpo", "plain", "maker/model-8b"]
        and report.subtitle == "3 runs and 3 evaluations"
    )
    table = next(
        block
        for section in report.sections
        for block in section.blocks
        if block.kind == "table" and block.caption == "stories"
    )
    colors = {row[0].text: row[0].color for row in table.groups[0][1]}
    assert colors == {"convert, steps unset": 0, "plain, steps 4": 2, "maker/model-8b, steps 9": 3}


def test_the_evaluation_at_the_end_of_a_run_is_included(folder):
    write_result(folder / "runs/convert/evaluation.json", "anything")
    report = report_of([Path("runs/convert")])
    assert report.entries == ["convert"] and "Scores" in [section.title for section in report.sections]
    (folder / "runs/convert/evaluation.json").write_text('{"task": "sudoku"}')
    with pytest.warns(RuntimeWarning, match=r"left out: .*is no result"):
        assert report_of([Path("runs/convert")]).subtitle == "1 run"


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("empty", "empty"),
        ("missing.json", "missing.json"),
        ("cut.json", "cut.json"),
        ("damaged", "damaged/training_logs.json, line 1"),
    ],
)
def test_what_cannot_be_read_is_one_error(folder, source, where):
    (folder / "empty").mkdir()
    (folder / "cut.json").write_text('{"format": 1')
    (folder / "damaged").mkdir()
    (folder / "damaged" / LOG_NAME).write_text("{\n")
    with raises(DataError, where=where):
        report_of([Path(source)])


def test_what_is_given_twice_is_shown_once(folder):
    write_result(folder / "runs/convert/evaluation.json", "anything")
    one = write_result(folder / "one.json", "maker/model-8b")
    twice = [
        Path("runs"),
        Path("runs/convert"),
        folder / "runs/convert",
        one,
        Path("one.json"),
        Path("runs/convert/evaluation.json"),
    ]
    assert report_of(twice).subtitle == "3 runs and 2 evaluations"


def test_the_name_of_a_model_may_be_longer_than_that_of_a_file(folder):
    assert report_of([write_result(folder / "one.json", "x" * 5000)]).entries == ["x" * 5000]


def test_names_are_as_short_as_they_can_be():
    assert short_names(["/a/b/x", "/a/b/y/z", "org/model"]) == {
        "/a/b/x": "x",
        "/a/b/y/z": "y/z",
        "org/model": "org/model",
    }
    assert short_names(["/a/b/x"]) == {"/a/b/x": "x"} and short_names(["/a", "/a/b"]) == {
        "/a": "a",
        "/a/b": "a/b",
    }


def test_the_command_writes_the_page_and_pictures(folder):
    command = ["report", "runs/plain", "--output", "out/page.html", "--png", "out/png", "--title", "Mine"]
    made = CliRunner().invoke(app, command)
    assert made.exit_code == 0, made.output
    html = (folder / "out/page.html").read_text()
    assert "<h1>Mine</h1>" in html and "Curves" in html and len(list((folder / "out/png").glob("*.png"))) == 6
    assert made.stdout.splitlines() == ["out/page.html: Runs, Curves", "out/png: 6 pictures"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "--overwrite" in refused.stderr
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0
