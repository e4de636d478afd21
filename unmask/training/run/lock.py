"""One run per output folder, one evaluation per result: a lock on a file, which the system releases when the
process that holds it dies.

Where a file system has no `flock`, the file itself is the lock: filelock compares the process that it names
with those that run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from unmask.artifacts import read_file
from unmask.config.run import LOCK_FILE
from unmask.console import is_first_process
from unmask.errors import TrainingError
from unmask.redaction import masked_words

SECONDS = 0.25  # `is_running` holds a lock for a moment


def sole_run(folder: Path) -> contextlib.AbstractContextManager[None]:
    """`sole_writer` of a run's folder."""
    return sole_writer(folder, folder / LOCK_FILE)


@contextlib.contextmanager
def sole_writer(place: Path, path: Path) -> Iterator[None]:
    """A context in which no other process can enter with the lock file `path`; this one may again. The first
    process of several locks for all of them. The file's folder is created, and removed if nothing was
    written.

    Args:
        place: what is written, for the error.

    Raises:
        TrainingError: another process writes there, or nothing can be written.
    """
    if not is_first_process():
        yield
        return
    is_new, path = not path.parent.exists(), path.parent.resolve() / path.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        lock.acquire(timeout=SECONDS)
        # filelock itself names the process where it compares it with those that run
        if lock.lock_counter == 1 and not read_file(path).startswith(f"{os.getpid()}\n"):
            command = shlex.join(masked_words(sys.orig_argv))
            path.write_text(
                f"{os.getpid()}\n{socket.gethostname()}\n{' '.join(command.split())[:200]}\n",
                encoding="utf-8",
            )
    except Timeout as error:
        raise _occupied(place, path) from error
    except OSError as error:
        what, remedy = f"cannot be written to ({error.strerror})", "Choose another output"
        raise TrainingError(what, where=str(place), remedy=remedy) from error
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            # before it is released, so that a waiting process sees that it locked a removed file
            path.unlink(missing_ok=True)
        lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # not empty
                path.parent.rmdir()


def is_running(folder: Path) -> bool:
    """Whether a process runs in a folder."""
    path = folder.resolve() / LOCK_FILE
    if not path.exists():
        return False
    lock = _lock(path)
    try:
        lock.acquire(timeout=0)
    except OSError as error:
        return isinstance(error, Timeout)
    lock.release()
    return lock.is_locked


def _lock(path: Path) -> BaseFileLock:
    """The lock of this process on a file; acquiring it again counts."""
    return FileLock(path, is_singleton=True, thread_local=False)


def _occupied(place: Path, path: Path) -> TrainingError:
    try:
        pid, host, command = read_file(path).splitlines()[:3]
    except (OSError, ValueError):  # it is being written
        who, host = "another process", ""
    else:
        who = f"process {pid} on {host} ({command})"
    unknown = "" if host == socket.gethostname() else f" (if it has ended, remove {path})"
    return TrainingError(
        f"{who} is running here",
        where=str(place),
        remedy=f"Wait for it, end it, or choose another output{unknown}",
    )
