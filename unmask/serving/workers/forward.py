"""ASGI: hands requests to the workers, and their answers back."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx2 as httpx
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from unmask.serving.connections import DisconnectedError, while_connected
from unmask.serving.errors import error_body, error_response
from unmask.serving.metrics import COUNTED
from unmask.serving.submission import ServiceError, cut_off_error, ending_error
from unmask.serving.workers.pool import LostWorkerError, NoWorkerError, Pool, Worker

OWNER = "x-unmask-owner"
"""The header of every request of a client, by which a worker learns whose it is. What the server itself asks
has none."""
EVENTS = "text/event-stream"
CONNECTION_HEADERS = ("connection", "content-length", "date", "keep-alive", "transfer-encoding")
"""Headers of an answer that the connection to the client sets itself."""
SOONEST_RETRY = 5  # seconds


class Forward:
    """ASGI: a request goes to the worker that has fewest. Its body has been read before (`BodyLimits`). When
    the client leaves, the connection to the worker is closed, which frees its slots there. A worker that is
    lost in the middle of an answer may have been lost because of the request, which is not sent to another
    one."""

    def __init__(self, pool: Pool):
        self.pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        with suppress(DisconnectedError):
            await while_connected(receive, self._answer(scope, body, send))

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        if self.pool.stopping:
            return await _fail(send, ending_error())
        for worker in self.pool.by_load():
            with worker.busy():
                if await self._ask(worker, scope, body, send):
                    return
        if self.pool.stopping:
            return await _fail(send, ending_error())
        seconds = max(math.ceil(self.pool.start_seconds), SOONEST_RETRY)
        await _fail(
            send,
            NoWorkerError("no worker is ready", remedy=f"Try again in {seconds} seconds"),
            retry_after=seconds,
        )

    async def _ask(self, worker: Worker, scope: Scope, body: bytes, send: Send) -> bool:
        """Whether a worker could be asked. If so, its answer or an error has been sent."""
        assert worker.client is not None
        request = worker.client.build_request(scope["method"], "/", headers=_headers(scope), content=body)
        query = scope["query_string"]
        request.extensions["target"] = scope["raw_path"] + (b"?" + query if query else b"")  # as it came
        begun, scope[COUNTED] = False, True  # by the worker, those who leave included
        try:
            answer = await worker.client.send(request, stream=True)
            try:
                if not answer.headers.get("content-type", "").startswith(EVENTS):
                    content = await answer.aread()  # all of it before the status, which a lost worker changes
                    await _send_whole(send, answer, content)
                    return True
                await send(_start(answer))
                begun = True
                async for events in whole_events(answer):
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                await answer.aclose()
        except (httpx.ConnectError, httpx.ConnectTimeout):
            scope[COUNTED] = False
            return False
        except httpx.TransportError:
            scope[COUNTED] = False
            await _fail(send, self._lost(), begun=begun)
        return True

    def _lost(self) -> ServiceError:
        if self.pool.stopping:
            return cut_off_error()
        return LostWorkerError("the worker that computed this answer ended", remedy="Send it again")


async def whole_events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The events of a stream as they arrive. Of an event that was cut off nothing is sent, so that an error
    can follow."""
    rest = b""
    async for part in answer.aiter_raw():
        events, mark, rest = (rest + part).rpartition(b"\n\n")
        if mark:
            yield events + mark


def _headers(scope: Scope) -> dict[str, str]:
    """What a worker needs to know of a request beside its body. Nothing else that a client sends reaches
    it."""
    client, content_type = scope.get("client"), Headers(scope=scope).get("content-type")
    owner = scope.get("state", {}).get("owner") or (client[0] if client else "")
    return {OWNER: owner} | ({"content-type": content_type} if content_type else {})


def _start(answer: httpx.Response, **more: str) -> dict[str, Any]:
    headers = [
        (name.lower(), value)
        for name, value in answer.headers.raw
        if name.lower().decode() not in CONNECTION_HEADERS
    ]
    headers += [(name.encode(), value.encode()) for name, value in more.items()]
    return {"type": "http.response.start", "status": answer.status_code, "headers": headers}


async def _send_whole(send: Send, answer: httpx.Response, content: bytes) -> None:
    await send(_start(answer, **{"content-length": str(len(content))}))
    await send({"type": "http.response.body", "body": content})


async def _fail(
    send: Send, error: ServiceError, *, begun: bool = False, retry_after: int | None = None
) -> None:
    """Answer with an error; `begun`: as the last event of a stream."""
    if begun:
        event = f"data: {json.dumps(error_body(str(error), error.status))}\n\n"
        await send({"type": "http.response.body", "body": event.encode()})
    else:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        answer = error_response(str(error), error.status, **headers)
        await send(
            {"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers}
        )
        await send({"type": "http.response.body", "body": answer.body})
