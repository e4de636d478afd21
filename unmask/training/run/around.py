"""What surrounds a training: other runs in its folder, errors of the disk, lost processes, and signals, which
end it with a checkpoint."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import PartialState
from accelerate.utils import gather
from safetensors import SafetensorError
from transformers import TrainerCallback

from unmask.errors import RunStopped, TrainingError, first_line
from unmask.training.distributed import alone_in
from unmask.training.run.folder import checkpoints
from unmask.training.run.lost_process import another_has_ended, go_on, lost_process

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAVED = 75
"""The exit code after SIGTERM and SIGUSR1 if there is a checkpoint: EX_TEMPFAIL of sysexits.h, try again. 128
+ signal, which any process has that is ended by the signal, says nothing about a checkpoint."""
FORWARDED_SECONDS = 1.0
"""A launcher forwards a Ctrl-C that the terminal has sent to its processes, too: within this time it is the
same one."""

MAKE_ROOM = "Make room and permit writing"
FULL_DISK = f"{MAKE_ROOM}: --resume continues from the last checkpoint"
WRITE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.EMFILE,
}
IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}
"""Errors of a folder in the place of a file, or the reverse."""
_entered: set[Path] = set()  # the folders of this process's runs


@contextmanager
def running_in(folder: Path, at_end: Any = None) -> Iterator[None]:
    """What surrounds every training in this folder. A command enters it before it loads the model; the
    trainer inside then adds nothing.

    Args:
        at_end: called at the end like an `__exit__` method, before the folder is free for other runs.

    Raises:
        TrainingError: another run is here, or the disk cannot be written.
    """
    if (place := folder.resolve()) in _entered:
        yield
        return
    with alone_in(folder), ExitStack() as stack:
        _entered.add(place)
        stack.callback(_entered.remove, place)
        if at_end is not None:
            stack.push(at_end)
        with naming_write_errors(folder, FULL_DISK):
            yield


@contextmanager
def naming_write_errors(where: Path, remedy: str) -> Iterator[None]:
    """A context in which an error of the disk is raised as a TrainingError."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if (reason := _write_error(error)) is None:
            raise
        path = getattr(error, "filename2", None) or getattr(error, "filename", None) or where
        if getattr(error, "errno", None) in IN_THE_WAY:
            remedy = remedy.replace(MAKE_ROOM, "Move away what is in its place")
        raise TrainingError(f"cannot be written ({reason})", where=str(path), remedy=remedy) from error


def _write_error(error: Exception) -> str | None:
    """Why the disk cannot be written; None: it is another error."""
    if isinstance(error, OSError):
        return error.strerror if error.errno in WRITE_ERRORS | IN_THE_WAY else None
    of_torch = "PytorchStreamWriter" in str(error) or "unexpected pos" in str(error)
    if not of_torch and not isinstance(error, SafetensorError):
        return None
    return first_line(error.__context__ or error)


@contextmanager
def naming_lost_process(output: Path) -> Iterator[None]:
    """A context in which a lost connection to another process of the run is raised as LostProcessError.
    `output`: the folder of the run."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        # gloo adds advice
        what = f"lost the connection to another process of this run ({first_line(error).split('. ')[0]})"
        raise lost_process(output, what) from error


class StopOnSignal(TrainerCallback):
    """Within its context, SIGTERM, SIGUSR1 and Ctrl-C save a checkpoint at the end of the running step, and
    raise RunStopped.

    A second Ctrl-C, and each of these signals outside of training, raises it at once. A signal that this
    process ignores stays ignored: shells start background jobs that ignore Ctrl-C.

    Args:
        output: the folder of the run.
        resumes: whether the checkpoints that are there already are of this run.
        overwrites: whether the files that are there already are of an earlier one.
    """

    steps_before = 0  # of earlier stages of a conversion, which sets it

    def __init__(self, output: Path, *, resumes: bool, overwrites: bool = False):
        self.output, self._overwrites = output, overwrites
        self._owns_checkpoints = resumes
        self._received: signal.Signals | None = None
        self._since = 0.0
        self._training = self._agreed = False
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            mine = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._receive) for number in mine}
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._agreed and isinstance(error, RunStopped):  # a process that exits would abort the others
            PartialState().wait_for_everyone()
            PartialState().destroy_process_group()

    def _receive(self, number: int, _: Any) -> None:
        received = signal.Signals(number)
        if os.getpid() != self._process:  # a fork, such as a worker of the data loader
            if received is signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        # the launcher ends the others: nothing can be saved without it
        if received is signal.SIGTERM and another_has_ended():
            raise lost_process(self.output)
        forwarded = "LOCAL_RANK" in os.environ and time.monotonic() - self._since < FORWARDED_SECONDS
        if not self._training or (self._received is not None and received is signal.SIGINT and not forwarded):
            self._received = received
            raise self._stopped()
        if self._received is None:
            self._received, self._since = received, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                again = "; again: end at once" if received is signal.SIGINT else ""
                os.write(
                    2, f"\n{received.name}: saving a checkpoint at the end of this step{again}\n".encode()
                )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training = self._owns_checkpoints = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._agree(args):
            control.should_save, args.save_only_model = True, False

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._training:  # an evaluation follows the end of its step
            self.on_step_end(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._agreed:
            raise self._stopped(
                f"after step {self.steps_before + state.global_step}{self._stage(args)}, checkpoint saved"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training = False
        if self._agree(args):
            raise self._stopped(f"after the last step{self._stage(args)}")

    def _stage(self, args: Any) -> str:
        return "" if Path(args.output_dir) == self.output else f" (in {Path(args.output_dir).name})"

    def _agree(self, args: Any) -> bool:
        """Whether any process has received a signal. A collective, so that all stop after the same step."""
        number = self._received or 0
        if args.world_size > 1:
            number = int(gather(torch.tensor([number], device=args.device)).max())
        if number:
            self._received, self._agreed = signal.Signals(number), True
        return self._agreed

    def _stopped(self, how: str = "at once") -> RunStopped:
        assert self._received is not None
        saved = self._owns_checkpoints and any(map(checkpoints, [self.output, *self.output.glob("stage-*")]))
        found = "" if saved else "There is no checkpoint yet. "
        remedy = found + go_on(self.output, begun=self._owns_checkpoints or not self._overwrites)
        code = SAVED if saved and self._received is not signal.SIGINT else 128 + self._received
        return RunStopped(f"stopped by {self._received.name} {how}. {remedy}", code=code)
