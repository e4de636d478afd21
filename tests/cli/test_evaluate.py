"""`unmask evaluate`: a result says what it was made of, runs itself again, and survives being killed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, load_dataset
from typer.testing import CliRunner

from tests.helpers import TWO_PROCESSES, run_all
from unmask.cli import evaluation as commands
from unmask.cli.entry import app
from unmask.data.characters import character_model
from unmask.data.sources import pose
from unmask.errors import DataError
from unmask.evaluation import tasks
from unmask.evaluation.result_file import EvaluationResult, Metric, TaskScores, read_result
from unmask.evaluation.tasks import item_ids
from unmask.tasks import get_task
from unmask.variables import ACCEPT_UNSANDBOXED

DIGITS = str.maketrans("05678", "12341")  # to those of the task's alphabet
DRAWN = ["--task", "sudoku", "--temperature", "1", "--seed", "5", "--dtype", "float64"]
KILLED = """
import os, signal, sys
from unmask.cli.entry import main
from unmask.evaluation.item_log import ItemLog

add, left = ItemLog.add, int(sys.argv.pop(1))

def killed(log, task, items):
    global left
    add(log, task, items)
    left -= len(items)
    if left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)

ItemLog.add = killed
main()
"""
"""`unmask` in a process that dies once it has finished so many items."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    lm = character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0)
    folder = tmp_path_factory.mktemp("evaluated") / "model"
    lm.bind(lm.model.double()).save(folder)
    return str(folder)


def unmask(*words: object) -> str:
    """The output of a command that succeeds."""
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def refused(*words: object) -> str:
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 2, (result.output, result.exception)
    return result.stderr


def lasting(result: EvaluationResult, **update: object) -> str:
    """What two results of the same evaluation share, as it is in their files."""
    return result.model_copy(update={"times": {}, "environment": {}, **update}).model_dump_json()


def test_a_result_says_what_it_was_made_of_and_runs_itself_again(model, tmp_path):
    output = tmp_path / "out.json"
    shown = unmask("evaluate", model, *DRAWN, "--rows", 5, "--attempts", 2, "--output", output, "--trace")
    assert "pass@2" in shown and "tokens per second" in shown
    result = read_result(output)
    (scores,) = result.tasks
    assert (
        result.model["path"] == model
        and len(result.model["fingerprint"]) == 64
        and result.model["dtype"] == "float64"
    )
    assert scores.protocol["sampler"]["temperature"] == 1 and scores.protocol["sampler"]["seed"] == 5
    assert [len(item.completions) for item in scores.items] == [2] * 5 and all(
        item.traces for item in scores.items
    )
    assert (
        result.environment["packages"]["torch"] and result.times["tasks"]["sudoku"]["tokens_per_second"] > 0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"]
    assert "the same scores and items" in unmask("evaluate", "--rerun", output)

    changed = json.loads(output.read_text())
    changed["tasks"][0]["items"][0]["completions"][0] += "!"
    changed["environment"]["packages"]["torch"] = "0.4"
    output.write_text(json.dumps(changed))
    again = CliRunner().invoke(app, ["evaluate", "--rerun", str(output)])
    assert again.exit_code == 1
    assert (
        "items that differ" in again.output and "1 of 5" in again.output and "packages.torch" in again.output
    )


def test_several_tasks_at_once(model, tmp_path):
    rows = [{"input": "3,4,5", "output": "12"}, {"input": "2,4,6", "output": "12"}]
    (tmp_path / "countdown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own, output = ["--data", f"countdown={tmp_path / 'countdown.jsonl'}"], tmp_path / "out.json"
    unmask(
        "evaluate",
        model,
        "--task",
        "sudoku,countdown",
        "--task",
        "sudoku",
        *own,
        "--rows",
        2,
        "--output",
        output,
    )
    one, other = read_result(output).tasks
    assert (one.task, other.task, one.protocol["data"]) == ("sudoku", "countdown", "generated")
    assert (
        one.protocol["sampler"]["max_new_tokens"] == get_task("sudoku").max_completion
        and len(other.items) == 2
    )


def test_a_likelihood_is_a_result_too(model, tmp_path):
    (tmp_path / "text.txt").write_text("1234\n\n4321\n\n1342\n")
    unmask("evaluate", model, "--likelihood", tmp_path / "text.txt", "--output", tmp_path / "out.json")
    (scores,) = read_result(tmp_path / "out.json").tasks
    (metric,), (first, second, _) = scores.metrics.values(), scores.items
    assert (
        metric.low < metric.mean < metric.high
        and not metric.higher_is_better
        and metric.standard_error is None
    )
    assert first.prompt == "1234" and first.details["tokens"] == 4 and first.id != second.id
    assert first.details["log_likelihood"] == pytest.approx(-4 * first.scores["nats per token"])
    assert metric.mean == pytest.approx(sum(item.scores["nats per token"] for item in scores.items) / 3)
    assert scores.protocol["estimator"] == "exact" and "seed" not in scores.protocol
    assert "the same scores" in unmask("evaluate", "--rerun", tmp_path / "out.json")


CONFIGS = """---
configs:
- config_name: few
  data_files:
  - {split: train, path: few.jsonl}
  - {split: validation, path: held-out.jsonl}
- config_name: more
  data_files: more.jsonl
---
"""


@pytest.mark.parametrize(
    ("config", "split"), [("few", None), ("few", "validation"), ("more", None), (None, "test"), (None, None)]
)
def test_the_documents_are_those_of_a_split_and_a_config_as_datasets_reads_them(
    config, split, model, tmp_path, monkeypatch
):
    folder, words = tmp_path / "rows", ["--split", split] if split else []
    texts = {"few": ["1234"], "held-out": ["43", "12"], "more": ["3333", "21", "444"], "test": ["44"]}
    folder.mkdir()
    if config:
        (folder / "README.md").write_text(CONFIGS)
        for name in ("few", "held-out", "more"):
            Dataset.from_dict({"text": texts[name]}).to_json(folder / f"{name}.jsonl")
        loaded = load_dataset(str(folder), config, split=split or "train")["text"]
    else:
        sets = {"train": texts["few"], "test": texts["test"]}
        saved = DatasetDict({name: Dataset.from_dict({"text": texts}) for name, texts in sets.items()})
        saved.save_to_disk(folder)
        loaded = saved[split or "train"]["text"]
    source = f"{folder}:{config}" if config else folder
    unmask("evaluate", model, "--likelihood", source, *words, "--output", tmp_path / "out.json")
    scores = read_result(tmp_path / "out.json").tasks[0]
    assert [item.prompt for item in scores.items] == [*map(str, loaded)]
    assert "the same scores" in unmask("evaluate", "--rerun", tmp_path / "out.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to measure. Give --task, --lm-eval or --likelihood"),
        (["--task", "sudoku", "--likelihood", "a.txt"], "a.txt"),
        (["--task", "sudko"], "unknown task 'sudko'. Did you mean 'sudoku'?"),
        (["--task", "gsm8k"], "generates no problems"),
        (["--task", "sudoku", "--data", "missing.csv"], "missing.csv"),
        (["--task", "sudoku,countdown", "--data", "a.csv"], "does not say which task it belongs to"),
        (
            ["--task", "sudoku", "--data", "sudoku=a.csv", "--data", "sudoku=b.csv"],
            "data sudoku=b.csv: has two files",
        ),
        (["--task", "sudoku", "--split", "validation"], "--split: is of a dataset, and none is read"),
        (
            ["--likelihood", "docs/samples/stories.txt", "--split", "test"],
            "docs/samples/stories.txt: no split 'test'. Present: 'train'",
        ),
        (
            ["--task", "sudoku", "--max-new-tokens", "5"],
            "--max-new-tokens: the answers of sudoku have a length of their own",
        ),
        (["--task", "sudoku", "--style", "chat"], "chat template"),
        (["--task", "sudoku", "--attempts", "3"], "at temperature 0 are all the same"),
        (["--task", "sudoku", "--metric", "rouge"], "has no reference texts"),
        (
            ["--task", "sudoku", "--attempts", "3", "--temperature", "1", "--pass-at", "1,x"],
            "pass_at: 'x' is no number",
        ),
        (["--task", "sudoku", "--shots", "100"], "exceed the context"),
        (
            ["--likelihood", "docs/samples/stories.txt", "--steps", "3"],
            "--steps: a likelihood generates no text",
        ),
        (
            ["--likelihood", "docs/samples/stories.txt", "--cfg-scale", "1"],
            "--cfg-scale: a likelihood generates no text",
        ),
        (["--likelihood", "missing.txt"], "missing.txt"),
        (["--likelihood", "a.txt", "--attempts", "2"], "attempts: is read by --task only"),
        (["--task", "sudoku", "--samples", "3"], "samples: is read by --likelihood or --lm-eval only"),
        (
            ["--task", "sudoku", "--estimator", "exact"],
            "estimator: is read by --likelihood or --lm-eval only",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_error(words, message, model, tmp_path):
    error = refused("evaluate", model, *words, "--output", tmp_path / "out.json").splitlines()[-1]
    assert message in error and error.startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_an_existing_result_is_kept(model, tmp_path):
    output = tmp_path / "out.json"
    output.write_text("kept")
    command = ["evaluate", model, "--task", "sudoku", "--rows", 2, "--output", output]
    assert "the file exists" in refused(*command) and output.read_text() == "kept"
    unmask(*command, "--overwrite")
    assert len(read_result(output).tasks[0].items) == 2


def test_a_file_that_is_no_result_cannot_be_rerun(tmp_path):
    assert "no such file" in refused("evaluate", "--rerun", tmp_path / "out.json")
    (tmp_path / "out.json").write_text("{")
    assert "out.json" in refused("evaluate", "--rerun", tmp_path / "out.json")


def test_a_result_of_another_model_cannot_be_rerun(model, tmp_path, monkeypatch):
    own, output = tmp_path / "model", tmp_path / "out.json"
    shutil.copytree(model, own)
    unmask("evaluate", own, "--task", "sudoku", "--rows", 2, "--output", output)
    before = output.read_bytes()
    character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=1).save(own)
    monkeypatch.setattr(tasks, "generate", None)  # found before anything is computed
    error = refused("evaluate", "--rerun", output).splitlines()[-1]
    assert (
        error.startswith("error: ")
        and "of another model than there is now (fingerprint: " in error
        and output.read_bytes() == before
    )


@pytest.mark.parametrize("first", [True, False])
def test_a_rerun_may_accept_unsandboxed_code(first, monkeypatch, tmp_path):
    seen = []

    def rerun(path, harness):
        seen.append(os.environ[ACCEPT_UNSANDBOXED])
        raise DataError("enough", where="here", remedy="None")

    monkeypatch.setenv(ACCEPT_UNSANDBOXED, "")
    monkeypatch.setattr(commands, "rerun", rerun)
    (tmp_path / "out.json").write_text("{}")
    words = ["--rerun", tmp_path / "out.json"]
    assert "enough" in refused(
        "evaluate",
        *(["--i-accept-unsandboxed-code", *words] if first else [*words, "--i-accept-unsandboxed-code"]),
    )
    assert seen == ["1"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["model"], "model"),
        (["--batch-size", "3"], "--batch-size"),
        (["--output", "b.json"], "--output"),
        (["--overwrite"], "--overwrite"),
    ],
)
def test_a_rerun_reads_no_other_options(words, name, tmp_path):
    file = tmp_path / "out.json"
    for given in ([*words, "--rerun", file], ["--rerun", file, *words], [*words, f"--rerun={file}"]):
        assert f"{name}: is not read with --rerun" in refused("evaluate", *given)


def test_a_result_file_runs_no_code_of_a_model(model, tmp_path):
    output = tmp_path / "out.json"
    unmask("evaluate", model, "--task", "sudoku", "--rows", 2, "--output", output, "--trust-remote-code")
    assert "trust_remote_code" in refused("evaluate", "--rerun", output)


def test_arguments_of_another_kind_cannot_be_rerun(model, tmp_path):
    output = tmp_path / "out.json"
    unmask("evaluate", model, "--task", "sudoku", "--rows", 2, "--output", output)
    for section, message in (
        ("m", "other.json, arguments.model: "),
        ({"path": model, "layers": 2}, "other.json, arguments.model: layers: is not a known key"),
        ({}, "other.json, arguments.model: path: is required"),
    ):
        written = json.loads(output.read_text())
        written["arguments"]["model"] = section
        (tmp_path / "other.json").write_text(json.dumps(written))
        error = refused("evaluate", "--rerun", tmp_path / "other.json")
        assert message in error and "Give a file that" in error


def test_the_speed_is_that_of_the_items_asked_now(model, tmp_path):
    output, log = tmp_path / "out.json", tmp_path / "out.json.items.jsonl"
    command = [
        "evaluate",
        model,
        *DRAWN,
        "--attempts",
        3,
        "--pass-at",
        "1,3",
        "--rows",
        4,
        "--output",
        output,
    ]
    unmask(*command)
    (scores,) = read_result(output).tasks
    assert {"pass@1", "pass@3"} <= set(scores.metrics)
    identity = {"model": read_result(output).model, "protocols": {"sudoku": {}}, "pass_at": [1, 3]}
    identity["protocols"]["sudoku"] = {
        name: scores.protocol[name] for name in ("rows", "rows_sha256", "attempts", "sampler")
    }
    finished = [{"task": "sudoku", "item": item.model_dump(mode="json")} for item in scores.items]
    log.write_text("".join(json.dumps(line) + "\n" for line in [{"evaluation": identity}, *finished]))
    unmask(*command, "--overwrite")
    again = read_result(output)
    assert again.tasks == [scores] and again.times["resumed_items"] == 4
    assert again.times["tasks"]["sudoku"]["tokens_per_second"] is None


def test_the_items_of_another_evaluation_are_not_taken(model, tmp_path):
    output = tmp_path / "out.json"
    unmask("evaluate", model, *DRAWN, "--rows", 2, "--output", output)
    (tmp_path / "out.json.items.jsonl").write_text(
        '{"evaluation": {"model": {}}}\n{"task": "sudoku", "item": {}}\n'
    )
    assert "another evaluation" in refused(
        "evaluate", model, *DRAWN, "--rows", 2, "--output", output, "--overwrite"
    )


def killed_and_resumed(model: str, folder: Path, kills: list[int], words: list[str]) -> None:
    """An evaluation that is killed when so many more items are finished, and goes on with another batch size,
    gives the same result."""
    command = ["evaluate", model, *words, "--output"]
    unmask(*command, folder / "straight.json")
    output, log = folder / "out.json", folder / "out.json.items.jsonl"
    for kill in kills:
        process = subprocess.run(
            [sys.executable, "-c", KILLED, str(kill), *command, str(output), "--batch-size", "4"],
            capture_output=True,
        )
        assert process.returncode == -signal.SIGKILL and log.exists() and not output.exists()
    unmask(*command, output, "--batch-size", 3)
    straight, resumed = read_result(folder / "straight.json"), read_result(output)
    assert resumed.times["resumed_items"] >= sum(kills)
    assert lasting(resumed, arguments={}) == lasting(straight, arguments={})
    assert not log.exists()


@pytest.mark.slow
def test_a_killed_evaluation_goes_on(model, tmp_path):
    killed_and_resumed(model, tmp_path, [8], [*DRAWN, "--rows", "60"])


@pytest.mark.slow
def test_two_evaluations_at_once_do_not_write_one_output(model, tmp_path):
    command = ["evaluate", model, *DRAWN, "--rows", "4", "--output"]
    unmask(*command, tmp_path / "alone.json")
    stopped = KILLED.replace("SIGKILL", "SIGSTOP")
    first = subprocess.Popen(
        [sys.executable, "-c", stopped, "1", *command, str(tmp_path / "out.json")], stdout=subprocess.DEVNULL
    )
    try:
        assert os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1])  # in the middle
        error = refused(*command, tmp_path / "out.json")
        assert f"out.json: process {first.pid} on " in error and "is running here. Wait for it" in error
        assert "is running here" in refused(*command, tmp_path / "out.json", "--overwrite", "--seed", 6)
        first.send_signal(signal.SIGCONT)
        assert first.wait() == 0
    finally:
        first.kill()
    assert lasting(read_result(tmp_path / "out.json")) == lasting(read_result(tmp_path / "alone.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.json", "out.json"]


def text_of_forty(folder: Path) -> list[str]:
    """The options that measure its likelihood."""
    (folder / "text.txt").write_text(
        "\n\n".join(str(10**10 + 123456789 * number)[1:].translate(DIGITS) for number in range(40))
    )
    return [
        "--likelihood",
        str(folder / "text.txt"),
        "--estimator",
        "elbo",
        "--attention",
        "bidirectional",
        "--dtype",
        "float64",
    ]


@pytest.mark.slow
def test_a_killed_likelihood_goes_on(model, tmp_path):
    killed_and_resumed(model, tmp_path, [8], text_of_forty(tmp_path))


@pytest.mark.nightly
def test_an_evaluation_killed_again_and_again_goes_on(model, tmp_path):
    killed_and_resumed(model, tmp_path, [1, 4, 9, 40, 60], [*DRAWN, "--rows", "120"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "measured"),
    [
        ("torchrun", "likelihood"),
        *(
            pytest.param(launcher, "task", marks=pytest.mark.nightly)
            for launcher in ("torchrun", "accelerate")
        ),
        pytest.param("accelerate", "likelihood", marks=pytest.mark.nightly),
    ],
)
def test_two_processes_share_the_items(launcher, measured, model, tmp_path):
    words = [*DRAWN, "--rows", "30"] if measured == "task" else text_of_forty(tmp_path)
    command = ["evaluate", model, *words, "--output"]
    unmask(*command, tmp_path / "alone.json")
    before = set(tmp_path.iterdir())
    run_all(
        [sys.executable, *TWO_PROCESSES[launcher], "-m", "unmask", *command, str(tmp_path / "two.json")],
        timeout=300,
    )
    assert lasting(read_result(tmp_path / "two.json")) == lasting(read_result(tmp_path / "alone.json"))
    assert set(tmp_path.iterdir()) - before == {tmp_path / "two.json"}


def test_a_protocol_sets_what_is_not_given(model, tmp_path):
    """Prompt, sampler and rules; what the user gives replaces it, and the result says so."""
    output = tmp_path / "out.json"
    shorter = ["--max-new-tokens", 17, "--steps", 17, "--temperature", 0]
    unmask(
        "evaluate",
        model,
        "--task",
        "sudoku",
        "--protocol",
        "dream-base/cut",
        "--shots",
        0,
        "--rows",
        3,
        *shorter,
        "--output",
        output,
    )
    (scores,) = read_result(output).tasks
    authors, used = scores.protocol["authors"], scores.protocol["sampler"]
    assert (authors["name"], authors["variant"], authors["shots"]) == (
        "dream-base",
        "cut",
        8,
    ) and scores.protocol["shots"] == 0
    assert authors["sources"] and authors["differences"]
    assert authors["replaced"] == {
        "max_new_tokens": {"protocol": 24, "used": 17},
        "steps": {"protocol": 24, "used": 17},
    }
    assert (used["remasking"], used["schedule"], used["max_new_tokens"]) == ("entropy", "dream", 17)
    assert "the same scores and items" in unmask("evaluate", "--rerun", output)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--task", "sudoku", "--protocol", "dreambase"],
            "there is no protocol 'dreambase'. Did you mean 'dream-base'?",
        ),
        (["--task", "sudoku", "--protocol", "llada-base"], "protocol llada-base: has no task 'sudoku'"),
        (["--task", "sudoku", "--protocol", "d1"], "chat template"),
    ],
)
def test_a_protocol_that_does_not_fit_is_one_error(words, message, model):
    assert message in refused("evaluate", model, *words)


def test_a_rerun_names_the_tasks_that_only_one_result_has(model, tmp_path):
    output = tmp_path / "out.json"
    unmask("evaluate", model, "--task", "sudoku", "--rows", 2, "--output", output)
    written = json.loads(output.read_text())
    for there in ([], [written["tasks"][0] | {"task": "other"}]):
        output.write_text(json.dumps(written | {"tasks": there}))
        again = CliRunner().invoke(app, ["evaluate", "--rerun", str(output)])
        assert again.exit_code == 1 and "not measured" in again.output
    output.write_text(json.dumps(written | {"tasks": written["tasks"] * 2}))
    assert "the task sudoku is there twice" in refused("evaluate", "--rerun", output)


def test_a_metric_that_is_not_a_number_is_no_difference():
    before = EvaluationResult(
        model={},
        arguments={},
        tasks=[TaskScores(task="t", protocol={}, metrics={"mcc": Metric(mean=math.nan)})],
    )
    assert commands.differences(before, EvaluationResult.model_validate_json(before.model_dump_json())) == (
        [],
        [],
    )


def test_an_output_that_cannot_be_written_is_named_before_the_work(model, tmp_path):
    (tmp_path / "text.txt").write_text("1234")
    for output, message in (
        (tmp_path / "text.txt" / "out.json", "is a file, not a folder"),
        (tmp_path, "is a folder, not a file"),
    ):
        for words in (["--task", "sudoku"], ["--likelihood", tmp_path / "text.txt"]):
            assert message in refused("evaluate", model, *words, "--output", output, "--overwrite")
    assert (tmp_path / "text.txt").read_text() == "1234"


def test_pass_at_1_is_reported_of_one_attempt(model):
    assert "pass@1" in unmask("evaluate", model, "--task", "sudoku", "--rows", 2, "--pass-at", 1)


def test_an_item_has_one_name_in_all_styles_of_its_prompt():
    for name in ("sudoku", "shuffle", "countdown"):
        task = get_task(name)
        rows = task.generate("test", 5, 0)
        styles = [pose(task, rows, style, shots) for style in ("plain", "chat") for shots in (0, 2)]
        assert len({tuple(item_ids(posed)[-3:]) for posed in styles}) == 1
