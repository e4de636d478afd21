"""Forward passes over the slots: the logits at the hidden positions of the current blocks, and nothing else.

Shapes: B sequences of a pass, S slots, C columns of the slots (positions), T tokens, N hidden positions, J
some of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from unmask.generation.engine.cached_forward import cached_pass
from unmask.generation.engine.drafts import add_drafted
from unmask.generation.engine.host import moved, slot_index, starts
from unmask.generation.engine.lossy_cache import partial_pass
from unmask.generation.engine.recorded_passes import forward
from unmask.generation.engine.slots import BatchEntry, BatchState, Predictions
from unmask.models.attention import AttentionMask, Layout, hidden_fraction
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs

WASTE = 1024  # tokens of padding above which a separate pass is cheaper
ForwardPass = Callable[
    [DiffusionLM, BatchState, Sequence[BatchEntry], np.ndarray, Tensor, np.ndarray], Tensor
]


def predict(
    lm: DiffusionLM, slots: BatchState, entries: Sequence[BatchEntry], alone: bool = False
) -> Predictions:
    """Logits at the positions of the current blocks that `BatchState.hidden_positions` names. Sequences in
    equal states are computed once. Sequences of very different lengths have separate passes. With `alone`,
    every sequence has a pass of its own."""
    return run_passes(lm, slots, entries, alone)[0]


def run_passes(
    lm: DiffusionLM, slots: BatchState, entries: Sequence[BatchEntry], alone: bool
) -> tuple[Predictions, Tensor | None]:
    """The predictions of `predict`, and the number of each row among those that the passes computed; None:
    they are in this order."""
    member_N, slot_N, position_N = slots.hidden_positions(entries)
    ahead_N = np.zeros_like(member_N)
    if any(entry.draft is not None for entry in entries):
        member_N, slot_N, position_N, ahead_N = add_drafted(entries, member_N, slot_N, position_N)
    computed, twin = _distinct(slots, entries)
    parts, taken = list[Tensor](), list[np.ndarray]()
    for group, run in _passes(lm, entries, computed, alone):
        number_B = np.full(len(entries), -1)
        number_B[group] = np.arange(len(group))
        index_J = np.flatnonzero(number_B[member_N] >= 0)
        position_J = position_N
        if len(index_J) < len(member_N):
            position_J = position_N[moved(index_J, position_N.device)]
        own = [entries[member] for member in group]
        parts.append(run(lm, slots, own, number_B[member_N[index_J]], position_J, ahead_N[index_J]))
        taken.append(index_J)
    index_N = np.concatenate(taken)
    source_N = np.empty_like(member_N)  # index of each position among the computed ones
    source_N[index_N] = np.arange(len(index_N))
    if len(computed) < len(entries):  # such sequences have no drafts
        first_B = starts([entry.num_predicted for entry in entries])
        source_N = source_N[first_B[np.array(twin)[member_N]] + np.arange(len(member_N)) - first_B[member_N]]
    logits_NV, source = parts[0] if len(parts) == 1 else torch.cat(parts), None
    if not np.array_equal(source_N, np.arange(len(index_N))):
        source = moved(source_N, position_N.device)
        logits_NV = logits_NV[source]
    return Predictions(logits_NV, member_N, slot_N, position_N, ahead_N), source


def buckets(lengths: Sequence[int], alone: bool = False) -> Iterator[list[int]]:
    """Indices of sequences that share a pass. They are of similar lengths: the padding costs less than a
    separate pass."""
    bucket: list[int] = []
    padding = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padding += lengths[bucket[0]] - lengths[index] if bucket else 0
        if bucket and (alone or padding > WASTE):
            yield sorted(bucket)
            bucket, padding = [], 0
        bucket.append(index)
    if bucket:
        yield sorted(bucket)


def full_pass(
    lm: DiffusionLM,
    slots: BatchState,
    entries: Sequence[BatchEntry],
    member_N: np.ndarray,
    position_N: Tensor,
    ahead_N: np.ndarray,
) -> Tensor:
    """A pass of a bidirectional model over whole sequences."""
    lengths = tuple(entry.length for entry in entries)
    width, rows = max(lengths), slot_index([entry.slot for entry in entries], position_N.device)
    ids_BT = slots.ids_SC[:, :width][rows]
    layout, mask = slots.plans.get(lengths, lambda: _layout(lm, ids_BT, lengths), len(lengths) * width**2)
    fraction_BT = None
    if lm.has_time_embedding:
        fraction_BT = hidden_fraction(slots.hidden_SC[:, :width][rows], layout, lm.attention, lm.block_size)
    index_N = moved(member_N * width, position_N.device) + slots.read_at(lm, entries, member_N, position_N)
    return forward(lm, ForwardInputs(ids_BT, layout, mask, index_N, fraction_BT, pruned=True))


def _layout(lm: DiffusionLM, ids_BT: Tensor, lengths: Sequence[int]) -> tuple[Layout, AttentionMask]:
    """The layout and mask of whole sequences of these lengths."""
    width = ids_BT.shape[1]
    if min(lengths) == width:
        return lm.layout_and_mask(ids_BT, None)
    return lm.layout_and_mask(ids_BT, moved(np.arange(width) < np.array(lengths)[:, None], ids_BT.device))


def _passes(
    lm: DiffusionLM, entries: Sequence[BatchEntry], computed: list[int], alone: bool
) -> Iterator[tuple[list[int], ForwardPass]]:
    """The members of each pass, and the function that computes it."""
    exact_pass = full_pass if lm.attention == "bidirectional" else cached_pass
    for lossy, run in ((True, partial_pass), (False, exact_pass)):
        members = [member for member in computed if (entries[member].recompute is not None) == lossy]
        for bucket in buckets([entries[member].num_queries(lm) for member in members], alone):
            yield [members[index] for index in bucket], run


def _distinct(slots: BatchState, entries: Sequence[BatchEntry]) -> tuple[list[int], list[int]]:
    """The members to compute, and for every member the computed one with the same state, which may be itself.
    The host reads which states of sequences with the same prompt are equal."""
    groups: dict[tuple, list[int]] = {}
    for member, entry in enumerate(entries):
        if entry.state is not None:
            groups.setdefault(entry.state, []).append(member)
    twin = list(range(len(entries)))
    for members in groups.values():
        if len(members) > 1:
            slot_B = moved(np.array([entries[member].slot for member in members]), slots.ids_SC.device)
            state_BC = torch.where(slots.hidden_SC[slot_B], -1, slots.ids_SC[slot_B])
            first: dict[int, int] = {}
            for member, state in zip(
                members, state_BC.unique(dim=0, return_inverse=True)[1].tolist(), strict=True
            ):
                twin[member] = first.setdefault(state, member)
    return [member for member in range(len(entries)) if twin[member] == member], twin
