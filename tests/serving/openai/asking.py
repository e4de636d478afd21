"""Asks the application of a scheduler in the process of the tests, without a socket."""

from __future__ import annotations

import asyncio
import json
from functools import lru_cache
from typing import Any

import httpx2 as httpx
from starlette.types import ASGIApp

from unmask.serving.app import AppSettings, make_app
from unmask.serving.limits import RequestLimits
from unmask.serving.scheduler import Scheduler


@lru_cache(maxsize=8)
def app_of(scheduler: Scheduler, limits: RequestLimits | None = None) -> ASGIApp:
    """The application of a scheduler that runs."""
    return make_app(scheduler, AppSettings(limits or RequestLimits()))


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    """A client of an application."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost/v1")


async def post(app: ASGIApp, path: str, body: Any, kind: str | None = "application/json") -> httpx.Response:
    async with client_of(app) as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, headers={"content-type": kind} if kind else {})


def get(scheduler: Scheduler, path: str) -> httpx.Response:
    """The answer to a request without a body."""

    async def ask() -> httpx.Response:
        async with client_of(app_of(scheduler)) as client:
            return await client.get(f"http://localhost{path}")

    return asyncio.run(ask())


def ask(
    scheduler: Scheduler, path: str, limits: RequestLimits | None = None, /, **body: Any
) -> httpx.Response:
    """The answer to one request; the model need not be named."""
    return asyncio.run(post(app_of(scheduler, limits), path, {"model": next(iter(scheduler.models)), **body}))


def answer(scheduler: Scheduler, path: str, /, **body: Any) -> Any:
    """The answer to a request that is not refused."""
    response = ask(scheduler, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks_of(response: httpx.Response) -> list[Any]:
    """The chunks of a stream."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"), (
        response.text
    )
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def stream(scheduler: Scheduler, path: str, /, **body: Any) -> list[Any]:
    """The chunks of the answer to a request."""
    return chunks_of(ask(scheduler, path, stream=True, **body))


def idle(scheduler: Scheduler) -> bool:
    """Whether nothing runs or waits, once the step that is under way has ended."""
    asyncio.run(scheduler.between_steps(lambda: None))
    value = scheduler.metrics.registry.get_sample_value
    return value("unmask_running_sequences") == value("unmask_queue_length") == 0
