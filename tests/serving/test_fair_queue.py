"""Owners take turns; priorities order the items of one owner only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unmask.serving.fair_queue import FairQueue


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
