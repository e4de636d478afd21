"""The logs of reward functions, in the training process and in worker processes."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from unmask.rewards.calls import check_signature, shown


class Log:
    """What was passed to `log_extra` and `log_metric`, as TRL gives them to reward functions."""

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = defaultdict(list)
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Keep a value for each completion."""
        self.extras[_name(column)].extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Keep a number, which is averaged with the others of that name."""
        self.metrics[_name(name)].append(float(value))

    def add(self, other: Log) -> None:
        """Keep what another one has, behind one's own."""
        for column, values in other.extras.items():
            self.extras[column].extend(values)
        for name, numbers in other.metrics.items():
            self.metrics[name].extend(numbers)

    def columns(self, count: int) -> dict[str, list[Any]]:
        """The columns with a value for each of `count` completions: the last values, since a function that raised logged twice."""
        return {column: values[-count:] for column, values in list(self.extras.items()) if len(values) >= count}


def _name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a log cannot have the name {shown(name)}: give text")
    name.encode()  # raises for half a character (a lone surrogate), which trackers cannot write
    return name


def served(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as a worker serves it: of its name and its arguments without ways to log, it gives its values and a `Log`.

    Where it does not take the arguments it raises a TrainingError.
    """

    def call(name: str, /, **arguments: Any) -> Any:
        log = Log()
        given = {**arguments, "log_extra": log.log_extra, "log_metric": log.log_metric}
        check_signature(function, given, name)
        values = function(**given)
        return _awaited(values, log) if inspect.isawaitable(values) else (values, log)

    return call


async def _awaited(values: Awaitable[Any], log: Log) -> tuple[Any, Log]:
    return await values, log
