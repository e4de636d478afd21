"""Many programs judged side by side, each in sandboxes that ran nothing before and run nothing after."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from unmask.sandbox.cgroups import Group
from unmask.sandbox.isolation import FIRST_UID, UIDS, Host, Limits, SandboxError, probe
from unmask.sandbox.launch import Cell, Member
from unmask.sandbox.outcome import Outcome

MOST_SLOTS = 64


@dataclass(frozen=True)
class PythonTests:
    """A dataset's tests of a program.

    Attributes:
        asserts: a Python program; each assertion that it comes to is a test.
        names: what it takes from the candidate: its own name for it, and the candidate's.
        setup: a program that defines what else it needs.
    """

    asserts: str
    names: Mapping[str, str]
    setup: str = ""


class Slot:
    """A place for one sandbox after another, with user ids and control groups of its own.

    After a Python program the next cell is started, and gets ready before it is needed.
    """

    numbers = itertools.count()

    def __init__(self, host: Host, limits: Limits):
        self.host, self.limits = host, limits
        first = FIRST_UID + (os.getpid() * 64 + next(self.numbers) * 2) % UIDS
        self.uids = (first, first + 1)
        self.groups: tuple[Group | None, Group | None] = (None, None)
        if "cgroups" not in host.missing:
            names = [f"unmask-{os.getpid()}-{id(self)}-{role}" for role in ("candidate", "judge")]
            self.groups = (Group(names[0], limits.memory, limits.processes), Group(names[1], limits.memory, limits.processes))
        self._cell: Cell | None = None

    @contextlib.contextmanager
    def cell(self) -> Iterator[Cell]:
        """A candidate and a judge for one job; they are killed after it, and the next ones started."""
        cell, self._cell = self._cell or self._start(), None
        try:
            yield cell
        finally:
            cell.kill()
        with contextlib.suppress(OSError):  # if it cannot be started, the next job will say so
            self._cell = self._start()

    @contextlib.contextmanager
    def member(self, role: str) -> Iterator[Member]:
        """One process of that role, ready for its job; it is killed after it."""
        self.stop()
        member = Member(self.host, self.limits, self.uids[0], self.groups[0], role)
        try:
            member.wait_until_ready()
            yield member
        finally:
            member.kill()

    def stop(self) -> None:
        """Kill what waits for a job."""
        if self._cell is not None:
            self._cell.kill()
            self._cell = None

    def close(self) -> None:
        self.stop()
        for group in self.groups:
            if group:
                group.remove()

    def _start(self) -> Cell:
        return Cell(self.host, self.limits, self.uids, self.groups)


Job = Callable[[Slot], Outcome]
"""What a slot is lent for."""


def python_job(program: str, tests: PythonTests) -> Job:
    """The job of running a Python program's tests."""

    def job(slot: Slot) -> Outcome:
        with slot.cell() as cell:
            found = cell.run(program, {"tests": tests.asserts, "setup": tests.setup, "names": dict(tests.names)})
        return outcome(found, slot.limits)

    return job


def outcome(found: dict[str, Any] | None, limits: Limits) -> Outcome:
    """What a judge's findings mean. Once the program is heard, whatever goes wrong is its own doing."""
    if found is None:
        return Outcome("timeout", detail=f"not done within {limits.seconds:g} seconds")
    if "broken" in found:
        return Outcome("infrastructure", detail=f"the tests are broken: {found['broken']}")
    if "refused" in found:
        return Outcome("malformed" if found["syntax"] else "wrong", detail=found["refused"])
    if not found:
        return Outcome("wrong", detail="the tests ended before their end")
    passed, total = found["passed"], found["total"] + (not found["complete"])  # what ends the tests early is a failed one
    return Outcome("ok" if 0 < passed == total else "wrong", passed, total, found["detail"])


class Pool:
    """Sandboxes for many programs.

    Args:
        slots: how many run at once; None: two for each processor, as starting one is mostly waiting, shared by the ranks of this machine.
        limits: of each.
        accept_unsandboxed: run programs where nothing isolates them, as this user, with all that this user may do.

    Raises:
        SandboxError: nothing isolates here, and that was not accepted.
    """

    def __init__(self, slots: int | None = None, limits: Limits | None = None, *, accept_unsandboxed: bool = False):
        self.host, self.limits = probe(), limits or Limits()
        if not (self.host.isolated or accept_unsandboxed):
            raise SandboxError(
                f"programs cannot be isolated here: {self.host.missing['bubblewrap']}",
                where="sandbox",
                remedy="Install what is missing, or accept the risk with --i-accept-unsandboxed-code.",
            )
        count = slots or max(2, min(MOST_SLOTS, 2 * len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        self._slots = [Slot(self.host, self.limits) for _ in range(count)]
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        # Sandboxes end with the thread that started them, so that threads of the pool start them all.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="sandbox")
        self.close = weakref.finalize(self, _close, self._threads, self._slots)

    def submit(self, job: Job) -> Future[Outcome]:
        """The outcome of a job, once there is one."""
        return self._threads.submit(self._run, job)

    def run(self, jobs: Iterable[Job]) -> list[Outcome]:
        """The outcome of each job."""
        return [future.result() for future in [self.submit(job) for job in jobs]]

    def _run(self, job: Job) -> Outcome:
        slot = self._free.get()
        try:
            return job(slot)
        except (OSError, SandboxError) as error:
            return Outcome("infrastructure", detail=str(error))
        finally:
            self._free.put(slot)


def _close(threads: ThreadPoolExecutor, slots: Sequence[Slot]) -> None:
    threads.shutdown(cancel_futures=True)
    for slot in slots:
        slot.close()
