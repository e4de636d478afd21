"""A small version of the demo: every stage runs, is measured and saved, and the report shows all of it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unmask
from tests.errors import raises
from tests.helpers import REPOSITORY
from tests.training.tiny_runs import TINY_DEMO
from unmask.cli import app
from unmask.cli.train import VERB_HELP
from unmask.demo import QUICK, STAGES, Demo, DemoSettings, run_demo
from unmask.errors import ConfigError, RunStopped, TrainingError
from unmask.evaluation.report.content import Commands, Table
from unmask.evaluation.result_file import read_result
from unmask.evaluation.tasks import evaluate_task
from unmask.tasks import get_task


@pytest.mark.parametrize("task", ["sudoku", pytest.param("countdown", marks=pytest.mark.slow)])
def test_all_stages_run_and_leave_what_they_made(task, tmp_path, capsys):
    output = tmp_path / "demo"
    report = run_demo(task=task, output=output, seed=3, settings=TINY_DEMO)
    names = list(STAGES)
    assert list(report.entries) == names
    charts = [(series.name, chart.title) for chart in report.charts() for series in chart.series]
    losses = [
        ("pretrain", "pretrain: cross entropy"),
        ("convert", "convert: cross entropy"),
        ("dpo", "dpo: loss"),
        ("grpo", "grpo: reward"),
    ]
    assert set(losses) <= set(charts)
    tables = {
        block.caption: block
        for section in report.sections
        for block in section.blocks
        if isinstance(block, Table)
    }
    assert [row[0].text for row in tables["What was run"].groups[0][1]] == names
    differences = next(
        table for caption, table in tables.items() if caption.endswith("what made a difference")
    )
    assert [row[0].text for row in differences.groups[0][1]] == [
        f"{after} against {before}" for before, after in pairwise(names)
    ]

    first, *_, last = report.sections
    assert (first.title, last.title) == ("What happened", "What to type next")
    solved = [
        read_result(output / name / "evaluation.json").tasks[0].metrics["solved"].mean for name in names
    ]
    (said,) = [
        {row[0].text: (row[1].text, row[2].text) for row in block.groups[0][1]} for block in first.blocks
    ]
    assert list(said) == names
    assert all(
        f"{100 * mean:.1f}% of the problems solved" in said[name][0]
        for name, mean in zip(names, solved, strict=True)
    )
    assert "46.5% of them with a mistake" in said["sft"][0] and all(
        (REPOSITORY / page).is_file() for _, page in said.values()
    )

    lines = capsys.readouterr().out.splitlines()[-4:]
    commands = [command for block in last.blocks if isinstance(block, Commands) for command, _ in block.lines]
    assert lines[0] == f"report: {output / 'report.html'}" and lines[3] == f"next:   {commands[0]}"
    assert f"{solved[-1]:.1%}" in lines[1] and "6 held-out problems" in lines[1]
    assert [shlex.split(command)[1] for command in commands] == ["generate", *names[1:]]
    for command in commands:
        words = shlex.split(command)[1:]
        options = ["training.use_cpu=true", "--print-config"] if words[0] in VERB_HELP else []
        result = CliRunner().invoke(app, [*words, *options])
        assert result.exit_code == 0, (command, result.output, result.exception)
        files = [
            words[at + 1]
            for at, word in enumerate(words)
            if word in ("--model", "--data") and "my-" not in words[at + 1]
        ]
        assert all((tmp_path / file).exists() for file in files)

    page = (output / "report.html").read_text()
    assert all(f"</span>{name}<" in page for name in names) and "<svg" in page
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["config"]["seed"] == 3 and manifest["config"]["settings"]["rows"] == 64

    test_rows = get_task(task).generate("test", TINY_DEMO.test_rows, 4)
    for name in names:
        lm = unmask.load(output / name)
        assert lm.attention == ("causal" if name == "pretrain" else "bidirectional")
        evaluation = read_result(output / name / "evaluation.json")
        assert evaluation.tasks[0].items == evaluate_task(lm, get_task(task), test_rows).items


def stopping(self: Demo, phase: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param("pretrain", marks=pytest.mark.nightly), "dpo"])
def test_a_demo_that_was_stopped_goes_on_and_ends_as_one_that_was_not(stage, tmp_path, monkeypatch, capsys):
    run_demo(output=tmp_path / "whole", settings=TINY_DEMO)
    with monkeypatch.context() as patch:
        patch.setattr(Demo, stage, stopping)
        with pytest.raises(
            RunStopped, match=rf"stopped in {stage}. Continue with unmask demo --task sudoku --output "
        ) as stopped:
            run_demo(output=tmp_path / "parts", settings=TINY_DEMO)
    assert stopped.value.code == 130
    before = list(STAGES)[: list(STAGES).index(stage)]
    times = {name: (tmp_path / "parts" / name / "model.safetensors").stat().st_mtime_ns for name in before}
    with raises(TrainingError, where=str(tmp_path / "parts")):  # of another demo
        run_demo(output=tmp_path / "parts", settings=TINY_DEMO, seed=1)
    run_demo(output=tmp_path / "parts", settings=TINY_DEMO)
    assert times == {
        name: (tmp_path / "parts" / name / "model.safetensors").stat().st_mtime_ns for name in before
    }
    for name in STAGES:
        weights = [(tmp_path / each / name / "model.safetensors").read_bytes() for each in ("whole", "parts")]
        results = [
            read_result(tmp_path / each / name / "evaluation.json").tasks[0].items
            for each in ("whole", "parts")
        ]
        assert weights[0] == weights[1] and results[0] == results[1]
    with raises(TrainingError, where=str(tmp_path / "parts")):
        run_demo(output=tmp_path / "parts", settings=TINY_DEMO)
    # nothing of the demo before is used
    run_demo(output=tmp_path / "parts", settings=TINY_DEMO, seed=4, overwrite=True)


@pytest.mark.parametrize("name", ["sft/config.json", "report.html", "data/mine.txt", "manifest.json"])
def test_only_the_folder_of_a_demo_is_written_over(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with raises(TrainingError, where=str(tmp_path)):
        run_demo(output=tmp_path, settings=TINY_DEMO, overwrite=True)
    assert (tmp_path / name).read_text() == "{}" and len(list(tmp_path.iterdir())) == 1


MIRRORED = """
from unmask.rewards.verdict import OK, WRONG
from unmask.tasks import Puzzle, split_of

class Mirrored(Puzzle):
    name = "mirrored"
    fields = columns = ("word", "puzzle")
    alphabet = "abcdefgh="
    max_completion = 5

    def row(self, record, where):
        word = record["word"]
        return {"prompt": f"{word}=", "completion": word[::-1], "group": word, "word": word, "puzzle": None}

    def verify(self, completion, row):
        return OK if completion == row["word"][::-1] else WRONG

    def draw(self, split, rng):
        word = "".join(rng.sample("abcdefgh", 4))
        return self.row({"word": word}, "") if split_of(word) == split else None

    def corrupt(self, row, rng):
        return row["word"]

class Wide(Mirrored):
    name = "wide"

    def row(self, record, where):
        row = super().row(record, where)
        return row | {"prompt": "=" * 200 + row["prompt"]}
"""
"""A task whose answers have fewer tokens than a rollout of Sudoku has steps, and one whose prompts are longer
than Sudoku's."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mirrored", pytest.param("Wide", marks=pytest.mark.slow)])
def test_a_task_of_ones_own_runs_to_the_end(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my tasks.py").write_text(MIRRORED)
    report = run_demo(task=f"my tasks.py:{name}", output="demo", settings=TINY_DEMO)
    assert list(report.entries) == list(STAGES)
    [commands] = [block.lines for block in report.sections[-1].blocks if isinstance(block, Commands)]
    *_, (command, _) = commands
    words = shlex.split(command)
    assert (
        words[:2] == ["unmask", "grpo"]
        and words[words.index("--task") + 1] == f"my tasks.py:{name}"
        and "data.max_rows=64" in words
    )


@pytest.mark.parametrize("name", ["alphabet", "max_completion"])
def test_a_task_that_no_model_can_be_made_for_is_refused_at_once(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(re.sub(rf"    {name} = .*\n", "", MIRRORED))
    with raises(ConfigError, where="mine.py:Mirrored"):
        run_demo(task="mine.py:Mirrored", output="demo", settings=TINY_DEMO)
    assert not Path("demo").exists()


def test_no_solution_is_both_trained_on_and_tested(tmp_path):
    demo = Demo("sudoku", tmp_path, 0, TINY_DEMO)
    assert not {row["group"] for row in demo.train} & {row["group"] for row in demo.test}
    mistakes = sum(
        row["completion"] != shown["completion"]
        for row, shown in zip(demo.train, demo.demonstrations, strict=True)
    )
    assert 0.1 < mistakes / TINY_DEMO.rows < 0.5


def test_an_existing_output_is_refused_and_left_alone(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with raises(TrainingError, where=str(tmp_path)):
        run_demo(output=tmp_path, settings=TINY_DEMO)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "mine"


def test_quick_is_no_larger_in_anything_and_says_what_it_is():
    sizes = ("rows", "test_rows", "hidden", "layers", "batch", "pretrain", "convert", "sft", "dpo", "grpo")
    assert all(getattr(QUICK, name) <= getattr(DemoSettings(), name) for name in sizes)
    assert (QUICK.mistakes, QUICK.text_mistakes) == (DemoSettings().mistakes, DemoSettings().text_mistakes)
    assert "quick demo" in QUICK.remark and not DemoSettings().remark


@pytest.mark.slow
def test_what_the_quick_demo_suggests_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    done = subprocess.run(
        [sys.executable, "-m", "unmask", "demo", "--quick"], check=True, capture_output=True, text=True
    )
    report, *_, remark, following = done.stdout.splitlines()[-5:]
    assert report == "report: runs/demo/report.html" and remark == f"note:   {QUICK.remark}"
    assert max(map(len, done.stdout.splitlines())) <= 100
    scores = [
        json.loads((tmp_path / "runs/demo" / stage / "evaluation.json").read_text()) for stage in STAGES
    ]
    solved = [score["tasks"][0]["metrics"]["solved"]["mean"] for score in scores]
    assert solved[-1] > max(0.2, solved[0] + 0.05), solved  # what a reader sees of learning
    page = (tmp_path / "runs/demo/report.html").read_text()
    assert QUICK.remark in page and following.removeprefix("next:   ") in page
    commands = re.findall(r"^unmask .*$", page, re.M)
    assert len(commands) == 5
    for command in commands:
        given = [sys.executable, "-m", *shlex.split(command)]
        subprocess.run(
            [word.replace("max_steps=50", "max_steps=10") for word in given], check=True, capture_output=True
        )
