"""Processor time decides, and a program gets its share of it whatever its neighbors do."""

from __future__ import annotations

import dataclasses
import itertools
import select
import threading
import time

import pytest

from tests.helpers import partly_slow, require_sandbox
from unmask.sandbox import launch
from unmask.sandbox.isolation import SandboxLimits, probe
from unmask.sandbox.outcome import Outcome
from unmask.sandbox.pool import PythonTests, SandboxPool, python_job

TESTS = PythonTests("assert f(3) == 6", {"f": "f"})
HONEST = """
import time
def f(x):
    start = time.process_time()
    while time.process_time() - start < 0.5: pass
    return 2 * x
"""
SPINNERS = """
import os
def spin(leave):
    try: leave()
    except OSError: pass
    while True: pass
for n in range(100):
    try:
        if os.fork() == 0: spin({leave})
    except OSError: break
while True: pass
"""
ASKED_OFTEN = PythonTests(
    "for n in range(10000):\n    if f(n) != 2 * n: assert False\nassert f(0) == 0", {"f": "f"}
)
DOUBLE = "def f(x): return 2 * x"
SLEEPS = "import time\ndef f(x):\n    time.sleep({seconds})\n    return 2 * x\n"
CHILDREN = """
import os
def f(x):
    for n in range(2):
        if os.fork() == 0:
            while True: pass
    os.wait()
"""
UNCOUNTED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def f(x):
    for n in range(15):
        if os.fork() == 0:
            while time.process_time() < 0.2: pass
            os._exit(0)
        try: os.wait()
        except ChildProcessError: pass
    return 2 * x
"""
"""Computes in children that nobody waits for: the time of such a one is not added to its parent's when it
ends."""
VFORKS = """
import ctypes
libc = ctypes.CDLL(None)
def f(x):
    stack = ctypes.create_string_buffer(1 << 16)
    top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16) - 64)
    libc.clone(ctypes.cast(libc.sleep, ctypes.c_void_p), top, {flags} | 17, ctypes.c_void_p(3))
    return 2 * x
"""
"""Waits for a child that sleeps in its memory (CLONE_VM, CLONE_VFORK), which looks as if it waited for the
disk."""
HOSTILE = [
    SPINNERS.format(leave=leave) for leave in ("os.setsid", "lambda: os.setpgid(0, 0)", "lambda: os.nice(-5)")
]


def status_of(program: str, tests: PythonTests, limits: SandboxLimits) -> tuple[str, float]:
    """The status of a program, and the seconds that the verdict took."""
    require_sandbox()
    pool, start = SandboxPool(1, limits), time.monotonic()
    try:
        [outcome] = pool.run([python_job(program, tests)])
        return outcome.status, time.monotonic() - start
    finally:
        pool.close()


@partly_slow(
    "program, status",
    [
        (SLEEPS.format(seconds=1.5), "ok"),
        (SLEEPS.format(seconds=9), "timeout"),
        (CHILDREN, "timeout"),
        (HONEST, "ok"),
    ],
    *(2, 3),
)
def test_processor_time_of_all_processes_decides(program, status):
    """Sleep is not counted, until its own limit or that on time in all."""
    limits = SandboxLimits(seconds=1.0, wall_seconds=4.0 if "9" in program else 60.0)
    assert status_of(program, TESTS, limits)[0] == status


@pytest.mark.slow
def test_processor_time_of_children_that_nobody_waits_for_is_counted():
    require_sandbox()
    if "cgroups" in probe().missing:
        pytest.skip(probe().missing["cgroups"])
    assert status_of(UNCOUNTED, TESTS, SandboxLimits(seconds=1.0))[0] == "timeout"
    assert status_of(UNCOUNTED, TESTS, SandboxLimits(seconds=9.0))[0] == "ok"


@pytest.mark.parametrize("name", [b"\\xff\\xfe", b"a) R 1", b"\\n) D 0 0 (\\n"])
def test_the_name_of_a_process_may_be_any_bytes(name):
    """It stands in the file that its times are read from."""
    program = (
        f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{name.decode()}', 0, 0, "
        "0)\ntime.sleep(0.3)\ndef f(x): return 2 * x"
    )
    assert status_of(program, TESTS, SandboxLimits())[0] == "ok"


NAPS = "import time\ndef f(x):\n    while True: time.sleep(0.01)"
CHILD_SLEEPS = "import os, time\ndef f(x):\n    os.fork() or time.sleep(99)\n    os.wait()"
THREAD_COMPUTES = """
import threading, time
def compute():
    start = time.process_time()
    while time.process_time() - start < 1.0: pass
def f(x):
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return 2 * x
"""


@partly_slow(
    "program, tests, status",
    [
        (SLEEPS.format(seconds=99), TESTS, "timeout"),
        (NAPS, TESTS, "timeout"),
        (CHILD_SLEEPS, TESTS, "timeout"),
        (VFORKS.format(flags="0x4100"), TESTS, "timeout"),
        # a sibling (CLONE_PARENT) is refused, so that nothing waits
        (VFORKS.format(flags="0x4100 | 0x8000"), TESTS, "ok"),
        (VFORKS.format(flags="0x4100 | 0x10800"), TESTS, "ok"),  # a thread that is waited for, too
        ("import __main__\n__main__.Pipe.write = lambda *a: None", TESTS, "timeout"),
        (SLEEPS.format(seconds=0.2), TESTS, "ok"),
        (THREAD_COMPUTES, TESTS, "ok"),
        (DOUBLE, ASKED_OFTEN, "ok"),
    ],
    *(1, 2, 3, 5, 7, 8),
)
def test_programs_may_not_sleep_for_long(program, tests, status):
    """A candidate and a tester that wait for each other do not sleep, as one of them computes."""
    limits = SandboxLimits(seconds=5.0, idle_seconds=0.5)
    found, seconds = status_of(program, tests, limits)
    assert found == status
    assert seconds < limits.wall_seconds, "it was not the limit on sleep that ended the program"


def test_time_before_a_program_has_its_job_is_not_its_sleep(monkeypatch):
    send = launch.Member.send

    def send_late(member, payload):
        time.sleep(1.0)
        send(member, payload)

    monkeypatch.setattr(launch.Member, "send", send_late)
    limits = SandboxLimits(seconds=5.0, idle_seconds=0.5)
    assert status_of(SLEEPS.format(seconds=0.2), TESTS, limits)[0] == "ok"


def test_results_that_have_come_count_though_a_limit_is_found_later(monkeypatch):
    receive, late = launch.Member.receive, []

    def receive_late(member, seconds):
        if seconds != launch.POLL_SECONDS or late:
            return receive(member, seconds)
        late.append(select.select([member.control], [], [], 30.0)[0])
        return None

    monkeypatch.setattr(launch.Member, "receive", receive_late)
    monkeypatch.setattr(launch.Meter, "exceeded", lambda *_: "a limit")
    assert status_of(DOUBLE, TESTS, SandboxLimits(seconds=5.0))[0] == "ok" and late[0]


CROWD = """
import os, time
start = time.monotonic()
for n in range(28):
    if os.fork() == 0:
        turn = 1
        while True:
            time.sleep(max(0, start + 0.1 * turn - time.monotonic()))
            turn = int((time.monotonic() - start) / 0.1) + 1
            end = time.thread_time() + 0.0005
            while time.thread_time() < end: pass
while True: time.sleep(99)
"""
"""Processes that wake at once, compute next to nothing, and so wait for one another."""


def test_processes_that_wait_for_one_another_hide_no_sleep():
    require_sandbox()
    pool = SandboxPool(1, SandboxLimits(seconds=9.0, idle_seconds=1.0, wall_seconds=3.0))
    try:
        [outcome] = pool.run([python_job(CROWD, TESTS)])
    finally:
        pool.close()
    assert outcome.detail in ("not done within 1 s of sleep", "not done within 3 s in all")


@pytest.mark.parametrize("controlled", [True, False])
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.nightly)])
def test_hostile_neighbours_change_no_verdict(monkeypatch, count, controlled):
    """Three programs that start as many processes as they can, each of which spins, run all the time beside
    one honest one, which computes or is asked often. Waiting for a processor does not count as sleep.

    `controlled`: with control groups that share the processors, if this machine has them."""
    require_sandbox()
    if not controlled:
        host = dataclasses.replace(probe(), missing=dict.fromkeys(("cgroups", "cpu"), "taken away"))
        monkeypatch.setattr("unmask.sandbox.pool.probe", lambda: host)
    pool = SandboxPool(len(HOSTILE) + 1, SandboxLimits(seconds=2.0, idle_seconds=0.2))
    programs = [python_job(HONEST, TESTS), python_job(DOUBLE, ASKED_OFTEN)]
    done = threading.Event()
    found: list[Outcome] = []

    def attack(program: str) -> None:
        while not done.is_set():
            found.extend(pool.run([python_job(program, TESTS)]))

    attackers = [threading.Thread(target=attack, args=[program]) for program in HOSTILE]
    try:
        for attacker in attackers:
            attacker.start()
        honest = list(itertools.chain.from_iterable(pool.run([programs[n % 2]]) for n in range(count)))
    finally:
        done.set()
        for attacker in attackers:
            attacker.join()
        pool.close()
    assert [outcome for outcome in honest if outcome != Outcome("ok", 1, 1)] == []
    assert {outcome.status for outcome in found} == {"timeout"}
