"""Work that ends when the client does not wait for it any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


class DisconnectedError(Exception):
    """The client has gone."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work, which is cancelled if the client disconnects. The body of the request has been read.

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
    """Server-sent events. Their generator is closed as soon as the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]):
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(DisconnectedError, OSError):  # nobody reads the rest
                await while_connected(receive, self.stream_response(send))
        finally:
            await self._events.aclose()
