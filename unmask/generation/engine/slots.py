"""The sequences in work, on the device: what stands where, and what was revealed when.

Shapes: S slots, C columns (positions).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.generation.engine.kv_cache import SlotCache
from unmask.generation.output import Trace
from unmask.generation.requests import Request, block_start
from unmask.models.diffusion_lm import DiffusionLM


class Draft(NamedTuple):
    """States of a block one, two, ... steps ahead.

    Attributes:
        ids_GW: token ids, with the mask token at hidden positions.
        hidden_GW: what would still be hidden.
    """

    ids_GW: Tensor
    hidden_GW: Tensor


class Window(NamedTuple):
    """What a pass has to know of one sequence.

    Attributes:
        slot: where it stands.
        length: of the whole sequence.
        start, stop: the block in work.
        clean: the first position that its cached keys lack.
        read: of a lossy cache, the positions to compute; None: exact.
        state: equal for sequences that may stand in the same state; None where no other can.
        draft: states ahead to compute too.
    """

    slot: int
    length: int
    start: int
    stop: int
    clean: int = 0
    read: tuple[int, int] | None = None
    state: tuple | None = None
    draft: Draft | None = None

    def base(self, lm: DiffusionLM) -> int:
        """Where the attention's block in work begins, before which all is clean."""
        return block_start(self.start, lm.block_size)

    def end(self, lm: DiffusionLM) -> int:
        """Where it ends, or the sequence does."""
        return min(self.base(lm) + (lm.block_size or 1), self.length)

    def queries(self, lm: DiffusionLM) -> int:
        """How many positions a pass computes of it."""
        if self.read is not None:
            return self.read[1] - self.read[0]
        if lm.attention == "bidirectional":
            return self.length
        drafts = len(self.draft.ids_GW) if self.draft else 0
        return self.end(lm) - self.clean + drafts * (self.end(lm) - self.base(lm))


class Slots:
    """Rows of tensors, used from the first on: when a sequence leaves, the last row takes its place.

    Attributes:
        ids_SC: token ids, with the mask token at hidden positions.
        hidden_SC: what is still to be revealed.
        step_SC: when it was revealed, -1 for never.
        log_prob_SC, sampled_SC, entropy_SC: of what was revealed.
        cache: keys and values.
        count: the slots in use.
    """

    def __init__(self, device: torch.device, mask_token_id: int):
        self.mask_token_id = mask_token_id
        self.count = 0
        self.cache: SlotCache | None = None
        self.ids_SC = torch.zeros(0, 0, dtype=torch.long, device=device)
        self.hidden_SC = torch.zeros(0, 0, dtype=torch.bool, device=device)
        self.step_SC = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self.log_prob_SC, self.sampled_SC, self.entropy_SC = (torch.zeros(0, 0, dtype=torch.float64, device=device) for _ in range(3))

    @property
    def _tables(self) -> list[str]:
        return ["ids_SC", "hidden_SC", "step_SC", "log_prob_SC", "sampled_SC", "entropy_SC"]

    def reserve(self, slots: int, columns: int) -> None:
        """Make room; what is in use stays."""
        for name in self._tables:
            old = getattr(self, name)
            new = old.new_full((slots, columns), self.mask_token_id if name == "ids_SC" else 0)
            width = min(columns, old.shape[1])
            new[: self.count, :width] = old[: self.count, :width]
            setattr(self, name, new)
        if self.cache is not None:
            self.cache.reserve(slots, columns)

    def keep_keys(self) -> None:
        """Have a cache."""
        if self.cache is None:
            self.cache = SlotCache()
            self.cache.reserve(*self.ids_SC.shape)

    def hidden_rows(self, windows: Sequence[Window]) -> tuple[Tensor, Tensor, Tensor]:
        """Member, position and step ahead (0: none) of every hidden position of the blocks in work."""
        slot_B, start_B, stop_B = torch.tensor([(w.slot, w.start, w.stop) for w in windows], device=self.ids_SC.device).unbind(1)
        at_C = torch.arange(self.ids_SC.shape[1], device=slot_B.device)
        rows_BC = self.hidden_SC[slot_B] & (at_C >= start_B[:, None]) & (at_C < stop_B[:, None])
        rows = [F.pad(rows_BC.nonzero(), (0, 1))]
        for member, window in enumerate(windows):
            if window.draft is not None:
                ahead_M, column_M = window.draft.hidden_GW.nonzero(as_tuple=True)
                rows.append(torch.stack([torch.full_like(ahead_M, member), window.start + column_M, 1 + ahead_M], 1))
        member_N, position_N, ahead_N = torch.cat(rows).T.contiguous().unbind()
        return member_N, position_N, ahead_N

    def add(self, ids: list[int], hidden: list[bool]) -> int:
        """Take the next slot for a sequence."""
        slot, width = self.count, len(ids)
        self.count += 1
        self.ids_SC[slot] = self.mask_token_id
        self.ids_SC[slot, :width] = torch.tensor(ids, device=self.ids_SC.device)
        self.hidden_SC[slot] = False
        self.hidden_SC[slot, :width] = torch.tensor(hidden, device=self.ids_SC.device)
        self.step_SC[slot] = -1
        for name in ("log_prob_SC", "sampled_SC", "entropy_SC"):
            getattr(self, name)[slot] = 0.0
        return slot

    def remove(self, slot: int) -> int:
        """Free a slot; the last one in use moves there, and its old number is returned."""
        self.count -= 1
        if slot != self.count:
            for name in self._tables:
                getattr(self, name)[slot] = getattr(self, name)[self.count]
            if self.cache is not None:
                self.cache.copy(self.count, slot, self.cache.shape[1])
        return self.count

    def trace(self, slot: int, request: Request, passes: int, full: bool) -> Trace:
        """What a slot's sequence came to."""
        at = (slot, slice(request.start, request.length))
        trace = Trace(self.ids_SC[at].tolist(), self.step_SC[at].tolist(), self.log_prob_SC[at].tolist(), forward_passes=passes)
        if full:
            trace.sampled_log_probs, trace.entropies = self.sampled_SC[at].tolist(), self.entropy_SC[at].tolist()
        return trace

    def present(self, slot_N: Tensor, vocabulary: int) -> Tensor:
        """The tokens [N, V] that stand in these slots' sequences."""
        slot_R, row_N = slot_N.unique(return_inverse=True)
        shown_RC = torch.where(self.hidden_SC[slot_R], self.mask_token_id, self.ids_SC[slot_R])
        return torch.zeros(len(slot_R), vocabulary, dtype=torch.bool, device=slot_N.device).scatter_(1, shown_RC, True)[row_N]
