"""The tests of a GPU, without one: on a device that is no CPU (`tests/other_device.py`), in a process of its
own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.helpers import REPOSITORY


@pytest.mark.skipif(torch.cuda.is_available(), reason="`make test-gpu` runs them")
@pytest.mark.parametrize(
    "which",
    [
        pytest.param("gpu and not slow", marks=pytest.mark.slow),
        pytest.param("gpu and slow", marks=pytest.mark.nightly),
    ],
)
def test_the_device_that_stands_in_for_a_gpu(which):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.other_device",
        "-p",
        "no:cacheprovider",
        "-m",
        which,
        *files_for_a_gpu(),
    ]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout[-8000:] + run.stderr[-2000:]


def files_for_a_gpu() -> list[str]:
    """All that have tests marked `gpu`: others are not even collected."""
    files = (REPOSITORY / "tests").rglob("test_*.py")
    return [str(file) for file in files if "mark.gpu" in (text := file.read_text()) or "needs_gpu" in text]
