"""What the routes need of the engine: requests go in, frames and traces come out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from unmask.config.run import SamplerConfig
from unmask.errors import UnmaskError
from unmask.generation.frames import Frame
from unmask.generation.output import Trace
from unmask.generation.remote.protocol import OTHER_WEIGHTS
from unmask.generation.requests import Request
from unmask.models.diffusion_lm import DiffusionLM

Result = TypeVar("Result")


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

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None, retry_after: int = 1):
        super().__init__(what, where=where, remedy=remedy)
        self.retry_after = retry_after


class OtherWeightsError(ServiceError):
    """A request names weights that the server does not hold."""

    status = OTHER_WEIGHTS


class ReplacedError(ServiceError):
    """The weights with which a request was prepared have been replaced, or are about to be: it has to be prepared again."""

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


class Events(Protocol):
    """The events of what was submitted together. Cancelling the task that waits for one frees all slots within one step."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def ready(self) -> None:
        """Wait for the next event, or the end. Raises the error with which it ended."""
        ...

    def drop(self, index: int) -> None:
        """Drop a sequence, which frees its slot within one step. No event of it follows."""
        ...

    async def aclose(self) -> None:
        """Drop all sequences, which frees their slots within one step."""
        ...


class Service(Protocol):
    """A model that generates for many at once."""

    @property
    def lm(self) -> DiffusionLM: ...

    @property
    def name(self) -> str:
        """Of the model, as clients give it."""
        ...

    @property
    def parent(self) -> str | None:
        """The name of the model whose weights it shares, of which it is adapters; None: its weights are its own."""
        ...

    @property
    def version(self) -> str | None:
        """Of its weights, as a client named them; None: the first ones."""
        ...

    @property
    def weights(self) -> int:
        """How often its weights have been replaced."""
        ...

    def check_version(self, version: str | None) -> None:
        """Raise OtherWeightsError if the weights have another name than this one."""
        ...

    def check_room(self, count: int, owner: str) -> None:
        """Raise what `submit` would raise for so many sequences of an owner, before they are prepared: OverloadedError, GenerationError for
        more than may wait at all, or StoppedError."""
        ...

    def submit(
        self,
        work: Sequence[Work],
        *,
        owner: str,
        priority: int = 0,
        timeout: float | None = None,
        since: float | None = None,
        version: str | None = None,
        weights: int | None = None,
    ) -> Events:
        """Generate sequences.

        Args:
            owner: whose queue they wait in; owners take turns.
            priority: higher ones of an owner go first.
            timeout: seconds, waiting included.
            since: when they began, by the clock of the event loop; None: now.
            version: the weights to sample from; None: any.
            weights: those with which the work was prepared, by the number of replacements before them. They are kept until it is finished.
                None: any.

        Raises:
            OverloadedError: the queue is full (429).
            OtherWeightsError: the weights have another name (409).
            ReplacedError: the work was prepared with other weights, or new ones wait to be loaded.
            GenerationError: the model cannot do what is asked (400).
            TimeLimitError: the time is over (504).
            StoppedError: the server is ending (503).
        """
        ...

    async def aside(self, function: Callable[[], Result], *, owner: str) -> Result:
        """Run a function that takes long and needs no model, such as one that compiles a constraint, in a thread of its own, one at a time
        of each owner. Errors as it raises, OverloadedError and StoppedError."""
        ...

    async def search(self, function: Callable[[BetweenSteps], Result], *, owner: str) -> Result:
        """Run a function that uses the model again and again, such as the search for the length of a gap, as `aside` runs one.

        Args:
            function: hands what needs the model, a short part at a time, to its argument. That raises CancelledError once nobody waits for
                the result.
        """
        ...
