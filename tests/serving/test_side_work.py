"""Work beside the engine: owners take turns, and who leaves or ends waits for none."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from tests.serving.scheduling import until
from unmask.serving.service import OverloadedError, StoppedError
from unmask.serving.side_work import SideWork


class Held:
    """Functions that run until they are released."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.release = threading.Semaphore(0)

    def function(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self.release.acquire(timeout=30)
            return name

        return run


def test_owners_take_turns_one_at_a_time_of_each() -> None:
    held = Held()

    async def run() -> None:
        work = SideWork(at_once=2, waiting=8)
        names = [
            ("greedy", "g1"),
            ("greedy", "g2"),
            ("greedy", "g3"),
            ("modest", "m1"),
            ("late", "l1"),
            ("modest", "m2"),
        ]
        tasks = [asyncio.create_task(work.run(held.function(name), owner)) for owner, name in names]
        await until(lambda: len(held.begun) == 2)
        for _ in names:
            held.release.release()
            await asyncio.sleep(0.02)
        assert await asyncio.gather(*tasks) == [name for _, name in names]

    asyncio.run(run())
    assert held.begun[:2] == ["g1", "m1"] and held.begun.index("l1") < held.begun.index("g3")


def test_of_an_owner_only_so_many_wait() -> None:
    held = Held()

    async def run() -> None:
        work = SideWork(at_once=1, waiting=2)
        tasks = [asyncio.create_task(work.run(held.function("a"), "greedy")) for _ in range(3)]
        await until(lambda: len(held.begun) == 1)
        with pytest.raises(OverloadedError, match="too many requests of this client") as refused:
            await work.run(held.function("a"), "greedy")
        assert refused.value.status == 429 and refused.value.retry_after > 0
        tasks.append(asyncio.create_task(work.run(held.function("b"), "modest")))
        held.release.release(10)
        assert await asyncio.gather(*tasks) == ["a", "a", "a", "b"]

    asyncio.run(run())


def test_a_refusal_tells_how_long_those_before_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, held = [0.0], Held()
    monkeypatch.setattr("unmask.serving.side_work.monotonic", lambda: clock[0])

    async def run() -> None:
        work = SideWork(at_once=2, waiting=3)
        for _ in range(100):
            await work.run(lambda: clock.append(clock.pop() + 7), "another")
        tasks = [asyncio.create_task(work.run(held.function("a"), "greedy")) for _ in range(4)]
        await until(lambda: len(held.begun) == 1)
        with pytest.raises(OverloadedError, match="Try again in 21 seconds") as refused:
            await work.run(held.function("a"), "greedy")
        assert refused.value.retry_after == 21
        held.release.release(10)
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_who_leaves_gives_up_its_place_and_keeps_its_turn_until_its_function_ends() -> None:
    held = Held()

    async def run() -> None:
        work = SideWork(at_once=2, waiting=2)
        tasks = [asyncio.create_task(work.run(held.function(name), "a")) for name in ("first", "second")]
        await until(lambda: held.begun == ["first"])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        third = asyncio.create_task(work.run(held.function("third"), "a"))
        await asyncio.sleep(0.02)
        assert held.begun == ["first"]
        held.release.release(2)
        assert await third == "third"

    asyncio.run(run())
    assert held.begun == ["first", "third"]


def test_errors_are_the_callers() -> None:
    async def run() -> None:
        work = SideWork(at_once=1, waiting=1)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await work.run(lambda: 1 / 0, "a")

    asyncio.run(run())


def test_the_end_waits_for_none() -> None:
    held = Held()

    async def run() -> None:
        work = SideWork(at_once=1, waiting=2)
        tasks = [asyncio.create_task(work.run(held.function("a"), "a")) for _ in range(2)]
        await until(lambda: held.begun == ["a"])
        work.stop(StoppedError("the server is ending"))
        assert [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)] == [
            StoppedError
        ] * 2

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 20
    held.release.release(10)
