"""Streams that are silent for a while, and readers that are slower than the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx2 as httpx
import pytest
from starlette.types import Message

from tests.errors import raises
from tests.serving.scheduling import scheduling
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.generation.engine.engine import Engine
from unmask.generation.requests import make_requests
from unmask.serving import submission
from unmask.serving.app import AppSettings, make_app
from unmask.serving.openai import answers, routes
from unmask.serving.openai.answers import EventStream
from unmask.serving.submission import SlowReaderError, Work

SCOPE: dict[str, Any] = {"type": "http"}


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (answers, routes):
        monkeypatch.setattr(module, "HEARTBEAT", 0.05)


def test_a_silent_stream_says_that_it_waits_and_nothing_after_its_end() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        resume = asyncio.Event()

        async def events() -> AsyncGenerator[str, None]:
            yield "data: 1\n\n"
            await resume.wait()
            yield "data: 2\n\n"

        answer = asyncio.create_task(EventStream(events())(SCOPE, never, send))
        while sum(b"waiting" in message.get("body", b"") for message in sent) < 2:
            await asyncio.sleep(0.001)
        resume.set()
        await answer
        await asyncio.sleep(0.15)

    asyncio.run(run())
    assert sent[0]["type"] == "http.response.start" and sent[-1] == {
        "type": "http.response.body",
        "body": b"",
        "more_body": False,
    }
    bodies = [message["body"] for message in sent[1:-1]]
    assert (
        bodies[0] == b"data: 1\n\n"
        and bodies[-1] == b"data: 2\n\n"
        and set(bodies[1:-1]) == {b": waiting\n\n"}
    )


def test_a_reader_that_is_slower_than_the_engine_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "MOST_WAITING", 10)
    config = SamplerConfig(max_new_tokens=30, stop_at_eos=False)

    async def run() -> None:
        async with scheduling(float64_lm()) as scheduler:
            [request] = make_requests(scheduler.models["tiny"].lm, ["abc"], config)
            events = scheduler.submit("tiny", [Work(request, config, frames=True)], owner="a")
            value = scheduler.metrics.registry.get_sample_value
            while not any(
                value("unmask_sequences_total", {"model": "tiny", "outcome": outcome})
                for outcome in ("canceled", "finished")
            ):
                await asyncio.sleep(0.001)
            with raises(SlowReaderError, where=None):
                async for _ in events:
                    pass
            assert not scheduler.open_submissions

    asyncio.run(run())


def test_a_stream_that_waits_in_the_queue_begins_and_a_refusal_is_then_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that comes at once has its status."""
    release, step = threading.Event(), Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (release.wait(30), step(self))[1])
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "stream": True}

    async def run() -> None:
        async with scheduling(float64_lm()) as scheduler:
            transport = httpx.ASGITransport(make_app(scheduler, AppSettings()))
            client = httpx.AsyncClient(transport=transport, base_url="http://localhost/v1", timeout=60)
            soon = await client.post("/completions", json={**body, "diffusion": {"timeout": 0.01}})
            assert soon.status_code == 504
            late = await client.post("/completions", json={**body, "diffusion": {"timeout": 0.2}})
            assert (
                late.status_code == 200
                and late.text.startswith(": waiting\n\n")
                and '"type": "server_error"' in late.text
            )
            release.set()

    asyncio.run(run())
