"""A sandbox that cannot start leaves nothing behind."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.helpers import require_sandbox
from unmask.sandbox import launch
from unmask.sandbox.isolation import Limits, probe
from unmask.sandbox.pool import Pool, PythonTests, Slot, python_job

JOB = python_job("def f(x): return 2 * x", PythonTests("assert f(1) == 2", {"f": "f"}))


@pytest.mark.parametrize("failing", [1, 2])
def test_a_process_that_cannot_be_made_leaves_no_descriptor_and_no_process(monkeypatch, failing):
    require_sandbox()
    before = set(os.listdir("/proc/self/fd"))
    started, real = [], subprocess.Popen

    def popen(*args, **options):
        if len(started) % 2 == failing - 1:
            started.append(None)
            raise OSError("no memory")
        started.append(real(*args, **options))
        return started[-1]

    pool = Pool(1)
    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    for _ in range(4):
        (outcome,) = pool.run([JOB])
        assert outcome.status == "infrastructure" and "no memory" in outcome.detail
        if failing == 1:
            started.append(None)
    pool.close()
    assert all(process is None or process.poll() is not None for process in started)
    started.clear()
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_is_killed_counts_no_more():
    """Zombies fill a control group: after a few programs nothing could start in it."""
    require_sandbox()
    host = probe()
    if "cgroups" in host.missing:
        pytest.skip(host.missing["cgroups"])
    slot = Slot(host, Limits())
    counters = [folder / "pids.current" for group in slot.groups for folder in group.folders]
    counters = [counter for counter in counters if counter.exists()]
    for _ in range(10):
        with slot.member("candidate"):
            assert max(int(counter.read_text()) for counter in counters) > 0
        assert [int(counter.read_text()) for counter in counters] == [0] * len(counters)
    slot.close()
