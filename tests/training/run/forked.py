"""Runs of the command line that begin in a moment and can be killed anywhere: forks of a process that has
imported everything.

A process that starts from nothing spends most of its time on imports. A fork calls the `main` of the command
with the same arguments, and does from there on all that the command does. test_kills.py compares such runs
with those of processes that start from nothing.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from unmask.cli import main

CHANGES = {"os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}
"""The audit events of changes of files, besides that of a file that is opened."""
IMPORTED = [
    "tests.training.run.forked",
    "unmask.cli.run",
    "transformers.models.llama.modeling_llama",
]


@dataclass(frozen=True)
class Ended:
    """How a run has ended.

    Attributes:
        code: the exit code; negative: the signal that killed it.
        seconds: how long it ran.
        changes: the changes of files that it has begun: paths, of a renamed file both.
        errors: what it printed to stderr.
    """

    code: int
    seconds: float
    changes: list[str]
    errors: str


class ForkServer:
    """Starts the process that is forked, with one thread: a fork has no others."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(IMPORTED)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            forkserver.ensure_running()

    def run(
        self,
        command: list[str],
        folder: Path,
        *,
        after: float | None = None,
        before_change: int | None = None,
    ) -> Ended:
        """Run a command to its end, or kill it after some seconds, or before it makes a change of a file,
        numbered from 0.

        Args:
            folder: for what is recorded of the run.
        """
        changes, errors = folder / "changes.txt", folder / "errors.txt"
        for path in (changes, errors):
            path.write_text("")
        process = self.context.Process(target=_run, args=(command, changes, errors, before_change))
        begun = time.monotonic()
        process.start()
        process.join(after)
        seconds = time.monotonic() - begun
        process.kill()
        process.join()
        assert process.exitcode is not None
        return Ended(process.exitcode, seconds, changes.read_text().splitlines(), errors.read_text())


def _run(command: list[str], changes: Path, errors: Path, before_change: int | None) -> None:
    """The body of a forked process: the command, whose output is not shown."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    recorded, number = os.open(changes, os.O_WRONLY | os.O_APPEND), itertools.count()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            os.write(
                recorded,
                " ".join(str(each) for each in arguments if isinstance(each, (str, Path))).encode() + b"\n",
            )
            if next(number) == before_change:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    sys.argv, sys.orig_argv = ["unmask", *command], ["python", "unmask", *command]
    main()
