"""Sequences that were submitted together: their events on the way from the engine's thread to whoever waits
for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from unmask.generation.frames import Watched
from unmask.serving.service import Event, SlowReaderError, Work, time_limit_error

MOST_WAITING = 16_384
"""Events that may wait for whoever submitted the sequences: of a reader that is slower than the engine all
would gather in memory."""


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
        self._timer = None if timeout is None else self.loop.call_at(since + timeout, self._expire, timeout)

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

    def _expire(self, timeout: float) -> None:
        self.fail(time_limit_error(timeout))


Deliveries = list[tuple[Submission, Event | Exception]]


def hand_over(deliveries: Deliveries) -> None:
    """Give events and errors to their submissions, in the event loop's thread."""
    for submission, found in deliveries:
        submission.add(found) if isinstance(found, Event) else submission.fail(found)


@dataclass(eq=False)
class Entry:
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
    its sequences are dropped; cancelling the task that waits for one closes it. A sequence that is dropped
    frees its slot within one step."""

    def __init__(self, submission: Submission):
        self._submission = submission

    async def __anext__(self) -> Event:
        event = None
        try:
            event = await self._submission.next()
        finally:  # also when it is cancelled, or has ended with an error
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
