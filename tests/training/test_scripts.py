"""scripts/run.sh: a task and a mode become a run of reinforcement learning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY
from tests.training.conftest import QUICK, SMALL
from unmask.config_files import parse_yaml

SCRIPT = REPOSITORY / "scripts" / "run.sh"
TOOLS = "/usr/bin:/bin"


def run(*arguments: str | Path, path: str = TOOLS, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env={"PATH": path, **environment}, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def recorder(tmp_path: Path) -> str:
    """A PATH with an `unmask` that only tells how it was called."""
    program = tmp_path / "bin" / "unmask"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$UNMASK_OUTPUT_DIR" "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}:{TOOLS}"


def test_a_task_and_a_mode_are_words_of_the_command(recorder):
    called = run("sudoku", "balanced", "--model", "a model", "lora.r=2", path=recorder)
    command = ["grpo", "--recipe", "grpo-sudoku", "--mode", "balanced"]
    assert (called.returncode, called.stderr) == (0, "")
    assert called.stdout.splitlines() == ["runs/grpo-sudoku-balanced", *command, "--model", "a model", "lora.r=2"]
    for environment in ({"UNMASK_MODEL__PATH": "m"}, {"DIFFU_MODEL_PATH": "m", "UNMASK_OUTPUT_DIR": "out"}):
        called = run("sudoku", "balanced", path=recorder, **environment)
        assert called.stdout.splitlines() == [environment.get("UNMASK_OUTPUT_DIR", "runs/grpo-sudoku-balanced"), *command]
    assert run("gsm8k", "speed", "--config", "run.yaml", path=recorder).stdout.splitlines()[0] == ""


@pytest.mark.parametrize("arguments", [[], ["sudoku"], ["--model", "m"], ["sudoku", "--model", "m"]])
def test_without_a_task_and_a_mode_it_says_what_it_takes(arguments, recorder):
    called = run(*arguments, path=recorder)
    assert called.returncode == 2 and called.stderr.startswith("Usage: ") and called.stderr.endswith("error: give a task and a mode\n")
    assert run("--help", path=recorder).stdout == called.stderr[: called.stderr.index("error: ")]


def test_what_is_missing_is_told(recorder):
    called = run("sudoku", "balanced", path=recorder)
    assert (called.returncode, called.stderr) == (2, "error: no model: give --model PATH, or set UNMASK_MODEL__PATH\n")
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
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["rows"] == 4
    for arguments, words in [(["sudoko", "memory"], "Did you mean 'grpo-sudoku'?"), (["sudoku", "fast"], "'balanced'")]:
        refused = run(*arguments, path=path, **environment)
        assert refused.returncode == 2 and words in refused.stderr, refused.stderr
