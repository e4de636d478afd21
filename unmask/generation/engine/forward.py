"""Forward passes over the slots: the logits at the hidden positions of the blocks in work, and nothing else.

Shapes: B sequences of a pass, C columns of the slots, N hidden rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.generation.engine.cached_forward import cached_pass, partial_pass
from unmask.generation.engine.slots import Slots, Window
from unmask.models.diffusion_lm import DiffusionLM

WASTE = 1024  # tokens of padding in a pass from which a pass of its own is worth it
Pass = Callable[[DiffusionLM, Slots, Sequence[Window], Tensor, Tensor, Tensor], Tensor]


class Rows(NamedTuple):
    """Predictions at hidden positions, ordered by sequence of the pass and position; those for states ahead come after all others.

    Attributes:
        logits_NV: aligned logits.
        member_N: which of the windows a row belongs to.
        position_N: where.
        ahead_N: how many steps ahead the state that it was predicted from is drafted.
        drafted: whether any is.
    """

    logits_NV: Tensor
    member_N: Tensor
    position_N: Tensor
    ahead_N: Tensor
    drafted: bool

    def where(self, keep_N: Tensor, number_B: Tensor | None = None) -> Rows:
        """Some of the rows, perhaps with other numbers for their members."""
        at_M = keep_N.nonzero().squeeze(1)
        member_M = self.member_N[at_M]
        if number_B is not None:
            member_M = number_B[member_M]
        return Rows(self.logits_NV[at_M], member_M, self.position_N[at_M], self.ahead_N[at_M], self.drafted)


def predict(lm: DiffusionLM, slots: Slots, windows: Sequence[Window], alone: bool = False) -> Rows:
    """Logits at every hidden position of the blocks in work. What stands in the same state is computed once, what is of different
    lengths apart (`alone`: every sequence)."""
    member_N, position_N, ahead_N = slots.hidden_rows(windows)
    computed, twin = _distinct(slots, windows)
    parts: list[Tensor] = []
    place_N = torch.empty_like(member_N)  # of each row among those computed
    count = 0
    for members, run in _portions(lm, windows, computed, alone):
        number_B = torch.full((len(windows),), -1)
        number_B[members] = torch.arange(len(members))
        number_N = number_B.to(member_N.device)[member_N]
        at_M = (number_N >= 0).nonzero().squeeze(1)
        parts.append(run(lm, slots, [windows[member] for member in members], number_N[at_M], position_N[at_M], ahead_N[at_M]))
        place_N[at_M] = torch.arange(count, count + len(at_M), device=member_N.device)
        count += len(at_M)
    if len(computed) < len(windows):  # none of them with drafts
        place_BC = torch.empty(len(windows), slots.ids_SC.shape[1], dtype=torch.long, device=member_N.device)
        place_BC[member_N, position_N] = place_N
        place_N = place_BC[torch.tensor(twin, device=member_N.device)[member_N], position_N]
    logits_NV = parts[0] if len(parts) == 1 else torch.cat(parts)
    if len(parts) > 1 or len(computed) < len(windows):
        logits_NV = logits_NV[place_N]
    return Rows(logits_NV, member_N, position_N, ahead_N, any(window.draft for window in windows))


def buckets(lengths: Sequence[int], alone: bool = False) -> Iterator[list[int]]:
    """Indices of sequences that go into one pass: those of a length, as long as padding costs less than a pass of its own."""
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


def full_pass(lm: DiffusionLM, slots: Slots, windows: Sequence[Window], member_N: Tensor, position_N: Tensor, ahead_N: Tensor) -> Tensor:
    """Whole canvases."""
    length_B = torch.tensor([window.length for window in windows], device=member_N.device)
    slot_B = torch.tensor([window.slot for window in windows], device=member_N.device)
    width = max(window.length for window in windows)
    padded = any(window.length < width for window in windows)
    real_BT = (torch.arange(width, device=member_N.device) < length_B[:, None]).long() if padded else None
    inputs = lm.single(slots.ids_SC[slot_B, :width], real_BT, None, slots.hidden_SC[slot_B, :width])
    index_N = (member_N * width + position_N - int(lm.logit_shift)).clamp_min(0)
    return lm.forward(replace(inputs, index_N=index_N, pruned=True))


def _portions(lm: DiffusionLM, windows: Sequence[Window], computed: list[int], alone: bool) -> Iterator[tuple[list[int], Pass]]:
    """Which members go together, and through which pass."""
    whole = [member for member in computed if windows[member].read is None]
    part = [member for member in computed if windows[member].read is not None]
    kinds: list[tuple[list[int], Pass]] = [(part, partial_pass), (whole, full_pass if lm.attention == "bidirectional" else cached_pass)]
    for members, run in kinds:
        lengths = [windows[member].queries(lm) for member in members]
        for bucket in buckets(lengths, alone):
            yield [members[index] for index in bucket], run


def _distinct(slots: Slots, windows: Sequence[Window]) -> tuple[list[int], list[int]]:
    """The members to compute, and for every member the one whose state it shares (or itself)."""
    groups: dict[tuple, list[int]] = {}
    for member, window in enumerate(windows):
        if window.state is not None:
            groups.setdefault(window.state, []).append(member)
    twin = list(range(len(windows)))
    for members in groups.values():
        if len(members) > 1:
            slot_B = torch.tensor([windows[member].slot for member in members], device=slots.ids_SC.device)
            state_BC = torch.where(slots.hidden_SC[slot_B], -1, slots.ids_SC[slot_B])
            first: dict[int, int] = {}
            for member, kind in zip(members, state_BC.unique(dim=0, return_inverse=True)[1].tolist(), strict=True):
                twin[member] = first.setdefault(kind, member)
    return [member for member in range(len(windows)) if twin[member] == member], twin
