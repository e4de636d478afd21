"""`unmask serve`: uvicorn, with limits of connections, which finishes what it has accepted before it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from unmask.errors import ConfigError
from unmask.serving.connections import ConnectionLimits, LimitedConnection
from unmask.serving.scheduler import LAST_STEP

TURNS = 10  # of the event loop, in which it reads what arrived before the end
SECONDS_FOR_ERRORS = 2  # seconds in which errors reach those whose requests the end of the server cut off


class ServedEngine(Protocol):
    """What generates the answers of a server: a scheduler, or processes that have one each.

    Attributes:
        on_end: is called when it ends by itself.
    """

    on_end: Callable[[], None]

    async def stop(self, grace: float = 30.0) -> None:
        """Accept nothing more, and end when what was accepted has finished; after `grace` seconds the rest
        ends with an error."""
        ...


class GracefulServer(uvicorn.Server):
    """On SIGTERM or SIGINT it accepts nothing more, and ends when all that it has accepted is answered; after
    `grace` seconds the rest is answered with an error. It also ends when the engine does."""

    def __init__(
        self, config: uvicorn.Config, engine: ServedEngine, grace: float, on_start: Callable[[], object]
    ):
        super().__init__(config)
        self.engine, self.grace, self.on_start = engine, grace, on_start
        engine.on_end = partial(setattr, self, "should_exit", True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        answering = asyncio.create_task(super().shutdown(sockets))
        await asyncio.wait([answering], timeout=self.grace)
        # not before: requests that are still read or prepared have yet to be submitted
        await self.engine.stop(0)
        await answering


def open_port(host: str, port: int) -> socket.socket:
    """A bound address, which accepts no connections until `make_server`'s server runs; port 0: any free one.
    Raises ConfigError if it cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where TCP is named
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot be bound ({error})", where=f"{host}:{port}", remedy="Choose another --host or --port"
        ) from error
    return listener


def make_server(
    app: ASGIApp,
    engine: ServedEngine,
    *,
    connections: ConnectionLimits | None = None,
    grace: float = 30.0,
    keep_alive: int = 5,
    on_start: Callable[[], object] = lambda: None,
) -> GracefulServer:
    """A server of an application; `run(sockets=[listener])` serves until a signal comes.

    Args:
        grace: seconds in which accepted requests may finish after the signal.
        keep_alive: seconds after which an idle connection is closed.
        on_start: called once, when connections are accepted.
    """
    config = uvicorn.Config(
        app,
        http=partial(LimitedConnection, limits=connections or ConnectionLimits()),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        access_log=False,
        log_level=logging.WARNING,
        server_header=False,
        proxy_headers=False,  # by which clients could take turns under many names
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=int(grace) + LAST_STEP + SECONDS_FOR_ERRORS,
    )
    return GracefulServer(config, engine, grace, on_start)
