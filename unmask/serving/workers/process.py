"""The process of a worker, as the server that started it sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unmask.errors import UnmaskError, first_line
from unmask.serving.served_models import ServedModels

MODULE = "unmask.serving.workers.worker"
LONGEST_END = 10  # seconds


class WorkerStartError(UnmaskError):
    """A worker cannot start."""


class WorkerProcess:
    """A process that is ready.

    Attributes:
        socket: the Unix socket on which it listens.
        description: what it serves, for people.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, leash: asyncio.StreamWriter, ready: Mapping[str, Any]
    ):
        self._process, self._leash = process, leash
        self.socket, self.description = str(ready["socket"]), str(ready["description"])

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    async def ended(self) -> str:
        """Wait until it ends: how it did."""
        return how_it_ended(await self._process.wait())

    def kill(self) -> None:
        """Kill it, with all that it has started."""
        kill_group(self._process)

    async def end(self) -> None:
        """End it: it ends itself when the connection is closed."""
        await let_go(self._process, self._leash)
        shutil.rmtree(Path(self.socket).parent, ignore_errors=True)  # of one that was killed


async def start_worker(served: ServedModels, device: str, environment: Mapping[str, str]) -> WorkerProcess:
    """Start a worker, and wait until it is ready. WorkerStartError if it cannot be started, or ends
    before."""
    try:
        process, reader, leash = await _launch(environment)
    except OSError as error:
        remedy = "Start fewer workers, or raise what the system limits"
        raise WorkerStartError(
            f"a worker cannot be started ({first_line(error)})", where="--workers", remedy=remedy
        ) from error
    answer: dict[str, Any] = {}
    try:
        leash.write(replace(served, loading={**served.loading, "device": device}).to_json().encode() + b"\n")
        answer = json.loads(await _line(reader) or "{}")
    finally:  # also when nobody waits for it any more
        if "socket" not in answer:
            await let_go(process, leash)
    if "socket" in answer:
        return WorkerProcess(process, leash, answer)
    if "error" in answer:
        raise WorkerStartError(**answer["error"])
    what = f"a worker {how_it_ended(await process.wait())} before it was ready"
    raise WorkerStartError(
        what, where="--workers", remedy="See its errors above; if memory ran out, start fewer workers"
    )


async def _launch(
    environment: Mapping[str, str],
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """A process whose standard input is a socket to this one, and both directions of that. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as unless_started:
        reader, leash = await asyncio.open_connection(sock=ours)
        unless_started.callback(leash.close)
        command = [sys.executable, "-P", "-m", MODULE]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
        # In a group of its own a terminal's Ctrl-C does not reach it: the server decides when it ends.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=theirs.fileno(), env=environment, process_group=0
        )
        unless_started.pop_all()
    return process, reader, leash


async def _line(reader: asyncio.StreamReader) -> bytes:
    """What a worker says; empty if it ends before."""
    with contextlib.suppress(ConnectionError):
        return await reader.readline()
    return b""


async def let_go(process: asyncio.subprocess.Process, leash: asyncio.StreamWriter) -> None:
    """End a process by closing the connection to it, or kill it if it does not end."""
    leash.close()
    try:
        async with asyncio.timeout(LONGEST_END):
            await process.wait()
    except TimeoutError:
        kill_group(process)
        await process.wait()


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a process, with all that it has started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """In words."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
