"""What goes to the engine and what comes of it: sequences, their steps and traces, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from unmask.config.run import SamplerConfig
from unmask.errors import UnmaskError
from unmask.generation.frames import Frame
from unmask.generation.output import Trace
from unmask.generation.remote.protocol import OTHER_WEIGHTS
from unmask.generation.requests import Request

Result = TypeVar("Result")
LONGEST_RETRY = 300  # seconds


class BetweenSteps(Protocol):
    """Runs a function where the engine runs, between two of its steps."""

    def __call__(self, part: Callable[[], Result], /) -> Result: ...


class ServiceError(UnmaskError):
    """A request that the server does not answer.

    Attributes:
        status: of HTTP.
    """

    status = 500


class OverloadedError(ServiceError):
    """The queue is full.

    Attributes:
        retry_after: seconds after which there is probably room.
    """

    status = 429

    def __init__(
        self, what: str, *, where: str | None = None, remedy: str | None = None, retry_after: int = 1
    ):
        super().__init__(what, where=where, remedy=remedy)
        self.retry_after = retry_after


def overloaded_error(what: str, seconds: float) -> OverloadedError:
    """The error of a request for which there is no room until about so many seconds are over."""
    retry = min(max(math.ceil(seconds), 1), LONGEST_RETRY)
    return OverloadedError(what, remedy=f"Try again in {retry} second{'s' * (retry > 1)}", retry_after=retry)


class OtherWeightsError(ServiceError):
    """A request names weights that the server does not hold."""

    status = OTHER_WEIGHTS


class ReplacedError(ServiceError):
    """The weights with which a request was prepared have been replaced, or are about to be: it has to be
    prepared again."""

    status = OTHER_WEIGHTS


class TimeLimitError(ServiceError):
    """A request was not finished in its time, waiting included."""

    status = 504


class SlowReaderError(ServiceError):
    """Who asked does not read what comes."""

    status = 408


def time_limit_error(seconds: float) -> TimeLimitError:
    """The error of a request that took so long."""
    what = f"not finished within {seconds:g} seconds, waiting included"
    return TimeLimitError(what, where="timeout", remedy="Ask for less, or try again when fewer wait")


class StoppedError(ServiceError):
    """The server is ending."""

    status = 503


def ending_error() -> StoppedError:
    """The error of a request that comes too late."""
    return StoppedError("the server is ending", remedy="Send it again, to another one or later")


def cut_off_error() -> StoppedError:
    """The error of a request that was accepted, and has had its time at the end of the server."""
    return StoppedError("the server ended before this request was finished", remedy="Send it again")


@dataclass(frozen=True)
class Work:
    """A sequence to generate."""

    request: Request
    config: SamplerConfig
    frames: bool = False  # whether every step is looked at, else only the end


class Event(NamedTuple):
    """A step of a sequence, or its end."""

    index: int  # type: ignore[assignment]  # of the sequence in what was submitted
    frame: Frame | None  # set only with Work.frames
    trace: Trace | None  # set once for each sequence, at its end
    version: str | None = None  # of the weights that generate all sequences that were submitted with it
