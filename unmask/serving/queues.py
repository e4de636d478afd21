"""Who waits, and what runs beside the engines: a queue in which owners take turns, and functions that take
long, which run in threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, TypeVar

from unmask.serving.submission import OverloadedError, Result

Item = TypeVar("Item")
RECENT = 10
"""Functions over which the time of one is measured."""


class FairQueue(Generic[Item]):
    """Owners take turns, one item each; of an owner's items the one with the highest priority goes first,
    then the earliest."""

    def __init__(self) -> None:
        self._items: list[tuple[str, int, Item]] = []  # with owner and priority, as they came
        self._turns: list[str] = []  # the owners, that whose turn it is first

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """All items, in the order in which they came."""
        return (item for _, _, item in self._items)

    def of(self, owner: str) -> list[Item]:
        """The items of an owner, in the order in which they came."""
        return [item for each, _, item in self._items if each == owner]

    def longest(self) -> str:
        """The owner of most items. Raises ValueError if there is none."""
        counts = Counter(owner for owner, _, _ in self._items)
        return max(self._turns, key=counts.__getitem__)

    def push(self, item: Item, owner: str, priority: int = 0) -> None:
        """Add an item. An owner that has none waiting gets its turn after all others."""
        self._items.append((owner, priority, item))
        if owner not in self._turns:
            self._turns.append(owner)

    def pop(self, wanted: Callable[[Item], bool] = lambda _: True) -> Item | None:
        """Take the next item of those that are wanted; None if there is none."""
        for owner in self._turns:
            choices = [entry for entry in self._items if entry[0] == owner and wanted(entry[2])]
            if choices:
                chosen = max(choices, key=lambda entry: entry[1])  # the earliest of equal ones
                self._items.remove(chosen)
                self._turns.remove(owner)
                if self.of(owner):
                    self._turns.append(owner)
                return chosen[2]
        return None

    def remove(self, unwanted: Callable[[Item], bool]) -> None:
        """Take out some items."""
        self._items = [entry for entry in self._items if not unwanted(entry[2])]
        left = {owner for owner, _, _ in self._items}
        self._turns = [owner for owner in self._turns if owner in left]


@dataclass(eq=False)
class Job:
    """A function that needs the engines' thread."""

    function: Callable[[], Any]
    model: str | None = None  # that it needs as it is; None: any
    # whether it waits until no sequence of the model runs, and lets none enter before it
    exclusive: bool = False
    done: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Call the function, unless whoever wanted it has left."""
        if self.done.set_running_or_notify_cancel():
            try:
                self.done.set_result(self.function())
            except Exception as error:  # user code: whatever the function raises is for whoever wanted it
                self.done.set_exception(error)


@dataclass(eq=False)
class Turn:
    """A function that waits or runs, for an owner."""

    function: Callable[[], Any]
    owner: str
    answer: asyncio.Future[Any]
    began: float = 0.0


class SideWork:
    """Runs functions in threads, for owners who take turns: one at a time of each. It belongs to an event
    loop's thread.

    A thread cannot be ended. Who does not wait any more leaves it to itself, but its owner's turn lasts until
    it is finished; and the end of the process waits for none.

    Args:
        at_once: the most functions that run at once.
        waiting: the most that wait, of each owner.
    """

    def __init__(self, at_once: int, waiting: int):
        self.at_once, self.waiting = at_once, waiting
        self._queue: FairQueue[Turn] = FairQueue()
        self._running: list[Turn] = []
        self._seconds = 1.0  # of a function; at first a guess

    async def run(self, function: Callable[[], Result], owner: str) -> Result:
        """The result of a function, or its error. OverloadedError if too many wait."""
        if len(self._queue.of(owner)) >= self.waiting:
            waiting = len(self._queue.of(owner)) * self._seconds
            raise OverloadedError("too many requests of this client are prepared", waiting)
        turn = Turn(function, owner, asyncio.get_running_loop().create_future())
        self._queue.push(turn, owner)
        self._begin()
        try:
            return await turn.answer
        finally:
            self._queue.remove(lambda other: other is turn)

    def stop(self, error: Exception) -> None:
        """Answer all with an error. What runs is left to itself."""
        for turn in [*self._queue, *self._running]:
            if not turn.answer.done():
                turn.answer.set_exception(error)

    def _begin(self) -> None:
        """Run what may run."""
        while len(self._running) < self.at_once:
            if (turn := self._queue.pop(self._may_run)) is None:
                return
            self._running.append(turn)
            turn.began = monotonic()
            threading.Thread(target=self._run, args=(turn,), name="unmask-side-work", daemon=True).start()

    def _may_run(self, turn: Turn) -> bool:
        return not turn.answer.done() and all(turn.owner != other.owner for other in self._running)

    def _run(self, turn: Turn) -> None:
        """In a thread."""
        result, error = None, None
        try:
            result = turn.function()
        except Exception as raised:  # user code: whatever the function raises is for whoever wanted it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it whoever waited
            turn.answer.get_loop().call_soon_threadsafe(self._end, turn, result, error)

    def _end(self, turn: Turn, result: Any, error: Exception | None) -> None:
        self._running.remove(turn)
        self._seconds += (monotonic() - turn.began - self._seconds) / RECENT
        if not turn.answer.done():
            turn.answer.set_result(result) if error is None else turn.answer.set_exception(error)
        self._begin()
