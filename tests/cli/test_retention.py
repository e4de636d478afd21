"""`unmask evaluate --against`, and the same at the end of a training run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lm_eval.tasks import manager

from tests.cli.test_evaluate import KILLED, lasting, refused, unmask
from tests.evaluation.harness.local_tasks import TASKS, write_task
from tests.helpers import partly_slow
from tests.tiny import toy_lm
from tests.training.tiny_runs import QUICK
from unmask.cli.retention import has_exact_likelihoods
from unmask.config.run import LOCK_FILE
from unmask.data.characters import character_model
from unmask.errors import DataError
from unmask.evaluation.likelihood import default_estimator
from unmask.evaluation.result_file import read_result
from unmask.models.load import load
from unmask.tasks import get_task
from unmask.training.runs import find_runs

CHOICES = [{"q": "12" * (number % 3), "choices": ["34", "4321"], "gold": number % 2} for number in range(6)]
DIFFUSION = ["--steps", "3", "--remasking", "entropy", "--samples", "8"]
"""Settings that a causal model does not have."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model, a model converted from it (by nothing but its attention), a text, and a task of
    lm-eval."""
    folder = tmp_path_factory.mktemp("retention")
    lm = character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0)
    lm.bind(lm.model.double()).save(folder / "causal")
    load(folder / "causal", attention="bidirectional", dtype="float64").save(folder / "converted")
    (folder / "text.txt").write_text("1234\n\n4321\n\n1243\n")
    write_task(folder, "wikitext", TASKS["local_piqa"] | {"doc_to_text": "{{q}}="}, CHOICES)
    return folder


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not broken into narrow columns."""
    monkeypatch.setenv("COLUMNS", "200")


def against(folder: Path, *words: object) -> str:
    return unmask(
        "evaluate", folder / "converted", "--against", folder / "causal", "--dtype", "float64", *words
    )


@pytest.mark.slow
def test_both_models_are_evaluated_and_compared(folder, tmp_path):
    measured = [
        "--task",
        "sudoku",
        "--likelihood",
        folder / "text.txt",
        "--lm-eval",
        "wikitext",
        "--include-path",
        folder,
        "--rows",
        4,
    ]
    shown = against(folder, *measured, *DIFFUSION, "--output", tmp_path / "out.json")
    before, after = read_result(tmp_path / "out.before.json"), read_result(tmp_path / "out.json")
    assert (
        [scores.task for scores in before.tasks]
        == [scores.task for scores in after.tasks]
        == ["sudoku", "likelihood", "wikitext"]
    )
    assert [result.model["attention"] for result in (before, after)] == ["causal", "bidirectional"]
    assert [result.tasks[0].metrics["passes"].mean for result in (before, after)] == [17, 3]
    assert [result.tasks[1].protocol["estimator"] for result in (before, after)] == ["exact", "elbo"]
    for text in ("sudoku: passes", "nats per token", "wikitext: acc", "tokens per second", "estimator"):
        assert text in shown
    assert "sudoku: passes" in unmask("compare", tmp_path / "out.before.json", tmp_path / "out.json")
    for name in ("out.json", "out.before.json"):
        assert "the same scores" in unmask("evaluate", "--rerun", tmp_path / name)


@partly_slow("model, other", [("causal", "converted"), ("converted", "causal")], 1)
def test_samples_of_one_model_of_two_are_a_note(model, other, folder, tmp_path):
    """The one whose likelihoods are exact has no masks to sample."""
    words = [
        "evaluate",
        folder / model,
        "--against",
        folder / other,
        "--dtype",
        "float64",
        "--samples",
        8,
        "--output",
        tmp_path / "out.json",
    ]
    shown = unmask(
        *words,
        "--likelihood",
        folder / "text.txt",
        "--lm-eval",
        "wikitext",
        "--include-path",
        folder,
        "--rows",
        4,
    )
    assert f"note: the likelihoods of {folder / 'causal'} are exact" in " ".join(shown.split())
    by_model = {
        result.model["attention"]: result.tasks[0].protocol
        for result in map(read_result, tmp_path.glob("out*.json"))
    }
    assert by_model["bidirectional"]["samples"] == 8 and "samples" not in by_model["causal"]


@pytest.mark.parametrize(
    ("attention", "noise"),
    [
        (("causal", None, True), None),
        (("causal", None, False), None),
        (("bidirectional", None, False), None),
        (("block_causal", 3, False), None),
        (("block_causal", 5, True), None),
        (("block_causal", 3, False), "uniform"),
    ],
)
def test_which_likelihoods_are_exact_is_known_before_a_model_is_loaded(attention, noise):
    lm = toy_lm(attention=attention).with_noise(noise)
    assert has_exact_likelihoods(lm.settings, None) == (default_estimator(lm) == "exact")


def test_samples_that_no_model_reads_are_an_error(folder):
    words = ["--against", folder / "causal", "--likelihood", folder / "text.txt", "--samples", 8]
    assert "the likelihood of this model is exact" in refused("evaluate", folder / "causal", *words)


def test_a_result_of_the_earlier_model_is_not_measured_again(folder, tmp_path):
    command = ["--likelihood", folder / "text.txt", "--output", tmp_path / "out.json"]
    against(folder, *command)
    before = (tmp_path / "out.before.json").read_bytes()
    (tmp_path / "out.json").unlink()  # as if killed amid the second model
    against(folder, *command)
    assert (tmp_path / "out.before.json").read_bytes() == before
    (tmp_path / "out.json").unlink()
    words = ["evaluate", folder / "converted", "--against", folder / "causal", "--dtype", "float64", *command]
    error = refused(*words, "--rows", 1).splitlines()[-1]  # another evaluation
    assert "out.before.json: the file exists" in error and "--overwrite" in error
    assert (tmp_path / "out.before.json").read_bytes() == before and not (tmp_path / "out.json").exists()
    against(folder, *command, "--rows", 1, "--overwrite")
    assert len(read_result(tmp_path / "out.before.json").tasks[0].items) == 1


def test_the_result_of_the_earlier_model_on_other_texts_is_not_taken(folder, tmp_path):
    (tmp_path / "text.txt").write_text("1234\n\n4321\n")
    words = ["--likelihood", tmp_path / "text.txt", "--output", tmp_path / "out.json"]
    against(folder, *words)
    (tmp_path / "out.json").unlink()
    (tmp_path / "text.txt").write_text("1234\n\n4444\n")
    command = ["evaluate", folder / "converted", "--against", folder / "causal", "--dtype", "float64", *words]
    assert "out.before.json: the file exists" in refused(*command)


def test_a_file_that_is_no_result_is_kept(folder, tmp_path):
    (tmp_path / "out.before.json").write_text("notes")
    words = ["--likelihood", folder / "text.txt", "--output", tmp_path / "out.json"]
    assert "out.before.json: the file exists" in refused(
        "evaluate", folder / "converted", "--against", folder / "causal", *words
    )
    assert (tmp_path / "out.before.json").read_text() == "notes"


@pytest.mark.parametrize(
    "words", [["causal", "--likelihood", "missing.txt"], ["missing", "--task", "sudoku"]]
)
def test_a_model_or_text_that_is_not_there(words, folder, tmp_path):
    earlier, *measured = words
    words = [
        "evaluate",
        folder / "converted",
        "--against",
        folder / earlier,
        *measured,
        "--output",
        tmp_path / "out.json",
    ]
    assert "missing" in refused(*words)
    assert not list(tmp_path.iterdir())


def test_a_conversion_says_in_its_card_what_it_kept(folder, tmp_path):
    measured = [
        f"retention.likelihood={folder / 'text.txt'}",
        "retention.task=[sudoku]",
        "retention.rows=3",
        "sampler.steps=2",
    ]
    command = [
        "convert",
        "--model",
        folder / "causal",
        "--task",
        "sudoku",
        *QUICK,
        "data.max_rows=8",
        "data.eval_rows=2",
    ]
    shown = unmask(*command, "training.max_steps=10", *measured, "--output", tmp_path / "run")
    assert "what convert kept of" in shown and "nats per token" in shown
    differences = json.loads((tmp_path / "run/model/config.json").read_text())["unmask_history"][-1][
        "retention"
    ]["differences"]
    assert [(each["task"], each["metric"], each["items"]) for each in differences] == [
        *(("sudoku", name, 3) for name in ("solved", "value", "passes")),
        ("likelihood", "nats per token", 3),
    ]
    card = (tmp_path / "run/model/README.md").read_text()
    assert (
        "## What it kept" in card
        and "`causal` and the model after convert" in card
        and str(tmp_path) not in card
    )
    after = read_result(tmp_path / "run/retention.json")
    assert (
        after.model["attention"] == "bidirectional"
        and after.model["fingerprint"]
        != read_result(tmp_path / "run/retention.before.json").model["fingerprint"]
    )
    assert "what convert kept of" in unmask(
        *command, "training.max_steps=10", *measured, "--output", tmp_path / "run", "--resume"
    )


@pytest.mark.slow
def test_a_run_killed_amid_its_retention_is_not_finished_and_goes_on(folder, tmp_path):
    measured = [
        f"retention.likelihood={folder / 'text.txt'}",
        "retention.task=[sudoku]",
        "retention.rows=3",
        "sampler.steps=2",
    ]
    command = [
        "convert",
        "--model",
        folder / "causal",
        "--task",
        "sudoku",
        *QUICK,
        "data.max_rows=8",
        "data.eval_rows=2",
    ]
    command += ["training.max_steps=10", *measured, "--output"]
    # three problems and three documents of the earlier model, three problems and a document of the trained
    # one
    items = "10"
    process = subprocess.run(
        [sys.executable, "-c", KILLED, items, *map(str, command), str(tmp_path / "killed")],
        capture_output=True,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    (run,) = find_runs([tmp_path])
    assert run["state"] == "interrupted" and run["command"].endswith("--resume")
    unmask(*command, tmp_path / "killed", "--resume")
    unmask(*command, tmp_path / "whole")
    assert [run["state"] for run in find_runs([tmp_path])] == ["finished", "finished"]
    killed, whole = ({path.name for path in (tmp_path / name).iterdir()} for name in ("killed", "whole"))
    assert killed == whole
    model = json.loads((tmp_path / "whole/model/config.json").read_text())
    assert (
        json.loads((tmp_path / "killed/model/config.json").read_text()) == model
        and "retention" in model["unmask_history"][-1]
    )
    for name in ("retention.json", "retention.before.json"):
        one, other = (read_result(tmp_path / run / name) for run in ("killed", "whole"))
        assert lasting(one, model={}, arguments={}) == lasting(other, model={}, arguments={})
        assert one.model["fingerprint"] == other.model["fingerprint"]


def test_a_run_whose_retention_fails_is_not_finished(folder, tmp_path, monkeypatch):
    command = [
        "convert",
        "--model",
        folder / "causal",
        "--task",
        "sudoku",
        *QUICK,
        "data.max_rows=8",
        "data.eval_rows=2",
    ]
    command += [
        "training.max_steps=10",
        "retention.task=sudoku",
        "retention.rows=1",
        "--output",
        tmp_path / "run",
    ]
    monkeypatch.setattr(
        "unmask.cli.measurements.retention_of_run", lambda *_: (_ for _ in ()).throw(DataError("no data"))
    )
    assert "no data" in refused(*command)
    (run,) = find_runs([tmp_path])
    assert (run["state"], run["error"]) == ("failed", "no data")


def test_what_a_run_is_to_measure_is_checked_before_it_trains(folder, tmp_path, monkeypatch):
    # lm-eval's own tasks take half a minute to list
    monkeypatch.setattr(manager, "__file__", str(folder / "none" / "manager.py"))
    command = [
        "convert",
        "--model",
        folder / "causal",
        "--task",
        "sudoku",
        *QUICK,
        "--output",
        tmp_path / "run",
    ]
    assert "missing.txt" in refused(*command, "retention.likelihood=missing.txt")
    assert "unknown task 'sudko'" in refused(*command, "retention.task=[sudko]")
    assert "lm-eval has no task 'wikitxt'" in refused(
        *command, "retention.lm_eval=[wikitxt]", f"retention.include_path={folder}"
    )
    assert "nothing to measure" in refused(*command, "retention.rows=3")
    assert "model.from_scratch" in refused(*command, "retention.task=[sudoku]", "model.from_scratch=true")
    assert f"{folder / 'missing'}: " in refused(
        *command, "retention.task=[sudoku]", f"retention.against={folder / 'missing'}"
    )
    judge = ["retention.metric=[perplexity]", f"retention.judge={folder / 'missing'}"]
    assert f"{folder / 'missing'}: " in refused(*command, "retention.task=[sudoku]", *judge)
    assert "--curve: is of one model" in refused(
        *command, "retention.task=[sudoku]", "retention.curve='steps=2,4'"
    )
    assert "chat template" in refused(
        *command, "training.max_steps=10", "retention.task=[sudoku]", "retention.style=chat"
    )
    assert not (tmp_path / "run").exists() or not [
        path for path in (tmp_path / "run").iterdir() if path.name != LOCK_FILE
    ]


def test_one_item_has_a_difference_without_bounds(folder, tmp_path):
    command = [
        "convert",
        "--model",
        folder / "causal",
        "--task",
        "sudoku",
        *QUICK,
        "data.max_rows=8",
        "data.eval_rows=2",
    ]
    unmask(
        *command,
        "training.max_steps=10",
        "retention.task=sudoku",
        "retention.rows=1",
        "--output",
        tmp_path / "run",
    )
    text = (tmp_path / "run/model/config.json").read_text()
    config = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert config["unmask_history"][-1]["retention"]["differences"][0]["low"] is None
    assert "| sudoku: solved | 0.0% | 0.0% | +0.0% | 1 |" in (tmp_path / "run/model/README.md").read_text()
