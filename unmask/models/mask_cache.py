"""What is kept of masks: the most recently used, as long as they are small enough together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class SizedCache(Generic[Value]):
    """Values by key. The least recently used are forgotten where there are too many, or where they are too large together; the newest
    is always kept.

    Args:
        most: values at most.
        most_cells: the sum of their sizes at most.

    Attributes:
        hits: how often a value was there.
        misses: how often it had to be made.
    """

    def __init__(self, most: int, most_cells: int):
        self.most, self.most_cells = most, most_cells
        self._lock = Lock()
        self.clear()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def cells(self) -> int:
        """The size of all that is kept."""
        return sum(cells for _, cells in self._kept.values())

    def get(self, key: Hashable, make: Callable[[], Value], cells: int) -> Value:
        """The value of this key, made where it is not there.

        Args:
            key: all that the value depends on.
            make: makes it.
            cells: its size.
        """
        with self._lock:
            if key in self._kept:
                self.hits += 1
                self._kept.move_to_end(key)
                return self._kept[key][0]
            self.misses += 1
            while self._kept and (len(self._kept) >= self.most or self.cells + cells > self.most_cells):
                self._kept.popitem(last=False)  # before the new one is made: they need not fit beside each other
            value = make()
            self._kept[key] = value, cells
            return value

    def clear(self) -> None:
        """Forget everything, the counts too."""
        with self._lock:
            self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
            self.hits = self.misses = 0
