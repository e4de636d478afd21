"""Nothing of generation or likelihood is left on the CPU when the model is elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_device_that_is_no_cpu_gives_the_same():
    """In a process of its own: torch cannot forget a device."""
    file = Path(__file__).with_name("on_other_device.py")
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], capture_output=True, text=True)
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout[-5000:] + run.stderr[-2000:]
