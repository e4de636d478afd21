"""Start candidate and tester, each in a sandbox, send them a program and its tests, and kill them with all
their child processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unmask.sandbox.cgroups import ControlGroup
from unmask.sandbox.isolation import FILTER, INSIDE, WORKER, Host, SandboxError, SandboxLimits
from unmask.sandbox.worker import MAX_FRAME

START_SECONDS = 60.0
DEATH_SECONDS = 10.0
POLL_SECONDS = 0.1
BATCH_OVER = "the time of its batch was over"


class Member:
    """A process in a sandbox, with its child processes.

    Args:
        uid: user id to run as, if it can be chosen.
        group: an empty control group.
        role: which of worker.py's roles the process plays.
        pipes: descriptors from and to the other member, if any.
    """

    def __init__(
        self,
        host: Host,
        limits: SandboxLimits,
        uid: int,
        group: ControlGroup | None,
        role: str,
        pipes: Sequence[int] = (-1, -1),
    ):
        self.host, self.group = host, group
        self._received = b""
        self.first = -1
        """A pidfd of the first process in the sandbox; when it ends, so do all others in it."""
        self.ancestor = -1
        """The id of a process from which all others in the sandbox descend."""
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as at_end:
            (self.control, control), (self.info, info) = (_pipe(on_failure, at_end) for _ in range(2))
            rules = None
            if "seccomp" not in host.missing:
                rules = os.open(host.folder / FILTER, os.O_RDONLY)
                at_end.callback(os.close, rules)
            sandbox = host.command(uid, group.entrance() if group else (), rules, info)
            worker = [host.python, "-I", "-S", f"{INSIDE if host.isolated else host.folder}/{WORKER}"]
            arguments = [role, *map(str, (control, *pipes)), *limits.worker_arguments(host.counts_processes)]
            self.process = subprocess.Popen(
                [*sandbox, *worker, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[fd for fd in (control, info, rules, *pipes) if fd is not None and fd >= 0],
                cwd=None if host.isolated else tempfile.mkdtemp(dir=host.folder),
                start_new_session=True,
            )
            on_failure.pop_all()

    def wait_until_ready(self) -> None:
        """Wait for the first frame, which the process sends before it reads its payload. SandboxError if it
        does not start."""
        if self.receive(START_SECONDS) != b"null":
            raise SandboxError(
                "a sandbox does not start", where="sandbox", remedy="Run `unmask sandbox probe`"
            )
        if self.host.isolated:
            found = re.search(rb'"child-pid": ([0-9]+)', os.read(self.info, 4096))
            assert found, "bubblewrap reports the first process"
            self.ancestor = int(found[1])
            self.first = os.pidfd_open(self.ancestor)
        else:
            self.ancestor = self.process.pid

    def send(self, payload: Any) -> None:
        """Send what the process works on."""
        data = json.dumps(payload).encode()
        self.write(len(data).to_bytes(4, "big") + data)

    def write(self, data: bytes) -> None:
        """Write bytes to its standard input. SandboxError if it has ended."""
        assert self.process.stdin
        try:
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise SandboxError(
                "a sandbox ended before its job", where="sandbox", remedy="Run `unmask sandbox probe`"
            ) from None

    def receive(self, seconds: float) -> bytes | None:
        """The next frame. None after `seconds`; empty if the process ended, or sent more than `MAX_FRAME`."""
        deadline = time.monotonic() + seconds
        while len(self._received) < (end := 4 + int.from_bytes(self._received[:4], "big")):
            if not select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            part = os.read(self.control, 1 << 16)
            if not part or len(self._received) > MAX_FRAME:
                return b""
            self._received += part
        frame, self._received = self._received[4:end], self._received[end:]
        return frame

    def usage(self) -> Usage:
        """What all processes in the sandbox have used until now."""
        usage, counted = usage_of(self.ancestor), self.group.computed() if self.group else None
        return usage if counted is None else replace(usage, computed=counted)

    def kill(self) -> None:
        """Kill all processes in the sandbox, and wait until they are gone. SandboxError if one does not
        die."""
        gone = True
        if self.first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.first, signal.SIGKILL)
            gone = bool(select.select([self.first], [], [], DEATH_SECONDS)[0])
            os.close(self.first)
            # The outer bubblewrap then reaps it and ends. Zombies would still count in the group.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(DEATH_SECONDS)
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        gone = gone and (self.group is None or self.group.kill(DEATH_SECONDS))
        for descriptor in (self.control, self.info):
            os.close(descriptor)
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if not gone:
            raise SandboxError(
                "a process in a sandbox does not die",
                where="sandbox",
                remedy="Look for it with `ps`, and kill it",
            )


@dataclass(frozen=True)
class Usage:
    """What processes have used.

    Attributes:
        computed: seconds of processor time, with that of ended processes that were waited for.
        ran: seconds that the living threads computed.
        delays: of each living thread the seconds that it waited for a processor.
        idle: whether all threads sleep: none computes, or waits for a processor or the disk.
    """

    computed: float = 0.0
    ran: float = 0.0
    delays: Mapping[int, float] = field(default_factory=dict)
    idle: bool = True

    def __add__(self, other: Usage) -> Usage:
        delays = {**self.delays, **other.delays}
        return Usage(self.computed + other.computed, self.ran + other.ran, delays, self.idle and other.idle)

    def delayed_since(self, earlier: Usage) -> float:
        """Seconds for which one of the threads has waited for a processor since then, at most. Of several
        that wait at once, for one another too, only one counts."""
        return max(
            (seconds - earlier.delays.get(thread, 0.0) for thread, seconds in self.delays.items()),
            default=0.0,
        )


def usage_of(pid: int) -> Usage:
    """What a process and its descendants have used."""
    process, total = Path(f"/proc/{pid}"), Usage()
    with contextlib.suppress(OSError):  # it has ended since
        total += Usage(computed=sum(map(int, _stat(process)[11:15])) / os.sysconf("SC_CLK_TCK"))
        for thread in (process / "task").iterdir():
            with contextlib.suppress(OSError):  # as above
                children = (thread / "children").read_text().split()
                for child in children:
                    total += usage_of(int(child))
                # A parent waits uninterruptibly for a child that shares its memory (vfork), as for the disk.
                total += Usage(idle=_stat(thread)[0] not in ("R" if children else "RD"))
                ran, delayed, _ = map(int, (thread / "schedstat").read_text().split())
                total += Usage(ran=ran / 1e9, delays={int(thread.name): delayed / 1e9})
    return total


class Meter:
    """Compares what a program and its tests use with their limits.

    Args:
        usages: what each of the two had used when they got their job.
        now: when that was known, in seconds of a monotonic clock.
    """

    def __init__(self, limits: SandboxLimits, usages: Sequence[Usage], now: float):
        self.limits, self.idle = limits, 0.0
        self._first = self._last = usages
        self._start = self._read = now
        self._delayed = [0.0] * len(usages)

    def exceeded(self, usages: Sequence[Usage], before: float, after: float) -> str | None:
        """The limit that is exceeded, if any. `usages` were read between `before` and `after`, which are far
        apart on a busy host."""
        if all(usage.idle for usage in usages):
            pairs = zip(usages, self._last, strict=True)
            busy = sum(
                max(0.0, usage.ran - last.ran) + max(0.0, usage.delayed_since(last)) for usage, last in pairs
            )
            # The shortest time between the two readings, so that one that was late is not taken for sleep.
            self.idle += max(0.0, before - self._read - busy)
        counted = zip(usages, self._first, self._delayed, strict=True)
        # that of ended threads is kept
        self._delayed = [max(most, usage.delayed_since(first)) for usage, first, most in counted]
        self._last, self._read = usages, after
        computed = sum(
            usage.computed - first.computed for usage, first in zip(usages, self._first, strict=True)
        )
        spent = {
            f"{self.limits.seconds:g} s of processor time": computed - self.limits.seconds,
            f"{self.limits.idle_seconds:g} s of sleep": self.idle - self.limits.idle_seconds,
            f"{self.limits.wall_seconds:g} s in all": before
            - self._start
            - sum(self._delayed)
            - self.limits.wall_seconds,
        }
        return next((limit for limit, over in spent.items() if over > 0), None)


def _stat(process: Path) -> list[str]:
    """The fields of /proc/PID/stat, from the state. A name, which may be any bytes, comes before it."""
    return (process / "stat").read_bytes().rpartition(b")")[2].decode().split()


def _pipe(on_failure: contextlib.ExitStack, at_end: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe. `on_failure` closes its reading end, `at_end` its writing end."""
    reading, writing = os.pipe()
    on_failure.callback(os.close, reading)
    at_end.callback(os.close, writing)
    return reading, writing


class Cell:
    """A candidate and a tester, connected by two pipes, for one job. `uids` and `groups`: of the candidate,
    of the tester."""

    def __init__(
        self,
        host: Host,
        limits: SandboxLimits,
        uids: tuple[int, int],
        groups: tuple[ControlGroup | None, ControlGroup | None],
    ):
        self.limits = limits
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as at_end:
            read_requests, write_requests = _pipe(at_end, at_end)
            read_answers, write_answers = _pipe(at_end, at_end)
            self.candidate = Member(
                host, limits, uids[0], groups[0], "candidate", (read_requests, write_answers)
            )
            on_failure.callback(self.candidate.kill)
            self.tester = Member(host, limits, uids[1], groups[1], "tester", (read_answers, write_requests))
            on_failure.pop_all()

    def run(
        self, program: str | dict[str, str], payload: dict[str, Any], deadline: float = math.inf
    ) -> dict[str, Any]:
        """The results of the tester: `{"exceeded": limit}` after a time limit, an empty dict if it ends
        without results. Python's candidate is source text; a native program, and native tests, are
        `{"native": base64}`.

        Raises:
            SandboxError: one of the two did not start (then nothing of the program has run), or there are no
                results at the deadline (of `time.monotonic`).
        """
        for member in (self.tester, self.candidate):
            member.wait_until_ready()
        usages = self._usages()
        self.tester.send(payload)
        self.candidate.send(program)
        meter = Meter(self.limits, usages, time.monotonic())  # before, they wait for this process
        while (frame := self.tester.receive(POLL_SECONDS)) is None:
            before = time.monotonic()
            if before > deadline:
                raise SandboxError(BATCH_OVER, where="sandbox", remedy="Give the batch more time")
            limit = meter.exceeded(self._usages(), before, time.monotonic())
            if limit and not (frame := self.tester.receive(0.0)):
                return {"exceeded": limit}
            if frame:  # it came while this process waited for a processor
                break
        return json.loads(frame or b"{}")

    def _usages(self) -> list[Usage]:
        return [self.candidate.usage(), self.tester.usage()]

    def kill(self) -> None:
        self.candidate.kill()
        self.tester.kill()
