"""What `--resume` does with other settings, data and folders, and what the run's files then say."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.cli.test_run import PAIR, assert_refused, lines
from tests.helpers import partly_slow
from tests.training.tiny_runs import QUICK, equal, unmask, weights
from unmask.artifacts import MetricsLog
from unmask.config.yaml import parse_yaml
from unmask.models.load import load
from unmask.training.run import checkpoint

FOUR = ["training.max_steps=4", "training.save_steps=2", "training.lr_scheduler_type=constant"]


@pytest.fixture
def run(model, tmp_path):
    """An SFT run of four steps that was stopped after two, and the arguments that continue it."""
    arguments = ["sft", "--model", model, "--task", "sudoku", *QUICK, *FOUR, "--output", tmp_path / "out"]
    assert unmask(*arguments).exit_code == 0
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    return arguments


def test_a_changed_rate_acts_and_the_folder_says_from_when(run, tmp_path):
    resumed = unmask(*run, "--resume", "training.learning_rate=5e-4", "training.weight_decay=0.1")
    assert resumed.exit_code == 0, (resumed.output, resumed.exception)
    assert "training.learning_rate" in resumed.output and "takes effect from here on" in resumed.output
    rates = [
        line["learning_rate"]
        for line in MetricsLog(tmp_path / "out/training_logs.json").read()
        if "learning_rate" in line
    ]
    assert rates == pytest.approx([2e-5, 2e-5, 5e-4, 5e-4])
    text = (tmp_path / "out/config.yaml").read_text()
    assert "# training.learning_rate was 2e-05 until step 2" in text
    assert parse_yaml(text, "config.yaml")["training"]["learning_rate"] == 5e-4
    changes = json.loads((tmp_path / "out/manifest.json").read_text())["changes"]
    assert {"step": 2, "setting": "training.learning_rate", "old": 2e-5, "new": 5e-4} in changes
    card = (tmp_path / "out/model/README.md").read_text()
    assert "`learning_rate=2e-05` until step 2" in card and "`weight_decay=0.0` until step 2" in card
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    finished = unmask(*run, "--resume", "training.max_steps=2", "training.learning_rate=1e-3").output
    assert "was 2e-05, now 0.001: no step follows" in finished and "takes effect" not in finished
    # back to the first rate, and without the change of a lost step
    assert unmask(*run, "--resume").exit_code == 0
    assert "until step" not in (tmp_path / "out/config.yaml").read_text()


@partly_slow(
    "option, old, new",
    [
        ("training.per_device_train_batch_size=8", "4", "8"),
        ("training.seed=1", "42", "1"),
        ("training.optim=sgd", "adamw_torch_fused", "sgd"),
        ("lora.r=2", "unset", "2"),
        ("training.max_length=64", "1024", "64"),
    ],
    0,
    3,
)
def test_a_setting_that_makes_another_run_is_refused_and_nothing_is_written(option, old, new, run, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    name = option.partition("=")[0]
    assert_refused(unmask(*run, "--resume", option), name, f"{old}, now {new}", "Set it back", "--output")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


@partly_slow("verb, most", [("sft", 1), ("convert", 2)], 1)
def test_a_checkpoint_is_hashed_once(verb, most, model, tmp_path, monkeypatch):
    stages = ["training.stages=[{}, {}]"] if verb == "convert" else []
    run = [
        verb,
        "--model",
        model,
        "--task",
        "sudoku",
        *QUICK,
        *FOUR,
        *stages,
        "training.save_steps=1",
        "--output",
        tmp_path / "out",
    ]
    assert unmask(*run).exit_code == 0
    hashed, fault = [], checkpoint.fault
    shutil.rmtree(max((tmp_path / "out").rglob("checkpoint-*")))
    monkeypatch.setattr(checkpoint, "fault", lambda folder: hashed.append(folder) or fault(folder))
    resumed = unmask(*run, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert {path.name for path in hashed} == {
        "checkpoint-1" if verb == "convert" else "checkpoint-3"
    } and len(hashed) == most


def test_edited_data_are_refused_and_moved_data_are_not(model, tmp_path):
    rows = [PAIR, {**PAIR, "prompt": "3400="}] * 4
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    run = ["sft", "--model", model, *QUICK, *FOUR, "--output", tmp_path / "out", "--data"]
    assert unmask(*run, tmp_path / "rows.jsonl").exit_code == 0
    straight = weights(load(tmp_path / "out/model"))
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    for changed in (rows[:-1], [*rows[:-1], {**PAIR, "completion": "21"}]):
        (tmp_path / "edited.jsonl").write_text(lines(*changed))
        assert_refused(
            unmask(*run, tmp_path / "edited.jsonl", "--resume"), "train_dataset", f"{len(changed)} rows"
        )
    shutil.move(tmp_path / "rows.jsonl", tmp_path / "moved.jsonl")
    assert unmask(*run, tmp_path / "moved.jsonl", "--resume").exit_code == 0
    assert equal(weights(load(tmp_path / "out/model")), straight)


def test_a_stream_may_be_renamed_but_not_edited(model, tmp_path):
    rows = [{"text": "1+2=3 " * 9}, {"text": "3400=34 " * 9}] * 9
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    settings = [*QUICK, *FOUR, "data.streaming=true", "training.max_length=16", "training.max_unknown=1"]
    run = ["pretrain", "--model", model, *settings, "--output", tmp_path / "out", "--data"]
    assert unmask(*run, tmp_path / "rows.jsonl").exit_code == 0
    straight = weights(load(tmp_path / "out/model"))
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    (tmp_path / "edited.jsonl").write_text(lines(*rows, rows[0]))
    assert_refused(
        unmask(*run, tmp_path / "edited.jsonl", "--resume"), "data.file_contents", "bytes, content"
    )
    shutil.move(tmp_path / "rows.jsonl", tmp_path / "renamed.jsonl")
    resumed = unmask(*run, tmp_path / "renamed.jsonl", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert equal(weights(load(tmp_path / "out/model")), straight)


def test_a_folder_in_the_place_of_a_file_is_one_error(run, tmp_path):
    for name in ("config.yaml", "manifest.json", "training_logs.json", "data_report.json", "evaluation.json"):
        path = tmp_path / "out" / name
        path.rename(tmp_path / "kept")
        path.mkdir()
        assert_refused(unmask(*run, "--resume"), name, "Is a directory", "Move away what is in its place")
        path.rmdir()
        (tmp_path / "kept").rename(path)
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    (tmp_path / "out/.unfinished").write_text("x")
    assert_refused(
        unmask(*run, "--resume"),
        ".unfinished",
        "Not a directory",
        "Move away what is in its place. checkpoint-2 is intact",
    )


def test_a_folder_with_an_equals_sign_is_resumed_from(run, tmp_path):
    assert unmask(*run[:-1], tmp_path / "a=b").exit_code == 0
    assert unmask(*run[:-1], tmp_path / "c", "--resume", tmp_path / "a=b/checkpoint-2").exit_code == 0


def test_there_is_nothing_to_resume_in_a_mistyped_folder(run, tmp_path):
    assert_refused(
        unmask(*run[:-1], tmp_path / "uot", "--resume"), "uot", "nothing to resume", "without --resume"
    )
    assert not (tmp_path / "uot").exists()


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(run, tmp_path):
    straight = weights(load(tmp_path / "out/model"))
    shutil.rmtree(tmp_path / "out/checkpoint-2")
    assert unmask(*run, "--resume").exit_code == 0
    assert equal(weights(load(tmp_path / "out/model")), straight)


def test_fewer_steps_than_were_made_are_refused(run):
    assert_refused(unmask(*run, "--resume", "training.max_steps=1"), "training.max_steps", "2 steps")


def test_a_conversion_changes_its_rate_and_its_finished_stages_keep_theirs(model, tmp_path):
    stages = [
        "training.stages=[{}, {}]",
        "training.save_steps=2",
        "training.max_steps=8",
        "training.lr_scheduler_type=constant",
    ]
    run = ["convert", "--model", model, "--task", "sudoku", *QUICK, *stages, "--output", tmp_path / "out"]
    assert unmask(*run).exit_code == 0
    shutil.rmtree(tmp_path / "out/stage-2/checkpoint-4")
    assert_refused(unmask(*run, "--resume", "training.seed=1"), "training.seed", "42, now 1")
    assert_refused(unmask(*run, "--resume", "training.max_steps=12"), "training.max_steps", "8, now 12")
    resumed = unmask(*run, "--resume", "training.learning_rate=1e-3")
    assert resumed.exit_code == 0, (resumed.output, resumed.exception)
    rates = [
        line["learning_rate"]
        for line in MetricsLog(tmp_path / "out/training_logs.json").read()
        if "learning_rate" in line
    ]
    assert rates == pytest.approx([5e-4] * 6 + [1e-3] * 2)
    assert "takes effect from here on" in resumed.output
    assert "now 0.002: no step follows" in unmask(*run, "--resume", "training.learning_rate=2e-3").output
    card = (tmp_path / "out/model/README.md").read_text()
    first, second = (line for line in card.splitlines() if line.startswith("- convert "))
    assert "`learning_rate=0.0005`" in first and "until" not in first
    assert "`learning_rate=0.001`" in second and "`learning_rate=0.0005` until step 6" in second
