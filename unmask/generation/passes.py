"""Forward passes over the slots: the logits at the hidden positions of the blocks in work, and nothing else.

Shapes: B sequences of a pass, T positions, Q queries, K keys, N hidden rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.generation.slots import Slots
from unmask.models.attention import AttentionMask, Layout
from unmask.models.diffusion_lm import DiffusionLM, Reading

WASTE = 1024  # tokens of padding in a pass from which a pass of its own is worth it


class Window(NamedTuple):
    """What a pass has to know of one sequence.

    Attributes:
        slot: where it stands.
        length: of the whole sequence.
        start, stop: the block in work.
        clean: the first position that its cached keys lack.
        state: equal for sequences that may stand in the same state; None where no other can.
    """

    slot: int
    length: int
    start: int
    stop: int
    clean: int = 0
    state: tuple | None = None


class Rows(NamedTuple):
    """Predictions at hidden positions, ordered by sequence of the pass and position.

    Attributes:
        logits_NV: aligned logits.
        member_N: which of the windows a row belongs to.
        position_N: where.
    """

    logits_NV: Tensor
    member_N: Tensor
    position_N: Tensor


def hidden_rows(slots: Slots, windows: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """Member and position of every hidden position of the blocks in work."""
    slot_B, start_B, stop_B = _columns(windows, slots.ids_SC.device)
    width = max(window.stop for window in windows)
    at_T = torch.arange(width, device=slot_B.device)
    rows_BT = slots.hidden_SC[slot_B, :width] & (at_T >= start_B[:, None]) & (at_T < stop_B[:, None])
    return rows_BT.nonzero(as_tuple=True)


def full_pass(lm: DiffusionLM, slots: Slots, windows: Sequence[Window], alone: bool = False) -> Rows:
    """Whole canvases of a bidirectional model: short ones apart from long ones, equal ones once."""
    member_N, position_N = hidden_rows(slots, windows)
    computed, twin = _distinct(slots, windows)
    row_of_BT = torch.full((len(windows), slots.ids_SC.shape[1]), -1, device=member_N.device)
    pieces, count = [], 0
    for bucket in _buckets([windows[b].length for b in computed], alone):
        members = [computed[b] for b in bucket]
        some = [windows[b] for b in members]
        width = max(window.length for window in some)
        slot_B = torch.tensor([window.slot for window in some], device=member_N.device)
        length_B = torch.tensor([window.length for window in some], device=member_N.device)
        at_T = torch.arange(width, device=member_N.device)
        real_BT = None if all(window.length == width for window in some) else (at_T < length_B[:, None]).long()
        hidden_BT = slots.hidden_SC[slot_B, :width]
        member_M, position_M = hidden_rows(slots, some)
        rows_BT = torch.zeros_like(hidden_BT)
        rows_BT[member_M, position_M] = True
        pieces.append(lm.logits(slots.ids_SC[slot_B, :width], real_BT, rows_BT, hidden_BT))
        row_of_BT[torch.tensor(members, device=member_N.device)[member_M], position_M] = torch.arange(count, count + len(member_M)).to(
            member_M
        )
        count += len(member_M)
    logits_MV = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if len(pieces) > 1 or len(computed) < len(windows):
        logits_MV = logits_MV[row_of_BT[torch.tensor(twin, device=member_N.device)[member_N], position_N]]
    return Rows(logits_MV, member_N, position_N)


def _columns(windows: Sequence[Window], device: torch.device) -> Tensor:
    return torch.tensor([(window.slot, window.start, window.stop) for window in windows], device=device).unbind(1)  # type: ignore[return-value]


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
            state_BT = torch.where(slots.hidden_SC[slot_B], -1, slots.ids_SC[slot_B])
            first: dict[int, int] = {}
            for member, kind in zip(members, state_BT.unique(dim=0, return_inverse=True)[1].tolist(), strict=True):
                twin[member] = first.setdefault(kind, member)
    return [member for member in range(len(windows)) if twin[member] == member], twin


def _buckets(lengths: Sequence[int], alone: bool = False) -> Iterator[list[int]]:
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


def cached_pass(lm: DiffusionLM, slots: Slots, windows: Sequence[Window]) -> Rows:
    """The block in work of every sequence, over cached keys. The pass also commits the clean tokens before the block that the cache lacks.

    With a logit shift the last clean token before the block is read again, since it predicts the block's first one.
    """
    shift, grid = int(lm.logit_shift), lm.block_size or 1
    base = [window.start - window.start % grid for window in windows]
    read = [min(window.clean, max(first - shift, 0)) for window, first in zip(windows, base, strict=True)]
    work = [0 if lm.autoregressive else window.stop - first for window, first in zip(windows, base, strict=True)]
    device = slots.ids_SC.device
    ends = [first + width for first, width in zip(base, work, strict=True)]
    base_B1, read_B1, stop_B1 = torch.tensor(list(zip(base, read, ends, strict=True)), device=device)[:, :, None].unbind(1)
    clean = max(first - start for first, start in zip(base, read, strict=True))
    at_BQ = base_B1 + torch.arange(-clean, max(work), device=device)
    real_BQ = (at_BQ >= read_B1) & (at_BQ < stop_B1)
    position_BQ = torch.where(real_BQ, at_BQ, 0)
    noisy_BQ = real_BQ & (at_BQ >= base_B1)
    member_N, position_N = hidden_rows(slots, windows)
    queries = at_BQ.shape[1]
    index_N = member_N * queries + clean + position_N - base_B1[member_N, 0] - shift
    logits_NV = _run(lm, slots, windows, real_BQ, position_BQ, noisy_BQ, base_B1, index_N)
    return Rows(logits_NV, member_N, position_N)


def commit(lm: DiffusionLM, slots: Slots, windows: Sequence[Window]) -> None:
    """Read the clean tokens before the blocks in work into the cache: prompts, once for all that share them."""
    grid = lm.block_size or 1
    for bucket in _buckets([window.start - window.clean for window in windows]):
        some = [windows[index] for index in bucket]
        base_B1 = torch.tensor([[window.start - window.start % grid] for window in some], device=slots.ids_SC.device)
        read_B1 = torch.tensor([[window.clean] for window in some], device=slots.ids_SC.device)
        at_BQ = read_B1 + torch.arange(int((base_B1 - read_B1).max()), device=base_B1.device)
        real_BQ = at_BQ < base_B1
        index_N = torch.zeros(1, dtype=torch.long, device=base_B1.device)
        _run(lm, slots, some, real_BQ, torch.where(real_BQ, at_BQ, 0), torch.zeros_like(real_BQ), base_B1, index_N)


def _run(
    lm: DiffusionLM,
    slots: Slots,
    windows: Sequence[Window],
    real_BQ: Tensor,
    position_BQ: Tensor,
    noisy_BQ: Tensor,
    base_B1: Tensor,
    index_N: Tensor,
) -> Tensor:
    """One pass over cached keys: clean queries see what is clean up to the end of their block (with a causal context up to
    themselves), noisy ones all that is clean and their own block."""
    grid, width = lm.block_size or 1, int(position_BQ.max()) + 1
    slot_B = torch.tensor([window.slot for window in windows], device=base_B1.device)
    own_end_BQ = position_BQ + 1 if lm.causal_context or grid == 1 else (position_BQ // grid + 1) * grid
    stop_B1 = torch.where(noisy_BQ, position_BQ + 1, base_B1).amax(1, keepdim=True)
    end_BQ = torch.where(noisy_BQ, stop_B1, torch.minimum(own_end_BQ, base_B1)).clamp_min(1)  # padding sees the first key
    key_K = torch.arange(width, device=base_B1.device)
    allowed_BQK = key_K < end_BQ[:, :, None]
    positions = (position_BQ, key_K.expand(len(slot_B), -1)) if lm.attention == "causal" else None
    layout = Layout(real_BQ.long(), position_BQ, noisy_BQ.long())
    hidden_BQ = noisy_BQ & slots.hidden_SC[slot_B[:, None], position_BQ]
    reading = Reading(
        ids_BT=slots.ids_SC[slot_B[:, None], position_BQ],
        layout=layout,
        mask=AttentionMask(allowed_BQK[:, None], positions),
        index_N=index_N,
        share_BT=lm.hidden_share(hidden_BQ, layout) if lm.has_time_embedding else None,
    )
    assert slots.cache is not None
    column_BQ = torch.where(real_BQ, position_BQ, slots.cache.shape[1])
    return lm.forward(reading, slots.cache.read([window.slot for window in windows], column_BQ, width))
