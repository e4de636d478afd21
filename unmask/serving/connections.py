"""Connections to the server: a limited number at once, none for clients that are slow on purpose, and no work
for those that have gone."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import h11
from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

Result = TypeVar("Result")
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: %d\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)
LOOK_EVERY = 0.1  # seconds
PROBE_AFTER = 1.0
"""Seconds in which a client that sends nothing more is answered with nothing before the answer, as simple
clients expect."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections, those that are idle included.

    Attributes:
        connections: the most at once.
        head_seconds: in which the head of a request must arrive, from the connection or its first byte on.
        write_bytes, write_seconds: a client that reads fewer bytes of its answer in this time is cut off.
    """

    connections: int = 512
    head_seconds: float = 10.0
    write_bytes: int = 32 * 1024
    write_seconds: float = 30.0


class LimitedConnection(H11Protocol):
    """A connection of uvicorn with limits. It cuts idle ones off between requests itself
    (`timeout_keep_alive`)."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any):
        super().__init__(*args, **options)
        self.limits = limits
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # whatever the client has not read yet pauses writing, also at the end of its answer
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.limits.connections:
            transport.write(FULL % self.timeout_keep_alive)  # in which those are closed that are idle now
            transport.close()
        else:
            self._after("head", self.limits.head_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel("head")
        elif "head" not in self._timers:
            self._after("head", self.limits.head_seconds, self.transport.abort)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. If its request is whole, it may still read the answer, after which
        the connection is closed. Returns whether the connection stays open."""
        if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        self._look_whether_gone()
        self._after("probe", PROBE_AFTER, self._send_nothing)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel("write")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in [*self._timers]:
            self._cancel(name)
        super().connection_lost(exc)

    def _look_whether_gone(self) -> None:
        """Cut off a client that has closed its connection, and not only its half of it."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), 0)
        if poll.poll(0):  # POLLHUP or POLLERR
            self.transport.abort()
        else:
            self._after("look", LOOK_EVERY, self._look_whether_gone)

    def _send_nothing(self) -> None:
        """Send bytes without meaning. The system of a client that has gone answers them with a reset; until
        then both closes look alike. HTTP/1.0 has no such bytes: there the answer itself is what is sent
        first."""
        if self.conn.their_http_version != b"1.1":
            return
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.transport.write(
                self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
            )
        # it is chunked
        elif (
            self.conn.our_state is h11.SEND_BODY
            and self.conn.send_with_data_passthrough(h11.Data(data=b"")) == []
        ):
            self.transport.write(b"0")  # the first digit of the length of the next chunk

    def _expect_reading(self) -> None:
        """Look later how much of what waits now the client has read."""
        check = partial(self._check_reading, self.transport.get_write_buffer_size())
        self._after("write", self.limits.write_seconds, check)

    def _check_reading(self, waiting: int) -> None:
        """Cut off a client that has read too little of the bytes that were waiting."""
        if waiting - self.transport.get_write_buffer_size() < self.limits.write_bytes:
            self.transport.abort()
        else:
            self._expect_reading()

    def _after(self, name: str, seconds: float, function: Callable[[], None]) -> None:
        """Call a function later, in place of an earlier one of this name."""
        self._timers[name] = self.loop.call_later(seconds, function)

    def _cancel(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


class DisconnectedError(Exception):
    """The client has gone."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work, which is canceled if the client disconnects. The body of the request has been
    read.

    Raises:
        DisconnectedError: it has.
    """
    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise DisconnectedError
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
