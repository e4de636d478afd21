"""Forward passes over cached keys, exact for causal and block-causal models.

The queries of a pass are `[clean tokens | current block | draft 1 | draft 2 | ...]`, each part as wide as the
longest sequence needs.

Shapes: B sequences of a pass, Q queries, K keys, S slots, C columns (positions), N hidden positions, G
drafts, W positions of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unmask.generation.engine.host import moved, moved_together
from unmask.generation.engine.kv_cache import SlotCache
from unmask.generation.engine.recorded_passes import forward, num_columns
from unmask.generation.engine.slots import BatchEntry, BatchState, SpeculativeEntry
from unmask.models.attention import AttentionMask, Layout, hidden_fraction
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs
from unmask.models.recurrent import ReadingStep, Recurrence


class Extent(NamedTuple):
    """The part of a sequence that a pass computes: clean positions from `first` to `base`, the block from
    there to `stop`, and drafts."""

    slot: int
    first: int
    base: int
    stop: int
    num_drafts: int


@dataclass
class Queries:
    """The queries of a pass."""

    slot_BQ: Tensor
    position_BQ: Tensor  # in the sequence; 0 for padding
    document_BQ: Tensor  # 1; 0 for padding
    copy_BQ: Tensor  # 0 for clean tokens, 1 for the current block, 2 and more for its drafts
    column_BQ: Tensor  # the cache column of the query's key and value
    end_BQ: Tensor  # the query attends to the columns before this one
    ids_BQ: Tensor
    hidden_BQ: Tensor | None = None  # only for a time embedding
    # for a draft's query also first and last + 1 of its draft's columns; None: no drafts
    draft_BQ2: Tensor | None = None
    # the drafted tokens before a query, which it attends to as well; None: no drafted tokens
    path_BQK: Tensor | None = None
    # the keys that all this says; made by the first pass with these queries
    mask: AttentionMask | None = None
    recurrence: Recurrence | None = None  # how recurrent layers read them
    # by slot, the tokens that their states have read after the pass
    num_read: Mapping[int, int] = field(default_factory=dict)
    window_BQ: Tensor | None = None  # the position where each sliding window ends; None: the query's
    num_clean: int = 0  # queries of clean tokens before those of a block
    width: int = 0  # of the block, and of each draft

    @cached_property
    def written(self) -> tuple[Tensor, Tensor]:
        """The slots and columns [B, 1, Q] that the pass writes."""
        return self.slot_BQ[:, None], self.column_BQ[:, None]


def cached_pass(
    lm: DiffusionLM,
    slots: BatchState,
    entries: Sequence[BatchEntry],
    member_N: np.ndarray,
    position_N: Tensor,
    ahead_N: np.ndarray,
) -> Tensor:
    """A pass over the current block of every sequence and its drafts, which do not attend to each other. It
    also computes the clean tokens before the block that are not cached, and with a logit shift the last clean
    token again, because it predicts the first token of the block."""
    assert slots.cache is not None
    device = position_N.device
    extents = tuple(_extent(lm, entry, slots.cache) for entry in entries)
    cells = (
        len(extents)
        * max(extent.stop for extent in extents)
        * max(entry.num_queries(lm) for entry in entries)
    )
    # the same until one of the sequences moves on to another block
    queries = slots.plans.get((extents, slots.cache.shape), lambda: _block_queries(lm, slots, extents), cells)
    fill_in(lm, slots, queries)
    base_N = np.array([extent.base for extent in extents])[member_N]
    row_N = member_N * queries.ids_BQ.shape[1] + queries.num_clean
    index_N = moved(row_N + ahead_N * queries.width - base_N, device)
    index_N = index_N + slots.read_at(lm, entries, member_N, position_N)
    if ahead_N.any():
        _fill_in_drafts(entries, extents, queries)
        if lm.logit_shift:  # the last clean token predicts the first one of a draft, too
            last_N, first_N = moved_together(device, row_N - 1, np.where(ahead_N > 0, base_N, -1))
            index_N = torch.where(position_N == first_N, last_N, index_N)
    columns = max(extent.stop + extent.num_drafts * queries.width for extent in extents)
    return run_pass(lm, slots, entries, queries, columns, index_N)


def _fill_in_drafts(entries: Sequence[BatchEntry], extents: Sequence[Extent], queries: Queries) -> None:
    """The tokens of the queries of drafts."""
    for member, (entry, extent) in enumerate(zip(entries, extents, strict=True)):
        if entry.draft is not None:
            block = slice(entry.start - extent.base, entry.stop - extent.base)
            for values_BQ, draft_GW in (
                (queries.ids_BQ, entry.draft.ids_GW),
                (queries.hidden_BQ, entry.draft.hidden_GW),
            ):
                if values_BQ is not None:
                    values_Q = values_BQ[member, queries.num_clean + queries.width :]
                    values_Q.unflatten(0, (-1, queries.width))[: len(draft_GW), block] = draft_GW


def _block_queries(lm: DiffusionLM, slots: BatchState, extents: Sequence[Extent]) -> Queries:
    """The queries of a pass over these parts of sequences, without their tokens."""
    slot_B1, first_B1, base_B1, stop_B1, drafts_B1 = np.array(extents).T[:, :, None]
    num_clean, width = int((base_B1 - first_B1).max()), int((stop_B1 - base_B1).max())
    copies = 1 + int(drafts_B1.max())
    offset_Q = np.concatenate([np.arange(-num_clean, 0), np.tile(np.arange(width), copies)])  # from the base
    ahead_Q = np.concatenate([np.zeros(num_clean, dtype=int), np.repeat(np.arange(copies), width)])
    position_BQ = base_B1 + offset_Q
    real_BQ = (position_BQ >= first_B1) & (position_BQ < stop_B1) & (ahead_Q <= drafts_B1)
    # a draft has columns after the block, and attends to these and to the clean tokens
    draft_start_BQ = stop_B1 + (ahead_Q - 1) * width
    drafts = (ahead_Q, draft_start_BQ, draft_start_BQ + offset_Q) if copies > 1 else None
    queries = make_queries(lm, slots, slot_B1, position_BQ, real_BQ, base_B1, stop_B1, drafts)
    queries.num_clean, queries.width = num_clean, width
    if lm.recurrent:
        bases = [num_clean] * len(extents)
        _read_in_steps(lm, queries, extents, bases)
    return queries


def _read_in_steps(
    lm: DiffusionLM, queries: Queries, extents: Sequence[Extent], bases: Sequence[int]
) -> None:
    """Let recurrent layers read the clean tokens, after which their states are kept, then the block and each
    draft. With a logit shift the last clean token is read with the block, in this pass and in later ones.
    `bases`: the column of each sequence's query at `base`."""
    count, shift = queries.position_BQ.shape[1], int(lm.logit_shift)
    steps, place_N, start = list[ReadingStep](), np.zeros(len(extents) * count, dtype=int), 0

    def read(rows: list[tuple[int, np.ndarray]], *, kept: bool) -> None:
        """Add a step of these sequences: the member and the columns of each."""
        nonlocal start
        longest = max(len(column_Q) for _, column_Q in rows)
        index_RQ = np.zeros((len(rows), longest), dtype=int)
        for row, (member, column_Q) in enumerate(rows):
            index_RQ[row, : len(column_Q)] = member * count + column_Q
            place_N[index_RQ[row, : len(column_Q)]] = start + row * longest + np.arange(len(column_Q))
        steps.append(ReadingStep(index_RQ, np.array([member for member, _ in rows]), kept))
        start += index_RQ.size

    # of equal lengths, since padding would change the state that is kept
    by_length: dict[int, list[tuple[int, np.ndarray]]] = {}
    last: list[tuple[int, np.ndarray]] = []
    for member, (extent, at) in enumerate(zip(extents, bases, strict=True)):
        clean_Q = np.arange(extent.first - extent.base, 0) + at
        kept = max(len(clean_Q) - shift, 0)
        by_length.setdefault(kept, []).append((member, clean_Q[:kept]))
        block_Q = np.arange(extent.stop - extent.base) + at
        for draft in range(extent.num_drafts + 1):
            last.append((member, np.concatenate([clean_Q[kept:], block_Q + draft * queries.width])))
    for length, rows in by_length.items():
        if length:
            read(rows, kept=True)
    if rows := [row for row in last if len(row[1])]:
        read(rows, kept=False)
    slot_S = np.array([extent.slot for extent in extents])
    queries.recurrence = Recurrence(steps, place_N, queries.position_BQ.device, len(extents), slot_S)
    queries.num_read = {extent.slot: max(extent.base - shift, 0) for extent in extents}


def cache_clean_tokens(
    lm: DiffusionLM, slots: BatchState, entries: Sequence[BatchEntry], cache: SlotCache | None = None
) -> None:
    """Cache the keys and values of the clean tokens before the current blocks; `cache` as for `run_pass`."""
    slot_B1, start_B1, base_B1 = np.array(
        [(entry.slot, entry.num_cached, entry.base(lm)) for entry in entries]
    ).T[:, :, None]
    position_BQ = start_B1 + np.arange((base_B1 - start_B1).max())
    queries = make_queries(lm, slots, slot_B1, position_BQ, position_BQ < base_B1, base_B1, base_B1)
    if lm.recurrent:
        extents = [
            Extent(entry.slot, entry.num_cached, entry.base(lm), entry.base(lm), 0) for entry in entries
        ]
        bases = [extent.base - extent.first for extent in extents]
        _read_in_steps(lm, queries, extents, bases)
    fill_in(lm, slots, queries)
    run_pass(lm, slots, entries, queries, int(base_B1.max()), queries.position_BQ.new_zeros(1), cache=cache)


def _extent(lm: DiffusionLM, entry: BatchEntry, cache: SlotCache) -> Extent:
    base = entry.base(lm)
    first = min(entry.num_cached, max(base - int(lm.logit_shift), 0))
    if lm.recurrent:  # from where its states are
        first = cache.num_read[entry.slot]
    stop, drafts = base if lm.autoregressive else entry.end(lm), len(entry.draft.ids_GW) if entry.draft else 0
    return Extent(entry.slot, first, base, stop, drafts)


def make_queries(
    lm: DiffusionLM,
    slots: BatchState,
    slot_B1: np.ndarray,
    position_BQ: np.ndarray,
    real_BQ: np.ndarray,
    base_B1: np.ndarray,
    stop_B1: np.ndarray,
    drafts: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> Queries:
    """The queries of these positions, without their tokens. Those before `base` are clean: they attend to
    clean tokens up to the end of their block, or with a causal context up to themselves. The others attend to
    all positions before `stop`. In a bidirectional model all attend to all. `drafts`: the steps ahead [Q],
    the first column of each draft and the column of each query [B, Q]."""
    assert slots.cache is not None
    position_BQ = np.where(real_BQ, position_BQ, 0)
    if lm.attention == "bidirectional":
        noisy_BQ, end_BQ = np.zeros_like(real_BQ), np.broadcast_to(base_B1, position_BQ.shape)
    else:
        size = lm.block_size or 1
        noisy_BQ = real_BQ & (position_BQ >= base_B1)
        block_end_BQ = position_BQ + 1 if lm.causal_context else (position_BQ // size + 1) * size
        # padding attends to the first key
        end_BQ = np.where(noisy_BQ, stop_B1, np.minimum(block_end_BQ, base_B1)).clip(1)
    copy_BQ, column_BQ, draft_BQ = (
        noisy_BQ.astype(int),
        np.where(real_BQ, position_BQ, slots.cache.shape[1]),
        [],
    )
    if drafts is not None:
        ahead_Q, start_BQ, draft_column_BQ = drafts
        is_draft_BQ = real_BQ & (ahead_Q > 0)
        copy_BQ, end_BQ = copy_BQ * (1 + ahead_Q), np.where(is_draft_BQ, base_B1, end_BQ)
        column_BQ = np.where(is_draft_BQ, draft_column_BQ, column_BQ)
        draft_BQ = [
            np.where(is_draft_BQ, start_BQ, 0),
            np.where(is_draft_BQ, start_BQ + stop_B1 - base_B1, 0),
        ]
    rows = [np.broadcast_to(slot_B1, position_BQ.shape), position_BQ, real_BQ, copy_BQ, column_BQ, end_BQ]
    window_BQ = [np.where(copy_BQ > 0, base_B1, position_BQ)] if lm.canvas else []
    slot, position, document, copy, column, end, *draft = moved_together(
        slots.ids_SC.device, *rows, *draft_BQ, *window_BQ
    )
    window = draft.pop() if lm.canvas else None
    return Queries(
        slot,
        position,
        document,
        copy,
        column,
        end,
        position,
        draft_BQ2=torch.stack(draft, -1) if draft else None,
        window_BQ=window,
    )


def fill_in(lm: DiffusionLM, slots: BatchState, queries: Queries) -> None:
    """The present tokens of the queries."""
    at = (queries.slot_BQ, queries.position_BQ)
    queries.ids_BQ = slots.ids_SC[at]
    queries.hidden_BQ = (queries.document_BQ > 0) & slots.hidden_SC[at] if lm.has_time_embedding else None


def run_pass(
    lm: DiffusionLM,
    slots: BatchState,
    entries: Sequence[BatchEntry | SpeculativeEntry],
    queries: Queries,
    columns: int,
    index_N: Tensor,
    *,
    windows: bool = False,
    cache: SlotCache | None = None,
) -> Tensor:
    """One pass over the first columns of the cache: logits at the queries `index_N`.

    Args:
        windows: whether the model's sliding windows apply, as they do in a causal model.
        cache: another cache than that of the slots.
    """
    cache = slots.cache if cache is None else cache
    assert cache is not None
    columns = num_columns(lm, max(columns, 1), cache)
    layout = Layout(queries.document_BQ, queries.position_BQ, queries.copy_BQ)
    fraction_BQ = None  # of hidden tokens
    if lm.has_time_embedding and lm.attention == "bidirectional":
        length_B1 = moved(np.array([[entry.length] for entry in entries]), index_N.device)
        fraction_BQ = (slots.hidden_SC[queries.slot_BQ[:, 0]].sum(1, keepdim=True) / length_B1).expand_as(
            queries.position_BQ
        )
    elif lm.has_time_embedding:
        assert queries.hidden_BQ is not None
        fraction_BQ = hidden_fraction(
            queries.hidden_BQ & (queries.copy_BQ > 0), layout, lm.attention, lm.block_size
        )
    if queries.mask is None:
        mask = _mask(queries, columns, cache, windows or lm.canvas or lm.attention == "causal")
        queries.mask = replace(mask, recurrence=queries.recurrence)
    inputs = ForwardInputs(queries.ids_BQ, layout, queries.mask, index_N, fraction_BQ, pruned=True)
    if lm.canvas and queries.width:
        canvas = range(queries.num_clean, queries.num_clean + queries.width)
        soft_BWD = slots.soft_SWD[queries.slot_BQ[:, 0], : queries.width]
        inputs = replace(inputs, canvas=canvas, soft_BKD=soft_BWD)
    logits_NV = forward(
        lm, inputs, cache.begin_pass([entry.slot for entry in entries], *queries.written, columns)
    )
    cache.keep_states(queries.num_read)
    return logits_NV


def _mask(queries: Queries, columns: int, cache: SlotCache, windows: bool) -> AttentionMask:
    """The keys that each query attends to."""
    key_K = torch.arange(columns, device=queries.end_BQ.device)
    allowed_BQK = key_K < queries.end_BQ[:, :, None]
    if queries.draft_BQ2 is not None:
        allowed_BQK |= (key_K >= queries.draft_BQ2[:, :, :1]) & (key_K < queries.draft_BQ2[:, :, 1:])
    if queries.path_BQK is not None:
        allowed_BQK |= queries.path_BQK
    positions = None
    if windows:  # keys of earlier passes are at the position of their column
        column_BC = torch.arange(cache.shape[1] + 1, device=key_K.device).repeat(len(queries.end_BQ), 1)
        positions = (
            queries.position_BQ if queries.window_BQ is None else queries.window_BQ,
            column_BC.scatter_(1, queries.column_BQ, queries.position_BQ)[:, : len(key_K)],
        )
    return AttentionMask(allowed_BQK[:, None], positions)
