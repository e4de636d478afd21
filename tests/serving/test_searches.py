"""Searches for the length of a gap, beside the steps of others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

import unmask
from tests.errors import raises
from tests.serving.openai.asking import answer
from tests.serving.scheduling import collect, scheduling, traces, until, works
from tests.serving.servers import running
from tests.tiny import chat_lm, float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.generation import gap_lengths
from unmask.generation.engine.engine import Engine
from unmask.generation.gap_lengths import find_lengths
from unmask.generation.requests import make_requests
from unmask.serving.limits import RequestLimits
from unmask.serving.openai import plans, routes
from unmask.serving.openai.plans import Context, plan_completion, plan_infill
from unmask.serving.openai.requests import ChatRequest, CompletionRequest, EditRequest, InfillRequest
from unmask.serving.scheduler import Scheduler
from unmask.serving.submission import BetweenSteps, OverloadedError, ReplacedError, StoppedError, Work

CONFIG = SamplerConfig(max_new_tokens=30, stop_at_eos=False)
LM = float64_lm("phi", "bidirectional")
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
            return await scheduler.search("tiny", search, owner="b")

    assert asyncio.run(run()) == alone and passes > 10
    during = "".join(each[0] for each in made).strip("s")
    together = during[: during.rindex("s")]  # a slow event loop begins the search late
    assert "ppp" not in together and during.count("p") == passes and len(together) > 10


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
            task = asyncio.create_task(scheduler.search("tiny", endless, owner="a"))
            await until(inside.is_set)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            go_on.set()
            await until(lambda: ended)
            assert (
                await scheduler.search("tiny", lambda between_steps: between_steps(lambda: "next"), owner="a")
                == "next"
            )

    asyncio.run(run())
    assert isinstance(ended[0], CancelledError)


def test_the_end_of_the_server_ends_searches() -> None:
    def endless(between_steps: BetweenSteps) -> None:
        while True:
            between_steps(lambda: None)

    async def run() -> None:
        async with scheduling(LM) as scheduler:
            task = asyncio.create_task(scheduler.search("tiny", endless, owner="a"))
            await asyncio.sleep(0.02)
            await scheduler.stop(grace=30)
            with raises(StoppedError, where=None):
                await task
            with pytest.raises(StoppedError):
                await scheduler.search("tiny", endless, owner="a")

    asyncio.run(run())


def test_lengths_that_other_weights_found_are_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the weights that found them fill the gap."""
    searches = 0

    async def run() -> None:
        async with scheduling(LM) as scheduler:

            async def searching(model: str, function: Callable[..., Any], *, owner: str) -> Any:
                nonlocal searches
                searches += 1
                if searches == 1:
                    await scheduler.replace_weights("tiny", lambda: None, "new")
                return await Scheduler.search(scheduler, model, function, owner=owner)

            monkeypatch.setattr(scheduler, "search", searching)
            plan = await plan_infill(Context(scheduler, scheduler.models["tiny"], RequestLimits(), "a"), TEXT)
            assert plan.weights == 1 and searches == 2
            await scheduler.replace_weights("tiny", lambda: None, "newest")
            with pytest.raises(ReplacedError):
                scheduler.submit("tiny", plan.work, owner="a", weights=plan.weights)

    asyncio.run(run())


def test_the_weights_that_found_the_lengths_fill_them(stalled: threading.Semaphore) -> None:
    """Though they had no name, and others were sent before a slot was free; what needs none of them gets the
    new ones."""

    async def run() -> None:
        async with scheduling(LM, batch_size=1) as scheduler:
            plan = await plan_infill(Context(scheduler, scheduler.models["tiny"], RequestLimits(), "a"), TEXT)
            others = scheduler.submit("tiny", works(LM, ["abc"]), owner="a")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            waiting = scheduler.submit("tiny", works(LM, ["abc"]), owner="b")
            filling = scheduler.submit("tiny", plan.work, owner="a", weights=plan.weights)
            loading = asyncio.create_task(scheduler.replace_weights("tiny", lambda: None, "new"))
            await asyncio.sleep(0)
            with pytest.raises(ReplacedError):  # what is prepared now would hold them up
                scheduler.submit("tiny", plan.work, owner="a", weights=plan.weights)
            stalled.release(1000)
            assert {event.version for event in await collect(filling)} == {None}
            await loading
            assert {event.version for event in await collect(others)} == {None}
            assert {event.version for event in await collect(waiting)} == {"new"}

    asyncio.run(run())


def test_searches_come_after_new_weights_that_wait(stalled: threading.Semaphore) -> None:
    """Else they would be for the old ones. Those of other models do not wait."""

    async def run() -> list[str]:
        async with scheduling(LM, {"other": float64_lm("phi", "bidirectional")}) as scheduler:
            done: list[str] = []
            running = scheduler.submit("tiny", works(LM, ["abc"]), owner="a")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            loading = asyncio.create_task(
                scheduler.replace_weights("tiny", lambda: done.append("new weights"), "new")
            )
            await asyncio.sleep(0)
            own, other = (
                asyncio.create_task(
                    scheduler.search(
                        name, lambda part, name=name: part(lambda: done.append(name)), owner=name
                    )
                )
                for name in ("tiny", "other")
            )
            while not other.done():
                stalled.release()
                await asyncio.sleep(0)
            stalled.release(1000)
            await asyncio.gather(traces(running), loading, own)
            return done

    assert asyncio.run(run()) == ["other", "new weights", "tiny"]


def test_what_is_replaced_before_it_is_submitted_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = chat_lm()
    text = "def add(<gap>return a + b"

    def load() -> None:
        with torch.no_grad():
            for weight in lm.model.parameters():
                weight += 0.5 * torch.randn(
                    weight.shape, generator=torch.Generator().manual_seed(3), dtype=weight.dtype
                )

    with running(lm) as scheduler:
        infill, versions = routes.plan_infill, list[str | None]()

        async def planned(context: Context, body: InfillRequest) -> plans.RequestPlan:
            plan = await infill(context, body)
            versions.append(context.model.version)
            if len(versions) == 1:
                await scheduler.replace_weights("tiny", load, "new")
            return plan

        monkeypatch.setattr(routes, "plan_infill", planned)
        found = answer(scheduler, "infill", text=text, max_gap=8, seed=1)
    assert versions == [None, "new"] and found["diffusion"]["version"] == "new"
    config = SamplerConfig(seed=1)
    assert (
        found["choices"][0]["text"] == unmask.infill(lm, [text], config, length="search", max_gap=8).texts[0]
    )


def test_a_plan_finds_the_lengths_that_are_found_in_process() -> None:
    async def run() -> Any:
        async with scheduling(LM) as scheduler:
            context = Context(scheduler, scheduler.models["tiny"], RequestLimits(), "a")
            plans = [
                plan_infill(context, TEXT),
                plan_completion(
                    context, CompletionRequest(model="tiny", prompt="abcd", suffix="fedcba", max_tokens=9)
                ),
            ]
            return await asyncio.gather(*plans)

    [found] = find_lengths(LM, ["abcd<gap>fedcba"], CONFIG, 9, "<gap>")
    for plan in asyncio.run(run()):
        assert plan.work[0].request.ids == found.ids


def test_a_full_queue_refuses_before_anything_is_prepared(
    stalled: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: Any, **__: Any) -> Any:
        raise AssertionError("too early")

    for name in ("encode_prompt", "encode_completion", "encode_messages"):
        monkeypatch.setattr(plans, name, prepare)
    message = {"role": "user", "content": "a"}
    region = "<|code_to_edit|>\na\n<|/code_to_edit|>"

    async def run() -> None:
        async with scheduling(LM, batch_size=1, queue_size=1) as scheduler:
            first = scheduler.submit("tiny", works(LM, ["abc"]), owner="a")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            waiting = scheduler.submit("tiny", works(LM, ["abc"]), owner="a")
            monkeypatch.setattr(scheduler, "search", prepare)
            context = Context(scheduler, scheduler.models["tiny"], RequestLimits(), "a")
            for planning in (
                plan_infill(context, TEXT),
                plan_completion(context, CompletionRequest(model="tiny", prompt="abcd", suffix="fedcba")),
                plan_completion(context, CompletionRequest(model="tiny", prompt="abcd")),
                plans.plan_chat(context, ChatRequest(model="tiny", messages=[message])),
                plans.plan_edit(
                    context, EditRequest(model="tiny", messages=[{"role": "user", "content": region}])
                ),
            ):
                with raises(OverloadedError, where=None):
                    await planning
            stalled.release(1000)
            assert len(await traces(first)) == len(await traces(waiting)) == 1

    asyncio.run(run())
