"""What passes between a run and its reward functions: copies of the arguments, and plain answers.

The functions are users' code. What they return is converted where they run, so that no method of theirs is
called in the training loop.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
import os
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import format_exception_only
from typing import Any, get_args

from unmask.errors import RunStopped
from unmask.rewards.verdict import Verdict
from unmask.sandbox.outcome import Status


@dataclasses.dataclass(frozen=True)
class NotANumber:
    """What a function returned where a number should be, as text."""

    shown: str


Answer = float | None | Verdict | NotANumber


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a reward function, with copies of the trainer's state and of each entry of their
    lists, so that it may edit them."""

    def copy_value(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [copy_of(entry) for entry in value]
        return copy_of(value) if name == "trainer_state" else value

    return {name: copy_value(name, value) for name, value in arguments.items()}


def copy_of(value: Any) -> Any:
    """A deep copy; of what cannot be copied, as a lock, the object itself."""
    try:
        return copy.deepcopy(value)
    except Exception:  # user code
        return value


def answers_in(values: Any) -> list[Answer] | NotANumber:
    """The answers in what a function returned: a sequence, array or tensor, or one of numbers, arrays and
    tensors."""
    try:
        values = values.tolist() if hasattr(values, "tolist") else values
        return (
            [answer_in(value) for value in values]
            if isinstance(values, Sequence)
            else NotANumber(shown(values))
        )
    except BaseException as error:  # user code
        raise_interrupt(error)
        return NotANumber(shown(values))


def answer_in(value: Any) -> Answer:
    """The answer for one completion."""
    try:
        value = value.tolist() if hasattr(value, "tolist") else value
        if value is None:
            return None
        if isinstance(value, Verdict):  # or a class of theirs, whose attributes may change
            number, given, detail = value.value, value.status, str(value.detail)
            status = next((known for known in get_args(Status) if known == given), None)
            if status and (number is None or isinstance(number, numbers.Real)):
                return Verdict(None if number is None else float(number), status, detail)
        elif isinstance(value, numbers.Real):
            return float(value)
    except BaseException as error:  # user code, or an integer beyond floats
        raise_interrupt(error)
    return NotANumber(shown(value))


async def answers_of(values: Awaitable[Any]) -> list[Answer] | NotANumber:
    """The answers in what an async function returned."""
    return answers_in(await values)


def shown(value: Any) -> str:
    """The beginning of a value as text; its type if it cannot be printed."""
    try:
        return str(f"{value!r:.60}")
    except BaseException as error:  # user code, or an integer of thousands of digits
        raise_interrupt(error)
        return f"a {type(value).__name__}"


def describe_error(error: BaseException) -> str:
    """The type and message of an exception, also of one that cannot be printed."""
    try:
        return "".join(format_exception_only(error)).strip()
    except BaseException as other:  # user code
        raise_interrupt(other)
        return type(error).__name__


def raise_interrupt(error: BaseException) -> None:
    """Raise Ctrl-C and other signals again, which only the main thread gets: anywhere else they are a
    function's own."""
    if (
        isinstance(error, KeyboardInterrupt | RunStopped)
        and threading.current_thread() is threading.main_thread()
    ):
        raise error


@contextmanager
def only_this_process() -> Iterator[None]:
    """End a process that the code within forks when it gets here, as it would continue the run, or answer a
    second time."""
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            os._exit(1)
