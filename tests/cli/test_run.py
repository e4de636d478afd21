"""The training verbs from their settings to a saved model, and what they say of bad input."""

from __future__ import annotations

import html
import json
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.helpers import REPOSITORY, partly_slow, run_all, shared_path
from tests.tiny import llama_lm
from tests.training.tiny_runs import QUICK, equal, unmask, weights
from unmask.artifacts import MetricsLog
from unmask.cli.run import forget_earlier_run
from unmask.config.yaml import parse_yaml
from unmask.errors import UnmaskWarning
from unmask.evaluation.result_file import read_result
from unmask.models.chat_template import TEMPLATES
from unmask.models.load import load
from unmask.sandbox.outcome import Status
from unmask.tasks import get_task

GRPO = ["training.num_generations=2", "training.max_completion_length=17"]
PAIR = {"prompt": "1200=", "completion": "34"}
UNKNOWN = "training.max_unknown=1"


@pytest.mark.nightly  # tests/test_readme.py gives all verbs on the command line too
def test_the_verbs_lead_from_text_to_an_aligned_model(model, text, tmp_path):
    architecture = tmp_path / "architecture"
    shutil.copytree(model, architecture)
    (architecture / "model.safetensors").unlink()
    runs = [
        ("pretrain", architecture, ["--data", text, "model.from_scratch=true"], "causal"),
        (
            "convert",
            tmp_path / "pretrain" / "model",
            ["--task", "sudoku", "training.max_steps=6"],
            "bidirectional",
        ),
        ("sft", tmp_path / "convert" / "model", ["--task", "sudoku"], "bidirectional"),
        ("dpo", tmp_path / "sft" / "model", ["--task", "sudoku", "lora.r=2"], "bidirectional"),
        ("grpo", tmp_path / "dpo" / "model", ["--task", "sudoku", *GRPO], "bidirectional"),
    ]
    for verb, start, options, attention in runs:
        output = tmp_path / verb
        result = unmask(verb, "--model", start, "--output", output, *QUICK, *options)
        assert result.exit_code == 0, (verb, result.output, result.exception)
        assert load(output / "model").attention == attention
        assert parse_yaml((output / "config.yaml").read_text(), "config.yaml")["model"]["path"] == str(start)
        assert json.loads((output / "manifest.json").read_text())["verb"] == verb
        assert (output / "evaluation.json").exists() == ("sudoku" in options)
        assert MetricsLog(output / "training_logs.json").read()[0]["step"] == 1
    (scores,) = read_result(tmp_path / "grpo" / "evaluation.json").tasks
    assert len(scores.items) == 4 and all(item.completions for item in scores.items)

    final = tmp_path / "grpo" / "model"
    sampler = ["--max-new-tokens", "17"]
    generated = unmask("generate", final, "--prompt", "1200340021004300=", *sampler, "--json")
    assert generated.exit_code == 0 and len(json.loads(generated.stdout)["tokens"]) <= 17
    measured = unmask(
        "evaluate", final, "--task", "sudoku", "--rows", "4", *sampler, "--output", tmp_path / "sudoku.json"
    )
    assert measured.exit_code == 0 and "solved" in measured.stdout
    assert len(read_result(tmp_path / "sudoku.json").tasks[0].items) == 4
    likely = unmask("evaluate", final, "--likelihood", text, "--samples", "2")
    assert likely.exit_code == 0 and "nats per token" in likely.stdout
    shown = unmask("inspect", final)
    assert shown.exit_code == 0 and "bidirectional" in shown.stdout and "LlamaForCausalLM" in shown.stdout


def test_a_run_goes_on_where_it_was(model, tmp_path):
    run = [
        "sft",
        "--model",
        model,
        "--task",
        "sudoku",
        *QUICK,
        "training.max_steps=4",
        "training.save_steps=2",
        "--output",
    ]
    assert unmask(*run, tmp_path / "straight").exit_code == 0
    assert unmask(*run, tmp_path / "resumed").exit_code == 0
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-4")
    shutil.rmtree(tmp_path / "resumed" / "model")
    assert unmask(*run, tmp_path / "resumed").exit_code == 2
    assert unmask(*run, tmp_path / "resumed", "--resume").exit_code == 0
    one, other = (weights(load(tmp_path / name / "model")) for name in ("straight", "resumed"))
    assert equal(one, other)
    steps = [
        line["step"]
        for line in MetricsLog(tmp_path / "resumed" / "training_logs.json").read()
        if "loss" in line
    ]
    assert steps == [1, 2, 3, 4]
    # a later --resume would take checkpoint-4
    again = unmask(*run, tmp_path / "resumed", "--resume", tmp_path / "resumed/checkpoint-2")
    assert (
        again.exit_code == 2
        and "checkpoint-2: is followed by checkpoint-4. Remove the later ones" in again.stderr
    )
    elsewhere = unmask(*run, tmp_path / "elsewhere", "--resume", tmp_path / "resumed/checkpoint-2")
    assert elsewhere.exit_code == 0 and equal(weights(load(tmp_path / "elsewhere/model")), one)


def test_overwriting_removes_what_a_run_writes_and_nothing_else(tmp_path):
    for name in (
        "checkpoint-10",
        "stage-2",
        "stage-photos",
        "checkpoint-of-mine",
        "my-stage-2",
        "stage-2-old",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    results = [
        "evaluation.json",
        "retention.json",
        "retention.before.json.items.jsonl",
        "retention.json.answers_rank0.db",
    ]
    for name in (
        "stage-plan.md",
        "stage-3",
        "retention.md",
        "training_logs.json",
        "completions.jsonl",
        *results,
    ):
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoint-99").symlink_to(tmp_path / "stage-photos")
    forget_earlier_run(tmp_path)
    assert (tmp_path / "stage-photos/file").exists()
    left = [
        "checkpoint-of-mine",
        "my-stage-2",
        "retention.md",
        "stage-2-old",
        "stage-3",
        "stage-photos",
        "stage-plan.md",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_overwriting_replaces_the_scores_of_an_earlier_reference(model, tmp_path):
    """Unless the settings say otherwise; the settings that are written do not replace a reference later."""
    run = ["dpo", "--model", model, "--task", "sudoku", "--output", tmp_path / "out", *QUICK]
    assert unmask(*run).exit_code == 0
    refused = unmask(*run, "--overwrite", "training.seed=1", "training.stale_reference=error")
    assert refused.exit_code != 0 and "holds log-probabilities of another settings" in " ".join(
        refused.stderr.split()
    )
    with pytest.warns(
        RuntimeWarning,
        match="holds log-probabilities of another settings: the reference's log-probabilities are recomputed",
    ):
        assert unmask(*run, "--overwrite", "training.seed=1").exit_code == 0
    assert (
        parse_yaml((tmp_path / "out" / "config.yaml").read_text(), "config.yaml")["training"][
            "stale_reference"
        ]
        == "error"
    )
    assert unmask(*run, "--overwrite", "training.reference=frozen").exit_code == 0  # which stores nothing


def test_an_output_folder_in_use_is_refused_and_left_alone(model, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious.txt").write_text("results")
    result = unmask("sft", "--model", model, "--task", "sudoku", "--output", output, *QUICK)
    assert_refused(result, "out", "not empty", "--overwrite")
    assert [path.name for path in output.iterdir()] == ["precious.txt"]
    assert (output / "precious.txt").read_text() == "results"


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("output", "inputs"),
    [
        ("run", ["--model", "run"]),
        ("run", ["--model", "run/model"]),
        ("run", ["--model", "run/checkpoint-2"]),
        ("run", ["--model", "link"]),
        ("link", ["--model", "run/model"]),
        (".", ["--model", "run"]),
        ("run/model", ["--model", "run"]),
        ("run", ["--data", "run/rows.jsonl"]),
        ("run", ["data.eval=run/rows.jsonl", "--data", "rows.jsonl"]),
        ("run", ["data.train=[{path: rows.jsonl}, {path: run/rows.jsonl}]"]),
        ("run", ["--data", "rows.jsonl", "data.chat_template=run/rows.jsonl"]),
        ("run", ["--data", "rows.jsonl", "retention.likelihood=run/rows.jsonl"]),
        ("run", ["--data", "rows.jsonl", "--config", "run/config.yaml"]),
    ],
)
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["", "overwrite"])
def test_an_output_that_holds_an_input_is_refused_always(
    output, inputs, overwrite, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "run/model")
    shutil.copytree(model, "run/checkpoint-2")
    Path("run/manifest.json").write_text('{"verb": "pretrain"}')
    Path("run/rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    Path("run/config.yaml").write_text("training:\n  max_steps: 2\n")
    shutil.copy("run/rows.jsonl", "rows.jsonl")
    Path("link").symlink_to("run")
    before = content(tmp_path)
    given = [
        *([] if "--model" in inputs else ["--model", model]),
        *([] if "rows" in str(inputs) else ["--data", "rows.jsonl"]),
        *inputs,
    ]
    result = unmask("sft", *given, "--output", output, *overwrite, *QUICK)
    assert_refused(result, "input", "Choose another output")
    assert "--overwrite" not in result.stderr and content(tmp_path) == before


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "m", "--likelihood", "text.txt", "--output", "m/config.json"],
        ["evaluate", "text.txt", "--task", "sudoku", "--against", "m", "--output", "m/model.safetensors"],
        ["report", "m", "--output", "m/training_logs.json"],
        [
            "profile",
            "sft",
            "--model",
            "m",
            "--data",
            "rows.jsonl",
            "--output",
            "r",
            "--steps",
            "1",
            "--trace",
            "m/model.safetensors",
        ],
        [
            "profile",
            "sft",
            "--model",
            "m",
            "--data",
            "rows.jsonl",
            "--output",
            "r",
            "--steps",
            "1",
            "--trace",
            "rows.jsonl",
        ],
        ["export", "m", "--layout", "hf", "--output", "other"],
        ["demo", "--quick", "--output", "m"],
    ],
)
def test_no_file_of_an_input_or_of_others_is_replaced(words, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "m")
    Path("m/training_logs.json").write_text("")
    Path("m/manifest.json").write_text('{"verb": "sft", "config": {}, "state": "finished"}')
    Path("other").mkdir()
    Path("other/config.json").write_text("{}")
    Path("rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    Path("text.txt").write_text("12 12 12\n")
    before = content(tmp_path)
    result = unmask(*words, "--overwrite")
    assert result.exit_code == 2 and "hoose another output" in result.stderr, result.output
    assert content(tmp_path) == before


def test_a_result_beside_a_model_is_written_again(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "m")
    Path("text.txt").write_text("12 12 12\n")
    for more in ([], ["--overwrite"]):
        result = unmask("evaluate", "m", "--likelihood", "text.txt", "--output", "m/result.json", *more)
        assert result.exit_code == 0, result.output


def test_the_model_of_a_reward_and_the_code_of_a_task_are_inputs_too(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "run/model")
    Path("run/mine.py").write_text(
        "def short(completions, **columns):\n    return [0.0 for _ in completions]\n"
    )
    for inputs in (
        ["rewards=[run/mine.py:short]"],
        ["rewards=[sudoku]", "training.beta=0.1", "training.ref_model=run/model"],
    ):
        result = unmask(
            "grpo", "--model", model, "--task", "sudoku", "--output", "run", "--overwrite", *GRPO, *inputs
        )
        assert_refused(result, "holds an input, run/m", "Choose another output")


def test_a_folder_whose_links_lead_into_the_output_is_an_input_there(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "run/model")
    Path("linked").mkdir()
    for each in Path("run/model").iterdir():
        Path("linked", each.name).symlink_to(each.absolute())
    Path("rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    result = unmask(
        "sft", "--model", "linked", "--data", "rows.jsonl", "--output", "run", "--overwrite", "max_steps=1"
    )
    assert_refused(result, "holds an input, linked", "Choose another output")


@pytest.mark.parametrize(
    "name", ["config.yaml", "config.json", "manifest.json", "model/", "checkpoint-7/", "stage-1/"]
)
def test_what_no_run_has_written_is_not_replaced(name, model, tmp_path):
    output = tmp_path / "out"
    (output / name).parent.mkdir(parents=True)
    if name.endswith("/"):
        (output / name).mkdir()
        (output / name / "config.json").write_text("# mine\n")
    else:
        (output / name).write_text("# mine\n")
    before, name = content(output), name.rstrip("/")
    result = unmask("sft", "--model", model, "--task", "sudoku", "--output", output, "--overwrite", *QUICK)
    assert_refused(result, f"holds a {name} that no run has written", "Choose another output folder")
    assert content(output) == before


@partly_slow("inside", ["model", "model/sft", "checkpoint-2/deep", "stage-1", ".unfinished", "link"], 0, 3, 5)
def test_what_a_run_replaces_is_refused_as_the_output_of_another(inside, model, tmp_path):
    run = ["sft", "--model", model, "--task", "sudoku", *QUICK, "training.save_steps=2", "--output"]
    assert unmask(*run, tmp_path / "out").exit_code == 0
    (tmp_path / "link").symlink_to(tmp_path / "out/checkpoint-2")
    output = tmp_path / "link" if inside == "link" else tmp_path / "out" / inside
    before = sorted((tmp_path / "out").rglob("*"))
    words = (
        f"is a part of the run in {tmp_path / 'out'}, which writes, replaces and removes",
        f"beside it, such as {tmp_path / 'out'}/after-",
    )
    assert_refused(unmask(*run, output, "--overwrite"), *words)
    assert sorted((tmp_path / "out").rglob("*")) == before
    assert unmask(*run, tmp_path / "out", "--overwrite").exit_code == 0


def test_a_run_inside_the_folder_of_another_and_the_outer_one_leave_each_other_alone(model, tmp_path):
    run = ["sft", "--model", model, "--task", "sudoku", *QUICK, "training.save_steps=1", "--output"]
    outer, inner = tmp_path / "out", tmp_path / "out/sft"
    assert unmask(*run, outer).exit_code == 0
    assert unmask(*run, inner, "training.seed=1").exit_code == 0
    before = {path: path.read_bytes() for path in inner.rglob("*") if path.is_file()}
    for more in (["--resume"], ["--resume", outer / "checkpoint-1"]):  # not compared with the inner one
        shutil.rmtree(outer / "checkpoint-2")
        resumed = unmask(*run, outer, *more)
        assert resumed.exit_code == 0, resumed.output
    # that of another run
    refused = unmask(*run, outer, "training.seed=1", "--resume", inner / "checkpoint-1")
    assert_refused(refused, "out", "holds an input")
    assert unmask(*run, outer, "--overwrite").exit_code == 0
    assert {path: path.read_bytes() for path in inner.rglob("*") if path.is_file()} == before
    shutil.rmtree(inner / "checkpoint-2")
    assert unmask(*run, inner, "training.seed=1", "--resume").exit_code == 0


def assert_refused(result: Any, *words: str) -> None:
    """One line that says what, where and the remedy; no traceback; exit code 2."""
    assert result.exit_code == 2, (result.output, result.exception)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0] == result.stderr.splitlines()[-1]
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in result.output


def lines(*rows: Any) -> str:
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


@pytest.mark.parametrize(
    ("verb", "content", "words"),
    [
        ("sft", None, ["rows.jsonl", "no such file", "Check the path"]),
        ("sft", "\n \n", ["rows.jsonl", "empty", "at least one row"]),
        (
            "sft",
            lines(PAIR, '{"prompt": "12", '),
            [
                "rows.jsonl, line 2",
                "malformed JSON",
                "Fix or remove the row. Or leave such rows out with training.bad_rows=skip",
            ],
        ),
        ("sft", lines(PAIR, {"prompt": "12="}), ["rows.jsonl, row 1", "no column 'completion'", "prompt"]),
        (
            "sft",
            lines(PAIR, {**PAIR, "prompt": "1" * 200}),
            [
                "rows.jsonl, row 1",
                "204 tokens",
                "a row holds 128",
                (
                    "or cut the prompt with training.truncation_mode=keep_end. Or leave such rows out with "
                    "training.bad_rows=skip"
                ),
            ],
        ),
        (
            "convert",
            lines({"text": "12"}, {"story": "12"}),
            ["rows.jsonl, row 1", "no column 'text'", "story"],
        ),
        ("pretrain", lines({"text": 12}), ["rows.jsonl, row 0", "12 is not text", "strings"]),
        (
            "dpo",
            lines({"prompt": "1", "chosen": "2", "rejected": "3"}, {"prompt": "1", "chosen": "2"}),
            ["row 1", "no column 'rejected'", "chosen", "training.bad_rows=skip"],
        ),
        (
            "grpo",
            lines(PAIR, {"prompt": "1" * 120}),
            ["rows.jsonl, row 1", "138 tokens", "context is 128", "training.max_completion_length to 7"],
        ),
        ("grpo", lines(PAIR, {"text": "1"}), ["rows.jsonl, row 1", "no column 'prompt'"]),
    ],
)
def test_bad_data_is_named_and_nothing_is_written(verb, content, words, model, tmp_path):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    rewards = [*GRPO, 'rewards=["sudoku"]'] if verb == "grpo" else []
    result = unmask(verb, "--model", model, "--data", path, "--output", tmp_path / "out", *QUICK, *rewards)
    assert_refused(result, *words)
    assert not (tmp_path / "out").exists()


MIXED = [
    (
        "sft",
        PAIR,
        {"prompt": [{"role": "user", "content": "1"}], "completion": [{"role": "assistant", "content": "2"}]},
    ),
    ("sft", PAIR, {"prompt": "1", "completion": 2}),
    (
        "dpo",
        {"prompt": "1", "chosen": "2", "rejected": "3"},
        {
            "conversations": [{"from": "human", "value": "1"}],
            **{
                name: {"from": "gpt", "value": str(number)}
                for number, name in enumerate(("chosen", "rejected"))
            },
        },
    ),
]


@pytest.mark.parametrize(("verb", "first", "other"), MIXED)
@partly_slow("suffix", ["json", "jsonl"], 1)
def test_a_file_of_mixed_layouts_is_refused_with_its_row_or_what_differs_is_left_out(
    suffix, verb, first, other, model, tmp_path
):
    path, rows = tmp_path / f"rows.{suffix}", [first] * 5 + [other]
    path.write_text(json.dumps(rows) if suffix == "json" else lines(*rows))
    run = [verb, "--model", model, "--data", path, *QUICK]
    assert_refused(
        unmask(*run, "--output", tmp_path / "out"),
        f"rows.{suffix}, row 5",
        "of" if other == MIXED[1][2] else "Keep one format",
    )
    assert not (tmp_path / "out").exists()
    result = unmask(*run, "--output", tmp_path / "out", "training.bad_rows=skip")
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads((tmp_path / "out" / "data_report.json").read_text())["train"]
    assert (report["read"], report["kept"]) == (6, 5)
    assert [told["rows"] for told in report["dropped"].values()] == [[5]]


def test_lines_that_are_no_json_are_counted_where_they_may_be_left_out(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(PAIR, '{"prompt": "12", ', PAIR, '"12"', {"prompt": "1"}, PAIR, '{"prom'))
    run = ["sft", "--model", model, "--data", path, f"data.eval={path}", *QUICK, "data.eval_rows=9"]
    assert_refused(unmask(*run, "--output", tmp_path / "early"), "rows.jsonl, line 2", "malformed JSON")
    result = unmask(*run, "--output", tmp_path / "out", "training.bad_rows=skip")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "train_dataset: rows" in result.output and "malformed JSON" in result.output
    report = json.loads((tmp_path / "out" / "data_report.json").read_text())
    assert report["train"] == report["eval"]
    assert report["train"]["dropped"] == {
        "malformed JSON": {"count": 2, "rows": [1, 6]},
        "wrong type": {"count": 1, "rows": [3]},
        "a column is missing": {"count": 1, "rows": [4]},
    }
    assert (
        parse_yaml((tmp_path / "out" / "config.yaml").read_text(), "config.yaml")["training"]["bad_rows"]
        == "skip"
    )


def test_verbs_without_answers_write_no_report_of_them(model, text, tmp_path):
    assert (
        unmask("pretrain", "--model", model, "--data", text, "--output", tmp_path / "out", *QUICK).exit_code
        == 0
    )
    assert not (tmp_path / "out" / "data_report.json").exists()


@partly_slow("verb", ["pretrain", "convert", pytest.param("grpo", marks=pytest.mark.slow)], 1)
def test_shown_rows_are_in_the_report_of_the_data(verb, model, text, tmp_path):
    more = ["--data", text, "training.packing=false"] if verb != "grpo" else ["--task", "sudoku", *GRPO]
    steps = ["training.max_steps=10"] if verb == "convert" else []
    result = unmask(
        verb, "--model", model, "--output", tmp_path / "out", *QUICK, *more, *steps, "--show-rows", "2"
    )
    assert result.exit_code == 0, (result.output, result.exception)
    rows = json.loads((tmp_path / "out" / "data_report.json").read_text())["train"]["rows"]
    parts = [part for row in rows for part in row]
    assert len(rows) == 2 and all(
        "⟦" in part and result.output.count(part) == parts.count(part) for part in parts
    )
    assert unmask("report", tmp_path / "out", "--output", tmp_path / "report.html").exit_code == 0
    page = html.unescape((tmp_path / "report.html").read_text())
    assert all(part in page for part in parts)


def test_the_shared_preferences_train_a_small_model_that_has_no_chat_template(tmp_path):
    data, small = (
        shared_path("data", "preference", "llamafactory_dpo_en_demo.json"),
        shared_path("models", "stories260K"),
    )
    run = [
        "dpo",
        "--model",
        small,
        "--data",
        data,
        *QUICK,
        "model.attention=bidirectional",
        "training.samples=1",
    ]
    assert_refused(unmask(*run, "--output", tmp_path / "out"), "no chat template", "data.chat_template")
    run += ["data.chat_template=simple", "training.max_length=256"]
    assert_refused(
        unmask(*run, "--output", tmp_path / "out"), "llamafactory_dpo_en_demo.json, row ", "a row holds 256"
    )
    with pytest.warns(UnmaskWarning, match=r"train_dataset: only \d of 16 rows are kept \(\d+ too long\)"):
        result = unmask(
            *run, "--output", tmp_path / "out", "training.bad_rows=skip", "training.truncation_mode=keep_end"
        )
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads((tmp_path / "out" / "data_report.json").read_text())["train"]
    assert report["read"] == 16 and 0 < report["kept"] < 16
    assert report["dropped"]["too long"]["count"] == 16 - report["kept"]
    assert load(tmp_path / "out" / "model").tokenizer.chat_template == TEMPLATES["simple"]


def test_the_ends_of_a_run_are_those_of_its_template_or_as_set(tmp_path):
    lm, rows = (
        llama_lm(vocab_size=16),
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4,
    )
    lm.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    end = lm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    lm.save(tmp_path / "tiny")
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    run = [
        "sft",
        "--model",
        tmp_path / "tiny",
        "--data",
        tmp_path / "rows.jsonl",
        f"data.chat_template={tmp_path}/chat.jinja",
        *QUICK,
    ]
    for name, more, ends in (("template", [], (2, end)), ("set", ["model.eos_token_ids=[8]"], (2, 8))):
        result = unmask(*run, "--output", tmp_path / name, *more)
        assert result.exit_code == 0, (result.output, result.exception)
        assert load(tmp_path / name / "model").eos_token_ids == ends


def test_reasoning_traces_in_the_layout_of_s1k_train_by_the_recipe(tmp_path):
    rows = [
        {
            "question": f"{n} and {n}?",
            "thinking_trajectories": [f"{n} " * 9 * n, "unused"],
            "attempt": str(2 * n),
            "solution": None,
        }
        for n in range(1, 9)
    ]
    (tmp_path / "s1k.jsonl").write_text(lines(*rows))
    # of the words it knows a few letters, and the rest as <unk>
    llama_lm(max_position_embeddings=256).save(tmp_path / "tiny")
    small = ["data.chat_template=simple", "lora.r=2"]
    run = [
        "sft",
        "--recipe",
        "sft-s1k",
        "--model",
        tmp_path / "tiny",
        "--data",
        tmp_path / "s1k.jsonl",
        *QUICK,
        *small,
        UNKNOWN,
    ]
    result = unmask(*run, "--output", tmp_path / "out")
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads((tmp_path / "out" / "data_report.json").read_text())["train"]
    assert (report["read"], report["kept"], report["dropped"]) == (8, 8, {})
    assert 0 < report["truncated"]["completion"] < 8
    config = parse_yaml((tmp_path / "out" / "config.yaml").read_text(), "config.yaml")
    assert config["training"]["learning_rate"] == 1e-5 and config["lora"]["alpha"] == 256


@pytest.mark.parametrize("verb", ["sft", "dpo", "grpo"])
def test_a_task_has_held_out_rows_while_it_trains(verb, model, tmp_path):
    evaluating = ["training.eval_strategy=steps", "training.eval_steps=1", "data.eval_rows=4"]
    more = GRPO if verb == "grpo" else []
    result = unmask(
        verb, "--model", model, "--task", "sudoku", "--output", tmp_path / "out", *QUICK, *more, *evaluating
    )
    assert result.exit_code == 0, (result.output, result.exception)
    lines = MetricsLog(tmp_path / "out" / "training_logs.json").read()
    assert [line["step"] for line in lines if ("eval_reward" if verb == "grpo" else "eval_loss") in line] == [
        1,
        2,
    ]


def test_held_out_rows_are_evaluated_on_at_the_end_at_least(model, tmp_path):
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(PAIR)}\n" * 8)
    data = ["--data", tmp_path / "rows.jsonl", f"data.eval={tmp_path / 'rows.jsonl'}"]
    result = unmask("sft", "--model", model, *data, "--output", tmp_path / "out", *QUICK)
    assert result.exit_code == 0, (result.output, result.exception)
    lines = MetricsLog(tmp_path / "out" / "training_logs.json").read()
    assert [line["step"] for line in lines if "eval_loss" in line] == [2]


@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_a_text_column_that_is_not_read_is_refused(verb, model, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "1", "content": "2", "chosen": "3", "rejected": "4"}\n')
    result = unmask(
        verb,
        "--model",
        model,
        "--data",
        tmp_path / "rows.jsonl",
        "--output",
        tmp_path / "out",
        "data.text_column=content",
    )
    assert (
        result.exit_code == 2 and "answers to prompts are read from columns of fixed names" in result.output
    )


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_model_is_refused(missing, model, tmp_path):
    shutil.copytree(model, tmp_path / "broken")
    for path in (tmp_path / "broken").glob("tokenizer*" if "tokenizer" in missing else missing):
        path.unlink()
    word = {"config.json": "config", "tokenizer.json": "tokenizer", "model.safetensors": "weights"}[missing]
    result = unmask(
        "sft", "--model", tmp_path / "broken", "--task", "sudoku", "--output", tmp_path / "out", *QUICK
    )
    assert_refused(result, "broken", word)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("verb", "options", "words"),
    [
        ("sft", ["training.learning_rat=1"], ["training.learning_rat", "learning_rate"]),
        ("sft", ["data.task=sudoko"], ["unknown task 'sudoko'", "sudoku"]),
        ("sft", ["model.from_scratch=true"], ["model.from_scratch", "Pre-train it first"]),
        (
            "grpo",
            ["training.num_generations=3", "training.max_completion_length=17"],
            ["num_generations", "4 completions"],
        ),
        (
            "grpo",
            [*GRPO, 'rewards=["nowhere:reward"]'],
            ["nowhere:reward: cannot be imported", "package.module:NAME"],
        ),
        ("convert", ["training.attention=causal"], ["attention", "bidirectional or block_causal"]),
        ("convert", ["lora.r=2", "training.time_embedding=true"], ["time_embedding", "without lora"]),
        ("pretrain", ["data.streaming=true"], ["data.task", "no stream and no mixture"]),
        (
            "pretrain",
            ["data.train=[{path: docs/samples/stories.txt}]"],
            ["data.task", "no stream and no mixture"],
        ),
        ("pretrain", ["data.shuffle_buffer=9"], ["data.shuffle_buffer", "data.streaming"]),
        (
            "pretrain",
            ["data.train=[{path: a.txt, weight: 0}]"],
            ["data.train.0.weight (command line): 0 is not valid", "greater than 0"],
        ),
    ],
)
def test_bad_settings_are_named_and_nothing_is_written(verb, options, words, model, tmp_path):
    task = [] if any("task" in option for option in options) else ["--task", "sudoku"]
    assert_refused(
        unmask(verb, "--model", model, *task, "--output", tmp_path / "out", *QUICK, *options), *words
    )
    assert not (tmp_path / "out").exists()


def test_without_data_there_is_nothing_to_train_on(model, tmp_path):
    assert_refused(
        unmask("sft", "--model", model, "--output", tmp_path / "out", *QUICK),
        "data.train",
        "--data FILE_OR_ID or --task NAME",
    )


def test_a_prompt_longer_than_the_context_is_refused(model):
    result = unmask("generate", model, "--prompt", "12=", "--prompt", "1" * 120, "--max-new-tokens", "17")
    assert_refused(
        result, "prompt 1", "121 prompt tokens and 17 new ones", "context of 128", "max_new_tokens"
    )


def test_a_loss_that_explodes_ends_the_run_and_spares_what_was_saved(model, tmp_path):
    explode = [
        "training.learning_rate=1e30",
        "training.max_steps=6",
        "training.save_steps=1",
        "training.lr_scheduler_type=constant",
    ]
    result = unmask(
        "sft", "--model", model, "--task", "sudoku", "--output", tmp_path / "out", *QUICK, *explode
    )
    assert_refused(result, "step ", " is nan", "learning rate")
    assert list((tmp_path / "out").glob("checkpoint-*"))
    assert not (tmp_path / "out" / "model").exists()


def lines_of(task: str, count: int) -> list[str]:
    return [row["prompt"] + row["completion"] for row in get_task(task).generate("train", count, 0)]


def test_a_streamed_mixture_is_trained_on(model, text, tmp_path):
    (tmp_path / "rows.jsonl").write_text(lines(*({"content": line} for line in lines_of("sudoku", 20))))
    (tmp_path / "data.yaml").write_text(f"""
data:
  train: [{{path: {text}, weight: 0.7}}, {{path: {tmp_path / "rows.jsonl"}, weight: 0.3, text_column: content}}]
  eval: {text}
  text_column: line
  streaming: true
  shuffle_buffer: 8
""")
    for verb, options in [
        ("pretrain", []),
        ("convert", ["training.stages=[{}]"]),
    ]:
        output = tmp_path / f"{verb}{len(options)}"
        result = unmask(
            verb, "--model", model, "--config", tmp_path / "data.yaml", "--output", output, *QUICK, *options
        )
        assert result.exit_code == 0, (result.output, result.exception)
        config = parse_yaml((output / "config.yaml").read_text(), "config.yaml")
        assert config["training"]["text_column"] == "line" and config["data"]["train"][0]["weight"] == 0.7


def test_a_stream_that_breaks_off_is_named(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(*[{"text": line} for line in lines_of("sudoku", 300)], '{"text": "12'))
    run = [
        "pretrain",
        "--model",
        model,
        "--data",
        path,
        *QUICK[:-2],
        "data.streaming=true",
        "training.max_steps=200",
    ]
    assert_refused(
        unmask(*run, "training.max_length=32", "--output", tmp_path / "out"),
        "rows.jsonl, line 301",
        "middle of a record",
    )
    path.write_text('{"text": "12')
    assert_refused(unmask(*run, "--output", tmp_path / "early"), "rows.jsonl, line 1", "middle of a record")
    assert not (tmp_path / "early").exists()


def test_rewards_and_held_out_rows_come_from_where_the_settings_say(model, tmp_path):
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(lines(PAIR, {**PAIR, "prompt": "3400="}))
    data = ["--data", tmp_path / "train.jsonl", f"data.eval={tmp_path / 'held_out.jsonl'}"]
    options = [
        'rewards=["tests.training.tiny_runs:share_of_a"]',
        "training.eval_strategy=steps",
        "training.eval_steps=1",
    ]
    result = unmask("grpo", "--model", model, "--output", tmp_path / "out", *QUICK, *GRPO, *data, *options)
    assert result.exit_code == 0, (result.output, result.exception)
    metrics = MetricsLog(tmp_path / "out" / "training_logs.json").read()
    assert [line["step"] for line in metrics if "eval_reward" in line] == [1, 2]
    assert "rewards/share_of_a" in metrics[0]


def test_problems_are_put_as_conversations_and_each_status_is_logged(tmp_path):
    # of the instructions it knows a few letters, and the rest as <unk>
    lm = llama_lm(max_position_embeddings=256)
    lm.save(tmp_path / "chat")
    task = ["--task", "sudoku", "data.style=chat", UNKNOWN]
    refused = unmask(
        "grpo", "--model", tmp_path / "chat", "--output", tmp_path / "early", *QUICK, *GRPO, *task
    )
    assert_refused(refused, "128 new ones exceed the context of 256")  # of the evaluation, before training
    assert not (tmp_path / "early").exists()
    task.append("sampler.max_new_tokens=17")
    result = unmask("grpo", "--model", tmp_path / "chat", "--output", tmp_path / "out", *QUICK, *GRPO, *task)
    assert result.exit_code == 0, (result.output, result.exception)
    metrics = MetricsLog(tmp_path / "out" / "training_logs.json").read()[0]
    statuses = [metrics[f"rewards/sudoku/{status}"] for status in get_args(Status)]
    assert sum(statuses) == pytest.approx(1) and metrics["unscored"] == 0
    assert len(read_result(tmp_path / "out" / "evaluation.json").tasks[0].items) == 4


SCRIPT = """
import sys
from pathlib import Path
import torch
from datasets import Dataset
from tests.tiny import llama_lm
from tests.training.tiny_runs import TEXTS, make, weights

folder = Path(sys.argv[1])
streamed = {"rows": Dataset.from_list(TEXTS).to_iterable_dataset()}
runs = [("stream", "pretrain", streamed), *((verb, verb, {}) for verb in ("pretrain", "sft", "dpo", "grpo"))]
for name, verb, more in runs:
    lm = llama_lm("causal" if verb == "pretrain" else "bidirectional", dtype=torch.float64)
    trainer = make(verb, folder, lm, per_device_train_batch_size=int(sys.argv[2]), optim="sgd", learning_rate=1.0, **more)
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(weights(lm), folder / f"{name}.pt")
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
"""


@pytest.mark.nightly  # tests/training/test_equal_runs.py compares all verbs
def test_two_processes_train_as_one_does(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "PATH": str(Path(sys.executable).parent),
    }
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for name, prefix, size in [("one", [], 4), ("two", launch, 2)]:
        (tmp_path / name).mkdir()
        command = [sys.executable, *prefix, str(script), str(tmp_path / name), str(size)]
        run_all(command, env=environment, timeout=600)
    for run in ("stream", "pretrain", "sft", "dpo", "grpo"):
        one, two = (torch.load(tmp_path / name / f"{run}.pt") for name in ("one", "two"))
        torch.testing.assert_close(two, one, rtol=0, atol=1e-6 if run in ("dpo", "grpo") else 1e-10)
