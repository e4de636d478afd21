"""A queue in which owners take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Owners take turns, one item each; of an owner's items the one with the highest priority goes first, then the earliest."""

    def __init__(self) -> None:
        self._heaps: OrderedDict[str, list[tuple[int, int, Item]]] = OrderedDict()  # the owner whose turn it is comes first
        self._arrivals = count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, item: Item, owner: str, priority: int = 0) -> None:
        """Add an item. An owner that has none waiting gets its turn after all others."""
        heappush(self._heaps.setdefault(owner, []), (-priority, next(self._arrivals), item))
        self._length += 1

    def pop(self) -> Item:
        """Take the next item. Raises IndexError if there is none."""
        if not self._heaps:
            raise IndexError("the queue is empty")
        owner, heap = next(iter(self._heaps.items()))
        _, _, item = heappop(heap)
        self._length -= 1
        if heap:
            self._heaps.move_to_end(owner)
        else:
            del self._heaps[owner]
        return item

    def remove(self, unwanted: Callable[[Item], bool]) -> None:
        """Take out some items."""
        for owner, heap in list(self._heaps.items()):
            kept = [entry for entry in heap if not unwanted(entry[-1])]
            self._length -= len(heap) - len(kept)
            heap[:] = kept
            heapify(heap)
            if not heap:
                del self._heaps[owner]
