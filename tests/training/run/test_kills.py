"""Runs that are killed at random moments are resumed as if they had not been: the same weights, the same
logs."""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import REPOSITORY
from tests.training.run.forked import Ended, ForkServer
from tests.training.run.runs import MODEL, command, ends
from unmask.tasks import get_task

SAVING = [
    "training.save_strategy=steps",
    "training.save_steps=1",
    "training.save_total_limit=3",
    "training.max_steps=12",
]
OWN = {
    "pretrain": [],
    "convert": ['training.stages=[{"share": 1}, {"share": 1}]'],
    "sft": [],
    "dpo": ["training.log_variance_steps=6"],
    "grpo": [
        "training.beta=0.1",
        "training.sync_ref_model=true",
        "training.ref_model_sync_steps=2",
        "training.log_completions=true",
        "training.log_completions_steps=4",
    ],
}
"""dpo stores the reference's scores of three epochs, and of eight redraws; grpo saves a reference that moves,
and completions."""
FILES = {"dpo": "reference_scores", "grpo": "/rollouts-0.pt"}
"""What only these write."""


def part_of_run(output: Path) -> str:
    """Where a run was killed."""
    if any(output.glob("**/.unfinished")):
        return "a save"
    if not (output / "manifest.json").exists():
        return "the reference's scores" if any(output.glob("*_reference_scores.*")) else "the start"
    return "the end" if (output / "model").exists() else "training"


class Trial:
    """A run that saves after every step, without kills and with them.

    Args:
        folder: for the runs.
    """

    def __init__(self, verb: str, model: Path, folder: Path, forks: ForkServer):
        self.verb, self.model, self.folder, self.forks = verb, model, folder, forks
        self.text = folder / "text.txt"
        self.text.write_text(
            "\n".join(
                row["prompt"] + row["completion"] for row in get_task("sudoku").generate("train", 12, 0)
            )
        )

    def command(self, output: Path) -> list[str]:
        data = ["--data", str(self.text)] if self.verb in ("pretrain", "convert") else []
        return [*command(self.verb, self.model, output, *data, *OWN[self.verb], *SAVING)]

    @functools.cached_property
    def whole(self) -> Ended:
        """A fork that is not killed. It is the same run as that of a process which starts from nothing."""
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        started = [sys.executable, "-m", "unmask", *self.command(self.folder / "process")]
        subprocess.run(started, env=environment, check=True, capture_output=True, timeout=300)
        ended = self.forks.run(self.command(self.folder / "whole"), self.folder)
        assert ended.code == 0, ended.errors
        assert ends(self.folder / "whole") == ends(self.folder / "process")
        assert (self.folder / "whole" / MODEL).read_bytes() != (self.model / "model.safetensors").read_bytes()
        return ended

    def killed(self, output: Path, **moment: Any) -> bool:
        """Start or continue a run, and kill it at a moment. False: it has ended before, and is the same
        run."""
        resumed = ["--resume"] if output.exists() and any(output.iterdir()) else []
        ended = self.forks.run([*self.command(output), *resumed], self.folder, **moment)
        if ended.code == -signal.SIGKILL:
            return True
        assert ended.code == 0, ended.errors
        assert ends(output) == ends(self.folder / "whole")
        return False

    def kill_at_random(self, kills: int, seed: int) -> Counter[str]:
        """Make so many kills, about half of them before a change of a file, the first one of a file that only
        this verb writes. Every run is resumed, and killed again, until it ends. Returns the number of kills
        amid each part of a run."""
        draw, met, output = random.Random(seed), Counter[str](), self.folder / "killed"
        while met.total() < kills:
            shutil.rmtree(output, ignore_errors=True)
            while self.killed(
                output,
                **(
                    self.moment(draw, FILES.get(self.verb) if not met else None)
                    if met.total() < kills
                    else {}
                ),
            ):
                met[part_of_run(output)] += 1
        return met

    def moment(self, draw: random.Random, file: str | None = None) -> dict[str, Any]:
        """A random one, or one before a change of a file."""
        if file is None and draw.random() < 0.5:
            return {"after": draw.uniform(0, self.whole.seconds)}
        return {
            "before_change": draw.choice(
                [number for number, change in enumerate(self.whole.changes) if (file or "") in change]
            )
        }


@pytest.fixture(scope="module")
def trials(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trial]:
    forks = ForkServer()
    return functools.cache(lambda verb: Trial(verb, model, tmp_path_factory.mktemp(verb), forks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "amid"),
    [
        *[
            pytest.param(verb, amid, marks=[pytest.mark.nightly] * (verb == "pretrain"))  # as in a conversion
            for verb, amid in itertools.product(OWN, ["/.unfinished/checkpoint-", "/.unfinished/model"])
        ],
        *FILES.items(),
    ],
)
def test_a_run_killed_while_it_writes_is_the_same_run(verb, amid, trials, tmp_path):
    trial = trials(verb)
    assert trial.killed(tmp_path / "run", **trial.moment(random.Random(0), amid))
    assert not trial.killed(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("verb", [verb for verb in OWN if verb != "pretrain"])
def test_a_run_killed_at_random_moments_is_the_same_run(verb, trials):
    trials(verb).kill_at_random(2, seed=0)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("verb", OWN)
def test_a_run_killed_at_many_random_moments_is_the_same_run(verb, trials):
    met = trials(verb).kill_at_random(40, seed=1)
    print(f"{verb}: {met.total()} kills, all resumed: {dict(met)}")
    assert met.keys() >= {"the start", "a save", "training"} | (
        {"the reference's scores"} if verb == "dpo" else set()
    )
