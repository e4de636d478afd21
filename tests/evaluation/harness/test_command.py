"""`unmask evaluate MODEL --lm-eval TASK`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import hatchling.build
import pytest
from lm_eval.tasks import manager
from typer.testing import CliRunner

from tests.evaluation.harness.local_tasks import TASKS, write_task
from tests.helpers import REPOSITORY, TWO_PROCESSES, run_all
from tests.tiny import toy_lm
from unmask.cli.entry import app
from unmask.evaluation.harness import HarnessLM
from unmask.evaluation.result_file import read_result
from unmask_lm_eval import register

DOCUMENTS = [
    {"q": "ab" * (number % 3) + "b" * number, "choices": ["ab", "bba"], "gold": number % 2}
    for number in range(5)
]
TEXTS = {
    "doc_to_text": "{{q}}",
    "doc_to_target": "ab",
    "generation_kwargs": {"max_gen_toks": 6, "until": ["bb"], "allowed_tokens": [4, 5]},
}
TASKS_OF_FOLDER = {
    "choices": TASKS["local_piqa"] | {"doc_to_text": "{{q}}"},
    "others": TASKS["local_piqa"] | {"doc_to_text": "{{q}}"},
    "rolling": TASKS["local_wikitext"] | {"doc_to_target": "{{q}}ab"},
    "texts": TASKS["local_stories"] | TEXTS,
    "drawn": TASKS["local_stories"]
    | TEXTS
    | {"generation_kwargs": TEXTS["generation_kwargs"] | {"do_sample": True}},
    "beams": TASKS["local_stories"] | TEXTS | {"generation_kwargs": {"num_beams": 4}},
    "missing": TASKS["local_piqa"],
    "undefined": TASKS["local_piqa"],
    "split": TASKS["local_piqa"] | {"test_split": "tset"},
    "field": TASKS["local_piqa"] | {"doc_to_txt": "{{q}}"},
    "hellaswag": TASKS["local_piqa"] | {"doc_to_text": "{{q}}"},
}
ALL = ["--lm-eval", "choices,rolling,texts,drawn", "--samples", "9", "--dtype", "float64"]
KILLED = """
import os, signal, sys
from unmask.evaluation.harness import HarnessLM

left = int(sys.argv.pop(1))

def counted(method):
    def call(self, *given, **more):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *given, **more)
    return call

HarnessLM.estimate_ids = counted(HarnessLM.estimate_ids)
"""
"""A process that dies once it has measured so many likelihoods."""


@pytest.fixture
def folder(tmp_path):
    toy_lm().save(tmp_path / "model")
    for name, task in TASKS_OF_FOLDER.items():
        write_task(tmp_path, name, task, DOCUMENTS)
    (tmp_path / "missing.jsonl").unlink()
    return tmp_path


def run(folder, *words):
    return CliRunner().invoke(
        app, ["evaluate", str(folder / "model"), "--include-path", str(folder), *map(str, words)]
    )


def finished(folder, *words):
    """The scores in the result file of a command that succeeds."""
    path = folder / "result.json"
    done = run(folder, *words, "--output", path, "--overwrite")
    assert done.exit_code == 0, (done.output, done.exception)
    return read_result(path).tasks


def outside():
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_a_result_of_lm_evals_tasks_runs_itself_again(folder):
    path = folder / "result.json"
    done = run(
        folder,
        "--lm-eval",
        "choices,others",
        "--samples",
        "9",
        "--rows",
        "3",
        "--dtype",
        "float64",
        "--output",
        path,
    )
    assert done.exit_code == 0, (done.output, done.exception)
    found = read_result(path)
    assert [scores.task for scores in found.tasks] == ["choices", "others"]
    assert all(len(scores.items) == 3 and scores.protocol["samples"] == 9 for scores in found.tasks)
    assert "choices" in done.output and "acc_norm" in done.output
    assert not list(folder.glob("*.db"))
    again = CliRunner().invoke(app, ["evaluate", "--rerun", str(path)])
    assert again.exit_code == 0 and "the same scores and items" in again.output


@pytest.mark.slow
def test_lm_evals_own_command_gives_the_same_scores(folder, monkeypatch):
    tasks = "choices,texts,rolling"
    shutil.rmtree(folder / "model")
    lm = toy_lm()
    lm.tokenizer.chat_template = "{% for message in messages %}a{{ message.content }}{% endfor %}"
    lm.save(folder / "model")
    settings = {"samples": "9", "steps": "3", "dtype": "float32"}
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    expected = finished(
        folder, "--lm-eval", tasks, "--rows", "3", "--shots", "1", "--style", "chat", *options
    )
    monkeypatch.chdir(REPOSITORY)
    zipfile.ZipFile(folder / hatchling.build.build_editable(str(folder))).extractall(folder)  # entry points
    arguments = ",".join(f"{name}={value}" for name, value in {"pretrained": "model", **settings}.items())
    words = ["--model", "unmask", "--model_args", arguments, "--tasks", tasks, "--include_path", "."]
    words += ["--batch_size", "auto:4", "--limit", "3", "--num_fewshot", "1", "--apply_chat_template"]
    done = subprocess.run(
        [Path(sys.executable).with_name("lm_eval"), *words, "--device", "cpu", "--output_path", "results"],
        env=outside() | {"PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(next(folder.glob("results/**/results_*.json")).read_text())["results"]
    assert [scores.task for scores in expected] == list(found)
    for scores in expected:
        assert scores.metrics and len(scores.items) == 3
        for name, metric in scores.metrics.items():
            assert found[scores.task][f"{name},none"] == metric.mean


@pytest.mark.parametrize("found", [None, ModuleType("lm_eval")], ids=["not installed", "a user's file"])
def test_other_modules_of_lm_evals_name_do_not_break_the_import_of_torch(found):
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
            del sys.modules[name]
        sys.modules["lm_eval"] = found
        register()


@pytest.mark.slow
def test_the_bits_depend_on_neither_batch_size_nor_order(folder):
    expected = finished(folder, *ALL)
    for size in (3, 8):
        assert finished(folder, *ALL, "--batch-size", size) == expected
    turned = finished(folder, *ALL, "--lm-eval", "drawn,texts,rolling,choices")
    assert sorted(turned, key=lambda scores: scores.task) == sorted(expected, key=lambda scores: scores.task)


@pytest.mark.slow
def test_a_stopped_evaluation_goes_on(folder, monkeypatch):
    expected = finished(folder, *ALL)
    calls, estimate = [], HarnessLM.estimate_ids

    def stopped(self, *arguments):
        calls.append(arguments)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return estimate(self, *arguments)

    monkeypatch.setattr(HarnessLM, "estimate_ids", stopped)
    assert run(folder, *ALL, "--output", folder / "result.json", "--overwrite").exit_code == 130
    assert len(calls) == 6 and len(list(folder.glob("result.json.answers_rank0.db"))) == 1
    other = run(folder, *ALL, "--seed", "1", "--output", folder / "result.json", "--overwrite")
    assert other.exit_code == 2 and "has answers of another evaluation (seed)" in other.output
    assert finished(folder, *ALL) == expected
    # two questions of two choices are not asked again
    assert len(calls) < 6 + 15 and not list(folder.glob("*.db"))


@pytest.mark.nightly  # tests/cli/test_evaluate.py kills one of our own tasks
def test_a_killed_evaluation_goes_on(folder):
    expected = finished(folder, *ALL)
    words = ["evaluate", folder / "model", "--include-path", folder, *ALL, "--output", folder / "killed.json"]
    program = [sys.executable, "-c", KILLED + "from unmask.cli.entry import main\nmain()"]
    for count in (5, 7):
        done = subprocess.run([*program, str(count), *map(str, words)], env=outside(), capture_output=True)
        assert done.returncode == -signal.SIGKILL and list(folder.glob("killed.json.answers*.db")), (
            done.stderr
        )
    whole = run_all(
        [sys.executable, "-m", "unmask", *words], timeout=300, env=outside(), stdout=-1, stderr=-1
    )
    assert b"error" not in whole.stderr.lower()
    same = read_result(folder / "killed.json").tasks == expected
    assert same


@pytest.mark.nightly  # tests/evaluation/harness/test_model.py compares two processes with one
def test_two_processes_give_the_result_of_one(folder):
    expected = finished(folder, *ALL)
    words = ["evaluate", folder / "model", "--include-path", folder, *ALL, "--output", folder / "two.json"]
    run_all(
        [sys.executable, *TWO_PROCESSES["accelerate"], "-m", "unmask", *words],
        timeout=300,
        env=outside(),
        cwd=folder,
    )
    same = read_result(folder / "two.json").tasks == expected
    assert same  # without pytest's explanation, which takes minutes
    assert not list(folder.glob("*.db"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lm-eval", "choises"], "lm-eval has no task 'choises'. Did you mean 'choices'"),
        (["--lm-eval", "missing"], "missing: the task cannot be loaded: FileNotFoundError"),
        (
            ["--lm-eval", "undefined"],
            "undefined: a template of the task does not fit its data: 'query' is undefined",
        ),
        (["--lm-eval", "split"], "split: the task cannot be loaded: KeyError: 'tset'"),
        (["--lm-eval", "field"], "unexpected keyword argument 'doc_to_txt'. Check the task's file"),
        (["--lm-eval", "beams"], "gen_kwargs: 'num_beams' is no option of the sampler"),
        (["--lm-eval", "choices", "--style", "chat"], "no chat template"),
        (["--lm-eval", "texts", "--style", "chat"], "no chat template"),
        (["--lm-eval", "choices", "--data", "a.jsonl"], "data: is read by --task only"),
        (["--lm-eval", "choices", "--split", "train"], "split: is read by --task or --likelihood only"),
        (["--lm-eval", "choices", "--steps", "3"], "steps: no task generates text"),
        (
            ["--lm-eval", "choices,texts", "--cfg-scale", "1"],
            "cfg_scale: likelihoods are computed without guidance",
        ),
        (["--lm-eval", "hellaswag", "--protocol", "llada-base"], "Use llada-base/without-guidance"),
        (["--lm-eval", "choices", "--include-path", "nowhere"], "nowhere: is not a folder"),
        (["--task", "sudoku"], "include_path: is read by --lm-eval only"),
    ],
)
def test_wrong_input_is_one_line(folder, monkeypatch, words, message):
    # lm-eval's own tasks take half a minute to list
    monkeypatch.setattr(manager, "__file__", str(folder / "none" / "manager.py"))
    done = run(folder, *words, "--output", folder / "result.json")
    assert done.exit_code == 2 and message in done.output, (done.output, done.exception)
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last and "Traceback" not in done.output
    assert not (folder / "result.json").exists()
