"""Forward passes over cached keys: exact ones of causal and block-causal models, lossy ones of bidirectional models.

Shapes: B sequences of a pass, Q queries, K keys, N hidden positions, G drafts, W positions of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.generation.engine.slots import BatchEntry, Slots
from unmask.models.attention import AttentionMask, Layout
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs


@dataclass
class Queries:
    """The queries of a pass.

    Attributes:
        position_BQ: in the sequence; 0 for padding.
        real_BQ: False for padding.
        copy_BQ: 0 for clean tokens, 1 for the current block, 2 and more for its drafts.
        column_BQ: the cache column of the query's key and value.
        end_BQ: a query attends to the columns before this one,
        own_BQ2: and to a range of columns, of its own draft.
        ids_BQ, hidden_BQ: token ids, and whether they are hidden.
    """

    position_BQ: Tensor
    real_BQ: Tensor
    copy_BQ: Tensor
    column_BQ: Tensor
    end_BQ: Tensor
    own_BQ2: Tensor
    ids_BQ: Tensor
    hidden_BQ: Tensor


def cached_pass(
    lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry], member_N: Tensor, position_N: Tensor, ahead_N: Tensor
) -> Tensor:
    """The current block of every sequence over cached keys, and drafts of its next states, which do not attend to each other.

    The pass also commits the clean tokens before the block that the cache lacks. With a logit shift it computes the last clean token
    before the block again, since that predicts the first token of the block.
    """
    shift, device = int(lm.logit_shift), member_N.device
    base = [entry.base(lm) for entry in entries]
    read = [min(entry.clean, max(first - shift, 0)) for entry, first in zip(entries, base, strict=True)]
    stop = [first if lm.autoregressive else entry.end(lm) for entry, first in zip(entries, base, strict=True)]
    clean = max(first - start for first, start in zip(base, read, strict=True))
    work = max(last - first for first, last in zip(base, stop, strict=True))
    drafted = [len(entry.draft.ids_GW) if entry.draft else 0 for entry in entries]
    base_B1, read_B1, stop_B1, drafted_B1 = torch.tensor(list(zip(base, read, stop, drafted, strict=True)), device=device)[
        :, :, None
    ].unbind(1)
    copies = 1 + max(drafted)
    offset_Q = torch.cat([torch.arange(-clean, 0, device=device), torch.arange(work, device=device).repeat(copies)])
    ahead_Q = F.pad(torch.arange(copies, device=device).repeat_interleave(work), (clean, 0))
    at_BQ = base_B1 + offset_Q
    real_BQ = (at_BQ >= read_B1) & (at_BQ < stop_B1) & (ahead_Q <= drafted_B1)
    queries = _queries(lm, slots, entries, at_BQ, real_BQ, base_B1, stop_B1)
    for member, entry in enumerate(entries):
        for ahead in range(drafted[member]):
            assert entry.draft is not None
            first = clean + (1 + ahead) * work + entry.start - base[member]
            at = (member, slice(first, first + entry.stop - entry.start))
            queries.ids_BQ[at], queries.hidden_BQ[at] = entry.draft.ids_GW[ahead], entry.draft.hidden_GW[ahead]
    if copies > 1:
        queries.copy_BQ = queries.copy_BQ * (1 + ahead_Q)
        own_BQ = stop_B1 + (ahead_Q - 1) * work
        apart_BQ = real_BQ & (ahead_Q > 0)
        queries.column_BQ = torch.where(apart_BQ, own_BQ + offset_Q, queries.column_BQ)
        queries.end_BQ = torch.where(apart_BQ, base_B1, queries.end_BQ)
        queries.own_BQ2 = torch.stack([own_BQ, own_BQ + (stop_B1 - base_B1)], -1) * apart_BQ[..., None]
    first_N = base_B1[member_N, 0]
    column_N = clean + ahead_N * work + position_N - first_N - shift
    column_N = torch.where(position_N - first_N < shift, clean - 1, column_N)
    width = max(last + number * work for last, number in zip(stop, drafted, strict=True))
    return _run(lm, slots, entries, queries, width, member_N * at_BQ.shape[1] + column_N)


def commit(lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry]) -> None:
    """Compute the keys and values of the clean tokens before the current blocks."""
    edges = [(entry.base(lm), entry.clean) for entry in entries]
    base_B1, read_B1 = torch.tensor(edges, device=slots.ids_SC.device)[:, :, None].unbind(1)
    at_BQ = read_B1 + torch.arange(max(base - read for base, read in edges), device=base_B1.device)
    queries = _queries(lm, slots, entries, at_BQ, at_BQ < base_B1, base_B1, base_B1)
    _run(lm, slots, entries, queries, max(base for base, _ in edges), base_B1.new_zeros(1))


def partial_pass(
    lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry], member_N: Tensor, position_N: Tensor, ahead_N: Tensor
) -> Tensor:
    """Lossy: some positions of a bidirectional model, over stale keys of the others (Wu et al. 2025, "Fast-dLLM")."""
    device, shift = member_N.device, int(lm.logit_shift)
    spans = [(max(entry.read[0] - shift, 0), entry.read[1]) for entry in entries if entry.read is not None]
    read_B1, stop_B1 = torch.tensor(spans, device=device)[:, :, None].unbind(1)
    at_BQ = read_B1 + torch.arange(max(stop - read for read, stop in spans), device=device)
    length_B1 = torch.tensor([[entry.length] for entry in entries], device=device)
    queries = _queries(lm, slots, entries, at_BQ, at_BQ < stop_B1, length_B1, stop_B1)
    width = max(entry.length for entry in entries)
    return _run(lm, slots, entries, queries, width, member_N * at_BQ.shape[1] + position_N - read_B1[member_N, 0] - shift)


def _queries(
    lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry], at_BQ: Tensor, real_BQ: Tensor, base_B1: Tensor, stop_B1: Tensor
) -> Queries:
    """Positions as queries. Those before `base` are clean and attend to clean tokens up to the end of their block (with a causal context
    up to themselves), the others to all before `stop`; in a bidirectional model all attend to all."""
    assert slots.cache is not None
    slot_B1 = torch.tensor([[entry.slot] for entry in entries], device=at_BQ.device)
    position_BQ = torch.where(real_BQ, at_BQ, 0)
    if lm.attention == "bidirectional":
        noisy_BQ, end_BQ = torch.zeros_like(real_BQ), base_B1.expand_as(at_BQ)
    else:
        grid = lm.block_size or 1
        noisy_BQ = real_BQ & (at_BQ >= base_B1)
        own_end_BQ = position_BQ + 1 if lm.causal_context or grid == 1 else (position_BQ // grid + 1) * grid
        end_BQ = torch.where(noisy_BQ, stop_B1, torch.minimum(own_end_BQ, base_B1)).clamp_min(1)  # padding attends to the first key
    return Queries(
        position_BQ=position_BQ,
        real_BQ=real_BQ,
        copy_BQ=noisy_BQ.long(),
        column_BQ=torch.where(real_BQ, position_BQ, slots.cache.shape[1]),
        end_BQ=end_BQ,
        own_BQ2=end_BQ.new_zeros(1, 1, 2),
        ids_BQ=slots.ids_SC[slot_B1, position_BQ],
        hidden_BQ=real_BQ & slots.hidden_SC[slot_B1, position_BQ],
    )


def _run(lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry], queries: Queries, width: int, index_N: Tensor) -> Tensor:
    """One pass over the first `width` cached keys: logits at the queries `index_N`."""
    assert slots.cache is not None
    members = [entry.slot for entry in entries]
    layout = Layout(queries.real_BQ.long(), queries.position_BQ, queries.copy_BQ)
    share_BT = None
    if lm.has_time_embedding and lm.attention == "bidirectional":
        length_B1 = torch.tensor([[entry.length] for entry in entries], device=index_N.device)
        share_BT = (slots.hidden_SC[members].sum(1, keepdim=True) / length_B1).expand_as(queries.position_BQ)
    elif lm.has_time_embedding:
        share_BT = lm.hidden_share(queries.hidden_BQ & (queries.copy_BQ > 0), layout)
    key_K = torch.arange(max(width, 1), device=index_N.device)
    allowed_BQK = key_K < queries.end_BQ[:, :, None]
    if queries.own_BQ2.shape[1] > 1:
        allowed_BQK |= (key_K >= queries.own_BQ2[:, :, :1]) & (key_K < queries.own_BQ2[:, :, 1:])
    positions = (queries.position_BQ, key_K.expand(len(members), -1)) if lm.attention == "causal" else None
    mask = AttentionMask(allowed_BQK[:, None], positions)
    inputs = ForwardInputs(queries.ids_BQ, layout, mask, index_N, share_BT, pruned=True)
    return lm.forward(inputs, slots.cache.read(members, queries.column_BQ, len(key_K)))
