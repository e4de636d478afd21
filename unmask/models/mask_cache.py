"""A cache of attention masks: the most recently used, bounded by number and total size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Mask = TypeVar("Mask")


class MaskCache(Generic[Mask]):
    """At most `max_masks` masks of at most `max_cells` elements together, by key: the most recently used. The
    newest is always kept.

    `hits` counts the look-ups of a cached mask, `misses` those that had to compute it.
    """

    def __init__(self, max_masks: int, max_cells: int):
        self.max_masks, self.max_cells = max_masks, max_cells
        self._lock = Lock()
        self.clear()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def cells(self) -> int:
        """The elements of all cached masks."""
        return sum(cells for _, cells in self._kept.values())

    def get(self, key: Hashable, compute: Callable[[], Mask], cells: int) -> Mask:
        """The mask of a key, which says everything that it depends on; of `cells` elements, and computed if
        it is not cached."""
        with self._lock:
            if key in self._kept:
                self.hits += 1
                self._kept.move_to_end(key)
                return self._kept[key][0]
            self.misses += 1
            while self._kept and (len(self._kept) >= self.max_masks or self.cells + cells > self.max_cells):
                # before the new one is computed, so that they are not in memory together
                self._kept.popitem(last=False)
            mask = compute()
            self._kept[key] = mask, cells
            return mask

    def clear(self) -> None:
        """Clear masks and counts."""
        with self._lock:
            self._kept: OrderedDict[Hashable, tuple[Mask, int]] = OrderedDict()
            self.hits = self.misses = 0
