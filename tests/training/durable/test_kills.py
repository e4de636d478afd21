"""Runs that are killed at random moments are resumed as if they had not been: the same weights, the same log."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers import REPOSITORY
from tests.training.durable.runs import command, logged
from tests.training.tiny_runs import equal

ALONE = [sys.executable, "-m", "unmask"]
STEPS = 12
VERBS = ["pretrain", "convert", "sft"]


def arguments(verb: str, model: Path, text: Path, output: Path) -> list[str]:
    """A run that saves after every step."""
    own = ["--data", str(text)] if verb in ("pretrain", "convert") else []
    own += ['training.stages=[{"share": 1}, {"share": 1}]'] if verb == "convert" else []
    saving = ["training.save_strategy=steps", "training.save_steps=1", "training.save_total_limit=3"]
    return [*command(verb, model, output, *own, *saving), f"training.max_steps={STEPS}"]


def start(launch: list[str], run: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launch, *run], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def lines(output: Path) -> int:
    log = output / "training_logs.json"
    return len(log.read_text().splitlines()) if log.exists() else 0


def wait_for_moment(process: subprocess.Popen[str], output: Path, draw: random.Random) -> bool:
    """Wait until a random moment of the training; False: the run has ended before."""
    wanted = lines(output) + draw.randrange(0, 5)
    while lines(output) <= wanted:
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.1))
    return process.poll() is None


def going_on(run: list[str], output: Path) -> list[str]:
    """The command that continues a run, or starts again where nothing was saved."""
    if not output.exists():
        return run
    return [*run, "--resume" if any(output.glob("**/checkpoint-*")) else "--overwrite"]


def finish(launch: list[str], run: list[str]) -> None:
    with start(launch, run) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def same(one: Path, other: Path) -> bool:
    return equal(*(load_file(folder / "model" / "model.safetensors") for folder in (one, other))) and logged(one) == logged(other)


def killed_at_random(verb: str, kills: int, seed: int, model: Path, text: Path, folder: Path) -> int:
    """Kill a run this many times, and let it finish; compare it with one that was not killed. Returns the number of kills that met it."""
    draw, output, met = random.Random(seed), folder / "killed", 0
    finish(ALONE, arguments(verb, model, text, folder / "straight"))
    run = arguments(verb, model, text, output)
    for _ in range(kills):
        with start(ALONE, going_on(run, output)) as process:
            if wait_for_moment(process, output, draw):
                process.kill()
                met += 1
            process.communicate(timeout=300)
        if (output / "model").exists():
            break
    finish(ALONE, going_on(run, output))
    assert same(folder / "straight", output)
    return met


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_run_killed_at_random_moments_is_the_same_run(verb, model, text, tmp_path):
    assert killed_at_random(verb, 2, 0, model, text, tmp_path) > 0


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("verb", VERBS)
def test_a_run_killed_at_many_random_moments_is_the_same_run(verb, seed, model, text, tmp_path):
    assert killed_at_random(verb, 4, 1 + seed, model, text, tmp_path) > 0
