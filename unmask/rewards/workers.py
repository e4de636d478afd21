"""Python processes that serve a function and are killed if a call takes too long.

They are new interpreters, not forks: they inherit no CUDA context and no locks, and do not run the caller's
main script again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from unmask.config.user_code import load_function
from unmask.errors import ConfigError, TrainingError, UnmaskError
from unmask.rewards.answers import describe_error, only_this_process
from unmask.rewards.timeouts import LateError, awaited
from unmask.sandbox.launch import POLL_SECONDS, usage_of

GRACE_SECONDS = 10.0
START_SECONDS = 300.0
"""Time limit of a new process for importing the function."""
END_SECONDS = 5.0
"""Time limit for the end of a process that closed its pipe."""


class WorkerError(UnmaskError):
    """A worker did not answer: it cannot start, or the call failed (`WorkerCallError`)."""


class WorkerCallError(WorkerError):
    """A call failed: the function raised, or as the two subclasses say."""


class WorkerDeathError(WorkerCallError):
    """A call ended the process of its worker."""


class WorkerTimeoutError(WorkerCallError, LateError):
    """A call exceeded its time limit, and its worker was killed."""


class RewardWorker:
    """A process that serves one function. It starts at the first call, and restarts at the first call after
    its end.

    It imports from the folders that this process imports from. Of the current folder, which may hold data
    from elsewhere, it imports the module of the function only.

    Args:
        target: the function: `package.module:function` or `path/to/file.py:function`.
        wrapper: name of a function that is applied to it first; empty: none.
    """

    def __init__(self, target: str, wrapper: str = ""):
        self.target, self.wrapper = target, wrapper
        self.process: subprocess.Popen[bytes] | None = None
        """The process; None before its start and after `close`."""
        self._pipe: Connection | None = None
        self._lock = threading.Lock()
        self._end: Callable[[], Any] = lambda: None

    def apply(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float, cpu_seconds: float = math.inf
    ) -> Any:
        """Call the function, for at most `timeout` seconds from when the process is ready and idle,
        `cpu_seconds` of processor time.

        Raises:
            WorkerTimeoutError: the function took longer, or used more.
            WorkerDeathError: it ended the process.
            TrainingError: it raised one.
            WorkerCallError: it raised another exception.
            WorkerError: it cannot be imported.
        """
        with self._lock:
            if self.process is not None and self.process.poll() is not None:  # it died since the last call
                self.close()
            pipe = self._pipe or self._start()
            late = f"no answer within {min(timeout, cpu_seconds):g} seconds"
            return self._exchange(pipe, (timeout, args, kwargs), timeout, late, cpu_seconds)

    def start(self) -> None:
        """Start the process, unless it is running. WorkerError if the function cannot be imported."""
        with self._lock:
            if self._pipe is None:
                self._start()

    def close(self) -> None:
        """Kill the process."""
        self._end()
        self.process = self._pipe = None

    def _start(self) -> Connection:
        self._pipe, remote = Pipe()
        command = [sys.executable, "-P", "-m", __name__, str(remote.fileno()), self.target, self.wrapper]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            command, pass_fds=[remote.fileno()], env=environment, stdin=subprocess.DEVNULL
        )
        remote.close()
        # Unlike `__del__`, it keeps both alive until it has ended them, also in a cycle of garbage.
        self._end = weakref.finalize(self, _end, self.process, self._pipe)
        try:
            self._exchange(self._pipe, None, START_SECONDS, f"not started within {START_SECONDS:g} seconds")
        except WorkerCallError as error:  # not the fault of a call
            self.close()
            raise WorkerError(error.what, where=self.target) from None
        return self._pipe

    def _exchange(
        self, pipe: Connection, message: Any, timeout: float, late: str, cpu_seconds: float = math.inf
    ) -> Any:
        """The answer to a message; None sends nothing and reads the first answer."""
        try:
            if message is not None:
                pipe.send(message)
            if not self._answers(pipe, timeout, cpu_seconds):
                self.close()
                raise WorkerTimeoutError(late, where=self.target)
            failed, answer = pipe.recv()
        except (EOFError, ConnectionError):
            assert self.process is not None
            what = f"its process ended (exit code {self.process.wait(END_SECONDS)})"
            self.close()
            raise WorkerDeathError(what, where=self.target) from None
        if failed:
            raise answer if isinstance(answer, TrainingError) else WorkerCallError(answer, where=self.target)
        return answer

    def _answers(self, pipe: Connection, timeout: float, cpu_seconds: float) -> bool:
        """Wait for an answer. Returns whether there is one within these limits."""
        if cpu_seconds == math.inf:
            return pipe.poll(timeout)
        assert self.process is not None
        end, cpu_end = time.monotonic() + timeout, usage_of(self.process.pid).computed + cpu_seconds
        while not (ready := pipe.poll(POLL_SECONDS)):
            if time.monotonic() > end or usage_of(self.process.pid).computed > cpu_end:
                break
        return ready


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    process.kill()
    process.wait()
    pipe.close()


def serve(pipe: Connection, target: str, wrapper: str) -> None:
    """Run in the process of a worker: report that it is ready, then answer each call with (failed, value or
    message)."""
    try:
        function = load_function(target)
        if wrapper:
            function = load_function(wrapper)(function)
    except ConfigError as error:
        pipe.send((True, f"{error.what}. {error.remedy}"))
        return
    pipe.send((False, None))
    runner = asyncio.Runner()  # a single one, so that the clients and locks of async functions outlive a call
    while True:
        try:
            timeout, args, kwargs = pipe.recv()
        except EOFError:
            return
        # Ends this process after its parent has died, even during a call.
        faulthandler.dump_traceback_later(timeout + GRACE_SECONDS, exit=True)
        try:
            with only_this_process():
                value = function(*args, **kwargs)
                value = runner.run(awaited(value)) if inspect.isawaitable(value) else value
            pipe.send((False, value))
        except TrainingError as error:
            pipe.send((True, error))
        except Exception as error:  # user code, and what it returns may not be picklable
            pipe.send((True, f"raised {describe_error(error)}"))
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    # the trainer receives them too, and ends this process itself
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    serve(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3])
