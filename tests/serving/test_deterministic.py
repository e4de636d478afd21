"""A server that computes every sequence separately."""

from __future__ import annotations

import asyncio

import httpx2 as httpx
import pytest

import unmask
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.generation.output import Trace
from unmask.generation.requests import make_requests
from unmask.serving.app import AppSettings, make_app
from unmask.serving.scheduler import Scheduler
from unmask.serving.submission import Work

CONFIG = SamplerConfig(max_new_tokens=8, temperature=1.0, seed=5, trace=True)
PROMPTS = ["abc", "f", "fedcba", "dd"]


def test_it_gives_the_last_bits_of_a_sequence_alone() -> None:
    lm = float64_lm(attention="block_causal", block_size=4)

    async def run() -> list[Trace]:
        scheduler = Scheduler({"tiny": lm}, batch_size=4, deterministic=True)
        scheduler.start()
        work = [Work(request, CONFIG) for request in make_requests(lm, PROMPTS, CONFIG)]
        found = {event.index: event.trace async for event in scheduler.submit("tiny", work, owner="a")}
        await scheduler.stop(0)
        return [trace for _, trace in sorted(found.items()) if trace is not None]

    exact = CONFIG.model_copy(update={"deterministic": True})
    assert asyncio.run(run()) == [(unmask.generate(lm, [prompt], exact).trace or [])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "name, value", [("deterministic", True), ("batch_size", 4), ("max_batch_tokens", 100)]
)
def test_a_client_that_asks_for_it_learns_whose_it_is(name: str, value: object) -> None:
    async def run() -> httpx.Response:
        app = make_app(Scheduler({"tiny": float64_lm()}), AppSettings())
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost/v1"
        ) as client:
            return await client.post(
                "/completions", json={"model": "tiny", "prompt": "abc", "diffusion": {name: value}}
            )

    refused = asyncio.run(run())
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == f"diffusion.{name}"
    assert error["message"] == f"diffusion.{name} is not supported: it is a setting of the server"
