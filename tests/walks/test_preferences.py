"""From a preference trainer with config.yaml and JSONL, on one card of 16 GB."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY, run_all
from tests.training.tiny_runs import unmask
from tests.walks.walking import walk
from unmask.artifacts import MetricsLog
from unmask.config.yaml import parse_yaml
from unmask.evaluation.result_file import read_result
from unmask.models.load import load

ROW = {
    "prompt": (
        "Question: A store sells 5 types of cakes, 8 of each type. If 3 customers buy 10 cakes, how many "
        "remain? Answer:"
    ),
    "chosen": (
        " Initial cakes = 5 types * 8 cakes/type = 40 cakes. Cakes sold = 10 cakes. Cakes left = 40 - 10 = "
        "30 cakes."
    ),
    "rejected": " 5 * 8 = 40. 40 - 3 = 37 cakes left.",
}
OLD = """
model_name_or_path: GSAI-ML/LLaDA-1B-Base
preference_data_path: data/preference_data/reasoning_prefs.jsonl
output_dir: out
learning_rate: 5.0e-6
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 1
beta: 0.1
diffusion_steps: 2
use_mixed_precision: bf16
gradient_checkpointing: true
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the guide sets up."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text(OLD)
    (tmp_path / "data/preference_data").mkdir(parents=True)
    (tmp_path / "data/preference_data/reasoning_prefs.jsonl").write_text(f"{json.dumps(ROW)}\n" * 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def migrated() -> None:
    walk("migrate", "config/config.yaml", "--output", "dpo.yaml")


def test_its_configuration_becomes_ours(project):
    refused = unmask("dpo", "--config", "config/config.yaml")
    assert refused.exit_code == 2 and "unmask migrate config/config.yaml --output NEW.yaml" in refused.stderr
    migrated()
    new = parse_yaml(Path("dpo.yaml").read_text(), "dpo.yaml")
    assert (new["model"]["path"], new["output_dir"]) == ("GSAI-ML/LLaDA-1B-Base", "out")
    assert new["data"]["train"] == "data/preference_data/reasoning_prefs.jsonl"
    expected = {
        "learning_rate": 5e-6,
        "beta": 0.1,
        "samples": 2,
        "bf16": True,
        "activation_checkpointing": True,
    }
    assert new["training"].items() >= expected.items()


@pytest.mark.slow
def test_a_dry_run_tells_what_the_card_would_hold(project, stories):
    migrated()
    settings = [
        "--model",
        stories,
        "training.use_cpu=true",
        "training.max_length=256",
        "training.gradient_accumulation_steps=1",
        "training.bf16=false",
    ]
    told = walk("dpo", "--config", "dpo.yaml", *settings, "--dry-run").stdout
    assert "predicted" in told and not Path("out").exists()
    small = unmask(
        "dpo",
        "--config",
        "dpo.yaml",
        *settings,
        "--dry-run",
        "--recipe",
        "rtx4080-16gb",
        "hardware.max_memory_gb=0.001",
    )
    assert small.exit_code == 2 and "a step of 1 rows needs" in small.stderr


@pytest.mark.slow
def test_training_logs_evaluates_and_saves(project, stories):
    migrated()
    board = ["training.report_to=tensorboard", "training.logging_dir=out/logs", "training.logging_steps=1"]
    settings = ["--use_cpu", "--max_length", "256", "--gradient_accumulation_steps=2", "--no-bf16"]
    ran = walk("dpo", "--config", "dpo.yaml", "--model", stories, *settings, *board)
    assert "chosen" in ran.stdout and "accuracy" in ran.output  # a report of the rows, and progress
    assert list(Path("out/logs").glob("events.out.tfevents.*"))
    steps = [line for line in MetricsLog(Path("out/training_logs.json")).read() if "margin" in line]
    assert len(steps) == 2 and {"loss", "learning_rate", "accuracy", "samples_per_second"} <= steps[0].keys()
    assert load("out/model").attention == "bidirectional"
    # Its guide leaves evaluation to other scripts.
    options = ["They are stones.", "They are animals.", "They are cars.", "They are trees."]
    question = {
        "context": "All cats are animals.",
        "query": "What follows?",
        "options": options,
        "correct_option": 1,
    }
    Path("logiqa.jsonl").write_text(json.dumps(question))
    measured = walk(
        "evaluate",
        "out/model",
        "--task",
        "multiple_choice",
        "--data",
        "logiqa.jsonl",
        "--max-new-tokens",
        "8",
    )
    assert "solved" in measured.stdout
    Path("gsm8k.jsonl").write_text(
        json.dumps({"question": ROW["prompt"], "answer": f"{ROW['chosen']}\n#### 30"})
    )
    walk(
        "evaluate",
        "out/model",
        "--task",
        "gsm8k",
        "--data",
        "gsm8k.jsonl",
        "--max-new-tokens",
        "8",
        "--output",
        "gsm8k.json",
    )
    assert len(read_result("gsm8k.json").tasks[0].items) == 1


def test_what_goes_wrong_is_told_in_one_line(project, stories):
    migrated()
    run = ["dpo", "--config", "dpo.yaml", "--model", stories, "training.use_cpu=true", "training.bf16=false"]
    Path("bad.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "chosen": "2"}))
    for settings, words in [
        (
            ["--learning_rat", "1e-6"],
            "--learning_rat: is no setting or option of dpo. Did you mean training.learning_rate?",
        ),
        (
            ["--data", "data/preference_data/my_prefs.jsonl"],
            "data/preference_data/my_prefs.jsonl: no such file",
        ),
        (["--data", "bad.jsonl"], "bad.jsonl, row 0: no column 'rejected'"),
        (["training.max_length=256", "training.beta=0"], "training.beta"),
    ]:
        refused = unmask(*run, *settings)
        assert refused.exit_code == 2 and words in refused.stderr, refused.output
        assert not Path("out/model").exists()


@pytest.mark.slow
def test_the_recipe_for_a_card_of_16_gb_takes_overrides(project, stories):
    row = ["--data", "data/preference_data/reasoning_prefs.jsonl", "--output", "adapters"]
    here = [
        "model.device=cpu",
        "model.dtype=float32",
        "training.use_cpu=true",
        "training.bf16=false",
        "training.optim=adamw_torch",
    ]
    short = [
        "lora.r=2",
        "training.max_length=256",
        "training.samples=1",
        "training.gradient_accumulation_steps=4",
    ]
    walk(
        "dpo",
        "--recipe",
        "dpo-rtx4080-16gb",
        "--model",
        stories,
        *row,
        *here,
        *short,
        "training.save_strategy=no",
    )
    settings = parse_yaml(Path("adapters/config.yaml").read_text(), "config.yaml")
    assert (settings["lora"]["r"], settings["lora"]["alpha"]) == (2, 128)
    assert (
        settings["training"]["activation_checkpointing"]
        and settings["training"]["per_device_train_batch_size"] == 1
    )
    assert load("adapters/model").attention == "bidirectional"  # the adapters are merged


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["script", pytest.param("accelerate", marks=pytest.mark.nightly)])
def test_the_launchers_of_its_guide(launcher, project, stories):
    migrated()
    flags = [
        "--model_name_or_path",
        stories,
        "--preference_data_path",
        "data/preference_data/reasoning_prefs.jsonl",
    ]
    flags += [
        "--output_dir",
        "my_dpo_output",
        "--learning_rate",
        "1e-6",
        "--per_device_train_batch_size",
        "1",
    ]
    flags += ["--gradient_accumulation_steps", "4", "--max_length", "256", "--use_cpu", "true"]
    script = ["bash", REPOSITORY / "scripts/dpo.sh", "--config", "dpo.yaml", *flags]
    accelerate = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "-m",
        "unmask",
        "dpo",
        "--config",
        "dpo.yaml",
    ]
    accelerate += [
        "--model",
        stories,
        "--output",
        "my_dpo_output",
        "training.learning_rate=1e-6",
        "training.gradient_accumulation_steps=4",
    ]
    accelerate += ["training.max_length=256", "training.use_cpu=true"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": path}
    command = {"script": script, "accelerate": accelerate}[launcher]
    run_all(command, env=environment, timeout=300)
    settings = parse_yaml(Path("my_dpo_output/config.yaml").read_text(), "config.yaml")["training"]
    assert settings["learning_rate"] == 1e-6 and settings["gradient_accumulation_steps"] == 4
    assert Path("my_dpo_output/model/model.safetensors").exists()
