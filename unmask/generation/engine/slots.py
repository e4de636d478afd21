"""The running sequences on the device: their tokens, which are hidden, and the step that revealed each.

Shapes: S slots, R some of them, C columns (positions), B sequences, N hidden positions, J drafted ones, G drafts, W block, V vocabulary,
K most probable tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.config.run import SamplerConfig
from unmask.generation.engine.kv_cache import SlotCache
from unmask.generation.output import Trace
from unmask.generation.policies import Decision
from unmask.generation.requests import Request, block_start
from unmask.models.diffusion_lm import DiffusionLM

TABLES = (
    *("ids_SC", "hidden_SC", "step_SC", "log_prob_SC", "sampled_SC", "entropy_SC"),
    *("top_id_SCK", "top_log_prob_SCK", "forbidden_id_SCK", "forbidden_log_prob_SCK"),
)
Which = Literal["top", "forbidden"]
"""Of what tokens the most probable ones are recorded: of all, or of those that the constraint forbids."""


class Draft(NamedTuple):
    """Predicted states of a block after one, two, ... more steps."""

    ids_GW: Tensor  # with the mask token at hidden positions
    hidden_GW: Tensor


class BatchEntry(NamedTuple):
    """One sequence of a pass, with its current decoding block from `start` to `stop`."""

    slot: int
    length: int  # of the whole sequence
    start: int
    stop: int
    num_cached: int = 0  # positions whose keys and values are cached, from the first one on
    recompute: tuple[int, int] | None = None  # with a lossy cache, the positions to compute; None: exact
    state: tuple | None = None  # equal in sequences that may be in the same state; None: no other sequence is
    draft: Draft | None = None  # its states are computed too
    revise: Literal["probability", "quality"] | None = None  # the positions that were revealed in the block are computed too, for this

    def base(self, lm: DiffusionLM) -> int:
        """The start of the current attention block: the tokens before it are clean."""
        return block_start(self.start, lm.block_size)

    def end(self, lm: DiffusionLM) -> int:
        """The end of the current attention block, or of the sequence."""
        return min(self.base(lm) + (lm.block_size or 1), self.length)

    def num_queries(self, lm: DiffusionLM) -> int:
        """The number of positions that a pass computes."""
        if self.recompute is not None:
            return self.recompute[1] - self.recompute[0]
        if lm.attention == "bidirectional":
            return self.length
        drafts = len(self.draft.ids_GW) if self.draft else 0
        return self.end(lm) - self.num_cached + drafts * (self.end(lm) - self.base(lm))


class SpeculativeEntry(NamedTuple):
    """One sequence of a pass of mode self-speculative: clean positions from `first` to `base`, drafts of the tokens after them, and masks
    after each node that may be the last one kept."""

    slot: int
    length: int  # of the whole sequence
    first: int
    base: int
    draft_G: Tensor
    num_masks: int

    @property
    def num_columns(self) -> int:
        """The cache columns of the pass: of positions before the first mask, and of the masks."""
        return self.base + len(self.draft_G) + (len(self.draft_G) + 1) * self.num_masks


def as_columns(values: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, ...]:
    """The fields of tuples, each as a tensor [B, 1]."""
    return torch.tensor(values, device=device)[:, :, None].unbind(1)


class Slots:
    """Tables with a slot (a row) per sequence. The first `count` are in use: when a sequence leaves, the last one moves to its slot.

    Attributes:
        ids_SC: token ids, with the mask token at hidden positions.
        step_SC: the step that revealed each token; -1: none.
        log_prob_SC, sampled_SC, entropy_SC: as in `Decision`, of revealed tokens.
        top_id_SCK, top_log_prob_SCK, forbidden_id_SCK, forbidden_log_prob_SCK: likewise; K is 0 until `create_top`.
    """

    def __init__(self, device: torch.device, mask_token_id: int):
        self.mask_token_id = mask_token_id
        self.count = 0
        self.cache: SlotCache | None = None
        self.verifier_cache: SlotCache | None = None  # of another model, which verifies the drafts of this one
        self.ids_SC = torch.zeros(0, 0, dtype=torch.long, device=device)
        self.hidden_SC = torch.zeros(0, 0, dtype=torch.bool, device=device)
        self.step_SC = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self.log_prob_SC, self.sampled_SC, self.entropy_SC = (torch.zeros(0, 0, dtype=torch.float64, device=device) for _ in range(3))
        self.top_id_SCK, self.forbidden_id_SCK = (torch.zeros(0, 0, 0, dtype=torch.long, device=device) for _ in range(2))
        self.top_log_prob_SCK, self.forbidden_log_prob_SCK = (torch.zeros(0, 0, 0, dtype=torch.float64, device=device) for _ in range(2))

    def reserve(self, slots: int, columns: int) -> None:
        """Allocate slots and columns; those in use keep their values."""
        for name in TABLES:
            old = getattr(self, name)
            new = old.new_full((slots, columns, *old.shape[2:]), self.mask_token_id if name == "ids_SC" else 0)
            width = min(columns, old.shape[1])
            new[: self.count, :width] = old[: self.count, :width]
            setattr(self, name, new)
        for cache in self._caches:
            cache.reserve(slots, columns)

    def create_top(self, which: Which, count: int) -> None:
        """Create the tables of the most probable tokens, unless they are there."""
        for name in (f"{which}_id_SCK", f"{which}_log_prob_SCK"):
            if getattr(self, name).shape[2] == 0:
                setattr(self, name, getattr(self, name).new_zeros(*self.ids_SC.shape, count))

    def create_cache(self) -> None:
        """Create the key-value cache, unless there is one."""
        if self.cache is None:
            self.cache = SlotCache()
            self.cache.reserve(*self.ids_SC.shape)

    def create_verifier_cache(self) -> None:
        """Create the key-value cache of the model that verifies drafts."""
        self.verifier_cache = SlotCache()
        self.verifier_cache.reserve(*self.ids_SC.shape)

    @property
    def _caches(self) -> list[SlotCache]:
        return [cache for cache in (self.cache, self.verifier_cache) if cache is not None]

    def clear_caches(self, slots: Sequence[int]) -> None:
        """Zero the keys and values of slots."""
        for cache in self._caches:
            cache.clear(slots)

    def copy_keys(self, source: int, targets: Tensor, columns: int) -> None:
        """Copy the keys and values of the first columns of a slot to others."""
        for cache in self._caches:
            cache.copy(source, targets, columns)

    def hidden_positions(self, entries: Sequence[BatchEntry]) -> tuple[Tensor, Tensor, Tensor]:
        """Member, position and steps ahead (0: the current state) of every position to predict: the hidden ones of the current blocks, and
        the revealed ones of a block that is revised."""
        blocks = [(entry.slot, entry.start, entry.stop) for entry in entries]
        slot_B, start_B, stop_B = torch.tensor(blocks, device=self.ids_SC.device).unbind(1)
        position_C = torch.arange(self.ids_SC.shape[1], device=slot_B.device)
        inside_BC = (position_C >= start_B[:, None]) & (position_C < stop_B[:, None])
        hidden_BC = self.hidden_SC[slot_B]
        if any(entry.revise is not None for entry in entries):
            revise_B = torch.tensor([entry.revise is not None for entry in entries], device=slot_B.device)
            hidden_BC = hidden_BC | (revise_B[:, None] & (self.step_SC[slot_B] >= 0))
        index = [F.pad((hidden_BC & inside_BC).nonzero(), (0, 1))]
        for member, entry in enumerate(entries):
            if entry.draft is not None:
                ahead_J, column_J = entry.draft.hidden_GW.nonzero(as_tuple=True)
                index.append(torch.stack([torch.full_like(ahead_J, member), entry.start + column_J, 1 + ahead_J], 1))
        member_N, position_N, ahead_N = torch.cat(index).T.contiguous().unbind()
        return member_N, position_N, ahead_N

    def shifts(self, lm: DiffusionLM, entries: Sequence[BatchEntry], member_N: Tensor, position_N: Tensor) -> Tensor | int:
        """The number of rows before each position at which it is read: with a logit shift 1, but 0 where a visible token's quality is."""
        if not lm.logit_shift or all(entry.revise != "quality" for entry in entries):
            return int(lm.logit_shift)
        slot_B, quality_B = torch.tensor([(entry.slot, entry.revise == "quality") for entry in entries], device=member_N.device).unbind(1)
        return 1 - (~self.hidden_SC[slot_B[member_N], position_N] & (quality_B[member_N] > 0)).long()

    def add(self, ids: list[int], hidden: list[bool]) -> int:
        """Put a sequence into the next slot."""
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

    def write(self, at: tuple[Tensor, Tensor], decision: Decision, index_J: Tensor, step_J: Tensor) -> None:
        """Reveal tokens of a decision, of its index `index_J`, at these slots and positions."""
        self.ids_SC[at], self.hidden_SC[at], self.step_SC[at] = decision.token_N[index_J], False, step_J.to(self.step_SC.dtype)
        records = (decision.log_prob_N, decision.sampled_log_prob_N, decision.entropy_N)
        for table, values_N in zip((self.log_prob_SC, self.sampled_SC, self.entropy_SC), records, strict=True):
            if values_N is not None:
                table[at] = values_N[index_J].double()
        if decision.top_id_NK is not None and decision.top_log_prob_NK is not None:
            self.top_id_SCK[at] = decision.top_id_NK[index_J]
            self.top_log_prob_SCK[at] = decision.top_log_prob_NK[index_J].double()
        if decision.forbidden_id_NK is not None and decision.forbidden_log_prob_NK is not None:
            self.forbidden_id_SCK[at] = decision.forbidden_id_NK[index_J]
            self.forbidden_log_prob_SCK[at] = decision.forbidden_log_prob_NK[index_J].double()

    def remove(self, slot: int) -> int:
        """Free a slot: the last one in use moves there. Returns its old index."""
        self.count -= 1
        if slot != self.count:
            for name in TABLES:
                getattr(self, name)[slot] = getattr(self, name)[self.count]
            for cache in self._caches:
                cache.copy(self.count, slot, cache.shape[1])
        return self.count

    def trace(self, slot: int, request: Request, passes: int, config: SamplerConfig) -> Trace:
        """The trace of a slot's sequence."""
        at = (slot, slice(request.start, request.length))
        trace = Trace(self.ids_SC[at].tolist(), self.step_SC[at].tolist(), self.log_prob_SC[at].tolist(), forward_passes=passes)
        if config.trace:
            trace.sampled_log_probs, trace.entropies = self.sampled_SC[at].tolist(), self.entropy_SC[at].tolist()
        if config.top_log_probs:
            trace.top_ids, trace.top_log_probs = self.most_probable("top", at, config.top_log_probs)
        if config.top_forbidden:
            trace.forbidden_ids, trace.forbidden_log_probs = self.most_probable("forbidden", at, config.top_forbidden)
        return trace

    def most_probable(self, which: Which, at: tuple[int, slice], count: int) -> tuple[list[list[int]], list[list[float]]]:
        """At each of a slot's positions, the most probable tokens when it was revealed, at most `count`, and their log-probabilities; none
        where no token was revealed."""
        id_CK, log_prob_CK = getattr(self, f"{which}_id_SCK")[at][:, :count], getattr(self, f"{which}_log_prob_SCK")[at][:, :count]
        recorded_CK = self.step_SC[at].ge(0)[:, None].expand_as(id_CK)
        if which == "forbidden":
            recorded_CK = recorded_CK & (log_prob_CK > -torch.inf)
        number_C = recorded_CK.sum(1).tolist()
        ids, log_probs = (
            [each[:number] for each, number in zip(table_CK.tolist(), number_C, strict=True)] for table_CK in (id_CK, log_prob_CK)
        )
        return ids, log_probs

    def present(self, slot_N: Tensor, vocabulary: int) -> Tensor:
        """The tokens [N, V] that occur in the sequences of these slots."""
        slot_R, row_N = slot_N.unique(return_inverse=True)
        shown_RC = torch.where(self.hidden_SC[slot_R], self.mask_token_id, self.ids_SC[slot_R])
        return torch.zeros(len(slot_R), vocabulary, dtype=torch.bool, device=slot_N.device).scatter_(1, shown_RC, True)[row_N]
