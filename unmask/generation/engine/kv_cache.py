"""Keys and values of the running sequences. Column c of a slot holds position c. While a block is denoised,
every step overwrites its columns; when its tokens are final, one more pass writes their keys. Keys of noised
tokens are never reused. Drafts of mode self-speculative are in any columns after those of the final tokens,
and move to their positions when they are kept.

A recurrent layer has one state per slot, after the clean tokens of its sequence (with a logit shift, before
the last of them, which every pass computes again).

Shapes: S slots, C columns, B sequences of a pass, Q queries, H heads, D head width.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from unmask.generation.engine.host import slot_index
from unmask.models.attention import LayerKeys
from unmask.models.recurrent import States


class SlotCache(Cache):
    """A key-value cache for models, of a fixed number of slots and columns."""

    def __init__(self, memory: CacheMemory | None = None) -> None:
        super().__init__(layers=[])
        self.stored: list[tuple[Tensor, Tensor]] = []
        self.places: dict[int, int] = {}  # in `stored`, of layers
        self.states: dict[int, States] = {}  # of recurrent layers, [S, ...]
        self.num_read: list[int] = []  # the tokens of each slot that its states have read
        self._written: list[tuple[int, Tensor, States]] = []  # states after the present pass
        self.shape = (0, 0)
        self.heads: dict[int, Tensor] = {}  # numbers [H, 1] of heads, by how many a layer has
        self.index: slice | Tensor = slice(0)  # of the slots of the current pass, in the order of its batch
        self.slot_B1Q = torch.zeros(0, 1, 0, dtype=torch.long)  # the same
        # where the pass writes; padding: the extra column after the last
        self.column_B1Q = torch.zeros(0, 1, 0, dtype=torch.long)
        self.width = 0  # the number of columns that the pass reads
        # of each layer that part of `stored`, if the slots are consecutive
        self._read: list[tuple[Tensor, Tensor]] = []
        self.memory = memory  # of an earlier cache, to be used again

    def reserve(self, slots: int, columns: int) -> None:
        """Allocate slots and columns; stored keys and values stay, as far as they fit."""
        if self.memory is not None and self.memory.serves(self, slots, columns):
            return
        kept = [min(old, new) for old, new in zip(self.shape, (slots, columns), strict=True)]
        for layer, pair in enumerate(self.stored):
            grown = self._empty(pair[0], slots, columns), self._empty(pair[1], slots, columns)
            for old, new in zip(pair, grown, strict=True):
                new[: kept[0], :, : kept[1]] = old[: kept[0], :, : kept[1]]
            self.stored[layer] = grown
        for states in self.states.values():
            for name, old in states.items():
                states[name] = old.new_zeros(slots, *old.shape[1:])
                states[name][: kept[0]] = old[: kept[0]]
        self.num_read = [*self.num_read, *[0] * slots][:slots]
        self.shape, self._read = (slots, columns), []

    def copy(self, source: int, targets: int | Tensor, columns: int) -> None:
        """Copy the first columns of a slot to another, or to several."""
        for stored in chain.from_iterable(self.stored):
            stored[targets, :, :columns] = stored[source, :, :columns]
        for state in self._all_states():
            state[targets] = state[source].clone()
        for target in [targets] if isinstance(targets, int) else targets.tolist():
            self.num_read[target] = self.num_read[source]

    def move(self, slot_N: Tensor, source_N: Tensor, target_N: Tensor) -> None:
        """Copy columns of slots to other columns of the same slots, all at once."""
        for stored in chain.from_iterable(self.stored):
            stored[slot_N, :, target_N] = stored[slot_N, :, source_N]

    def clear(self, slots: Sequence[int]) -> None:
        """Zero the slots. A masked key has weight 0, but 0 x NaN would be NaN."""
        for stored in chain(chain.from_iterable(self.stored), self._all_states()):
            stored[list(slots)] = 0
        for slot in slots:
            self.num_read[slot] = 0

    def begin_pass(self, slots: list[int], slot_B1Q: Tensor, column_B1Q: Tensor, width: int) -> SlotCache:
        """Set the slots, columns and width of the next pass, and return the cache."""
        index = slot_index(slots, column_B1Q.device)
        if isinstance(index, Tensor):
            self._read = []
        elif len(self._read) < len(self.stored) or (index, width) != (self.index, self.width):
            self._read = [(keys[index, :, :width], values[index, :, :width]) for keys, values in self.stored]
        self.index, self.slot_B1Q, self.column_B1Q, self.width = index, slot_B1Q, column_B1Q, width
        self._written = []
        return self

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_: Any,
        queries: slice | None = None,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, Q, D] of a layer and return all that the pass reads, [B, H, width, D].
        `queries`: those of the pass that they belong to; None: all."""
        place = self.places.setdefault(layer_idx, len(self.places))
        if place == len(self.stored):
            self.stored.append((self._empty(key_states, *self.shape), self._empty(value_states, *self.shape)))
        if (count := key_states.shape[1]) not in self.heads:
            self.heads[count] = torch.arange(count, device=key_states.device)[:, None]
        slot_B1Q, column_B1Q = self.slot_B1Q, self.column_B1Q
        if queries is not None:
            slot_B1Q, column_B1Q = slot_B1Q[..., queries], column_B1Q[..., queries]
        at = (slot_B1Q, self.heads[count], column_B1Q)
        for stored, new in zip(self.stored[place], (key_states, value_states), strict=True):
            stored[at] = new
        if not torch.compiler.is_compiling() and place < len(self._read):
            return self._read[place]
        index = (
            self.index
            if isinstance(self.index, Tensor)
            else slice(self.index.start, self.index.start + len(key_states))
        )
        keys, values = (stored[:, :, : self.width][index] for stored in self.stored[place])
        return keys, values

    def part(self, queries: range) -> LayerKeys:
        """`update` for some of the pass's queries."""
        return partial(self.update, queries=slice(queries.start, queries.stop))

    def read_states(self, layer: int, slot_S: Tensor) -> States:
        """The states of a recurrent layer in these slots; empty: no sequence has any."""
        return {name: state[slot_S] for name, state in self.states.get(layer, {}).items()}

    def write_states(self, layer: int, slot_S: Tensor, states: States) -> None:
        """Take the states of a recurrent layer after the present pass."""
        self._written.append((layer, slot_S, states))

    def keep_states(self, num_read: Mapping[int, int]) -> None:
        """Keep what a whole pass has written: a pass that is interrupted can be run again. `num_read`: the
        tokens that the states of each slot have read."""
        for layer, slot_S, states in self._written:
            own = self.states.setdefault(layer, {})
            for name, state in states.items():
                if name not in own:
                    own[name] = state.new_zeros(self.shape[0], *state.shape[1:])
                own[name][slot_S] = state
        self._written = []
        for slot, number in num_read.items():
            self.num_read[slot] = number

    def _all_states(self) -> Iterator[Tensor]:
        return chain.from_iterable(states.values() for states in self.states.values())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens before the queries, for models; 0, since positions are passed."""
        return 0

    @staticmethod
    def _empty(like: Tensor, slots: int, columns: int) -> Tensor:
        """A table with one extra column, to which padding is written."""
        return like.new_zeros(slots, like.shape[1], columns + 1, like.shape[3])


class CacheMemory:
    """The tables of the latest cache of a model. The next cache takes them over, as CUDA graphs were recorded
    with this memory."""

    def __init__(self) -> None:
        self._owner: Callable[[], SlotCache | None] = lambda: None
        self._stored: list[tuple[Tensor, Tensor]] = []
        self._shape = (0, 0)
        # made while a graph is recorded, they would be in memory that other graphs write to
        self._heads: dict[int, Tensor] = {}

    def keep(self, cache: SlotCache) -> None:
        """Remember the tables of this cache."""
        self._owner, self._stored, self._shape, self._heads = (
            weakref.ref(cache),
            cache.stored,
            cache.shape,
            cache.heads,
        )

    def serves(self, cache: SlotCache, slots: int, columns: int) -> bool:
        """Whether the cache has that many slots and columns, perhaps now: without tables, it gets those of a
        cache that is gone."""
        if not cache.stored and self._owner() is None and self._stored:
            cache.stored, cache.shape, cache.heads = self._stored, self._shape, self._heads
            cache.num_read = [0] * cache.shape[0]
            cache.clear(range(cache.shape[0]))
            self.keep(cache)
        return bool(cache.stored) and slots <= cache.shape[0] and columns <= cache.shape[1]
