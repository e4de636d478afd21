"""Asks the routes of a service in the process of the tests, without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx

from tests.serving.in_process import StepService, make_app
from unmask.serving.limits import Limits


async def post(app: Any, path: str, body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, headers={"content-type": "application/json"})


def ask(service: StepService, path: str, limits: Limits | None = None, /, **body: Any) -> httpx.Response:
    """The answer to one request; the model need not be named."""
    return asyncio.run(post(make_app(service, limits), path, {"model": service.name, **body}))


def answer(service: StepService, path: str, /, **body: Any) -> Any:
    """The answer to a request that is not refused."""
    response = ask(service, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks_of(response: httpx.Response) -> list[Any]:
    """The chunks of a stream."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"), response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def stream(service: StepService, path: str, /, **body: Any) -> list[Any]:
    """The chunks of the answer to a request."""
    return chunks_of(ask(service, path, stream=True, **body))
