"""Who waits, and what runs beside the engines: a queue in which owners take turns, and functions that take
long, which run in threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
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
        # the owner whose turn it is comes first
        self._waiting: OrderedDict[str, list[tuple[int, Item]]] = OrderedDict()
        self._length = 0  # which other threads may read

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        """All items, those of an owner in the order in which they came."""
        return (item for items in self._waiting.values() for _, item in items)

    def of(self, owner: str) -> list[Item]:
        """The items of an owner, in the order in which they came."""
        return [item for _, item in self._waiting.get(owner, ())]

    def longest(self) -> str:
        """The owner of most items. Raises ValueError if there is none."""
        return max(self._waiting, key=lambda owner: len(self._waiting[owner]))

    def push(self, item: Item, owner: str, priority: int = 0) -> None:
        """Add an item. An owner that has none waiting gets its turn after all others."""
        self._waiting.setdefault(owner, []).append((priority, item))
        self._length += 1

    def pop(self, wanted: Callable[[Item], bool] = lambda _: True) -> Item | None:
        """Take the next item of those that are wanted; None if there is none."""
        for owner, items in self._waiting.items():
            choices = [index for index, (_, item) in enumerate(items) if wanted(item)]
            if choices:
                # the earliest of equal ones
                _, item = items.pop(max(choices, key=lambda index: items[index][0]))
                self._length -= 1
                self._waiting.move_to_end(owner)
                if not items:
                    del self._waiting[owner]
                return item
        return None

    def remove(self, unwanted: Callable[[Item], bool]) -> None:
        """Take out some items."""
        for owner, items in list(self._waiting.items()):
            kept = [entry for entry in items if not unwanted(entry[1])]
            self._length -= len(items) - len(kept)
            items[:] = kept
            if not items:
                del self._waiting[owner]


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
            threading.Thread(
                target=self._run, args=(turn, turn.answer.get_loop()), name="unmask-side-work", daemon=True
            ).start()

    def _may_run(self, turn: Turn) -> bool:
        return not turn.answer.done() and all(turn.owner != other.owner for other in self._running)

    def _run(self, turn: Turn, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread."""
        result, error = None, None
        try:
            result = turn.function()
        except Exception as raised:  # user code: whatever the function raises is for whoever wanted it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it whoever waited
            loop.call_soon_threadsafe(self._end, turn, result, error)

    def _end(self, turn: Turn, result: Any, error: Exception | None) -> None:
        self._running.remove(turn)
        self._seconds += (monotonic() - turn.began - self._seconds) / RECENT
        if not turn.answer.done():
            turn.answer.set_result(result) if error is None else turn.answer.set_exception(error)
        self._begin()
