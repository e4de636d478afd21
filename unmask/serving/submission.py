"""What goes to the engines and what comes of it: sequences that were submitted together, their events on the
way from the engines' thread to whoever waits for them, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple, Protocol, TypeVar

from unmask.config.sampler import SamplerConfig
from unmask.errors import UnmaskError
from unmask.generation.frames import Frame, Watched
from unmask.generation.output import Trace
from unmask.generation.remote.protocol import OTHER_WEIGHTS
from unmask.generation.requests import Request

Result = TypeVar("Result")
LONGEST_RETRY = 300  # seconds
MOST_WAITING = 16_384
"""Events that may wait for whoever submitted the sequences: of a reader that is slower than the engine all
would gather in memory."""


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
    """There is no room for a request, probably for `seconds`.

    Attributes:
        retry_after: the seconds that the client is asked to wait.
    """

    status = 429

    def __init__(self, what: str, seconds: float = 0.0):
        self.retry_after = min(max(math.ceil(seconds), 1), LONGEST_RETRY)
        plural = "s" * (self.retry_after > 1)
        super().__init__(what, remedy=f"Try again in {self.retry_after} second{plural}")


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

    def __init__(self, seconds: float):
        what = f"not finished within {seconds:g} seconds, waiting included"
        super().__init__(what, where="timeout", remedy="Ask for less, or try again when fewer wait")


class SlowReaderError(ServiceError):
    """Who asked does not read what comes."""

    status = 408


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


class Submission:
    """Sequences that were submitted together, and their events. The event loop's thread owns it, but for
    `closed`, which others read.

    Attributes:
        model: the name of the model that generates them.
        closed: whether nobody waits for it any more; its sequences are then dropped between steps.
        dropped: the sequences for which nobody waits any more, which are then dropped as well.
        started: when its request came, by `time.monotonic`.
        begun: whether a sequence of it has run. The others then run on the same weights.
        prepared: whether it was prepared with the weights that there are, on which it then runs.
    """

    def __init__(
        self,
        model: str,
        work: Sequence[Work],
        version: str | None,
        timeout: float | None,
        since: float | None,
        on_drop: Callable[[Submission], None],
        *,
        prepared: bool = False,
    ):
        self.model, self.work, self.version = model, work, version
        self.loop = asyncio.get_running_loop()
        self.closed = self.begun = False
        self.prepared = prepared
        self.dropped: frozenset[int] = frozenset()
        self._ended: set[int] = set()  # those whose last event has arrived
        self._on_drop = on_drop
        self._arrived: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        now = self.loop.time()
        since = now if since is None else since
        self.started = monotonic() - (now - since)
        self._timer = None
        if timeout is not None:
            self._timer = self.loop.call_at(since + timeout, self.fail, TimeLimitError(timeout))

    def add(self, event: Event) -> None:
        """An event has arrived."""
        if self.closed or event.index in self.dropped:
            return
        if len(self._arrived) == MOST_WAITING:
            return self.fail(
                SlowReaderError(
                    f"{MOST_WAITING:,} events wait to be read", remedy="Read faster, or without frames"
                )
            )
        self._arrived.append(event)
        if event.trace is not None:
            self._ended.add(event.index)
        self._wake.set()

    @property
    def _finished(self) -> bool:
        """Whether no further event comes."""
        return len(self._ended | self.dropped) == len(self.work)

    @property
    def keeps_weights(self) -> bool:
        """Whether new weights wait until it is finished."""
        return self.begun or self.prepared

    def wants(self, index: int) -> bool:
        """Whether somebody waits for a sequence."""
        return not self.closed and index not in self.dropped

    def drop(self, index: int) -> None:
        """Nobody waits for a sequence any more."""
        self.dropped |= {index}
        self._on_drop(self)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """End with an error, after the events that have arrived."""
        if not self.closed and not self._finished:
            self._error = error
            self.close()

    def close(self) -> None:
        """End: nobody waits for it any more."""
        if not self.closed:
            self.closed = True
            self._wake.set()
            if self._timer is not None:
                self._timer.cancel()
            self._on_drop(self)

    async def ready(self) -> None:
        """Wait for an event, or the end. Raises the error with which it ended."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self._finished or self.closed:
                return
            self._wake.clear()
            await self._wake.wait()

    async def next(self) -> Event | None:
        """The next event; None after the last one. Raises the error with which it ended."""
        await self.ready()
        return self._arrived.popleft() if self._arrived else None


Deliveries = list[tuple[Submission, Event | Exception]]


def hand_over(deliveries: Deliveries) -> None:
    """Give events and errors to their submissions, in the event loop's thread."""
    for submission, found in deliveries:
        submission.add(found) if isinstance(found, Event) else submission.fail(found)


@dataclass(eq=False)
class QueueEntry:
    """A sequence that waits or runs."""

    submission: Submission
    index: int  # in the submission
    watched: Watched | None
    steps_left: int = 0  # at most
    seen: bool = False  # whether its first frame has been made
    alone: bool = False  # whether it runs by itself, as a step with others has failed

    @property
    def work(self) -> Work:
        return self.submission.work[self.index]

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it."""
        return self.submission.wants(self.index)


class Events(AsyncIterator[Event]):
    """The events of a submission, for whoever submitted it. When it is closed, or nobody holds it any more,
    its sequences are dropped; canceling the task that waits for one closes it. A sequence that is dropped
    frees its slot within one step."""

    def __init__(self, submission: Submission):
        self._submission = submission

    async def __anext__(self) -> Event:
        event = None
        try:
            event = await self._submission.next()
        finally:  # also when it is canceled, or has ended with an error
            if event is None:
                self._submission.close()
        if event is None:
            raise StopAsyncIteration
        return event

    async def ready(self) -> None:
        """Wait for the next event, or the end. Raises the error with which it ended."""
        await self._submission.ready()

    def drop(self, index: int) -> None:
        """Drop a sequence. No event of it follows."""
        self._submission.drop(index)

    async def aclose(self) -> None:
        """Drop all sequences."""
        self._submission.close()

    def __del__(self) -> None:
        if not self._submission.closed:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the server
                self._submission.loop.call_soon_threadsafe(self._submission.close)
