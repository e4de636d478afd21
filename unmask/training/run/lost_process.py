"""The other processes of a run on this machine. If one of them is lost, this one ends with an error that says
so, wherever it waits.

A loss is noticed in three ways. gloo reports a closed connection (`naming_lost_process`). torchrun ends the
others with SIGTERM. A process that waits outside of Python, to meet the others or for NCCL, notices neither,
and torchrun kills it half a minute later without a word: so a thread watches the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from unmask.artifacts import started_by
from unmask.config.run import LOCK_FILE
from unmask.console import first_to_report
from unmask.errors import LostProcessError
from unmask.redaction import masked_argument, masked_words, shell_line, shown
from unmask.variables import SETTING

LOOKS_EVERY, PATIENCE = 0.5, 10.0
"""Seconds between two looks at the other processes, and those that this one has to end by itself when one is
lost."""
COMMON = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
"""The variables that are equal in the processes of a run."""

_seen: set[psutil.Process] = set()


def another_has_ended(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether another process of the run on this machine has ended. One that was never seen counts as
    running."""
    if len(_seen) < _others(environ):
        _seen.update(_started_together(environ))
    return not all(map(_runs, _seen))


def _others(environ: Mapping[str, str]) -> int:
    return int(environ.get("LOCAL_WORLD_SIZE", 1)) - 1


def _started_together(environ: Mapping[str, str]) -> Iterator[psutil.Process]:
    parent = psutil.Process().parent()
    for process in parent.children() if parent else []:
        with contextlib.suppress(psutil.Error):
            theirs = process.environ()
            if (
                process.pid != os.getpid()
                and "RANK" in theirs
                and all(theirs.get(name) == environ.get(name) for name in COMMON)
            ):
                yield process


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lost_process(output: Path, what: str = "another process of this run has ended") -> LostProcessError:
    """The error for a run in this folder."""
    return LostProcessError(what, where="launcher", remedy=go_on(output, begun=True))


def go_on(output: Path, *, begun: bool) -> str:
    """How to go on with a run, as a sentence. `begun`: whether the files in its folder, if there are any, are
    its own."""
    begun = begun and output.is_dir() and any(path.name != LOCK_FILE for path in output.iterdir())
    processes = _others(os.environ) + 1
    whole = os.environ.get("WORLD_SIZE", "1") == str(processes)  # else on several machines
    line, together = started_by(), processes if whole else 1
    how = (
        f"Resume with: {resume_command(line, together)}"
        if begun
        else f"Start again with: {command(line, together)}"
    )
    return how if whole else f"{how} (and the same launcher)"


@contextlib.contextmanager
def ending_with_others(output: Path) -> Iterator[None]:
    """A context in which this process ends with an error when another one of the run has ended: at once if
    SIGTERM comes, unless it is handled inside, and `PATIENCE` seconds later in any case. `output`: the folder
    of the run."""
    if not _others(os.environ) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def watch() -> None:
        while not another_has_ended():
            if left.wait(LOOKS_EVERY):
                return
        if not left.wait(PATIENCE):
            _end(output)

    def receive(number: int, _: Any) -> None:
        if another_has_ended():
            _end(output)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    another_has_ended()  # sees the others while they still run
    left, before = threading.Event(), signal.signal(signal.SIGTERM, receive)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        left.set()
        # its own error is on the way
        signal.signal(signal.SIGTERM, signal.SIG_IGN if another_has_ended() else before)


def _end(output: Path) -> None:
    """End this process, also if its main thread waits outside of Python. What was being written is lost, as
    if it had been killed."""
    if first_to_report():
        os.write(2, f"error: {shown(str(lost_process(output)))}\n".encode())
    os._exit(2)


def resume_command(argv: Sequence[str], processes: int = 1) -> str:
    """The command line that continues a run, from the one that started it. Arguments as in `command`."""
    kept: list[str] = []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if argument == "--resume" and arguments and not arguments[0].startswith("-"):
            if "=" not in arguments[0] or Path(arguments[0]).is_dir():
                arguments.pop(0)
        elif argument not in ("--resume", "--overwrite") and not argument.startswith(
            ("--resume=", "training.resume_from_checkpoint=")
        ):
            kept.append(argument)
    return command([*kept, "--resume"], processes)


def command(argv: Sequence[str], processes: int = 1) -> str:
    """The command line of a run, without secrets.

    Args:
        argv: the words that started it (`started_by`), with those of the interpreter.
        processes: how many train together.
    """
    set_before = [
        word.partition("=")
        for word in takewhile(lambda word: SETTING.fullmatch(word.partition("=")[0]), argv)
    ]
    argv = argv[len(set_before) :]
    start = next((number for number, word in enumerate(argv) if Path(word).stem == "unmask"), 0)
    program = "python -m unmask" if argv[start - 1] == "-m" else "unmask"
    launched = f"torchrun --nproc-per-node {processes} -m unmask" if processes > 1 else program
    variables = "".join(
        f"{name}={shell_line([masked_argument(f'{name}={value}').partition('=')[2]])} "
        for name, _, value in set_before
    )
    return f"{variables}{launched} {shell_line(masked_words(argv[start + 1 :]))}"
