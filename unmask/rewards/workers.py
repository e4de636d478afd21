"""Python processes that answer calls, and are killed where a call does not come back.

They are new interpreters, never forks: they inherit no CUDA context and no locks, and do not run the caller's main script again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import format_exception_only
from typing import Any

from unmask.errors import ConfigError, TrainingError, UnmaskError
from unmask.rewards.calls import LateError, awaited

GRACE_SECONDS = 10.0
START_SECONDS = 300.0
"""How long a new process may take to import what it serves."""


class WorkerError(UnmaskError):
    """No answer: the worker cannot start, unless it is a `WorkerCallError`."""


class WorkerCallError(WorkerError):
    """No answer by the call's own doing: the function raised, unless it is one of the next two."""


class WorkerDeathError(WorkerCallError):
    """A call ended its worker's process."""


class WorkerTimeoutError(WorkerCallError, LateError):
    """A call took longer than it may; its worker is no more."""


def load_function(target: str) -> Callable[..., Any]:
    """The function that `package.module:function` or `path/to/file.py:function` names.

    Raises:
        ConfigError: there is no such module, file or function, or importing it fails.
    """
    source, _, name = target.rpartition(":")
    try:
        if source.endswith(".py"):
            spec = spec_from_file_location(Path(source).stem, source)
            assert spec and spec.loader
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        function = getattr(module, name)
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}, not a function")
        return function
    except (Exception, SystemExit) as error:  # user code
        what = f"cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(what, where=target, remedy="Give package.module:function or path/to/file.py:function") from error


def describe_error(error: BaseException) -> str:
    """What an exception is and says, also of one that cannot be printed."""
    return "".join(format_exception_only(error)).strip()


class Worker:
    """A process that serves one function; it starts at the first call, and again at the first one after its end.

    Args:
        target: `package.module:function` or `path/to/file.py:function`.
        wrapper: the same of a function that makes of it what is served; empty: none.
    """

    def __init__(self, target: str, wrapper: str = ""):
        self.target, self.wrapper = target, wrapper
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()

    def call(self, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """What the function returns: see `apply`."""
        return self.apply(args, kwargs, timeout)

    def apply(self, args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float) -> Any:
        """What the function returns. One call at a time; others wait.

        Args:
            args, kwargs: of the function.
            timeout: seconds from when the process is there and idle.

        Raises:
            WorkerTimeoutError: it took longer.
            WorkerDeathError: it ended the process.
            TrainingError: it raised one.
            WorkerCallError: it raised something else.
            WorkerError: it cannot be imported.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:  # it died since the last call
                self.close()
            pipe = self._pipe or self._start()
            return self._exchange(pipe, (timeout, args, kwargs), timeout, f"no answer within {timeout:g} seconds")

    def start(self) -> None:
        """Start the process, if it is not there. Raises as `call` does where the function cannot be imported."""
        with self._lock:
            if self._pipe is None:
                self._start()

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self) -> Connection:
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), self.target, self.wrapper]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        try:
            self._exchange(self._pipe, None, START_SECONDS, f"not started within {START_SECONDS:g} seconds")
        except WorkerCallError as error:  # no call's doing
            self.close()
            raise WorkerError(error.what, where=self.target) from None
        return self._pipe

    def _exchange(self, pipe: Connection, message: Any, timeout: float, late: str) -> Any:
        """The answer to a message (None: to nothing, it speaks first)."""
        try:
            if message is not None:
                pipe.send(message)
            if not pipe.poll(timeout):
                self.close()
                raise WorkerTimeoutError(late, where=self.target)
            failed, answer = pipe.recv()
        except (EOFError, ConnectionError):
            assert self._process is not None
            code = self._process.wait()
            self.close()
            raise WorkerDeathError(f"its process ended (exit code {code})", where=self.target) from None
        if failed:
            raise answer if isinstance(answer, TrainingError) else WorkerCallError(answer, where=self.target)
        return answer

    def __del__(self) -> None:
        self.close()


def serve(pipe: Connection, target: str, wrapper: str) -> None:
    """What a worker's process does: say that it is there, then answer call after call with (failed, value or message)."""
    try:
        function = load_function(target)
        if wrapper:
            function = load_function(wrapper)(function)
    except ConfigError as error:
        pipe.send((True, error.what))
        return
    pipe.send((False, None))
    runner = asyncio.Runner()  # of async functions; one, so that their clients and locks outlive a call
    while True:
        try:
            timeout, args, kwargs = pipe.recv()
        except EOFError:
            return
        # Ends this process, even in the middle of a call, when its parent has died.
        faulthandler.dump_traceback_later(timeout + GRACE_SECONDS, exit=True)
        try:
            value = function(*args, **kwargs)
            pipe.send((False, runner.run(awaited(value)) if inspect.isawaitable(value) else value))
        except TrainingError as error:
            pipe.send((True, error))
        except Exception as error:  # user code, and what it returns may not be picklable
            pipe.send((True, f"raised {describe_error(error)}"))
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3])
