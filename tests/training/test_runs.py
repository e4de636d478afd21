"""What a run's folder says of it, `unmask runs`, and two runs that are started in one folder."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY
from tests.training.tiny_runs import QUICK, equal, unmask, weights
from unmask.artifacts import MetricsLog
from unmask.config.run import LOCK_FILE
from unmask.models.load import load
from unmask.redaction import CONTROL
from unmask.training.trainer import DiffusionTrainer


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "unmask", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


def listed(folder: Path) -> list[dict]:
    result = unmask("runs", folder, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_folder_explains_itself_and_is_listed_with_the_others(model, tmp_path):
    run = [
        "sft",
        "--model",
        model,
        "--task",
        "sudoku",
        *QUICK,
        "training.save_steps=1",
        "--output",
        tmp_path / "runs/good",
    ]
    assert unmask(*run).exit_code == 0
    manifest = json.loads((tmp_path / "runs/good/manifest.json").read_text())
    assert (
        manifest["verb"] == "sft"
        and manifest["state"] == "finished"
        and manifest["steps"] == 2
        and manifest["changes"] == []
    )
    assert manifest["config"]["training"]["max_length"] == 1024  # resolved, with defaults
    assert (
        manifest["inputs"]["train_dataset"]["rows"] == 16
        and len(manifest["inputs"]["train_dataset"]["sha256"]) == 64
    )
    assert set(manifest["git"]) == {"commit", "changed"}  # the tests run in a repository

    explode = [
        "training.learning_rate=1e30",
        "training.max_steps=6",
        "training.lr_scheduler_type=constant",
        "model.trust_remote_code=true",
    ]
    assert unmask(*run[:-1], tmp_path / "runs/bad", *explode).exit_code == 2
    (tmp_path / "runs/other").mkdir()
    (tmp_path / "runs/other/manifest.json").write_text('{"task": "sudoku"}')
    bad, good = listed(tmp_path)
    assert (good["folder"], good["state"], good["step"], good["steps"], good["command"]) == (
        str(run[-1]),
        "finished",
        2,
        2,
        None,
    )
    assert "loss" in good["metrics"]
    assert bad["state"] == "failed" and " is nan" in bad["error"] and bad["steps"] == 6
    assert bad["command"] == (
        f"python -m {shlex.join(map(str, ['unmask', *run[:-1], tmp_path / 'runs/bad', *explode]))} --resume"
    )
    shown = unmask("runs", tmp_path).output
    assert "2 runs" in shown and "finished" in shown and "failed" in shown and bad["command"] in shown
    for checkpoint in (tmp_path / "runs/bad").glob("checkpoint-*"):  # of weights that exploded
        shutil.rmtree(checkpoint)
    assert unmask(*shlex.split(bad["command"])[3:], "training.learning_rate=1e-4").exit_code == 0
    assert {run["state"] for run in listed(tmp_path)} == {"finished"}
    refused = unmask("runs", tmp_path / "nowhere")
    assert refused.exit_code == 2 and "no such folder" in refused.stderr


def test_a_printed_command_is_the_real_one_although_control_characters_are_not_printed(tmp_path):
    words = ["sft", "--output", "o\x1b[2J\u202e'a\n", "training.run_name=\\u001b"]
    (tmp_path / "manifest.json").write_text(
        json.dumps({"verb": "sft", "state": "failed", "command": shlex.join(["unmask", *words])})
    )
    printed = unmask("runs", tmp_path).output.splitlines()[-1]
    assert not CONTROL.search(printed) and printed.startswith("unmask sft")
    read = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {printed}"],
        env={"LC_ALL": "C.UTF-8"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert read.stdout.split("\0")[:-1] == ["unmask", *words, "--resume"]


def test_a_full_disk_is_one_error_although_the_state_cannot_be_written(model, tmp_path, monkeypatch):
    before, step = resource.getrlimit(resource.RLIMIT_FSIZE), DiffusionTrainer.training_step

    def on_a_full_disk(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        return step(*arguments)

    monkeypatch.setattr(DiffusionTrainer, "training_step", on_a_full_disk)
    try:
        failed = unmask("sft", "--model", model, "--task", "sudoku", *QUICK, "--output", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failed.exit_code == 2, failed.exception
    assert "cannot be written (File too large)" in failed.stderr.splitlines()[-1]
    # as after a kill: the last state on the disk is "running"
    assert listed(tmp_path)[0]["state"] == "interrupted"


@pytest.mark.slow
def test_a_killed_run_is_interrupted_and_a_second_one_is_refused_while_it_runs(model, tmp_path):
    output = tmp_path / "out"
    run = [
        "sft",
        "--model",
        model,
        "--task",
        "sudoku",
        *QUICK,
        "training.max_steps=10000",
        "training.save_steps=2",
        "--output",
        output,
    ]
    first = start(*run)
    try:
        while not list(output.glob("checkpoint-*")):
            assert first.poll() is None, first.stderr.read()
            time.sleep(0.1)
        assert listed(output)[0]["state"] == "running"
        config = (output / "config.yaml").read_bytes()
        for more in ([], ["--resume"], ["--overwrite"]):
            refused = unmask(*run, "training.seed=1", *more)
            assert refused.exit_code == 2
            assert more == [] or f"process {first.pid} on " in refused.stderr
        assert (output / "config.yaml").read_bytes() == config
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert (output / LOCK_FILE).exists()
    (described,) = listed(output)
    assert described["state"] == "interrupted" and described["command"].endswith("--resume")


@pytest.mark.slow
def test_of_two_runs_started_together_one_trains(model, tmp_path):
    run = ["sft", "--model", model, "--task", "sudoku", *QUICK, "training.max_steps=10", "--output"]
    both = [start(*run, tmp_path / "out", f"training.seed={seed}") for seed in (1, 2)]
    errors = [process.communicate()[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], errors
    winner, loser = codes.index(0), codes.index(2)
    assert "is running here" in errors[loser] or "not empty" in errors[loser]
    assert f"seed: {winner + 1}\n" in (tmp_path / "out/config.yaml").read_text()
    assert [
        line["step"] for line in MetricsLog(tmp_path / "out/training_logs.json").read() if "loss" in line
    ] == [*range(1, 11)]
    # with as many threads as the others
    alone = start(*run, tmp_path / "alone", f"training.seed={winner + 1}")
    _, errors = alone.communicate()
    assert alone.returncode == 0, errors
    assert equal(*(weights(load(tmp_path / name / "model")) for name in ("out", "alone")))
