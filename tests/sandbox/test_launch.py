"""A sandbox that cannot start leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from tests.helpers import require_sandbox
from unmask.sandbox import launch
from unmask.sandbox.isolation import SandboxLimits, probe
from unmask.sandbox.launch import Meter, Usage
from unmask.sandbox.pool import PythonTests, SandboxPool, Slot, python_job

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

    pool = SandboxPool(1)
    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    for _ in range(4):
        (outcome,) = pool.run([JOB])
        assert outcome.status == "verifier_error" and "no memory" in outcome.detail
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
    slot = Slot(host, SandboxLimits())
    counters = [folder / "pids.current" for group in slot.groups for folder in group.folders]
    counters = [counter for counter in counters if counter.exists()]
    for _ in range(10):
        with slot.member("candidate"):
            assert max(int(counter.read_text()) for counter in counters) > 0
        assert [int(counter.read_text()) for counter in counters] == [0] * len(counters)
    slot.close()


def used(ran: float = 0.5, delayed: float = 0.5, **named: Any) -> Usage:
    return Usage(ran=ran, delays={1: delayed, 2: 0.3}, **named)


def exceeded(*readings: tuple[Usage, float, float]) -> str | None:
    """The limit that the last of these readings exceeds, and none before it does. The tests do nothing."""
    meter = Meter(SandboxLimits(seconds=2.0, idle_seconds=1.0, wall_seconds=9.0), [used(), used()], now=100.0)
    *earlier, last = [meter.exceeded([usage, used()], before, after) for usage, before, after in readings]
    assert not any(earlier)
    return last


@pytest.mark.parametrize(
    ("usage", "now", "limit"),
    [
        (used(2.6, computed=2.1, idle=False), 103.0, "2 s of processor time"),
        (used(0.6), 101.2, "1 s of sleep"),
        (used(0.6, idle=False), 109.1, "9 s in all"),
        (used(1.1, 1.0), 102.0, None),  # it ran for 0.6 s, and waited for a processor for 0.5 s
        (used(0.6, 90.5, idle=False), 195.0, None),  # waited for a processor
        # for one another
        (Usage(ran=0.6, delays={thread: 0.2 for thread in range(3, 32)}), 101.5, "1 s of sleep"),
        (Usage(ran=0.6, delays={thread: 2.0 for thread in range(3, 32)}, idle=False), 111.2, "9 s in all"),
    ],
)
def test_the_limit_that_ends_a_program_is_named(usage, now, limit):
    assert exceeded((usage, now, now)) == limit


def test_a_late_reading_is_not_taken_for_sleep():
    """On a busy host seconds pass between a look at the clock and the reading of the times."""
    late = (used(delayed=4.5), 100.1, 104.0)
    assert exceeded(late, (used(0.6, 4.5), 104.1, 104.1)) is None
    assert exceeded(late, (used(0.6, 4.5), 105.2, 105.2)) == "1 s of sleep"


def test_the_waiting_of_ended_threads_is_not_forgotten():
    assert (
        exceeded((used(0.6, 30.5, idle=False), 131.0, 131.0), (Usage(ran=0.2, idle=False), 138.0, 138.0))
        is None
    )
