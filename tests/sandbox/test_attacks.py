"""No program forges a verdict, reaches the host, takes more than its share, or outlives its turn."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.attacks import FORGERIES, GREED, HOST, PREAMBLE
from unmask.sandbox.outcome import Outcome
from unmask.sandbox.pool import PythonTests, SandboxPool, python_job

TESTS = PythonTests("assert f(3) == 6\nassert f(4) == 8\n", {"f": "f"})
SOME_GREED = ("a fork bomb", "a daemon", "all memory", "all disk", "a loop that ignores signals")


def batches(together: Iterable[str], attacks: Iterable[str]) -> list[Any]:
    """Parameters: some attacks side by side, and each attack by itself: slow, or nightly."""
    often = [
        pytest.param(
            [name] * times,
            id=f"{name}-{times}",
            marks=pytest.mark.slow if times == 1 and number % 3 == 0 else pytest.mark.nightly,
        )
        for number, name in enumerate(attacks)
        for times in (1, 20)
    ]
    return [pytest.param([*together], id="together"), *often]


class Host:
    """Targets on the host: a file, a port, an abstract socket, an environment variable."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.canary = folder / "canary"
        self.canary.write_text("untouched")
        folder.chmod(0o777)
        self.canary.chmod(0o666)
        monkeypatch.setenv("UNMASK_TEST_SECRET", "secret")
        self.connections = 0
        self.abstract = f"unmask-test-{os.getpid()}"
        self.tcp, self.unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
        self.unix.bind("\0" + self.abstract)
        self.unix.listen()
        self.threads = [
            threading.Thread(target=self._serve, args=[server], daemon=True)
            for server in (self.tcp, self.unix)
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            self.connections += 1
            connection.close()

    def fill(self, program: str) -> str:
        port = self.tcp.getsockname()[1]
        return program.format(canary=str(self.canary), port=port, abstract=self.abstract, pid=os.getpid())

    def close(self) -> None:
        for server, thread in zip((self.tcp, self.unix), self.threads, strict=True):
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            server.close()


@pytest.fixture
def host(tmp_path, monkeypatch):
    host = Host(tmp_path, monkeypatch)
    yield host
    host.close()


def of_sandboxes(pool: SandboxPool) -> list[str]:
    """The command lines of all processes that run as one of a pool's users."""
    users = {uid for slot in pool.slots for uid in slot.uids}
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid in users:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    found.append(file.read().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended since
            continue
    return found


def outcomes_of(pool: SandboxPool, programs: Sequence[str]) -> list[Outcome]:
    return pool.run([python_job(program, TESTS) for program in programs])


def assert_defeated(
    pool: SandboxPool, programs: Mapping[str, str], names: Sequence[str], statuses: Collection[str]
) -> None:
    """Run these attacks. None passes a test, and nothing survives."""
    found = zip(names, outcomes_of(pool, [programs[name] for name in names]), strict=True)
    assert not [
        (name, outcome) for name, outcome in found if outcome.status not in statuses or outcome.passed
    ]
    assert_nobody_survives(pool)


def assert_nobody_survives(pool: SandboxPool) -> None:
    """Only the processes that wait for the next job run as a user of the sandboxes: three for each, with
    bubblewrap's two."""
    waiting = sum(slot.waiting_cell is not None for slot in pool.slots)
    deadline = time.monotonic() + 60
    while len(running := of_sandboxes(pool)) != 3 * 2 * waiting:
        assert time.monotonic() < deadline, f"{waiting} cells wait, but these run: {running}"
        time.sleep(0.02)


def test_an_honest_program_passes_and_the_means_of_attack_do_not_stop_it(pool):
    outcomes = outcomes_of(pool, [PREAMBLE + f"answers(lambda: {works})" for works in (True, False)])
    assert [(outcome.status, outcome.passed) for outcome in outcomes] == [("ok", 2), ("wrong", 0)]


@pytest.mark.parametrize("names", batches(FORGERIES, FORGERIES))
def test_no_verdict_is_forged(pool, names):
    assert_defeated(pool, FORGERIES, names, {"wrong", "malformed", "timeout"})


@pytest.mark.parametrize("names", batches(HOST, HOST))
def test_nothing_of_the_host_is_reached(pool, host, names):
    assert_defeated(
        pool,
        {name: PREAMBLE + host.fill(program) for name, program in HOST.items()},
        names,
        {"wrong", "timeout"},
    )
    assert host.canary.read_text() == "untouched" and not host.connections


@pytest.mark.parametrize("names", batches(SOME_GREED, GREED))
def test_nothing_is_taken_beyond_the_limits(pool, names):
    assert_defeated(
        pool, {name: PREAMBLE + program for name, program in GREED.items()}, names, {"wrong", "timeout"}
    )
    assert outcomes_of(pool, ["def f(x): return 2 * x"]) == [Outcome("ok", 2, 2)]


def test_a_sandbox_that_ran_one_program_never_runs_another(pool):
    """Each candidate has its own process, whose memory holds nothing of an earlier one."""
    program = (
        "import builtins\nruns = getattr(builtins, 'runs', 0) + 1\nbuiltins.runs = runs\ndef f(x): return "
        "runs"
    )
    found = pool.run([python_job(program, PythonTests("assert f(0) == 1", {"f": "f"}))] * 3 * len(pool.slots))
    assert {outcome.status for outcome in found} == {"ok"}
