"""Whoever leaves, fails or comes too late disturbs nobody; and how a scheduler ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

import unmask
from tests.errors import raises
from tests.serving.scheduling import CONFIG, LONG, alone, collect, outline, scheduling, traces, until, works
from tests.tiny import float64_lm
from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation.engine.engine import Engine
from unmask.generation.frames import Frame, Watched
from unmask.generation.output import Trace
from unmask.generation.requests import make_infill_requests
from unmask.serving.scheduler import MOST_FAILURES, Scheduler
from unmask.serving.submission import ServiceError, StoppedError, TimeLimitError, Work


@pytest.mark.parametrize("how", ["closed", "canceled", "dropped", "never begun", "expired"])
def test_who_leaves_frees_the_slots_within_a_step(how: str, stalled: threading.Semaphore) -> None:
    lm = float64_lm(attention="bidirectional")

    async def run() -> None:
        async with scheduling(lm, batch_size=4) as scheduler:
            value = scheduler.metrics.registry.get_sample_value
            events = scheduler.submit(
                "tiny",
                works(lm, ["abc"] * 6, LONG, frames=True),
                owner="a",
                timeout=0.5 if how == "expired" else None,
            )
            await until(lambda: value("unmask_running_sequences") == 4)
            if how != "never begun":
                stalled.release()
                await anext(events)
            if how == "closed":
                await events.aclose()
                assert await collect(events) is not None
            elif how == "canceled":
                task = asyncio.create_task(collect(events))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "expired":
                with raises(TimeLimitError, where="timeout"):
                    await collect(events)
            del events
            gc.collect()
            await asyncio.sleep(0)
            await until(lambda: value("unmask_queue_length") == 0)
            stalled.release()
            await until(lambda: value("unmask_running_sequences") == 0)
            assert value("unmask_sequences_total", {"model": "tiny", "outcome": "canceled"}) == 4
            assert not scheduler.open_submissions
            stalled.release(1000)
            assert outline(
                await traces(scheduler.submit("tiny", works(lm, ["abc"]), owner="a"))
            ) == await alone(scheduler, "abc")

    asyncio.run(run())


def test_a_step_that_fails_ends_what_ran_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm, step = float64_lm(), Engine.step

    def failing(self: Engine) -> Any:
        if any(each.request.key == 13 for each in [*self.running, *self.waiting]):
            raise RuntimeError("out of memory at the secret prompt's step")
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)

    async def run() -> None:
        async with scheduling(lm, batch_size=4) as scheduler:
            for _ in range(MOST_FAILURES):
                bad = scheduler.submit("tiny", works(lm, ["abc"], first_key=13), owner="a")
                with raises(ServiceError, where=None) as failed:
                    await collect(bad)
                assert failed.value.status == 500 and "secret" not in str(failed.value)
            assert not scheduler.healthy
            assert outline(
                await traces(scheduler.submit("tiny", works(lm, ["abc"]), owner="a"))
            ) == await alone(scheduler, "abc")
            assert (
                scheduler.healthy
                and scheduler.metrics.registry.get_sample_value(
                    "unmask_engine_failures_total", {"model": "tiny"}
                )
                == MOST_FAILURES
            )

    asyncio.run(run())
    assert "the engine of tiny failed, with 1 sequences" in caplog.text


@pytest.mark.parametrize(
    "error",
    [RuntimeError("out of memory"), GenerationError("the predictions are NaN")],
    ids=["any", "its own"],
)
def test_who_fails_in_company_fails_alone(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others start again, and whoever watches them sees no step twice."""
    lm, step, count = float64_lm(attention="bidirectional"), Engine.step, 0
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
            asked = [scheduler.submit("tiny", [work], owner="a") for work in works(lm, prompts, frames=True)]
            found = await asyncio.gather(*map(collect, asked), return_exceptions=True)
            for number, (prompt, events) in enumerate(zip(prompts, found, strict=True)):
                if number == bad:
                    assert isinstance(
                        events, GenerationError if isinstance(error, GenerationError) else ServiceError
                    )
                    continue
                assert not isinstance(events, BaseException) and events[-1].trace is not None
                assert outline([events[-1].trace]) == await alone(scheduler, prompt, key=number)
                assert [event.frame.step for event in events if event.frame] == list(range(1, 9))
            assert scheduler.healthy

    asyncio.run(run())


def test_what_a_step_finished_is_not_lost_when_another_sequence_cannot_be_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm, look, failed = float64_lm(attention="bidirectional"), Watched.look, threading.Event()
    short = CONFIG.model_copy(update={"stop_at_eos": False})

    def failing(self: Watched, engine: Engine, ticket: int) -> Frame | None:
        frame = look(self, engine, ticket)
        if frame is not None and frame.step == short.max_new_tokens and not failed.is_set():
            failed.set()
            raise RuntimeError("out of memory")
        return frame

    monkeypatch.setattr(Watched, "look", failing)

    async def run() -> None:
        async with scheduling(lm) as scheduler, asyncio.timeout(60):
            both = [*works(lm, ["abc"], short), *works(lm, ["f"], LONG, frames=True, first_key=1)]
            found = outline(await traces(scheduler.submit("tiny", both, owner="a")))
            assert failed.is_set()
            assert found == [*await alone(scheduler, "abc", short), *await alone(scheduler, "f", LONG, key=1)]

    asyncio.run(run())


def test_an_error_outside_a_step_is_one_requests_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, submit = float64_lm(), Engine.submit

    def failing(self: Engine, request: Any, config: SamplerConfig) -> int:
        if request.key == 13:
            raise RuntimeError("no memory for its cache")
        return submit(self, request, config)

    monkeypatch.setattr(Engine, "submit", failing)

    async def run() -> None:
        async with scheduling(lm, batch_size=2) as scheduler:
            good = scheduler.submit("tiny", works(lm, ["abc", "f"]), owner="a")
            with raises(ServiceError, where=None):
                await collect(scheduler.submit("tiny", works(lm, ["dd"], first_key=13), owner="b"))
            assert outline(await traces(good)) == [
                *await alone(scheduler, "abc"),
                *await alone(scheduler, "f", key=1),
            ]

    asyncio.run(run())


def test_without_an_engine_the_server_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm, ended = float64_lm(), threading.Event()

    async def run() -> None:
        async with scheduling(lm, batch_size=2) as scheduler:
            scheduler.on_end = ended.set
            monkeypatch.setattr(Engine, "step", lambda self: 1 / 0)
            monkeypatch.setattr(scheduler.models["tiny"], "make_engine", lambda lm: 1 / 0)
            with pytest.raises(StoppedError):
                await collect(scheduler.submit("tiny", works(lm, ["abc"]), owner="a"))
            await asyncio.to_thread(ended.wait, 30)
            assert not scheduler.healthy

    asyncio.run(run())
    assert "the engine cannot go on" in caplog.text


def test_what_the_engine_refuses_ends_its_own_submission_only() -> None:
    lm = float64_lm(attention="bidirectional")
    other = works(lm, ["abc"])[0]
    unfit = Work(other.request, CONFIG.model_copy(update={"threshold": 0.9}))  # made with other settings

    async def run() -> None:
        async with scheduling(lm, batch_size=4) as scheduler:
            bad, good = (
                scheduler.submit("tiny", [other, unfit], owner="a"),
                scheduler.submit("tiny", works(lm, ["f"]), owner="b"),
            )
            with raises(GenerationError, where="config"):
                await collect(bad)
            assert outline(await traces(good)) == await alone(scheduler, "f")

    asyncio.run(run())


def test_at_the_end_what_was_accepted_finishes() -> None:
    lm = float64_lm(attention="bidirectional")

    async def run() -> list[Trace]:
        async with scheduling(lm, batch_size=1) as scheduler:
            asked = asyncio.create_task(
                traces(scheduler.submit("tiny", works(lm, ["abc", "f", "dd"]), owner="a"))
            )
            ending = asyncio.create_task(scheduler.stop(grace=30))
            await asyncio.sleep(0)
            with raises(StoppedError, where=None) as stopped:
                scheduler.submit("tiny", works(lm, ["abc"]), owner="a")
            with raises(StoppedError, where=None):
                await scheduler.replace_weights("tiny", lambda: None, "1")
            assert stopped.value.status == 503
            await ending
            return await asked

    assert outline(asyncio.run(run())) == outline(
        unmask.generate(lm, ["abc", "f", "dd"], CONFIG, [0, 1, 2]).trace or []
    )


def test_after_the_grace_the_rest_ends_with_an_error(stalled: threading.Semaphore) -> None:
    lm = float64_lm()

    async def run() -> None:
        scheduler = Scheduler({"tiny": lm}, batch_size=1)
        scheduler.start()
        asked = asyncio.create_task(collect(scheduler.submit("tiny", works(lm, ["abc"] * 3), owner="a")))
        ending = asyncio.create_task(scheduler.stop(grace=0.01))
        with raises(StoppedError, where=None):
            await asked
        stalled.release(1000)
        await ending
        assert not scheduler.healthy

    asyncio.run(run())


def test_an_event_loop_that_ends_leaves_the_engine_to_others() -> None:
    """Loops end while their sequences run: the thread goes on for others."""
    lm = float64_lm()
    scheduler = Scheduler({"tiny": lm}, batch_size=2)
    scheduler.start()

    async def leave() -> None:
        scheduler.submit("tiny", works(lm, ["abc"], LONG), owner="a")

    async def ask() -> list[Trace]:
        try:
            return await traces(scheduler.submit("tiny", works(lm, ["abc"]), owner="a"))
        finally:
            await scheduler.stop(0)

    asyncio.run(leave())
    assert outline(asyncio.run(ask())) == outline(
        unmask.generate(scheduler.models["tiny"].lm, ["abc"], CONFIG, [0]).trace or []
    )


def test_nothing_keeps_a_request_that_has_ended() -> None:
    """Nor what was computed for its constraint, which takes a state's byte for each of its tokens."""
    pytest.importorskip("outlines_core")
    lm = float64_lm(attention="bidirectional")
    config = SamplerConfig(constraint=ConstraintConfig(regex="a[a-f]*", over="text"))

    async def run() -> list[weakref.ref[Any]]:
        async with scheduling(lm) as scheduler:
            requests = make_infill_requests(
                lm, [f"a{lm.tokenizer.mask_token}b{lm.tokenizer.mask_token}"] * 2, config
            )
            found = [weakref.ref(gap) for request in requests for gap in request.gaps]
            events = scheduler.submit(
                "tiny", [Work(request, config, frames=True) for request in requests], owner="a"
            )
            del requests
            await collect(events)
            del events
            await until(lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 0)
            await scheduler.between_steps(gc.collect)
            return [each for each in found if each() is not None]

    assert asyncio.run(run()) == []
