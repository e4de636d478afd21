"""Forward passes over the slots: the logits at the hidden positions of the blocks in work, and nothing else.

Shapes: B sequences of a pass, C columns of the slots, N hidden rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.generation.cached import cached_pass, partial_pass
from unmask.generation.slots import Slots, Window
from unmask.models.diffusion_lm import DiffusionLM

WASTE = 1024  # tokens of padding in a pass from which a pass of its own is worth it
Pass = Callable[[DiffusionLM, Slots, Sequence[Window], Tensor, Tensor, Tensor], Tensor]


class Rows(NamedTuple):
    """Predictions at hidden positions, ordered by sequence of the pass and position; those for states ahead come after all others.

    Attributes:
        logits_NV: aligned logits.
        member_N: which of the windows a row belongs to.
        position_N: where.
        ahead_N: how many steps ahead the state that it was predicted from is guessed.
    """

    logits_NV: Tensor
    member_N: Tensor
    position_N: Tensor
    ahead_N: Tensor

    def where(self, keep_N: Tensor, number_B: Tensor | None = None) -> Rows:
        """Some of the rows, perhaps with other numbers for their members."""
        if keep_N.all() and number_B is None:
            return self
        member_N = self.member_N if number_B is None else number_B[self.member_N]
        return Rows(self.logits_NV[keep_N], member_N[keep_N], self.position_N[keep_N], self.ahead_N[keep_N])


def predict(lm: DiffusionLM, slots: Slots, windows: Sequence[Window], alone: bool = False) -> Rows:
    """Logits at every hidden position of the blocks in work. What stands in the same state is computed once, what is of different
    lengths apart (`alone`: every sequence)."""
    member_N, position_N, ahead_N = slots.hidden_rows(windows)
    computed, twin = _distinct(slots, windows)
    deepest = max(len(window.guess.ids_GW) if window.guess else 0 for window in windows)
    place_BGC = torch.full((len(windows), 1 + deepest, slots.ids_SC.shape[1]), -1, device=member_N.device)
    parts: list[Tensor] = []
    count = 0
    for members, run in _portions(lm, windows, computed, alone):
        some = [windows[member] for member in members]
        member_M, position_M, ahead_M = slots.hidden_rows(some)
        parts.append(run(lm, slots, some, member_M, position_M, ahead_M))
        place_M = torch.arange(count, count + len(member_M), device=member_N.device)
        place_BGC[torch.tensor(members, device=member_N.device)[member_M], ahead_M, position_M] = place_M
        count += len(member_M)
    logits_NV = parts[0] if len(parts) == 1 else torch.cat(parts)
    if len(parts) > 1 or len(computed) < len(windows):
        logits_NV = logits_NV[place_BGC[torch.tensor(twin, device=member_N.device)[member_N], ahead_N, position_N]]
    return Rows(logits_NV, member_N, position_N, ahead_N)


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
    hidden_BT = slots.hidden_SC[slot_B, :width]
    rows_BT = torch.zeros_like(hidden_BT)
    rows_BT[member_N, position_N] = True
    return lm.logits(slots.ids_SC[slot_B, :width], real_BT, rows_BT, hidden_BT)


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
