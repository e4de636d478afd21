"""What passes between a run and its reward functions: copies of the arguments, and plain answers.

What the functions return is converted where they run.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
import os
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from traceback import format_exception_only
from typing import Any, get_args

from unmask.rewards.verdict import Verdict
from unmask.sandbox.outcome import Status


@dataclasses.dataclass(frozen=True)
class NotANumber:
    """What a function returned where a number should be, as text."""

    shown: str


AnswerValue = float | None | Verdict | NotANumber


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


def answers_in(values: Any) -> list[AnswerValue] | NotANumber:
    """The answers in what a function returned: a sequence, array or tensor, or one of numbers, arrays and
    tensors."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return (
        [answer_in(value) for value in values] if isinstance(values, Sequence) else NotANumber(shown(values))
    )


def answer_in(value: Any) -> AnswerValue:
    """The answer for one completion."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None:
        return None
    if isinstance(value, Verdict):
        if value.status in get_args(Status) and (
            value.value is None or isinstance(value.value, numbers.Real)
        ):
            return dataclasses.replace(value, value=None if value.value is None else float(value.value))
    elif isinstance(value, numbers.Real):
        with suppress(OverflowError):
            return float(value)
    return NotANumber(shown(value))


async def answers_of(values: Awaitable[Any]) -> list[AnswerValue] | NotANumber:
    """The answers in what an async function returned."""
    return answers_in(await values)


def shown(value: Any) -> str:
    """The beginning of a value as text; the type of an integer that is too long for one."""
    try:
        return f"{value!r:.60}"
    except ValueError:
        return f"a {type(value).__name__}"


def describe_error(error: BaseException) -> str:
    """The type and message of an exception."""
    return "".join(format_exception_only(error)).strip()


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
