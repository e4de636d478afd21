"""Choices that are known before their sequences end: they free their slots, and the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.helpers import partly_slow
from tests.tiny import cached_chat_lm, float64_lm
from unmask.generation.engine.engine import Engine
from unmask.serving.app import AppSettings, make_app
from unmask.serving.scheduler import Scheduler

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(autouse=True)
def _slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a while, as of larger models."""
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (time.sleep(0.01), step(self))[1])


@contextlib.asynccontextmanager
async def asking(lm: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Scheduler]]:
    scheduler = Scheduler({"tiny": lm})
    scheduler.start()
    try:
        transport = httpx.ASGITransport(make_app(scheduler, AppSettings()))
        yield httpx.AsyncClient(transport=transport, base_url="http://localhost/v1", timeout=60), scheduler
    finally:
        await scheduler.stop(grace=0)


def ended(scheduler: Scheduler, outcome: str) -> float:
    return (
        scheduler.metrics.registry.get_sample_value(
            "unmask_sequences_total", {"model": "tiny", "outcome": outcome}
        )
        or 0.0
    )


async def until_idle(scheduler: Scheduler) -> None:
    while scheduler.metrics.registry.get_sample_value("unmask_running_sequences"):
        await asyncio.sleep(0.001)


@partly_slow("stream", [False, True], 1)
def test_a_stop_string_in_one_of_two_choices_frees_its_slot(stream: bool) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 30, "temperature": 1.0, "seed": 3, "n": 2}
    body["diffusion"] = {"stop_at_eos": False}

    async def run() -> None:
        async with asking(float64_lm()) as (client, scheduler):
            texts = [
                choice["text"] for choice in (await client.post("/completions", json=body)).json()["choices"]
            ]
            stop = next(texts[0][at : at + 4] for at in range(8) if texts[0][at : at + 4] not in texts[1])
            answer = await client.post("/completions", json={**body, "stop": stop, "stream": stream})
            await until_idle(scheduler)
            assert (ended(scheduler, "canceled"), ended(scheduler, "finished")) == (1, 3)
            if not stream:
                found = answer.json()["choices"]
                assert [each["text"] for each in found] == [texts[0].partition(stop)[0], texts[1]]
                assert [each["finish_reason"] for each in found] == ["stop", "length"]
            else:
                assert answer.text.endswith("data: [DONE]\n\n")

    asyncio.run(run())


@partly_slow("stream", [False, True], 1)
def test_a_finished_single_call_frees_its_slot(stream: bool) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 200,
        "tools": [TOOL],
        "n": 2,
    }
    body |= {
        "parallel_tool_calls": False,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    body["diffusion"] = {
        "constraint": {"regex": CALL.replace("{", r"\{").replace("}", r"\}") + "x*"},
        "stop_at_eos": False,
    }

    async def run() -> httpx.Response:
        async with asking(cached_chat_lm("causal")) as (client, scheduler):
            answer = await client.post("/chat/completions", json=body)
            await until_idle(scheduler)
            assert (ended(scheduler, "canceled"), ended(scheduler, "finished")) == (2, 0)
            return answer

    answer = asyncio.run(run())
    if stream:
        assert (
            answer.text.count('"name": "f"') == 2 and answer.text.count('"finish_reason": "tool_calls"') == 2
        )
    else:
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 1
        assert answer.json()["usage"]["completion_tokens"] < 2 * 200


def test_frames_go_on_to_the_end() -> None:
    body = {
        "model": "tiny",
        "prompt": "abc",
        "max_tokens": 30,
        "stream": True,
        "stop": ["a", "b", "c", "d", "e", "f"],
    }
    body["diffusion"] = {"stream": "frames", "stop_at_eos": False}

    async def run() -> None:
        async with asking(float64_lm()) as (client, scheduler):
            answer = await client.post("/completions", json=body)
            assert ended(scheduler, "finished") == 1 and answer.text.count('"frame": ') == 30

    asyncio.run(run())
