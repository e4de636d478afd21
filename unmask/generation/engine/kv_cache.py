"""Keys and values of the running sequences. Column c of a slot holds position c. While a block is denoised, every step overwrites its
columns; when its tokens are final, one more pass writes their keys. Keys of noised tokens are never reused. Drafts of mode self-speculative
are in any columns after those of the final tokens, and move to their positions when they are kept.

Shapes: S slots, C columns, B sequences of a pass, Q queries, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """A key-value cache for models, of a fixed number of slots and columns."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.stored: list[tuple[Tensor, Tensor]] = []
        self.shape = (0, 0)
        self.slot_B = torch.zeros(0, dtype=torch.long)  # of the current pass, in the order of its batch
        self.first: int | None = None  # of these slots, if they are consecutive
        self.column_BQ = torch.zeros(0, 0, dtype=torch.long)  # where the pass writes; padding: the extra column after the last
        self.width = 0  # the number of columns that the pass reads

    def reserve(self, slots: int, columns: int) -> None:
        """Allocate slots and columns; stored keys and values stay, as far as they fit."""
        kept = [min(old, new) for old, new in zip(self.shape, (slots, columns), strict=True)]
        for layer, pair in enumerate(self.stored):
            grown = self._empty(pair[0], slots, columns), self._empty(pair[1], slots, columns)
            for old, new in zip(pair, grown, strict=True):
                new[: kept[0], :, : kept[1]] = old[: kept[0], :, : kept[1]]
            self.stored[layer] = grown
        self.shape = (slots, columns)

    def copy(self, source: int, targets: int | Tensor, columns: int) -> None:
        """Copy the first columns of a slot to another, or to several."""
        for stored in chain.from_iterable(self.stored):
            stored[targets, :, :columns] = stored[source, :, :columns]

    def move(self, slot_N: Tensor, source_N: Tensor, target_N: Tensor) -> None:
        """Copy columns of slots to other columns of the same slots, all at once."""
        for stored in chain.from_iterable(self.stored):
            stored[slot_N, :, target_N] = stored[slot_N, :, source_N]

    def clear(self, slots: Sequence[int]) -> None:
        """Zero the slots. A masked key has weight 0, but 0 x NaN would be NaN."""
        for stored in chain.from_iterable(self.stored):
            stored[list(slots)] = 0

    def begin_pass(self, slots: Sequence[int], column_BQ: Tensor, width: int) -> SlotCache:
        """Set the slots, columns and width of the next pass, and return the cache."""
        self.slot_B = torch.tensor(slots, device=column_BQ.device)
        self.first = slots[0] if list(slots) == list(range(slots[0], slots[0] + len(slots))) else None
        self.column_BQ, self.width = column_BQ, width
        return self

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, Q, D] of a layer and return all that the pass reads, [B, H, width, D]."""
        if layer_idx == len(self.stored):
            self.stored.append((self._empty(key_states, *self.shape), self._empty(value_states, *self.shape)))
        for stored, new in zip(self.stored[layer_idx], (key_states, value_states), strict=True):
            stored[self.slot_B[:, None], :, self.column_BQ] = new.transpose(1, 2)
        slots = self.slot_B if self.first is None else slice(self.first, self.first + len(key_states))
        keys, values = (stored[:, :, : self.width][slots] for stored in self.stored[layer_idx])
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens before the queries, for models; 0, since positions are passed."""
        return 0

    @staticmethod
    def _empty(like: Tensor, slots: int, columns: int) -> Tensor:
        """A table with one extra column, to which padding is written."""
        return like.new_zeros(slots, like.shape[1], columns + 1, like.shape[3])
