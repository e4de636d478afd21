"""Forward passes over cached keys: exact for causal and block-causal models, lossy for bidirectional models.

The queries of a pass are `[clean tokens | current block | draft 1 | draft 2 | ...]`, each part as wide as the longest sequence needs.

Shapes: B sequences of a pass, Q queries, K keys, S slots, C columns (positions), N hidden positions, G drafts, W positions of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.generation.engine.kv_cache import SlotCache
from unmask.generation.engine.slots import BatchEntry, Slots, SpeculativeEntry, as_columns
from unmask.models.attention import AttentionMask, Layout, hidden_fraction
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs


class Extent(NamedTuple):
    """The part of a sequence that a pass computes: clean positions from `first` to `base`, the block from there to `stop`, and drafts."""

    first: int
    base: int
    stop: int
    num_drafts: int


@dataclass
class Queries:
    """The queries of a pass."""

    position_BQ: Tensor  # in the sequence; 0 for padding
    real_BQ: Tensor  # False for padding
    copy_BQ: Tensor  # 0 for clean tokens, 1 for the current block, 2 and more for its drafts
    column_BQ: Tensor  # the cache column of the query's key and value
    end_BQ: Tensor  # the query attends to the columns before this one
    ids_BQ: Tensor
    hidden_BQ: Tensor
    draft_BQ2: Tensor | None = None  # for a draft's query also first and last + 1 of its draft's columns; None: no drafts
    path_BQK: Tensor | None = None  # the drafted tokens before a query, which it attends to as well; None: no drafted tokens


def cached_pass(
    lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry], member_N: Tensor, position_N: Tensor, ahead_N: Tensor
) -> Tensor:
    """A pass over the current block of every sequence and its drafts, which do not attend to each other. It also computes the clean tokens
    before the block that are not cached, and with a logit shift the last clean token again, because it predicts the first token of the
    block."""
    device = member_N.device
    extents = [_extent(lm, entry) for entry in entries]
    num_clean = max(extent.base - extent.first for extent in extents)
    width = max(extent.stop - extent.base for extent in extents)
    copies = 1 + max(extent.num_drafts for extent in extents)
    first_B1, base_B1, stop_B1, drafts_B1 = as_columns(extents, device)
    offset_Q = torch.cat([torch.arange(-num_clean, 0, device=device), torch.arange(width, device=device).repeat(copies)])  # from the base
    ahead_Q = F.pad(torch.arange(copies, device=device).repeat_interleave(width), (num_clean, 0))
    position_BQ = base_B1 + offset_Q
    real_BQ = (position_BQ >= first_B1) & (position_BQ < stop_B1) & (ahead_Q <= drafts_B1)
    queries = _queries(lm, slots, entries, position_BQ, real_BQ, base_B1, stop_B1)
    for member, (entry, extent) in enumerate(zip(entries, extents, strict=True)):
        if entry.draft is not None:
            block = slice(entry.start - extent.base, entry.stop - extent.base)
            for values_BQ, draft_GW in ((queries.ids_BQ, entry.draft.ids_GW), (queries.hidden_BQ, entry.draft.hidden_GW)):
                values_BQ[member, num_clean + width :].unflatten(0, (-1, width))[: len(draft_GW), block] = draft_GW
    if copies > 1:  # a draft has columns after the block, and attends to these and to the clean tokens
        draft_BQ = real_BQ & (ahead_Q > 0)
        draft_start_BQ = stop_B1 + (ahead_Q - 1) * width
        queries.copy_BQ = queries.copy_BQ * (1 + ahead_Q)
        queries.column_BQ = torch.where(draft_BQ, draft_start_BQ + offset_Q, queries.column_BQ)
        queries.end_BQ = torch.where(draft_BQ, base_B1, queries.end_BQ)
        queries.draft_BQ2 = torch.stack([draft_start_BQ, draft_start_BQ + stop_B1 - base_B1], -1).where(draft_BQ[..., None], 0)
    offset_N = position_N - base_B1[member_N, 0]
    shift_N = slots.shifts(lm, entries, member_N, position_N)
    query_N = torch.where(offset_N < shift_N, num_clean - 1, num_clean + ahead_N * width + offset_N - shift_N)
    columns = max(extent.stop + extent.num_drafts * width for extent in extents)
    return run_pass(lm, slots, entries, queries, columns, member_N * position_BQ.shape[1] + query_N)


def cache_clean_tokens(lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry], cache: SlotCache | None = None) -> None:
    """Cache the keys and values of the clean tokens before the current blocks; `cache` as for `run_pass`."""
    spans = [(entry.num_cached, entry.base(lm)) for entry in entries]
    start_B1, base_B1 = as_columns(spans, slots.ids_SC.device)
    position_BQ = start_B1 + torch.arange(max(base - start for start, base in spans), device=base_B1.device)
    queries = _queries(lm, slots, entries, position_BQ, position_BQ < base_B1, base_B1, base_B1)
    run_pass(lm, slots, entries, queries, max(base for _, base in spans), base_B1.new_zeros(1), cache=cache)


def partial_pass(
    lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry], member_N: Tensor, position_N: Tensor, ahead_N: Tensor
) -> Tensor:
    """A lossy pass of a bidirectional model: some positions, over stale keys of the others (Wu et al. 2025, "Fast-dLLM")."""
    device, shift = member_N.device, int(lm.logit_shift)
    spans = [(max(entry.recompute[0] - shift, 0), entry.recompute[1], entry.length) for entry in entries if entry.recompute is not None]
    start_B1, stop_B1, length_B1 = as_columns(spans, device)
    position_BQ = start_B1 + torch.arange(max(stop - start for start, stop, _ in spans), device=device)
    queries = _queries(lm, slots, entries, position_BQ, position_BQ < stop_B1, length_B1, stop_B1)
    index_N = member_N * position_BQ.shape[1] + position_N - start_B1[member_N, 0]
    index_N = index_N - slots.shifts(lm, entries, member_N, position_N)
    return run_pass(lm, slots, entries, queries, max(entry.length for entry in entries), index_N)


def _extent(lm: DiffusionLM, entry: BatchEntry) -> Extent:
    base = entry.base(lm)
    first = min(entry.num_cached, max(base - int(lm.logit_shift), 0))
    return Extent(first, base, base if lm.autoregressive else entry.end(lm), len(entry.draft.ids_GW) if entry.draft else 0)


def _queries(
    lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry], position_BQ: Tensor, real_BQ: Tensor, base_B1: Tensor, stop_B1: Tensor
) -> Queries:
    """The queries of these positions. Those before `base` are clean: they attend to clean tokens up to the end of their block, or with a
    causal context up to themselves. The others attend to all positions before `stop`. In a bidirectional model all attend to all."""
    assert slots.cache is not None
    slot_B1 = torch.tensor([[entry.slot] for entry in entries], device=position_BQ.device)
    position_BQ = torch.where(real_BQ, position_BQ, 0)
    if lm.attention == "bidirectional":
        noisy_BQ, end_BQ = torch.zeros_like(real_BQ), base_B1.expand_as(position_BQ)
    else:
        size = lm.block_size or 1
        noisy_BQ = real_BQ & (position_BQ >= base_B1)
        block_end_BQ = position_BQ + 1 if lm.causal_context or size == 1 else (position_BQ // size + 1) * size
        end_BQ = torch.where(noisy_BQ, stop_B1, torch.minimum(block_end_BQ, base_B1)).clamp_min(1)  # padding attends to the first key
    return Queries(
        position_BQ=position_BQ,
        real_BQ=real_BQ,
        copy_BQ=noisy_BQ.long(),
        column_BQ=torch.where(real_BQ, position_BQ, slots.cache.shape[1]),
        end_BQ=end_BQ,
        ids_BQ=slots.ids_SC[slot_B1, position_BQ],
        hidden_BQ=real_BQ & slots.hidden_SC[slot_B1, position_BQ],
    )


def run_pass(
    lm: DiffusionLM,
    slots: Slots,
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
    slot_indices = [entry.slot for entry in entries]
    layout = Layout(queries.real_BQ.long(), queries.position_BQ, queries.copy_BQ)
    fraction_BQ = None  # of hidden tokens
    if lm.has_time_embedding and lm.attention == "bidirectional":
        length_B1 = torch.tensor([[entry.length] for entry in entries], device=index_N.device)
        fraction_BQ = (slots.hidden_SC[slot_indices].sum(1, keepdim=True) / length_B1).expand_as(queries.position_BQ)
    elif lm.has_time_embedding:
        fraction_BQ = hidden_fraction(queries.hidden_BQ & (queries.copy_BQ > 0), layout, lm.attention, lm.block_size)
    key_K = torch.arange(max(columns, 1), device=index_N.device)
    allowed_BQK = key_K < queries.end_BQ[:, :, None]
    if queries.draft_BQ2 is not None:
        allowed_BQK |= (key_K >= queries.draft_BQ2[:, :, :1]) & (key_K < queries.draft_BQ2[:, :, 1:])
    if queries.path_BQK is not None:
        allowed_BQK |= queries.path_BQK
    positions = None
    if windows or lm.attention == "causal":  # keys of earlier passes are at the position of their column
        column_BC = torch.arange(cache.shape[1] + 1, device=index_N.device).repeat(len(entries), 1)
        positions = (queries.position_BQ, column_BC.scatter_(1, queries.column_BQ, queries.position_BQ)[:, : len(key_K)])
    mask = AttentionMask(allowed_BQK[:, None], positions)
    inputs = ForwardInputs(queries.ids_BQ, layout, mask, index_N, fraction_BQ, pruned=True)
    return lm.forward(inputs, cache.begin_pass(slot_indices, queries.column_BQ, len(key_K)))
