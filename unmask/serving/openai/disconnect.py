"""Work that ends when the client does not wait for it any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

Result = TypeVar("Result")
HEARTBEAT = 15.0  # seconds
WAITING = b": waiting\n\n"


class DisconnectedError(Exception):
    """The client has gone."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work, which is cancelled if the client disconnects. The body of the request has been
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


class EventStream(StreamingResponse):
    """Server-sent events. Their generator is closed as soon as the client disconnects. Whenever none comes
    for a while, a comment says that the server is still there, which clients and proxies would doubt
    otherwise."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]):
        super().__init__(events, headers={"X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(DisconnectedError, OSError):  # nobody reads the rest
                await while_connected(receive, self.stream_response(send))
        finally:
            await self._events.aclose()

    async def stream_response(self, send: Send) -> None:
        one_by_one, silent = asyncio.Lock(), False

        async def say(message: Message) -> None:
            nonlocal silent
            async with one_by_one:
                silent = False
                await send(message)

        async def comment() -> None:
            nonlocal silent
            while True:
                silent = True
                await asyncio.sleep(HEARTBEAT)
                if silent:
                    await say({"type": "http.response.body", "body": WAITING, "more_body": True})

        commenting: asyncio.Task[None] | None = None
        try:
            await say(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            commenting = asyncio.create_task(comment())
            async for event in self._events:
                await say({"type": "http.response.body", "body": event.encode(), "more_body": True})
        finally:
            if commenting is not None:
                commenting.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
