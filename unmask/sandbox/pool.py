"""Test many programs at a time, each in new sandboxes."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from unmask.sandbox.cgroups import ControlGroup
from unmask.sandbox.isolation import FIRST_UID, UIDS, Host, SandboxError, SandboxLimits, probe
from unmask.sandbox.launch import BATCH_OVER, Cell, Member
from unmask.sandbox.outcome import Outcome

MOST_SLOTS = 64


@dataclass(frozen=True)
class PythonTests:
    """A dataset's tests of a program.

    Attributes:
        asserts: a Python program. Each assertion that it reaches is a test.
        names: names in the candidate, by the names that the tests use for them.
        setup: a program that defines everything else that the tests need.
    """

    asserts: str
    names: Mapping[str, str]
    setup: str = ""


class Slot:
    """Runs one sandbox after another, with the same user ids and control groups. Cells are started in
    advance."""

    numbers = itertools.count()

    def __init__(self, host: Host, limits: SandboxLimits):
        self.host, self.limits = host, limits
        self.deadline = math.inf
        """When the current job must be done (of `time.monotonic`)."""
        first = FIRST_UID + (os.getpid() * 64 + next(self.numbers) * 2) % UIDS
        self.uids = (first, first + 1)
        self.groups: tuple[ControlGroup | None, ControlGroup | None] = (None, None)
        if "cgroups" not in host.missing:
            name = f"unmask-{os.getpid()}-{id(self)}"
            candidate, tester = (
                ControlGroup(f"{name}-{role}", limits.memory, limits.processes)
                for role in ("candidate", "tester")
            )
            self.groups = (candidate, tester)
        self.waiting_cell: Cell | None = None
        """The cell that was started in advance."""

    @contextlib.contextmanager
    def cell(self) -> Iterator[Cell]:
        """A candidate and a tester for one job. Afterwards they are killed and the next ones started."""
        cell, self.waiting_cell = self.waiting_cell or self._start(), None
        try:
            yield cell
        finally:
            cell.kill()
        with contextlib.suppress(OSError):  # the next job reports the failure
            self.waiting_cell = self._start()

    @contextlib.contextmanager
    def member(self, role: str) -> Iterator[Member]:
        """A process with a role of worker.py, ready for one job and killed after it."""
        self.stop()
        member = Member(self.host, self.limits, self.uids[0], self.groups[0], role)
        try:
            member.wait_until_ready()
            yield member
        finally:
            member.kill()

    def stop(self) -> None:
        """Kill the cell that was started in advance."""
        if self.waiting_cell is not None:
            self.waiting_cell.kill()
            self.waiting_cell = None

    def close(self) -> None:
        self.stop()
        for group in filter(None, self.groups):
            group.remove()

    def _start(self) -> Cell:
        return Cell(self.host, self.limits, self.uids, self.groups)


SlotJob = Callable[[Slot], Outcome]
"""Runs one program in a slot."""


def python_job(program: str, tests: PythonTests) -> SlotJob:
    """The job of running the tests of a Python program."""

    def job(slot: Slot) -> Outcome:
        with slot.cell() as cell:
            payload = {"tests": tests.asserts, "setup": tests.setup, "names": dict(tests.names)}
            results = cell.run(program, payload, slot.deadline)
        return outcome_of(results)

    return job


def outcome_of(results: dict[str, Any]) -> Outcome:
    """The outcome of the results of a tester, Python's or native. Once the program is loaded, all failures
    count against it."""
    if "exceeded" in results:
        return Outcome("timeout", detail=f"not done within {results['exceeded']}")
    if "broken" in results:
        return Outcome("verifier_error", detail=f"the tests are broken: {results['broken']}")
    if "refused" in results:
        return Outcome("malformed" if results["syntax"] else "wrong", detail=results["refused"])
    if not results:
        return Outcome("wrong", detail="the tests ended early")
    passed, total = results["passed"], results["total"]
    if not results["complete"]:
        total += 1  # an early end counts as a failed test
    return Outcome("ok" if 0 < passed == total else "wrong", passed, total, results["detail"])


class SandboxPool:
    """Sandboxes for many programs. SandboxError on a host without isolation, unless `accept_unsandboxed` is
    set.

    Args:
        slots: number of programs at a time. None: two per processor (starting one is mostly waiting), or one
            where no control group shares the processors between them; divided by the local ranks.
        limits: limits of each program.
        accept_unsandboxed: on a host without isolation, run programs as this user, with all its permissions.
    """

    def __init__(
        self,
        slots: int | None = None,
        limits: SandboxLimits | None = None,
        *,
        accept_unsandboxed: bool = False,
    ):
        self.host, self.limits = probe(), limits or SandboxLimits()
        if not (self.host.isolated or accept_unsandboxed):
            what = f"programs cannot be isolated here: {self.host.missing['bubblewrap']}"
            remedy = "Install what is missing, or accept the risk with --i-accept-unsandboxed-code"
            raise SandboxError(what, where="sandbox", remedy=remedy)
        wanted = (
            (1 if "cpu" in self.host.missing else 2)
            * len(os.sched_getaffinity(0))
            // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        )
        count = slots or max(1, min(MOST_SLOTS, wanted))
        self.slots = [Slot(self.host, self.limits) for _ in range(count)]
        """All slots, busy and free."""
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)
        # A sandbox dies with the thread that started it, so the threads of the pool start all sandboxes.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="sandbox")
        self.close = weakref.finalize(self, _close, self._threads, self.slots)

    def submit(self, job: SlotJob, deadline: float = math.inf) -> Future[Outcome]:
        """A future with the outcome of a job. It is killed at the deadline (of `time.monotonic`), and its
        outcome is `verifier_error`."""
        return self._threads.submit(self._run, job, deadline)

    def run(self, jobs: Iterable[SlotJob], deadline: float = math.inf) -> list[Outcome]:
        """The outcome of each job."""
        return [future.result() for future in [self.submit(job, deadline) for job in jobs]]

    def _run(self, job: SlotJob, deadline: float) -> Outcome:
        if time.monotonic() > deadline:
            return Outcome("verifier_error", detail=BATCH_OVER)
        slot = self._free.get()
        slot.deadline = deadline
        try:
            return job(slot)
        except (OSError, SandboxError) as error:
            return Outcome("verifier_error", detail=str(error))
        finally:
            self._free.put(slot)


def _close(threads: ThreadPoolExecutor, slots: Sequence[Slot]) -> None:
    threads.shutdown(cancel_futures=True)
    for slot in slots:
        slot.close()
