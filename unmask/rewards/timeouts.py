"""Time limits for users' functions; calls of reward functions that return an exception in place of a value;
checks of their arguments."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, wait
from contextvars import ContextVar
from typing import Any, TypeVar

from unmask.errors import TrainingError, UnmaskError
from unmask.rewards.answers import (
    AnswerValue,
    NotANumber,
    copied,
    describe_error,
    only_this_process,
)

T = TypeVar("T")
CallArguments = Mapping[str, Any]
"""The arguments of a reward function. Lists have an entry for each completion; anything else applies to all
of them."""
TimedCall = Callable[[CallArguments, float], list[AnswerValue] | NotANumber]
"""Calls a function with arguments; raises LateError after this number of seconds."""
PING_SECONDS = 1.0
DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)
"""When the verdicts of a batch must be there (of `time.monotonic`): what runs longer is ended, and does not
delay the next batch."""


class LateError(UnmaskError):
    """A call exceeded its time limit."""


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except (Exception, SystemExit) as error:
            future.set_exception(error)
        except BaseException as error:  # user code: Ctrl-C does not reach threads
            future.set_exception(RuntimeError(describe_error(error)))

    threading.Thread(target=run, daemon=True).start()
    return future


def limited(future: Future[T], seconds: float) -> T:
    """The result of a future. After `seconds` without one, it is canceled (if possible) and LateError is
    raised."""
    if not wait([future], timeout=seconds).done:
        future.cancel()
        raise LateError(f"no answer within {seconds:g} seconds")
    return future.result()


class EventLoop:
    """The event loop of async functions. As in TRL, it outlives a call, as clients and locks must; a blocked
    one is replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, awaitable: Awaitable[T], seconds: float) -> T:
        """The awaited result; after `seconds` it is canceled and LateError is raised."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            loop = self._loop
        try:
            return limited(asyncio.run_coroutine_threadsafe(awaited(awaitable), loop), seconds)
        except LateError:
            responsive = threading.Event()
            loop.call_soon_threadsafe(responsive.set)
            if not responsive.wait(PING_SECONDS):
                with self._lock:
                    self._loop = None if self._loop is loop else self._loop
            raise


async def awaited(awaitable: Awaitable[T]) -> T:
    """A coroutine of anything that can be awaited. SystemExit and others that would end the event loop become
    a RuntimeError."""
    with only_this_process():
        try:
            return await awaitable
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # user code
            raise RuntimeError(describe_error(error)) from error


EVENT_LOOP = EventLoop()


def reward_values(
    call: TimedCall, arguments: CallArguments, seconds: float, *, name: str, alone: bool
) -> list[Any]:
    """The value of a reward function for each completion, or the exception in its place.

    Args:
        call: calls the function with copies of `arguments`, and returns its `answers_in` what the function
            returned.
        seconds: time limit of all calls together.
        name: name of the function in errors.
        alone: if the function raises, call it again for each completion alone, in the remaining time, so that
            one bad completion does not cost the others their rewards.

    Raises:
        TrainingError: the function raised it, or did not return one value per completion.
    """
    end, count = time.monotonic() + seconds, len(arguments["completions"])
    values = _values_or_error(call, arguments, seconds)
    if isinstance(values, BaseException):
        if isinstance(values, LateError) or not alone or count == 1:
            return [values] * count
        return [
            _answer(call, select(arguments, slice(row, row + 1)), end - time.monotonic(), values)
            for row in range(count)
        ]
    if isinstance(values, NotANumber) or len(values) != count:
        found = values.shown if isinstance(values, NotANumber) else f"{len(values)} values"
        what = f"returned {found} for {count} completions"
        raise TrainingError(
            what, where=f"reward function {name}", remedy="Return one float or None per completion"
        )
    return values


def check_signature(function: Callable[..., Any], arguments: CallArguments, name: str) -> None:
    """Raise a TrainingError if a function does not accept the arguments: it would fail on every
    completion."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        remedy = "Name columns that the dataset has, and accept **kwargs for all others"
        raise TrainingError(
            f"cannot be called: {error}", where=f"reward function {name}", remedy=remedy
        ) from error


def select(arguments: CallArguments, at: slice) -> CallArguments:
    """The arguments for some of the completions."""
    return {name: value[at] if isinstance(value, list) else value for name, value in arguments.items()}


def _values_or_error(
    call: TimedCall, arguments: CallArguments, seconds: float
) -> list[AnswerValue] | NotANumber | BaseException:
    """What a call with copies of the arguments returns, or the exception that the function raises."""
    try:
        return call(copied(arguments), seconds)
    except TrainingError:
        raise
    except (Exception, SystemExit) as error:  # user code
        return error


def _answer(
    call: TimedCall, arguments: CallArguments, seconds: float, of_all: BaseException
) -> AnswerValue | BaseException:
    """The value or exception for one completion alone, of a function that raised `of_all` for all of them."""
    if seconds <= 0:
        return LateError("no time left")
    values = _values_or_error(call, arguments, seconds)
    if isinstance(values, BaseException):
        return values
    # A function that does not support single completions must not end the run.
    return of_all if isinstance(values, NotANumber) or len(values) != 1 else values[0]
