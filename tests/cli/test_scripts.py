"""scripts/: thin callers of the command line, and a configuration of accelerate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from tests.helpers import REPOSITORY, run_all
from tests.training.tiny_runs import QUICK, SMALL
from unmask.config.yaml import parse_yaml
from unmask.evaluation.result_file import read_result

SCRIPTS = REPOSITORY / "scripts"
TOOLS = "/usr/bin:/bin"


def run(
    *arguments: str | Path, script: str = "run.sh", path: str = TOOLS, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / script), *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return run_all(command, env={"PATH": path, **environment}, check=False, timeout=300, **pipes)


@pytest.fixture
def recorder(tmp_path: Path) -> str:
    """A PATH with an `unmask` that records how it was called."""
    program = tmp_path / "bin" / "unmask"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$UNMASK_OUTPUT_DIR" "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}:{TOOLS}"


def test_a_task_and_a_mode_are_words_of_the_command(recorder):
    called = run("sudoku", "balanced", "--model", "a model", "lora.r=2", path=recorder)
    command = ["grpo", "--recipe", "grpo-sudoku", "--mode", "balanced"]
    assert (called.returncode, called.stderr) == (0, "")
    assert called.stdout.splitlines() == [
        "runs/grpo-sudoku-balanced",
        *command,
        "--model",
        "a model",
        "lora.r=2",
    ]
    for environment in ({"UNMASK_MODEL__PATH": "m"}, {"DIFFU_MODEL_PATH": "m", "UNMASK_OUTPUT_DIR": "out"}):
        called = run("sudoku", "balanced", path=recorder, **environment)
        assert called.stdout.splitlines() == [
            environment.get("UNMASK_OUTPUT_DIR", "runs/grpo-sudoku-balanced"),
            *command,
        ]
    assert run("gsm8k", "speed", "--config", "run.yaml", path=recorder).stdout.splitlines()[0] == ""


def called_with(*arguments: str, script: str = "run.sh", path: str, **environment: str) -> list[str]:
    """What the script passes to `unmask`."""
    called = run(*arguments, script=script, path=path, **environment)
    assert called.returncode == 0, called.stderr
    return called.stdout.splitlines()[1:]


def test_a_task_that_is_left_out_is_that_of_the_variable_and_a_mode_is_balanced(recorder):
    model = {"DIFFU_MODEL_PATH": "m"}
    balanced = ["grpo", "--recipe", "grpo-gsm8k", "--mode", "balanced"]
    assert called_with(path=recorder, DIFFU_DATASET="gsm8k", **model) == balanced
    assert called_with("gsm8k", path=recorder, **model) == balanced
    assert called_with("lora.r=2", path=recorder, DIFFU_DATASET="gsm8k", **model) == [*balanced, "lora.r=2"]
    assert called_with("--model", "n", path=recorder, DIFFU_DATASET="gsm8k") == [*balanced, "--model", "n"]
    for arguments in ([], ["--model", "m"]):
        called = run(*arguments, path=recorder)
        assert called.returncode == 2 and called.stderr.startswith("Usage: ")
        assert called.stderr.endswith("error: give a task, or set DIFFU_DATASET\n")
        assert run("--help", path=recorder).stdout == called.stderr[: called.stderr.index("error: ")]


def test_the_variable_does_not_stand_against_the_task_that_is_typed(tmp_path):
    program = tmp_path / "unmask"
    program.write_text('#!/bin/sh\necho "$DIFFU_DATASET"\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{TOOLS}"
    for dataset, words in [
        ("gsm8k", "the task is sudoku; DIFFU_DATASET, gsm8k, is passed over"),
        ("sudoku", ""),
    ]:
        called = run("sudoku", "balanced", "--model", "m", path=path, DIFFU_DATASET=dataset)
        assert (called.returncode, called.stdout, called.stderr.strip()) == (0, "\n", words)
    called = run("sudoku", "balanced", "--model", "m", path=path, DIFFU_DATASET="data/rows.jsonl")
    assert called.stdout == "data/rows.jsonl\n" and "the data are those of DIFFU_DATASET" in called.stderr


def test_conversion_takes_the_configurations_and_options_of_its_forerunner(recorder):
    def handed(*arguments: str) -> list[str]:
        return called_with(*arguments, script="convert.sh", path=recorder)

    assert handed("--model", "m", "--data", "d", "--dry_run") == [
        "convert",
        "--recipe",
        "full",
        "--model",
        "m",
        "--data",
        "d",
        "--dry-run",
    ]
    files = ["--model_config", "m.yaml", "--training_config=t.yaml", "--hardware_config", "h.yaml", "--debug"]
    assert handed(*files) == [
        "convert",
        "--config",
        "m.yaml",
        "--config",
        "t.yaml",
        "--config",
        "h.yaml",
        "--debug",
    ]
    resumed = ["convert", "--config", "c.yaml", "--resume", "runs/c/stage-2/checkpoint-10"]
    assert handed("--config", "c.yaml", "--checkpoint", "runs/c/stage-2/checkpoint-10") == resumed
    for arguments, words in [([], "give a model and data"), (["--checkpoint"], "--checkpoint needs a value")]:
        refused = run(*arguments, script="convert.sh", path=recorder)
        assert refused.returncode == 2 and words in refused.stderr
    assert run("--help", script="convert.sh", path=recorder).stdout.startswith("Usage: ")


def test_options_of_preference_optimisation_get_the_names_of_ours(recorder):
    flags = [
        "--model_name_or_path",
        "m",
        "--preference_data_path",
        "p.jsonl",
        "--output_dir",
        "o",
        "--learning_rate",
        "1e-6",
    ]
    settings = [
        "--diffusion_steps=4",
        "--gradient_checkpointing",
        "true",
        "training.beta=0.3",
        "--resume",
        "--config_file",
        "c.yaml",
    ]
    command = [
        "dpo",
        "--model",
        "m",
        "--data",
        "p.jsonl",
        "--output",
        "o",
        "--learning_rate",
        "1e-6",
        "--samples=4",
    ]
    command += ["--activation_checkpointing", "true", "training.beta=0.3", "--resume", "--config", "c.yaml"]
    assert called_with(*flags, *settings, script="dpo.sh", path=recorder) == command
    refused = run(script="dpo.sh", path=recorder)
    assert refused.returncode == 2 and "give a model and preferences" in refused.stderr
    assert run("--help", script="dpo.sh", path=recorder).stdout.startswith("Usage: ")


def test_the_launcher_of_three_gpus_is_read_by_accelerate():
    config = load_config_from_file(str(SCRIPTS / "accelerate-a40-x3.yaml"))
    assert (config.distributed_type, config.mixed_precision, config.num_processes) == (
        DistributedType.MULTI_GPU,
        "bf16",
        3,
    )


def test_what_is_missing_is_told(recorder):
    called = run("sudoku", "balanced", path=recorder)
    assert (called.returncode, called.stderr) == (
        2,
        "error: no model: give --model PATH, or set UNMASK_MODEL__PATH\n",
    )
    if (REPOSITORY / ".venv").exists():
        pytest.skip("finds the environment of this checkout")
    called = run("sudoku", "balanced", "--model", "m")
    assert called.returncode == 2 and called.stderr.startswith("error: unmask is not installed")


@pytest.mark.slow
def test_a_run_of_reinforcement_learning(model, tmp_path):
    environment = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "DIFFU_MODEL_PATH": str(model)}
    path = f"{Path(sys.executable).parent}:{TOOLS}"
    called = run("sudoku", "memory", "--output", tmp_path / "out", *QUICK, *SMALL, path=path, **environment)
    assert called.returncode == 0, called.stderr
    assert "DIFFU_MODEL_PATH is read as model.path" in called.stderr
    training = parse_yaml((tmp_path / "out" / "config.yaml").read_text(), "config.yaml")["training"]
    assert training["activation_checkpointing"] and training["beta"] == 0.04
    assert len(read_result(tmp_path / "out" / "evaluation.json").tasks[0].items) == 4
    for arguments, words in [
        (["sudoko", "memory"], "Did you mean 'grpo-sudoku'?"),
        (["sudoku", "fast"], "'balanced'"),
    ]:
        refused = run(*arguments, path=path, **environment)
        assert refused.returncode == 2 and words in refused.stderr, refused.stderr
