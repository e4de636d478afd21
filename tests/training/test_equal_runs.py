"""Every verb makes the same run in one process and, under DDP and FSDP2, in two and four: the same losses,
evaluation and weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import REPOSITORY, run_all
from tests.training.equal_runs import VERBS, run
from tests.training.tiny_runs import weights
from unmask.models.load import load


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, {verb: run(verb, folder / verb) for verb in VERBS}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_several_processes_make_the_run_of_one(processes, mode, alone, tmp_path):
    script = REPOSITORY / "tests" / "training" / "equal_runs.py"
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "HOME": os.environ["HOME"],
        "PATH": os.environ["PATH"],
    }
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    run_all([*launch, script, mode, tmp_path], env=environment, timeout=600)
    folder, expected = alone
    for rank in range(processes):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for verb in VERBS:
            assert found[verb]["losses"] == pytest.approx(expected[verb]["losses"], rel=1e-5, abs=1e-6), verb
            assert found[verb]["evaluation"] == pytest.approx(
                expected[verb]["evaluation"], rel=1e-5, abs=1e-6
            ), verb
    for verb in VERBS:
        together, single = weights(load(tmp_path / verb / "model")), weights(load(folder / verb / "model"))
        torch.testing.assert_close(
            together, single, rtol=0, atol=1e-5, msg=lambda text, verb=verb: f"{verb}: {text}"
        )
