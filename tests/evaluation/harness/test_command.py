"""`unmask evaluate MODEL --lm-eval TASK`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests import toy
from tests.evaluation.harness.local_tasks import TASKS, write_task
from unmask.cli.entry import app
from unmask.evaluation.result_file import read_result

DOCUMENTS = [{"q": "ab" * (number % 3), "choices": ["ab", "bba"], "gold": number % 2} for number in range(5)]


@pytest.fixture
def folder(tmp_path):
    toy.toy().save(tmp_path / "model")
    for name in ("choices", "others"):
        write_task(tmp_path, name, TASKS["local_piqa"] | {"doc_to_text": "{{q}}"}, DOCUMENTS)
    return tmp_path


def run(folder, *words):
    return CliRunner().invoke(app, ["evaluate", str(folder / "model"), "--include-path", str(folder), *map(str, words)])


def test_a_result_of_lm_evals_tasks_runs_itself_again(folder):
    path = folder / "result.json"
    done = run(folder, "--lm-eval", "choices,others", "--samples", "9", "--rows", "3", "--dtype", "float64", "--output", path)
    assert done.exit_code == 0, (done.output, done.exception)
    found = read_result(path)
    assert [scores.task for scores in found.tasks] == ["choices", "others"]
    assert all(len(scores.items) == 3 and scores.protocol["samples"] == 9 for scores in found.tasks)
    assert "choices" in done.output and "acc_norm" in done.output
    again = CliRunner().invoke(app, ["evaluate", "--rerun", str(path)])
    assert again.exit_code == 0 and "the same scores and items" in again.output


def test_wrong_options_are_one_line(folder):
    for words, message in (
        (["--lm-eval", "choices", "--data", "a.jsonl"], "--data: is read by --task only"),
        (["--lm-eval", "choices", "--style", "chat"], "no chat template"),
        (["--lm-eval", "choices", "--steps", "3"], "steps: no task generates text"),
        (["--task", "sudoku"], "--include-path: is read by --lm-eval only"),
    ):
        done = run(folder, *words)
        assert done.exit_code == 2 and message in done.output, (words, done.output)
        last = done.output.strip().splitlines()[-1]
        assert last.startswith("error: ") and message in last and "Traceback" not in done.output
