"""Calls of users' functions with a time limit; an exception is returned in the place of the value."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from unmask.errors import TrainingError, UnmaskError

T = TypeVar("T")
Arguments = Mapping[str, Any]
"""Of a reward function. Lists have an entry for each completion; anything else is for all of them."""
Call = Callable[[Arguments, float], Any]
"""Calls a function with arguments, and raises LateError after that number of seconds."""
PING_SECONDS = 1.0


class LateError(UnmaskError):
    """A call exceeded its time limit."""


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # user code
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def limited(future: Future[T], seconds: float) -> T:
    """The result of a future. Without one in time it is cancelled, if possible, and LateError is raised."""
    if not wait([future], timeout=seconds).done:
        future.cancel()
        raise LateError(f"no answer within {seconds:g} seconds")
    return future.result()


class EventLoop:
    """The event loop of async functions. It is kept, as in TRL, so that clients and locks outlive a call; a blocked one is replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, awaitable: Awaitable[T], seconds: float) -> T:
        """The awaited result; after `seconds` it is cancelled and LateError is raised."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            loop = self._loop
        try:
            return limited(asyncio.run_coroutine_threadsafe(awaited(awaitable), loop), seconds)
        except LateError:
            self._leave_if_blocked(loop)
            raise

    def _leave_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        pong = threading.Event()
        loop.call_soon_threadsafe(pong.set)
        if not pong.wait(PING_SECONDS):
            with self._lock:
                self._loop = None if self._loop is loop else self._loop


async def awaited(awaitable: Awaitable[T]) -> T:
    """A coroutine of anything that can be awaited."""
    try:
        return await awaitable
    except SystemExit as error:  # user code; it would end the loop
        raise RuntimeError(f"SystemExit: {error}") from error


EVENT_LOOP = EventLoop()


def reward_values(call: Call, arguments: Arguments, seconds: float, *, name: str, alone: bool) -> list[Any]:
    """The value of a function for each completion, or the exception in its place.

    Args:
        call: calls the function.
        arguments: its arguments.
        seconds: time limit of all calls together.
        name: its name.
        alone: whether a function that raises is called again for each completion alone, in the remaining time, so that one bad completion
            does not lose the rewards of the others.

    Raises:
        TrainingError: the function raised it, or did not return one value per completion.
    """
    end, count = time.monotonic() + seconds, len(arguments["completions"])
    try:
        values = _listed(call(arguments, seconds))
    except TrainingError:
        raise
    except (Exception, SystemExit) as error:  # user code
        if isinstance(error, LateError) or not alone or count == 1:
            return [error] * count
        return [_answer(call, part(arguments, slice(row, row + 1)), end - time.monotonic(), error) for row in range(count)]
    if not isinstance(values, Sequence) or len(values) != count:
        found = f"{len(values)} values" if isinstance(values, Sequence) else shown(values)
        what = f"returned {found} for {count} completions"
        raise TrainingError(what, where=f"reward function {name}", remedy="Return one float or None per completion")
    return list(values)


def check_signature(function: Callable[..., Any], arguments: Arguments, name: str) -> None:
    """Raise a TrainingError where a function does not take the arguments: it would fail on everything."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions written in C
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        remedy = "Name columns that the dataset has, and accept **kwargs for all others"
        raise TrainingError(f"cannot be called: {error}", where=f"reward function {name}", remedy=remedy) from error


def part(arguments: Arguments, at: slice) -> Arguments:
    """The arguments for some of the completions."""
    return {name: value[at] if isinstance(value, list) else value for name, value in arguments.items()}


def _answer(call: Call, arguments: Arguments, seconds: float, of_all: BaseException) -> Any:
    """What a function that raised `of_all` gives for one completion alone."""
    if seconds <= 0:
        return LateError("no time left")
    try:
        values = _listed(call(arguments, seconds))
    except TrainingError:
        raise
    except (Exception, SystemExit) as error:  # user code
        return error
    # A function may not support a single completion; that does not end the run.
    return values[0] if isinstance(values, Sequence) and len(values) == 1 else of_all


def _listed(values: Any) -> Any:
    """Arrays and tensors as lists and numbers, also those in a list."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return [value.tolist() if hasattr(value, "tolist") else value for value in values] if isinstance(values, Sequence) else values


def shown(value: Any) -> str:
    """The beginning of a value as text, also of one that cannot be printed."""
    try:
        return f"{value!r:.60}"
    except Exception:  # user code, or an integer of thousands of digits
        return f"a {type(value).__name__}"
