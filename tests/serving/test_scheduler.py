"""The scheduler: many at once, each as if alone, in turns, and all of one submission of the same weights."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import chain
from typing import Any

import pytest

import unmask
from tests.errors import raises
from tests.generation.cases import PATTERNS
from tests.helpers import partly_slow
from tests.serving.scheduling import CONFIG, LONG, alone, collect, outline, scheduling, traces, until, works
from tests.serving.servers import Stall
from tests.tiny import float64_lm
from unmask.errors import GenerationError, UnmaskError
from unmask.generation.engine.engine import Engine
from unmask.generation.frames import Frame, replay
from unmask.generation.output import Trace
from unmask.serving.scheduler import Scheduler
from unmask.serving.submission import Event, Events, OtherWeightsError, OverloadedError


@partly_slow("attention, block_size", PATTERNS, 2, 4)
def test_in_company_every_sequence_is_as_alone(attention: str, block_size: int | None) -> None:
    lm = float64_lm(attention=attention, block_size=block_size, eos_bias=0.3, layers=1)
    prompts = ["abc", "f", "abc", "fedcba", "dd", "f", "abc", "be"]
    configs = [
        CONFIG,
        CONFIG.model_copy(update={"max_new_tokens": 12}),
        CONFIG.model_copy(update={"temperature": 0.0, "deterministic": True}),
    ]

    async def run() -> list[list[Trace]]:
        async with scheduling(lm, batch_size=5) as scheduler:
            asked = [
                traces(scheduler.submit("tiny", works(lm, prompts, config), owner=f"{i}"))
                for i, config in enumerate(configs)
            ]
            return await asyncio.gather(*asked)

    for config, found in zip(configs, asyncio.run(run()), strict=True):
        for key, (prompt, trace) in enumerate(zip(prompts, found, strict=True)):
            expected = unmask.generate(lm, [prompt], config, [key]).trace
            if config.deterministic:
                assert [trace] == expected
            assert outline([trace]) == outline(expected or [])


def test_frames_replay_to_the_canvas_and_the_last_comes_with_the_trace() -> None:
    lm = float64_lm(attention="bidirectional")

    async def run() -> list[Event]:
        async with scheduling(lm, batch_size=2) as scheduler:
            return await collect(
                scheduler.submit("tiny", works(lm, ["abc", "f", "dd"], frames=True), owner="a")
            )

    events = asyncio.run(run())
    for index, work in enumerate(works(lm, ["abc", "f", "dd"])):
        frames = [event.frame for event in events if event.index == index]
        [trace] = [event.trace for event in events if event.index == index and event.trace]
        assert all(isinstance(frame, Frame) for frame in frames) and events[-1].trace is not None
        assert len(frames) == 8 and [frame.step for frame in frames if frame] == list(range(1, 9))
        start = work.request.start
        assert replay(work.request.ids, [f for f in frames if f], lm.mask_token_id) == [
            *work.request.ids[:start],
            *trace.canvas,
        ]


def test_owners_take_turns(stalled: threading.Semaphore) -> None:
    lm, order = float64_lm(), []

    async def run() -> None:
        async with scheduling(lm, batch_size=1) as scheduler:

            async def ask(owner: str, count: int, priority: int = 0) -> None:
                async for event in scheduler.submit(
                    "tiny", works(lm, ["abc"] * count), owner=owner, priority=priority
                ):
                    order.append((owner, priority, event.index))

            value = scheduler.metrics.registry.get_sample_value
            tasks = [asyncio.create_task(ask("first", 1))]
            await until(lambda: value("unmask_running_sequences") == 1)
            tasks += [
                asyncio.create_task(ask(*who)) for who in [("greedy", 3), ("modest", 2), ("greedy", 1, 1)]
            ]
            await until(lambda: value("unmask_queue_length") == 6)
            stalled.release(1000)
            await asyncio.gather(*tasks)

    asyncio.run(run())
    turns = [
        ("greedy", 1, 0),
        ("modest", 0, 0),
        ("greedy", 0, 0),
        ("modest", 0, 1),
        ("greedy", 0, 1),
        ("greedy", 0, 2),
    ]
    assert order == [("first", 0, 0), *turns]


def test_a_full_queue_refuses_and_says_when_to_come_back(stalled: threading.Semaphore) -> None:
    lm = float64_lm()

    async def run() -> None:
        async with scheduling(lm, batch_size=1, queue_size=3) as scheduler:
            running = scheduler.submit("tiny", works(lm, ["abc"]), owner="a")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            waiting = scheduler.submit("tiny", works(lm, ["abc"] * 3), owner="a")
            with raises(OverloadedError, where=None) as refused:
                scheduler.submit("tiny", works(lm, ["f"]), owner="b")
            assert refused.value.status == 429 and 1 <= refused.value.retry_after <= 300
            with raises(GenerationError, where="n"):
                scheduler.submit("tiny", works(lm, ["f"] * 4), owner="b")
            await waiting.aclose()  # frees its places at once, though a step is under way
            late = scheduler.submit("tiny", works(lm, ["f"]), owner="b")
            stalled.release(1000)
            assert outline(await traces(running)) == await alone(scheduler, "abc")
            assert outline(await traces(late)) == await alone(scheduler, "f")

    asyncio.run(run())


class Clock:
    """A clock by which every step of an engine takes 3 seconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, step = 0.0, Engine.step

        def counted(engine: Engine) -> Any:
            self.now += 3
            return step(engine)

        patch.setattr(Engine, "step", counted)
        patch.setattr("unmask.serving.scheduler.monotonic", lambda: self.now)


@partly_slow("batch_size", [1, 3], 1)
@pytest.mark.parametrize("sizes", [[12], [24, 8]])
@partly_slow("before", [0, 6], 1)
def test_a_refusal_tells_how_long_what_waits_takes(
    batch_size: int, sizes: list[int], before: int, stalled: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a first step as well as after other sequences, and an hour without any."""
    lm, clock = float64_lm(layers=1), Clock(monkeypatch)

    async def run() -> tuple[int, float]:
        async with scheduling(lm, batch_size=batch_size, queue_size=8) as scheduler:
            value: Any = scheduler.metrics.registry.get_sample_value

            def submit(*numbers: int) -> Events:
                configs = [
                    LONG.model_copy(update={"max_new_tokens": sizes[number % len(sizes)]})
                    for number in numbers
                ]
                return scheduler.submit(
                    "tiny",
                    list(chain.from_iterable(works(lm, ["abc"], config) for config in configs)),
                    owner="a",
                )

            stalled.release(1000)
            for number in range(before):
                await traces(submit(number))
            await scheduler.between_steps(lambda: None)
            clock.now += 3600
            while stalled.acquire(blocking=False):
                pass
            running = submit(*range(batch_size))
            await until(lambda: value("unmask_running_sequences") == batch_size)
            stalled.release(2)
            await until(lambda: not stalled._value)
            waiting = [submit(number) for number in range(8)]
            stalled.release(3)
            await until(lambda: not stalled._value)
            with pytest.raises(OverloadedError) as refused:
                submit(8)
            began = clock.now
            stalled.release(10_000)
            await asyncio.gather(*map(traces, [running, *waiting]))
            return refused.value.retry_after, clock.now - began

    told, took = asyncio.run(run())
    assert took / 2 < told < 1.5 * took, (told, took)


def test_of_a_full_queue_the_latest_of_whoever_has_most_gives_way(stalled: threading.Semaphore) -> None:
    lm = float64_lm()

    async def run() -> None:
        async with scheduling(lm, batch_size=1, queue_size=4) as scheduler:
            running = scheduler.submit("tiny", works(lm, ["abc"]), owner="greedy")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            waiting = [scheduler.submit("tiny", works(lm, ["f"]), owner="greedy") for _ in range(4)]
            modest = [scheduler.submit("tiny", works(lm, ["abc"]), owner="modest") for _ in range(2)]
            with pytest.raises(OverloadedError):  # it has as many as whoever has most
                scheduler.submit("tiny", works(lm, ["abc"]), owner="modest")
            stalled.release(1000)
            for events in (running, *modest):
                assert outline(await traces(events)) == await alone(scheduler, "abc")
            for events in waiting[:2]:
                assert outline(await traces(events)) == await alone(scheduler, "f")
            for events in waiting[2:]:
                with raises(OverloadedError, where=None):
                    await collect(events)

    asyncio.run(run())


def test_all_sequences_of_a_submission_are_of_the_same_weights(stalled: threading.Semaphore) -> None:
    lm = float64_lm()

    async def run() -> None:
        async with scheduling(lm, batch_size=1) as scheduler:
            begun = scheduler.submit("tiny", works(lm, ["abc", "f", "dd"]), owner="a")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            waiting = scheduler.submit("tiny", works(lm, ["abc"]), owner="b")
            loaded = asyncio.create_task(scheduler.replace_weights("tiny", lambda: None, "new"))
            await asyncio.sleep(0)
            stalled.release(1000)
            assert {event.version for event in await collect(begun)} == {None}
            await loaded
            assert {event.version for event in await collect(waiting)} == {"new"}

    asyncio.run(run())


def test_new_weights_enter_when_nothing_runs_and_those_who_wait_get_them(
    stalled: threading.Semaphore,
) -> None:
    lm = float64_lm(attention="bidirectional")
    steps_before: list[int] = []

    async def run() -> None:
        async with scheduling(lm, batch_size=1) as scheduler:
            running = scheduler.submit("tiny", works(lm, ["abc"]), owner="a")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            old = scheduler.submit("tiny", works(lm, ["abc"]), owner="a")
            loaded = asyncio.create_task(
                scheduler.replace_weights(
                    "tiny",
                    lambda: steps_before.append(
                        int(scheduler.metrics.forward_passes.labels("tiny")._value.get())
                    ),
                    "new",
                )
            )
            await asyncio.sleep(0)
            stalled.release(1000)
            await loaded
            assert scheduler.models["tiny"].version == "new" and len(await traces(running)) == 1
            assert len(await traces(old)) == 1  # it named no weights
            with raises(OtherWeightsError, where="version"):
                scheduler.submit("tiny", works(lm, ["abc"]), owner="a", version="old")
            assert (
                len(await traces(scheduler.submit("tiny", works(lm, ["abc"]), owner="a", version="new"))) == 1
            )

            def refuse() -> None:
                raise UnmaskError("of another model")

            with raises(UnmaskError, where=None):
                await scheduler.replace_weights("tiny", refuse, "worse")
            assert scheduler.models["tiny"].version == "new"

    asyncio.run(run())
    assert steps_before == [8]  # those of the first sequence, and none of the one that waited


def test_weights_that_are_replaced_while_a_request_waits_for_its_own_refuse_it(
    stalled: threading.Semaphore,
) -> None:
    lm = float64_lm()

    async def run() -> None:
        async with scheduling(lm, batch_size=1) as scheduler:
            await scheduler.replace_weights("tiny", lambda: None, "1")
            running = scheduler.submit("tiny", works(lm, ["abc"]), owner="a", version="1")
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1)
            waiting = scheduler.submit("tiny", works(lm, ["abc"]), owner="a", version="1")
            loaded = asyncio.create_task(scheduler.replace_weights("tiny", lambda: None, "2"))
            await asyncio.sleep(0)
            stalled.release(1000)
            await loaded
            assert len(await traces(running)) == 1
            with raises(OtherWeightsError, where="version"):
                await collect(waiting)

    asyncio.run(run())


def test_functions_run_one_between_two_steps_and_their_errors_are_the_callers(
    stalled: threading.Semaphore,
) -> None:
    lm, seen = float64_lm(attention="bidirectional"), []

    async def run() -> None:
        async with scheduling(lm, batch_size=1, queue_size=2) as scheduler:
            passes = scheduler.metrics.forward_passes.labels("tiny")._value.get
            running = scheduler.submit("tiny", works(lm, ["abc"]), owner="a")
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


def test_an_idle_engine_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, waits = float64_lm(), []
    wait = Scheduler.wait_for_work
    monkeypatch.setattr(Scheduler, "wait_for_work", lambda self: waits.append(1) or wait(self))

    async def run() -> None:
        async with scheduling(lm) as scheduler:
            await traces(scheduler.submit("tiny", works(lm, ["abc"]), owner="a"))
            await asyncio.sleep(0.02)
            before, began = len(waits), time.thread_time()
            await asyncio.sleep(0.3)
            assert len(waits) == before and time.thread_time() - began < 0.1

    asyncio.run(run())


def test_the_time_to_the_first_frame_counts_from_the_request() -> None:
    """Not from when its prompt has been encoded, and its constraint compiled."""
    lm = float64_lm()

    async def run() -> float:
        async with scheduling(lm) as scheduler:
            since = asyncio.get_running_loop().time() - 100
            await collect(scheduler.submit("tiny", works(lm, ["abc"], frames=True), owner="a", since=since))
            return scheduler.metrics.registry.get_sample_value("unmask_first_frame_seconds_sum") or 0.0

    assert 100 <= asyncio.run(run()) < 200
