"""The workers of a server, as whoever sends them requests sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2 as httpx

from unmask.serving.submission import ServiceError

LONGEST_ANSWER = 30.0
"""Seconds in which the event loop of a worker answers a question about itself, at any load."""


class NoWorkerError(ServiceError):
    """No worker can take a request now."""

    status = 503


class LostWorkerError(ServiceError):
    """The worker that computed an answer ended."""

    status = 502


@dataclass(eq=False)
class Worker:
    """A worker. Its process may end, and another one take its place.

    Attributes:
        number: counts from 0.
        client: of the present process; None: it is not ready yet, or has ended.
        live: whether it may have requests.
        starts: how many processes have been ready.
        in_flight: requests that it has.
        end: ends its process.
    """

    number: int
    client: httpx.AsyncClient | None = None
    live: bool = False
    starts: int = 0
    in_flight: int = 0
    end: Callable[[], None] = lambda: None
    last: int = 0  # when it had a request, of all that were sent

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count one more request in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def join(self, socket: str) -> None:
        """A process is ready, and listens on this Unix socket."""
        self.client, self.starts = client_of(socket), self.starts + 1

    async def leave(self) -> None:
        """Its process has ended."""
        client, self.client, self.live = self.client, None, False
        if client is not None:
            await client.aclose()

    async def ask(
        self, method: str, path: str, *, timeout: float | None = LONGEST_ANSWER, **content: object
    ) -> httpx.Response | None:
        """The answer to a question about the worker itself; None: its process has ended, or does not answer
        in time."""
        if self.client is None:
            return None
        try:
            asked = self.client.request(method, path, timeout=timeout, **content)  # type: ignore[arg-type]
            return await asked
        except (httpx.TransportError, RuntimeError):  # the latter of a client that is closed
            return None


class Pool:
    """All workers of a server.

    Attributes:
        stopping: whether the server ends.
        start_seconds: how long the start of a worker took last.
    """

    def __init__(self, count: int):
        self.workers = tuple(Worker(number) for number in range(count))
        self.stopping = False
        self.start_seconds = 0.0
        self._sent = itertools.count(1)

    @property
    def live(self) -> list[Worker]:
        """The workers that may have requests."""
        return [worker for worker in self.workers if worker.live]

    @property
    def in_flight(self) -> int:
        """Requests that the workers have."""
        return sum(worker.in_flight for worker in self.workers)

    def by_load(self) -> Iterator[Worker]:
        """The workers that may have a request: first the one that has fewest, of several the one that has
        been idle for longest."""
        for worker in sorted(self.live, key=lambda worker: (worker.in_flight, worker.last)):
            if worker.live:  # still
                worker.last = next(self._sent)
                yield worker


def client_of(socket: str) -> httpx.AsyncClient:
    """A client of a Unix socket. Each request has a connection of its own, as one that is kept might be
    closed meanwhile."""
    transport = httpx.AsyncHTTPTransport(
        uds=socket, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
    )
    return httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=httpx.Timeout(None, connect=LONGEST_ANSWER)
    )
