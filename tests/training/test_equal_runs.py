"""Every verb makes the same run in one process and, under DDP and FSDP2, in two and four: the same losses,
evaluation and weights."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import REPOSITORY, run_all
from tests.training.equal_runs import TOLERANCES, VERBS, run
from tests.training.tiny_runs import weights
from unmask.models.load import load


@pytest.fixture(scope="module")
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return request.param, folder, {verb: run(request.param, verb, folder / verb) for verb in VERBS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "mode", "alone"),
    [
        pytest.param(
            *case,
            marks=[] if case in {(2, "ddp", "qwen3_5_text"), (2, "fsdp", "llama")} else pytest.mark.nightly,
        )
        for case in itertools.product([2, 4], ["ddp", "fsdp"], ["llama", "qwen3_5_text"])
    ],
    indirect=["alone"],
)
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
    family, folder, expected = alone
    bar = TOLERANCES[family]
    run_all([*launch, script, family, mode, tmp_path], env=environment, timeout=600)
    for rank in range(processes):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for verb in VERBS:
            assert found[verb]["losses"] == pytest.approx(expected[verb]["losses"], rel=bar, abs=bar / 10), (
                verb
            )
            assert found[verb]["evaluation"] == pytest.approx(
                expected[verb]["evaluation"], rel=bar, abs=bar / 10
            ), verb
    for verb in VERBS:
        together, single = weights(load(tmp_path / verb / "model")), weights(load(folder / verb / "model"))
        torch.testing.assert_close(
            together, single, rtol=0, atol=bar, msg=lambda text, verb=verb: f"{verb}: {text}"
        )
