"""A cache of attention masks: the most recently used, bounded by number and total size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class SizedCache(Generic[Value]):
    """At most `most` values of at most `most_cells` together, by key: the most recently used. The newest is always kept.

    `hits` counts the look-ups of a cached value, `misses` those that had to compute it.
    """

    def __init__(self, most: int, most_cells: int):
        self.most, self.most_cells = most, most_cells
        self._lock = Lock()
        self.clear()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def cells(self) -> int:
        """The total size of the cached values."""
        return sum(cells for _, cells in self._kept.values())

    def get(self, key: Hashable, compute: Callable[[], Value], cells: int) -> Value:
        """The value of a key, which says everything that it depends on; of size `cells`, and computed if it is not cached."""
        with self._lock:
            if key in self._kept:
                self.hits += 1
                self._kept.move_to_end(key)
                return self._kept[key][0]
            self.misses += 1
            while self._kept and (len(self._kept) >= self.most or self.cells + cells > self.most_cells):
                self._kept.popitem(last=False)  # before the new one is computed, so that they are not in memory together
            value = compute()
            self._kept[key] = value, cells
            return value

    def clear(self) -> None:
        """Clear values and counts."""
        with self._lock:
            self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
            self.hits = self.misses = 0
