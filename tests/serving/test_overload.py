"""Ten times as many clients as there is room for: each is answered as if alone and within the time that the
queue implies, or told when to come back."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect
from collections import Counter
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest

import unmask
from tests.serving.servers import scheduler_of, serving
from tests.tiny import cached_chat_lm, chat_lm
from unmask.config.sampler import SamplerConfig
from unmask.generation.engine.engine import Engine

pytestmark = pytest.mark.slow
SLOTS, QUEUE, STEPS = 2, 8, 32
CLIENTS = 10 * (SLOTS + QUEUE)
MOST_STEPS = STEPS * (math.ceil(QUEUE / SLOTS) + 1)
"""Steps in which an accepted request is answered: whoever is last in the queue enters when all before it have
had their turns."""
PROMPTS = ["a", "bc", "def", "0 1 2", "x = "]
SETTINGS: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}


class Answered(NamedTuple):
    """An answer, and when it was asked for and there."""

    body: dict[str, Any]
    response: httpx.Response
    began: float
    ended: float


async def insist(client: httpx.AsyncClient, number: int, count: int) -> list[Answered]:
    """Ask so many times, one after the other, without the waits that are asked for."""
    found = []
    for turn in range(count):
        body = {
            "model": "tiny",
            "prompt": PROMPTS[(number + turn) % len(PROMPTS)],
            "max_tokens": STEPS,
            "seed": number % 4,
            **SETTINGS,
        }
        began = perf_counter()
        response = await client.post("/v1/completions", json=body)
        found.append(Answered(body, response, began, perf_counter()))
    return found


async def overload(url: str, count: int) -> list[Answered]:
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, verify=False) as client:
        return list(
            chain.from_iterable(
                await asyncio.gather(*(insist(client, number, count) for number in range(CLIENTS)))
            )
        )


def percentile(values: list[int], fraction: float) -> int:
    return sorted(values)[math.ceil(fraction * len(values)) - 1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each step of the engine ended."""
    ends, step = list[float](), Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (step(self), ends.append(perf_counter()))[0])
    return ends


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.nightly)])
def test_ten_times_as_many_clients_as_there_is_room_for(count: int, clock: list[float]) -> None:
    """Times are measured in steps of the engine, which are as slow as the load makes them; what HTTP takes is
    seen in those refused."""
    with serving(chat_lm(), batch_size=SLOTS, queue_size=QUEUE) as (url, server):
        answers = asyncio.run(overload(url, count))
        value: Any = scheduler_of(server).metrics.registry.get_sample_value
        assert value("unmask_running_sequences") == value("unmask_queue_length") == 0
    statuses = Counter(answer.response.status_code for answer in answers)
    assert (
        statuses.keys() == {200, 429}
        and statuses.total() == CLIENTS * count
        and statuses[200] >= SLOTS + QUEUE
    )
    steps: dict[int, list[int]] = {200: [], 429: []}
    for body, response, began, ended in answers:
        steps[response.status_code].append(bisect(clock, ended) - bisect(clock, began))
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
        else:
            config = SamplerConfig(max_new_tokens=STEPS, seed=body["seed"], **SETTINGS)
            assert (
                response.json()["choices"][0]["text"]
                == unmask.generate(cached_chat_lm(), [body["prompt"]], config).texts[0]
            )
    # An answer passes twice through what a refusal passes once: on its way in, and on its way out.
    http = percentile(steps[429], 0.99)
    assert min(steps[200]) >= STEPS and percentile(steps[200], 0.99) <= MOST_STEPS + 2 * http
