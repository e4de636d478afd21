"""The scheduler: many at once, each as if alone; and whoever leaves, fails or comes too late disturbs nobody."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

import unmask
from tests.generation.tiny_models import every_pattern, tiny
from unmask.config.run import SamplerConfig
from unmask.errors import GenerationError, UnmaskError
from unmask.generation.engine.engine import Engine
from unmask.generation.frames import Frame, replay
from unmask.generation.output import Trace
from unmask.generation.requests import make_requests
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.scheduler import MOST_FAILURES, Scheduler
from unmask.serving.service import Event, OtherWeightsError, OverloadedError, ServiceError, StoppedError, TimeLimitError, Work

CONFIG = SamplerConfig(max_new_tokens=8, temperature=1.0, seed=5, trace=True)
LONG = CONFIG.model_copy(update={"max_new_tokens": 36, "stop_at_eos": False})


@contextlib.asynccontextmanager
async def scheduling(lm: DiffusionLM, **settings: Any) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(lm, "tiny", **settings)
    scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.stop(grace=0)


def works(
    lm: DiffusionLM, prompts: Sequence[Any], config: SamplerConfig = CONFIG, *, frames: bool = False, first_key: int = 0
) -> list[Work]:
    keys = range(first_key, first_key + len(prompts))
    return [Work(request, config, frames) for request in make_requests(lm, prompts, config, list(keys))]


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


async def traces(events: AsyncIterator[Event]) -> list[Trace]:
    """Of each sequence, in order."""
    found = {event.index: event.trace async for event in events if event.trace is not None}
    return [found[index] for index in sorted(found)]


async def alone(scheduler: Scheduler, prompt: str, config: SamplerConfig = CONFIG, key: int = 0) -> list[tuple[list[int], list[int]]]:
    """The tokens and steps of a prompt by itself. A model computes in one thread at a time."""
    found = await scheduler.between_steps(lambda: unmask.generate(scheduler.lm, [prompt], config, [key]))
    return outline(found.trace or [])


def outline(found: Sequence[Trace]) -> list[tuple[list[int], list[int]]]:
    """Tokens and steps; the last bits of log-probabilities depend on the company, but for `deterministic`."""
    return [(trace.canvas, trace.steps) for trace in found]


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Every step of an engine waits for a release."""
    allowed, step = threading.Semaphore(0), Engine.step

    def held(self: Engine) -> Any:
        assert allowed.acquire(timeout=30)
        return step(self)

    monkeypatch.setattr(Engine, "step", held)
    yield allowed
    allowed.release(1000)


@every_pattern
def test_in_company_every_sequence_is_as_alone(attention: str, block_size: int | None) -> None:
    lm = tiny(attention=attention, block_size=block_size, eos_bias=0.3, layers=1)
    prompts = ["abc", "f", "abc", "fedcba", "dd", "f", "abc", "be"]
    configs = [
        CONFIG,
        CONFIG.model_copy(update={"max_new_tokens": 12}),
        CONFIG.model_copy(update={"temperature": 0.0, "deterministic": True}),
    ]

    async def run() -> list[list[Trace]]:
        async with scheduling(lm, batch_size=5) as scheduler:
            asked = [traces(scheduler.submit(works(lm, prompts, config), owner=f"{i}")) for i, config in enumerate(configs)]
            return await asyncio.gather(*asked)

    for config, found in zip(configs, asyncio.run(run()), strict=True):
        for key, (prompt, trace) in enumerate(zip(prompts, found, strict=True)):
            expected = unmask.generate(lm, [prompt], config, [key]).trace
            if config.deterministic:
                assert [trace] == expected
            assert outline([trace]) == outline(expected or [])


def test_frames_replay_to_the_canvas_and_the_last_comes_with_the_trace() -> None:
    lm = tiny(attention="bidirectional")

    async def run() -> list[Event]:
        async with scheduling(lm, batch_size=2) as scheduler:
            return await collect(scheduler.submit(works(lm, ["abc", "f", "dd"], frames=True), owner="a"))

    events = asyncio.run(run())
    for index, work in enumerate(works(lm, ["abc", "f", "dd"])):
        frames = [event.frame for event in events if event.index == index]
        [trace] = [event.trace for event in events if event.index == index and event.trace]
        assert all(isinstance(frame, Frame) for frame in frames) and events[-1].trace is not None
        assert len(frames) == 8 and [frame.step for frame in frames if frame] == list(range(1, 9))
        start = work.request.start
        assert replay(work.request.ids, [f for f in frames if f], lm.mask_token_id) == [*work.request.ids[:start], *trace.canvas]


def test_owners_take_turns(stalled: threading.Semaphore) -> None:
    lm, order = tiny(), []

    async def run() -> None:
        async with scheduling(lm, batch_size=1) as scheduler:

            async def ask(owner: str, count: int, priority: int = 0) -> None:
                async for event in scheduler.submit(works(lm, ["abc"] * count), owner=owner, priority=priority):
                    order.append((owner, priority, event.index))

            value = scheduler.metrics.registry.get_sample_value
            tasks = [asyncio.create_task(ask("first", 1))]
            await until(lambda: value("unmask_running_sequences") == 1)
            tasks += [asyncio.create_task(ask(*who)) for who in [("greedy", 3), ("modest", 2), ("greedy", 1, 1)]]
            await until(lambda: value("unmask_queue_length") == 6)
            stalled.release(1000)
            await asyncio.gather(*tasks)

    asyncio.run(run())
    turns = [("greedy", 1, 0), ("modest", 0, 0), ("greedy", 0, 0), ("modest", 0, 1), ("greedy", 0, 1), ("greedy", 0, 2)]
    assert order == [("first", 0, 0), *turns]


def test_a_full_queue_refuses_and_says_when_to_come_back(stalled: threading.Semaphore) -> None:
    lm = tiny()

    async def run() -> None:
        async with scheduling(lm, batch_size=1, queue_size=3) as scheduler:
            running = scheduler.submit(works(lm, ["abc"]), owner="a")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            waiting = scheduler.submit(works(lm, ["abc"] * 3), owner="a")
            with pytest.raises(OverloadedError, match=r"too many requests wait\. Try again in") as refused:
                scheduler.submit(works(lm, ["f"]), owner="b")
            assert refused.value.status == 429 and 1 <= refused.value.retry_after <= 300
            with pytest.raises(GenerationError, match=r"4 sequences at once, of 3 that may wait.*--queue-size"):
                scheduler.submit(works(lm, ["f"] * 4), owner="b")
            await waiting.aclose()  # frees its places at once, though a step is under way
            late = scheduler.submit(works(lm, ["f"]), owner="b")
            stalled.release(1000)
            assert outline(await traces(running)) == await alone(scheduler, "abc")
            assert outline(await traces(late)) == await alone(scheduler, "f")

    asyncio.run(run())


@pytest.mark.parametrize("how", ["closed", "cancelled", "dropped", "never begun", "expired"])
def test_who_leaves_frees_the_slots_within_a_step(how: str, stalled: threading.Semaphore) -> None:
    lm = tiny(attention="bidirectional")

    async def run() -> None:
        async with scheduling(lm, batch_size=4) as scheduler:
            value = scheduler.metrics.registry.get_sample_value
            events = scheduler.submit(works(lm, ["abc"] * 6, LONG, frames=True), owner="a", timeout=0.5 if how == "expired" else None)
            await until(lambda: value("unmask_running_sequences") == 4)
            if how != "never begun":
                stalled.release()
                await anext(events)
            if how == "closed":
                await events.aclose()
                assert await collect(events) is not None
            elif how == "cancelled":
                task = asyncio.create_task(collect(events))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "expired":
                with pytest.raises(TimeLimitError, match=r"not finished within 0\.5 seconds, waiting included"):
                    await collect(events)
            del events
            gc.collect()
            await asyncio.sleep(0)
            await until(lambda: value("unmask_queue_length") == 0)
            stalled.release()
            await until(lambda: value("unmask_running_sequences") == 0)
            assert value("unmask_sequences_total", {"outcome": "cancelled"}) == 4
            assert not scheduler._open
            stalled.release(1000)
            assert outline(await traces(scheduler.submit(works(lm, ["abc"]), owner="a"))) == await alone(scheduler, "abc")

    asyncio.run(run())


def test_a_step_that_fails_ends_what_ran_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    lm, step = tiny(), Engine.step

    def failing(self: Engine) -> Any:
        if any(each.request.key == 13 for each in [*self.running, *self.waiting]):
            raise RuntimeError("out of memory at the secret prompt's step")
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)

    async def run() -> None:
        async with scheduling(lm, batch_size=4) as scheduler:
            for _ in range(MOST_FAILURES):
                bad = scheduler.submit(works(lm, ["abc"], first_key=13), owner="a")
                with pytest.raises(ServiceError, match=r"the engine failed while this request ran\. Send it again") as failed:
                    await collect(bad)
                assert failed.value.status == 500 and "secret" not in str(failed.value)
            assert not scheduler.healthy
            assert outline(await traces(scheduler.submit(works(lm, ["abc"]), owner="a"))) == await alone(scheduler, "abc")
            assert scheduler.healthy and scheduler.metrics.registry.get_sample_value("unmask_engine_failures_total") == MOST_FAILURES

    asyncio.run(run())
    assert "the engine failed, with 1 sequences" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), GenerationError("the predictions are NaN")], ids=["any", "its own"])
def test_who_fails_in_company_fails_alone(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others start again, and whoever watches them sees no step twice."""
    lm, step, count = tiny(attention="bidirectional"), Engine.step, 0
    prompts, bad = ["abc", "f", "dd", "be", "fedcba"], 2

    def failing(self: Engine) -> Any:
        nonlocal count
        count += 1
        if count > 3 and any(each.request.key == bad for each in [*self.running, *self.waiting]):
            raise error
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)

    async def run() -> None:
        async with scheduling(lm, batch_size=4) as scheduler:
            asked = [scheduler.submit([work], owner="a") for work in works(lm, prompts, frames=True)]
            found = await asyncio.gather(*map(collect, asked), return_exceptions=True)
            for number, (prompt, events) in enumerate(zip(prompts, found, strict=True)):
                if number == bad:
                    assert isinstance(events, GenerationError if isinstance(error, GenerationError) else ServiceError)
                    continue
                assert not isinstance(events, BaseException) and events[-1].trace is not None
                assert outline([events[-1].trace]) == await alone(scheduler, prompt, key=number)
                assert [event.frame.step for event in events if event.frame] == list(range(1, 9))
            assert scheduler.healthy

    asyncio.run(run())


def test_an_error_outside_a_step_is_one_requests_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, submit = tiny(), Engine.submit

    def failing(self: Engine, request: Any, config: SamplerConfig) -> int:
        if request.key == 13:
            raise RuntimeError("no memory for its cache")
        return submit(self, request, config)

    monkeypatch.setattr(Engine, "submit", failing)

    async def run() -> None:
        async with scheduling(lm, batch_size=2) as scheduler:
            good = scheduler.submit(works(lm, ["abc", "f"]), owner="a")
            with pytest.raises(ServiceError, match="the engine failed"):
                await collect(scheduler.submit(works(lm, ["dd"], first_key=13), owner="b"))
            assert outline(await traces(good)) == [*await alone(scheduler, "abc"), *await alone(scheduler, "f", key=1)]

    asyncio.run(run())


def test_without_an_engine_the_server_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    lm, ended = tiny(), threading.Event()

    async def run() -> None:
        async with scheduling(lm, batch_size=2) as scheduler:
            scheduler.on_end = ended.set
            monkeypatch.setattr(Engine, "step", lambda self: 1 / 0)
            monkeypatch.setattr(scheduler, "_make_engine", lambda: 1 / 0)
            with pytest.raises(StoppedError):
                await collect(scheduler.submit(works(lm, ["abc"]), owner="a"))
            await asyncio.to_thread(ended.wait, 30)
            assert not scheduler.healthy

    asyncio.run(run())
    assert "the engine cannot go on" in caplog.text


def test_of_a_full_queue_the_latest_of_whoever_has_most_gives_way(stalled: threading.Semaphore) -> None:
    lm = tiny()

    async def run() -> None:
        async with scheduling(lm, batch_size=1, queue_size=4) as scheduler:
            running = scheduler.submit(works(lm, ["abc"]), owner="greedy")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            waiting = [scheduler.submit(works(lm, ["f"]), owner="greedy") for _ in range(4)]
            modest = [scheduler.submit(works(lm, ["abc"]), owner="modest") for _ in range(2)]
            with pytest.raises(OverloadedError):  # it has as many as whoever has most
                scheduler.submit(works(lm, ["abc"]), owner="modest")
            stalled.release(1000)
            for events in (running, *modest):
                assert outline(await traces(events)) == await alone(scheduler, "abc")
            for events in waiting[:2]:
                assert outline(await traces(events)) == await alone(scheduler, "f")
            for events in waiting[2:]:
                with pytest.raises(OverloadedError, match="too many requests wait"):
                    await collect(events)

    asyncio.run(run())


def test_all_sequences_of_a_submission_are_of_the_same_weights(stalled: threading.Semaphore) -> None:
    lm = tiny()

    async def run() -> None:
        async with scheduling(lm, batch_size=1) as scheduler:
            begun = scheduler.submit(works(lm, ["abc", "f", "dd"]), owner="a")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            waiting = scheduler.submit(works(lm, ["abc"]), owner="b")
            loaded = asyncio.create_task(scheduler.replace_weights(lambda: None, "new"))
            await asyncio.sleep(0)
            stalled.release(1000)
            assert {event.version for event in await collect(begun)} == {None}
            await loaded
            assert {event.version for event in await collect(waiting)} == {"new"}

    asyncio.run(run())


def test_what_the_engine_refuses_ends_its_own_submission_only() -> None:
    lm = tiny(attention="bidirectional")
    other = works(lm, ["abc"])[0]
    unfit = Work(other.request, CONFIG.model_copy(update={"threshold": 0.9}))  # made with other settings

    async def run() -> None:
        async with scheduling(lm, batch_size=4) as scheduler:
            bad, good = scheduler.submit([other, unfit], owner="a"), scheduler.submit(works(lm, ["f"]), owner="b")
            with pytest.raises(GenerationError, match="the request was made with other settings"):
                await collect(bad)
            assert outline(await traces(good)) == await alone(scheduler, "f")

    asyncio.run(run())


def test_new_weights_enter_when_nothing_runs_and_those_who_wait_get_them(stalled: threading.Semaphore) -> None:
    lm = tiny(attention="bidirectional")
    steps_before: list[int] = []

    async def run() -> None:
        async with scheduling(lm, batch_size=1) as scheduler:
            running = scheduler.submit(works(lm, ["abc"]), owner="a")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            old = scheduler.submit(works(lm, ["abc"]), owner="a")
            loaded = asyncio.create_task(
                scheduler.replace_weights(lambda: steps_before.append(int(scheduler.metrics.forward_passes._value.get())), "new")
            )
            await asyncio.sleep(0)
            stalled.release(1000)
            await loaded
            assert scheduler.version == "new" and len(await traces(running)) == 1
            assert len(await traces(old)) == 1  # it named no weights
            with pytest.raises(OtherWeightsError, match=r"version: the weights are 'new', not 'old'\. Send them with POST /v1/weights"):
                scheduler.submit(works(lm, ["abc"]), owner="a", version="old")
            assert len(await traces(scheduler.submit(works(lm, ["abc"]), owner="a", version="new"))) == 1

            def refuse() -> None:
                raise UnmaskError("of another model")

            with pytest.raises(UnmaskError, match="of another model"):
                await scheduler.replace_weights(refuse, "worse")
            assert scheduler.version == "new"

    asyncio.run(run())
    assert steps_before == [8]  # those of the first sequence, and none of the one that waited


def test_weights_that_are_replaced_while_a_request_waits_for_its_own_refuse_it(stalled: threading.Semaphore) -> None:
    lm = tiny()

    async def run() -> None:
        async with scheduling(lm, batch_size=1) as scheduler:
            await scheduler.replace_weights(lambda: None, "1")
            running = scheduler.submit(works(lm, ["abc"]), owner="a", version="1")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            waiting = scheduler.submit(works(lm, ["abc"]), owner="a", version="1")
            loaded = asyncio.create_task(scheduler.replace_weights(lambda: None, "2"))
            await asyncio.sleep(0)
            stalled.release(1000)
            await loaded
            assert len(await traces(running)) == 1
            with pytest.raises(OtherWeightsError, match="the weights are '2', not '1'"):
                await collect(waiting)

    asyncio.run(run())


def test_functions_run_one_between_two_steps_and_their_errors_are_the_callers(stalled: threading.Semaphore) -> None:
    lm, seen = tiny(attention="bidirectional"), []

    async def run() -> None:
        async with scheduling(lm, batch_size=1, queue_size=2) as scheduler:
            passes = scheduler.metrics.forward_passes._value.get
            running = scheduler.submit(works(lm, ["abc"]), owner="a")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)

            def look() -> str:
                assert threading.current_thread().name == "unmask-engine"
                seen.append(passes())
                return "found"

            asked = [asyncio.create_task(scheduler.between_steps(look)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await scheduler.between_steps(look)
            stalled.release(1000)
            assert await asyncio.gather(*asked) == ["found", "found"]
            assert outline(await traces(running)) == await alone(scheduler, "abc")
            with pytest.raises(ZeroDivisionError):
                await scheduler.between_steps(lambda: 1 / 0)
            assert scheduler.healthy

    asyncio.run(run())
    assert seen == [1, 2]


def test_at_the_end_what_was_accepted_finishes() -> None:
    lm = tiny(attention="bidirectional")

    async def run() -> list[Trace]:
        async with scheduling(lm, batch_size=1) as scheduler:
            asked = asyncio.create_task(traces(scheduler.submit(works(lm, ["abc", "f", "dd"]), owner="a")))
            ending = asyncio.create_task(scheduler.stop(grace=30))
            await asyncio.sleep(0)
            with pytest.raises(StoppedError, match="the server is ending") as stopped:
                scheduler.submit(works(lm, ["abc"]), owner="a")
            with pytest.raises(StoppedError, match="the server is ending"):
                await scheduler.replace_weights(lambda: None, "1")
            assert stopped.value.status == 503
            await ending
            return await asked

    assert outline(asyncio.run(run())) == outline(unmask.generate(lm, ["abc", "f", "dd"], CONFIG, [0, 1, 2]).trace or [])


def test_after_the_grace_the_rest_ends_with_an_error(stalled: threading.Semaphore) -> None:
    lm = tiny()

    async def run() -> None:
        scheduler = Scheduler(lm, "tiny", batch_size=1)
        scheduler.start()
        asked = asyncio.create_task(collect(scheduler.submit(works(lm, ["abc"] * 3), owner="a")))
        ending = asyncio.create_task(scheduler.stop(grace=0.01))
        with pytest.raises(StoppedError, match=r"the server ended before this request was finished\. Send it again"):
            await asked
        stalled.release(1000)
        await ending
        assert not scheduler.healthy

    asyncio.run(run())


def test_an_idle_engine_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, waits = tiny(), []
    wait = Scheduler._wait
    monkeypatch.setattr(Scheduler, "_wait", lambda self: waits.append(1) or wait(self))

    async def run() -> None:
        async with scheduling(lm) as scheduler:
            await traces(scheduler.submit(works(lm, ["abc"]), owner="a"))
            await asyncio.sleep(0.02)
            before, began = len(waits), time.thread_time()
            await asyncio.sleep(0.3)
            assert len(waits) == before and time.thread_time() - began < 0.1

    asyncio.run(run())


def test_an_event_loop_that_ends_leaves_the_engine_to_others() -> None:
    """Loops end while their sequences run: the thread goes on for others."""
    lm = tiny()
    scheduler = Scheduler(lm, "tiny", batch_size=2)
    scheduler.start()

    async def leave() -> None:
        scheduler.submit(works(lm, ["abc"], LONG), owner="a")

    async def ask() -> list[Trace]:
        try:
            return await traces(scheduler.submit(works(lm, ["abc"]), owner="a"))
        finally:
            await scheduler.stop(0)

    asyncio.run(leave())
    assert outline(asyncio.run(ask())) == outline(unmask.generate(scheduler.lm, ["abc"], CONFIG, [0]).trace or [])
