"""What reward functions log, in the training process and in worker processes."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from unmask.artifacts import plain
from unmask.rewards.answers import answers_in, answers_of, shown
from unmask.rewards.timeouts import check_signature


class Log:
    """The values passed to `log_extra` and `log_metric`, which TRL passes to reward functions."""

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = defaultdict(list)
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Keep a column: a value for each completion."""
        # here, because it may call methods of users' objects
        self.extras[_name(column)].extend(plain(list(values)))

    def log_metric(self, name: str, value: float) -> None:
        """Keep a number. All numbers of a name are averaged."""
        number = float(value)  # may raise: then there is no such name
        self.metrics[_name(name)].append(number)

    def add(self, other: Log) -> None:
        """Append the values of another log."""
        for column, values in other.extras.items():
            self.extras[column].extend(values)
        for name, numbers in other.metrics.items():
            self.metrics[name].extend(numbers)

    def columns(self, count: int) -> dict[str, list[Any]]:
        """The columns with at least `count` values: the last ones, because a function that raised was called,
        and logged, again."""
        return {
            column: values[-count:] for column, values in list(self.extras.items()) if len(values) >= count
        }


def _name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a log cannot have the name {shown(name)}: give text")
    name.encode()  # raises for a lone surrogate, which trackers cannot write
    return name


def served(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as a worker serves it: called with its name and its arguments except the loggers, it
    returns values and a `Log`.

    It raises a TrainingError if the function does not accept the arguments.
    """

    def call(name: str, /, **arguments: Any) -> Any:
        log = Log()
        arguments |= {"log_extra": log.log_extra, "log_metric": log.log_metric}
        check_signature(function, arguments, name)
        values = function(**arguments)
        return _awaited(values, log) if inspect.isawaitable(values) else (answers_in(values), log)

    return call


async def _awaited(values: Awaitable[Any], log: Log) -> tuple[Any, Log]:
    return await answers_of(values), log
