"""Submissions to a scheduler without a server, and what comes of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import unmask
from unmask.config.sampler import SamplerConfig
from unmask.generation.output import Trace
from unmask.generation.requests import make_requests
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.scheduler import Scheduler
from unmask.serving.submission import Event, Work

CONFIG = SamplerConfig(max_new_tokens=8, temperature=1.0, seed=5, trace=True)
LONG = CONFIG.model_copy(update={"max_new_tokens": 36, "stop_at_eos": False})


@contextlib.asynccontextmanager
async def scheduling(
    lm: DiffusionLM, more: Mapping[str, DiffusionLM] | None = None, **settings: Any
) -> AsyncIterator[Scheduler]:
    """A scheduler of this model, as `tiny`, and perhaps more."""
    scheduler = Scheduler({"tiny": lm, **(more or {})}, **settings)
    scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.stop(grace=0)


def works(
    lm: DiffusionLM,
    prompts: Sequence[Any],
    config: SamplerConfig = CONFIG,
    *,
    frames: bool = False,
    first_key: int = 0,
) -> list[Work]:
    keys = range(first_key, first_key + len(prompts))
    return [Work(request, config, frames) for request in make_requests(lm, prompts, config, list(keys))]


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


async def traces(events: AsyncIterator[Event]) -> list[Trace]:
    """Of each sequence, in order."""
    found = {event.index: event.trace async for event in events if event.trace is not None}
    return [found[index] for index in sorted(found)]


async def alone(
    scheduler: Scheduler, prompt: str, config: SamplerConfig = CONFIG, key: int = 0, *, model: str = "tiny"
) -> list[tuple[list[int], list[int]]]:
    """The tokens and steps of a prompt by itself. A model computes in one thread at a time."""
    found = await scheduler.between_steps(
        lambda: unmask.generate(scheduler.models[model].lm, [prompt], config, [key])
    )
    return outline(found.trace or [])


def outline(found: Sequence[Trace]) -> list[tuple[list[int], list[int]]]:
    """Tokens and steps; the last bits of log-probabilities depend on the company, but for `deterministic`."""
    return [(trace.canvas, trace.steps) for trace in found]


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
