"""One run per output folder: a lock that ends with the process that holds it.

The lock is `flock` on a file, which the system releases when a process dies. Where a file system has no `flock`, the file holds the process
id and its start time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from unmask.config.run import LOCK_FILE
from unmask.console import is_first_process
from unmask.errors import TrainingError
from unmask.redaction import masked_argument

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl: Any = None  # type: ignore[no-redef]


TRIES = 5


@dataclass(frozen=True)
class Holder:
    """The process that runs in a folder."""

    pid: int
    host: str
    started: float
    """When the process started, in seconds since 1970."""
    command: str

    @classmethod
    def this_process(cls) -> Holder:
        """This process."""
        return cls(os.getpid(), socket.gethostname(), psutil.Process().create_time(), shlex.join(map(masked_argument, sys.orig_argv)))

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """The process named in a lock file; None if it names none."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def is_alive(self) -> bool:
        """Whether it runs; a process of another machine is taken to run."""
        if self.host != socket.gethostname():
            return True
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1
        except psutil.Error:
            return False


_held: dict[Path, int] = {}
"""The open lock files of this process, by folder."""


@contextlib.contextmanager
def sole_run(folder: Path) -> Iterator[None]:
    """Inside, no other process can enter with this folder; this one may again. The first process of a run locks for all of them. The folder
    is created, and removed if nothing was written.

    Raises:
        TrainingError: another run holds the folder, or nothing can be written there.
    """
    key = folder.resolve()
    if key in _held or not is_first_process():
        yield
        return
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _held[key] = _lock(key / LOCK_FILE)
    except OSError as error:
        what, remedy = f"cannot be written to ({error.strerror})", "Choose another output folder"
        raise TrainingError(what, where=str(folder), remedy=remedy) from error
    try:
        yield
    finally:
        (key / LOCK_FILE).unlink(missing_ok=True)  # before it is released, so that a waiting process sees that it locked a removed file
        os.close(_held.pop(key))
        if is_new:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def is_running(folder: Path) -> bool:
    """Whether a process runs in a folder."""
    path = folder / LOCK_FILE
    if folder.resolve() in _held:
        return True
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        taken = _flock(handle)
        return not taken if taken is not None else not _is_left_behind(path)
    finally:
        os.close(handle)


def _lock(path: Path) -> int:
    """The open and locked file. Raises TrainingError if another process holds it, OSError if it cannot be written."""
    for attempt in itertools.count(1):
        handle, is_mine = _open(path)
        taken = _flock(handle)
        if taken is None:
            taken = is_mine
            if not taken and _is_left_behind(path):
                path.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed by the run that held it
            if taken and os.path.samestat(os.fstat(handle), path.stat()):
                break
        os.close(handle)
        if attempt == TRIES:  # `is_running` holds a lock for a moment
            raise _occupied(path)
        time.sleep(0.05)
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(asdict(Holder.this_process())).encode())
    return handle


def _open(path: Path) -> tuple[int, bool]:
    """The open file, and whether this call created it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False


def _flock(handle: int) -> bool | None:
    """Lock an open file. Returns whether no other process has it; None: there is no flock."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def _is_left_behind(path: Path) -> bool:
    """Whether the process named in a lock file has ended."""
    holder = Holder.read(path)
    return holder is not None and not holder.is_alive


def _occupied(path: Path) -> TrainingError:
    holder = Holder.read(path)
    unknown = "" if holder and holder.host == socket.gethostname() else f" (if it has ended, remove {path})"
    who = f"process {holder.pid} on {holder.host} ({' '.join(holder.command.split())[:200]})" if holder else "another process"
    return TrainingError(
        f"{who} is running here", where=str(path.parent), remedy=f"Wait for it, end it, or choose another output folder{unknown}"
    )


def _forget() -> None:
    """In a forked process, close the inherited files: the lock is its parent's, and must end with it."""
    for handle in _held.values():
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
