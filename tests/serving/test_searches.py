"""Searches for the length of a gap, beside the steps of others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest

from tests.generation.tiny_models import tiny
from tests.serving.scheduling import scheduling, until
from unmask.config.run import SamplerConfig
from unmask.generation import gap_lengths
from unmask.generation.engine.engine import Engine
from unmask.generation.gap_lengths import find_lengths
from unmask.generation.requests import make_requests
from unmask.serving.limits import Limits
from unmask.serving.model_service import ModelService
from unmask.serving.openai.plans import Context, plan_completion, plan_infill
from unmask.serving.openai.requests import CompletionRequest, InfillRequest
from unmask.serving.scheduler import Scheduler
from unmask.serving.service import BetweenSteps, OtherWeightsError, StoppedError, Work

CONFIG = SamplerConfig(max_new_tokens=30, stop_at_eos=False)
LM = tiny("phi", "bidirectional")
TEXT = InfillRequest(model="tiny", text="abcd<gap>fedcba", max_gap=9)


def search(between_steps: BetweenSteps) -> Any:
    return find_lengths(LM, ["abcd<gap>fedcba"], CONFIG, 9, "<gap>", between_steps)


def test_others_make_a_step_between_any_two_passes_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    step, look = Engine.step, gap_lengths.view_log_probs
    monkeypatch.setattr(gap_lengths, "TOKENS_PER_PASS", 60)
    monkeypatch.setattr(Engine, "step", lambda self: (made.append("step"), step(self))[1])
    monkeypatch.setattr(gap_lengths, "view_log_probs", lambda *args: (made.append("pass"), look(*args))[1])
    alone = find_lengths(LM, ["abcd<gap>fedcba"], CONFIG, 9, "<gap>")
    passes = len(made)
    made.clear()

    async def run() -> Any:
        async with scheduling(LM, batch_size=2) as scheduler:
            [request] = make_requests(LM, ["abc"], CONFIG)
            events = scheduler.submit("tiny", [Work(request, CONFIG, frames=True)], owner="a")
            await anext(events)
            return await scheduler.search(search, owner="b")

    assert asyncio.run(run()) == alone and passes > 10
    during = "".join(each[0] for each in made).strip("s")
    assert "ppp" not in during.split("ps" * 8)[0] and during.count("p") == passes and during.count("s") >= 20


def test_a_search_that_nobody_waits_for_ends_after_the_pass_that_it_is_in() -> None:
    ended: list[BaseException] = []
    inside, go_on = threading.Event(), threading.Event()

    def endless(between_steps: BetweenSteps) -> None:
        try:
            while True:
                between_steps(lambda: (inside.set(), go_on.wait(30)))
        except BaseException as error:
            ended.append(error)
            raise

    async def run() -> None:
        async with scheduling(LM) as scheduler:
            task = asyncio.create_task(scheduler.search(endless, owner="a"))
            await until(inside.is_set)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            go_on.set()
            await until(lambda: ended)
            assert await scheduler.search(lambda between_steps: between_steps(lambda: "next"), owner="a") == "next"

    asyncio.run(run())
    assert isinstance(ended[0], CancelledError)


def test_the_end_of_the_server_ends_searches() -> None:
    def endless(between_steps: BetweenSteps) -> None:
        while True:
            between_steps(lambda: None)

    async def run() -> None:
        async with scheduling(LM) as scheduler:
            task = asyncio.create_task(scheduler.search(endless, owner="a"))
            await asyncio.sleep(0.02)
            await scheduler.stop(grace=30)
            with pytest.raises(StoppedError, match="the server is ending"):
                await task
            with pytest.raises(StoppedError):
                await scheduler.search(endless, owner="a")

    asyncio.run(run())


def test_lengths_that_other_weights_found_are_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the weights that found them fill the gap."""
    searches = 0

    async def run() -> None:
        async with scheduling(LM) as scheduler:

            async def searching(function: Callable[..., Any], *, owner: str) -> Any:
                nonlocal searches
                searches += 1
                if searches == 1:
                    await scheduler.replace_weights("tiny", lambda: None, "new")
                return await Scheduler.search(scheduler, function, owner=owner)

            monkeypatch.setattr(scheduler, "search", searching)
            plan = await plan_infill(Context(ModelService(scheduler, "tiny"), Limits(), "a"), TEXT)
            assert plan.version == "new" and searches == 2
            await scheduler.replace_weights("tiny", lambda: None, "newest")
            with pytest.raises(OtherWeightsError):
                scheduler.submit("tiny", plan.work, owner="a", version=plan.version)

    asyncio.run(run())


def test_a_plan_finds_the_lengths_that_are_found_in_process() -> None:
    async def run() -> Any:
        async with scheduling(LM) as scheduler:
            context = Context(ModelService(scheduler, "tiny"), Limits(), "a")
            plans = [
                plan_infill(context, TEXT),
                plan_completion(context, CompletionRequest(model="tiny", prompt="abcd", suffix="fedcba", max_tokens=9)),
            ]
            return await asyncio.gather(*plans)

    [found] = find_lengths(LM, ["abcd<gap>fedcba"], CONFIG, 9, "<gap>")
    for plan in asyncio.run(run()):
        assert plan.work[0].request.ids == found.ids
