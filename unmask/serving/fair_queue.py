"""A queue in which owners take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


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
