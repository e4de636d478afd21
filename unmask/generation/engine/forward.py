"""Forward passes over the slots: the logits at the hidden positions of the current blocks, and nothing else.

Shapes: B sequences of a pass, S slots, C columns of the slots (positions), T tokens, N hidden positions, J some of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unmask.generation.engine.cached_forward import cached_pass, partial_pass
from unmask.generation.engine.slots import BatchEntry, Slots
from unmask.models.diffusion_lm import DiffusionLM

WASTE = 1024  # tokens of padding above which a separate pass is cheaper
Pass = Callable[[DiffusionLM, Slots, Sequence[BatchEntry], Tensor, Tensor, Tensor], Tensor]


class Predictions(NamedTuple):
    """Predictions at hidden positions, ordered by sequence and position; those of drafts come last."""

    logits_NV: Tensor  # aligned
    member_N: Tensor  # index of the sequence in the pass
    position_N: Tensor  # in the sequence
    ahead_N: Tensor  # how many steps ahead the predicted state is drafted; 0: the current state
    drafted: bool  # whether there are drafts
    quality_N: Tensor | None = None  # the logs of the quality head's probabilities; None: not computed

    def where(self, keep_N: Tensor, number_B: Tensor | None = None) -> Predictions:
        """Those that `keep_N` selects; `number_B` renumbers their members."""
        index_J = keep_N.nonzero().squeeze(1)
        member_J = self.member_N[index_J] if number_B is None else number_B[self.member_N[index_J]]
        quality_J = None if self.quality_N is None else self.quality_N[index_J]
        return Predictions(self.logits_NV[index_J], member_J, self.position_N[index_J], self.ahead_N[index_J], self.drafted, quality_J)


def predict(lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry], alone: bool = False) -> Predictions:
    """Logits at the positions of the current blocks that `Slots.hidden_positions` names. Sequences in equal states are computed once.
    Sequences of very different lengths have separate passes. With `alone`, every sequence has a pass of its own."""
    member_N, position_N, ahead_N = slots.hidden_positions(entries)
    computed, twin = _distinct(slots, entries)
    parts: list[Tensor] = []
    source_N = torch.empty_like(member_N)  # index of each position among the computed ones
    count = 0
    judged = any(entry.revise == "quality" for entry in entries)
    states: list[Tensor] = []
    for members, run in _passes(lm, entries, computed, alone):
        number_B = torch.full((len(entries),), -1)
        number_B[members] = torch.arange(len(members))
        number_N = number_B.to(member_N.device)[member_N]
        index_J = (number_N >= 0).nonzero().squeeze(1)
        with lm.capturing() if judged else nullcontext(states) as seen:
            parts.append(run(lm, slots, [entries[member] for member in members], number_N[index_J], position_N[index_J], ahead_N[index_J]))
        states = states + seen if judged else states
        source_N[index_J] = torch.arange(count, count + len(index_J), device=member_N.device)
        count += len(index_J)
    if len(computed) < len(entries):  # such sequences have no drafts
        source_BC = torch.empty(len(entries), slots.ids_SC.shape[1], dtype=torch.long, device=member_N.device)
        source_BC[member_N, position_N] = source_N
        source_N = source_BC[torch.tensor(twin, device=member_N.device)[member_N], position_N]
    logits_NV = parts[0] if len(parts) == 1 else torch.cat(parts)
    if len(parts) > 1 or len(computed) < len(entries):
        logits_NV = logits_NV[source_N]
    quality_N = None
    if judged:
        assert lm.quality_head is not None
        quality_N = logsigmoid(lm.quality_head(torch.cat(states)))[source_N]
    return Predictions(logits_NV, member_N, position_N, ahead_N, any(entry.draft for entry in entries), quality_N)


def buckets(lengths: Sequence[int], alone: bool = False) -> Iterator[list[int]]:
    """Indices of sequences that share a pass. They are of similar lengths: the padding costs less than a separate pass."""
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
    lm: DiffusionLM, slots: Slots, entries: Sequence[BatchEntry], member_N: Tensor, position_N: Tensor, ahead_N: Tensor
) -> Tensor:
    """A pass of a bidirectional model over whole sequences."""
    length_B = torch.tensor([entry.length for entry in entries], device=member_N.device)
    slot_B = torch.tensor([entry.slot for entry in entries], device=member_N.device)
    width = max(entry.length for entry in entries)
    padded = any(entry.length < width for entry in entries)
    real_BT = (torch.arange(width, device=member_N.device) < length_B[:, None]).long() if padded else None
    inputs = lm.noised_inputs(slots.ids_SC[slot_B, :width], real_BT, None, slots.hidden_SC[slot_B, :width])
    index_N = (member_N * width + position_N - slots.shifts(lm, entries, member_N, position_N)).clamp_min(0)
    return lm.forward(replace(inputs, index_N=index_N, pruned=True))


def _passes(lm: DiffusionLM, entries: Sequence[BatchEntry], computed: list[int], alone: bool) -> Iterator[tuple[list[int], Pass]]:
    """The members of each pass, and the function that computes it."""
    exact_pass = full_pass if lm.attention == "bidirectional" else cached_pass
    for lossy, run in ((True, partial_pass), (False, exact_pass)):
        members = [member for member in computed if (entries[member].recompute is not None) == lossy]
        for bucket in buckets([entries[member].num_queries(lm) for member in members], alone):
            yield [members[index] for index in bucket], run


def _distinct(slots: Slots, entries: Sequence[BatchEntry]) -> tuple[list[int], list[int]]:
    """The members to compute, and for every member the computed one with the same state, which may be itself."""
    groups: dict[tuple, list[int]] = {}
    for member, entry in enumerate(entries):
        if entry.state is not None:
            groups.setdefault(entry.state, []).append(member)
    twin = list(range(len(entries)))
    for members in groups.values():
        if len(members) > 1:
            slot_B = torch.tensor([entries[member].slot for member in members], device=slots.ids_SC.device)
            state_BC = torch.where(slots.hidden_SC[slot_B], -1, slots.ids_SC[slot_B])
            first: dict[int, int] = {}
            for member, state in zip(members, state_BC.unique(dim=0, return_inverse=True)[1].tolist(), strict=True):
                twin[member] = first.setdefault(state, member)
    return [member for member in range(len(entries)) if twin[member] == member], twin
