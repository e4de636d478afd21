"""Owners take turns, in the queue and with work beside the engine; priorities order the items of one owner
only. Who leaves or ends waits for none."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.serving.scheduling import until
from unmask.serving.queues import FairQueue, SideWork
from unmask.serving.submission import OverloadedError, StoppedError


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
        with raises(OverloadedError, where=None) as refused:
            await work.run(held.function("a"), "greedy")
        assert refused.value.status == 429 and refused.value.retry_after > 0
        tasks.append(asyncio.create_task(work.run(held.function("b"), "modest")))
        held.release.release(10)
        assert await asyncio.gather(*tasks) == ["a", "a", "a", "b"]

    asyncio.run(run())


def test_a_refusal_tells_how_long_those_before_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, held = [0.0], Held()
    monkeypatch.setattr("unmask.serving.queues.monotonic", lambda: clock[0])

    async def run() -> None:
        work = SideWork(at_once=2, waiting=3)
        for _ in range(100):
            await work.run(lambda: clock.append(clock.pop() + 7), "another")
        tasks = [asyncio.create_task(work.run(held.function("a"), "greedy")) for _ in range(4)]
        await until(lambda: len(held.begun) == 1)
        with raises(OverloadedError, where=None) as refused:
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


def drain(queue: FairQueue[str]) -> list[str | None]:
    return [queue.pop() for _ in range(len(queue))]


def test_owners_take_turns_and_each_goes_by_priority_and_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    for item, priority in [("a1", 0), ("a2", 5), ("a3", 5), ("a4", -1)]:
        queue.push(item, "a", priority)
    queue.push("b1", "b", -9)
    queue.push("c1", "c")
    queue.push("c2", "c")
    assert drain(queue) == ["a2", "b1", "c1", "a3", "c2", "a1", "a4"]


def test_an_owner_that_comes_back_waits_for_the_others() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a1", "a")
    queue.push("b1", "b")
    queue.push("b2", "b")
    assert queue.pop() == "a1"
    queue.push("a2", "a")
    assert drain(queue) == ["b1", "a2", "b2"]


def test_an_empty_queue_gives_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    assert queue.pop() is None


def test_unwanted_items_wait_and_keep_their_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1"):
        queue.push(item, item[0])
    assert queue.pop(lambda item: item in ("a2", "b1")) == "a2" and queue.pop("none".__eq__) is None
    assert queue.of("a") == ["a1"] and queue.longest() in ("a", "b") and sorted(queue) == ["a1", "b1"]
    assert drain(queue) == ["b1", "a1"]


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-2, 2)), max_size=30), st.sets(st.integers(0, 29))
)
def test_no_item_is_lost_and_no_owner_waits_for_two_of_another(
    pushed: list[tuple[str, int]], unwanted: set[int]
) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, (owner, priority) in enumerate(pushed):
        queue.push(number, owner, priority)
    queue.remove(unwanted.__contains__)
    kept = [number for number in range(len(pushed)) if number not in unwanted]
    assert len(queue) == len(kept)
    order = [item for _ in range(len(queue)) if (item := queue.pop()) is not None]
    assert sorted(order) == kept and len(queue) == 0
    owners = [pushed[number][0] for number in order]
    for i, owner in enumerate(owners):  # between two turns of an owner, every other that still waits has one
        if owner in owners[i + 1 :]:
            again = owners.index(owner, i + 1)
            assert set(owners[i + 1 : again]) == set(owners[i + 1 :]) - {owner}
