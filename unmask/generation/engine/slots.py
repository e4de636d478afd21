"""The running sequences on the device: their tokens, which are hidden, and the step that revealed each.

Shapes: S slots, R some of them, C columns (positions), B sequences, N hidden positions, J drafted ones, G
drafts, W block, V vocabulary, K most probable tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.config.sampler import SamplerConfig
from unmask.generation.engine.host import (
    first_by_order,
    first_true,
    members,
    moved,
    moved_together,
    slot_index,
)
from unmask.generation.engine.kv_cache import CacheMemory, SlotCache
from unmask.generation.output import Trace
from unmask.generation.policies import Decision
from unmask.generation.requests import Request, block_start
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.mask_cache import MaskCache

TABLES = {
    "ids_SC": torch.long,
    "hidden_SC": torch.bool,
    "step_SC": torch.int32,
    "log_prob_SC": torch.float64,
    "sampled_SC": torch.float64,
    "entropy_SC": torch.float64,
    "top_id_SCK": torch.long,
    "top_log_prob_SCK": torch.float64,
    "forbidden_id_SCK": torch.long,
    "forbidden_log_prob_SCK": torch.float64,
    "noise_SU": torch.float64,
    "sum_S": torch.float64,
}
CANVAS_TABLES = {"best_SC": torch.long, "unchanged_S": torch.long}
RECORDS = {
    "log_prob_SC": "log_prob_N",
    "sampled_SC": "sampled_log_prob_N",
    "entropy_SC": "entropy_N",
    "top_id_SCK": "top_id_NK",
    "top_log_prob_SCK": "top_log_prob_NK",
    "forbidden_id_SCK": "forbidden_id_NK",
    "forbidden_log_prob_SCK": "forbidden_log_prob_NK",
}
"""Fields of a `Decision` that are kept of revealed tokens."""
PLANS_KEPT = 16
CELLS_KEPT = 2**24
"""Elements of the masks of all kept plans: 16 MB as booleans, and four times that where they are added in
float32."""
Which = Literal["top", "forbidden"]
"""The most probable tokens are recorded of all tokens, or of those that the constraint forbids."""


class Draft(NamedTuple):
    """Predicted states of a block after one, two, ... more steps."""

    ids_GW: Tensor  # with the mask token at hidden positions
    hidden_GW: Tensor
    num_hidden: list[int]  # of each state


class BatchEntry(NamedTuple):
    """One sequence of a pass, with its current decoding block from `start` to `stop`."""

    slot: int
    length: int  # of the whole sequence
    start: int
    stop: int
    # positions of the block to predict: the hidden ones, and with `revise` those that were revealed in it
    num_predicted: int = 0
    num_cached: int = 0  # positions whose keys and values are cached, from the first one on
    recompute: tuple[int, int] | None = None  # with a lossy cache, the positions to compute; None: exact
    state: tuple | None = None  # equal in sequences that may be in the same state; None: no other sequence is
    draft: Draft | None = None  # its states are computed too
    # the positions that were revealed in the block are computed too, for this
    revise: Literal["probability", "quality"] | None = None

    def base(self, lm: DiffusionLM) -> int:
        """The start of the current attention block: the tokens before it are clean."""
        return block_start(lm, self.start)

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


class Predictions(NamedTuple):
    """Predictions at hidden positions, ordered by sequence and position; those of drafts come last."""

    logits_NV: Tensor  # aligned
    member_N: np.ndarray  # index of the sequence in the pass
    slot_N: Tensor  # of the sequence
    position_N: Tensor  # in the sequence
    ahead_N: np.ndarray  # how many steps ahead the predicted state is drafted; 0: the current state
    quality_N: Tensor | None = None  # the logs of the quality head's probabilities; None: not computed

    def counts(self, size: int) -> np.ndarray:
        """The number [B] of predictions of each of `size` sequences."""
        return np.bincount(self.member_N, minlength=size)

    def take(self, index_J: Tensor, member_J: np.ndarray) -> Predictions:
        """The predictions at some rows, whose members are `member_J`."""
        quality_J = None if self.quality_N is None else self.quality_N[index_J]
        at, ahead_J = (self.slot_N[index_J], self.position_N[index_J]), np.zeros_like(member_J)
        return Predictions(self.logits_NV[index_J], member_J, *at, ahead_J, quality_J)

    def at(self, index_J: np.ndarray, number_B: np.ndarray | None = None) -> Predictions:
        """The predictions at some rows; `number_B` renumbers their members."""
        member_N = self.member_N if number_B is None else number_B[self.member_N]
        if np.array_equal(index_J, np.arange(len(member_N))):
            return self._replace(member_N=member_N)
        taken = self.take(moved(index_J, self.position_N.device), member_N[index_J])
        return taken._replace(ahead_N=self.ahead_N[index_J])


class SpeculativeEntry(NamedTuple):
    """One sequence of a pass of mode self-speculative: clean positions from `first` to `base`, drafts of the
    tokens after them, and masks after each node that may be the last one kept."""

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


class BatchState:
    """Tables with a slot (a row) per sequence. The first `count` are in use: when a sequence leaves, the last
    one moves to its slot.

    Attributes:
        ids_SC: token ids, with the mask token at hidden positions.
        step_SC: the step that revealed each token; -1: none.
        log_prob_SC, sampled_SC, entropy_SC: as in `Decision`, of revealed tokens.
        top_id_SCK, top_log_prob_SCK, forbidden_id_SCK, forbidden_log_prob_SCK: likewise; K is 0 until
            `create_top`.
        noise_SU: random numbers of the next steps (`noise.py`); U is 0 until `create_noise`.
        soft_SWD: on canvases of models that read them, the mean embeddings of what was predicted last at each
            of a canvas's positions; W is 0 until `create_soft`.
        best_SC, unchanged_S: on canvases of random tokens, the most probable tokens, and for how many steps
            they have been the same.
        sum_S: of the log-probabilities of all tokens that were considered so far; NaN if some predictions
            were.
    """

    ids_SC: Tensor
    hidden_SC: Tensor
    step_SC: Tensor
    log_prob_SC: Tensor
    sampled_SC: Tensor
    entropy_SC: Tensor
    noise_SU: Tensor
    sum_S: Tensor
    best_SC: Tensor
    unchanged_S: Tensor
    soft_SWD: Tensor

    def __init__(self, device: torch.device, mask_token_id: int, *, random_tokens: bool = False):
        self.mask_token_id = mask_token_id
        self.tables = TABLES | CANVAS_TABLES if random_tokens else TABLES
        self.count = 0
        # what a pass needs of the host, by what the host knows of its sequences
        self.plans: MaskCache = MaskCache(PLANS_KEPT, CELLS_KEPT)
        self.cache: SlotCache | None = None
        # of another model, which verifies the drafts of this one
        self.verifier_cache: SlotCache | None = None
        for name, dtype in self.tables.items():
            axes = name.rsplit("_", 1)[1]
            setattr(self, name, torch.zeros([0] * len(axes), dtype=dtype, device=device))
        self.shown = torch.zeros((), dtype=torch.bool, device=device)

    def reserve(self, slots: int, columns: int) -> None:
        """Allocate slots and columns; those in use keep their values."""
        for name in self.tables:
            old = getattr(self, name)
            shape = (slots, columns, *old.shape[2:]) if "_SC" in name else (slots, *old.shape[1:])
            new = old.new_full(shape, self.mask_token_id if name == "ids_SC" else 0)
            if self.count:
                kept = tuple(
                    slice(min(sizes)) for sizes in zip((self.count, *old.shape[1:]), shape, strict=True)
                )
                new[kept] = old[kept]
            setattr(self, name, new)
        for cache in self.caches:
            cache.reserve(slots, columns)

    def create_top(self, which: Which, count: int) -> None:
        """Create the tables of the most probable tokens, unless they are there."""
        for name in (f"{which}_id_SCK", f"{which}_log_prob_SCK"):
            if getattr(self, name).shape[2] == 0:
                setattr(self, name, getattr(self, name).new_zeros(*self.ids_SC.shape, count))

    def create_noise(self, width: int) -> None:
        """Make room for `width` random numbers per slot."""
        if self.noise_SU.shape[1] < width:
            self.noise_SU = F.pad(self.noise_SU, (0, width - self.noise_SU.shape[1]))

    def create_soft(self, width: int, like: Tensor) -> None:
        """Make room for the mean embeddings of canvases, of the type and width of `like`."""
        self.tables = self.tables | {"soft_SWD": like.dtype}
        self.soft_SWD = like.new_zeros(len(self.ids_SC), width, like.shape[-1])

    def create_cache(self, memory: CacheMemory | None = None) -> None:
        """Create the key-value cache, unless there is one; `memory` may be that of an earlier one."""
        if self.cache is None:
            self.cache = SlotCache(memory)
            self.cache.reserve(*self.ids_SC.shape)

    @property
    def caches(self) -> list[SlotCache]:
        """The key-value caches that there are."""
        return [cache for cache in (self.cache, self.verifier_cache) if cache is not None]

    def blocks(self, spans: tuple[tuple[int, int, int], ...]) -> tuple[Tensor, Tensor]:
        """The slots and positions [B, W] of blocks, given the slot, start and stop of each; a shorter block
        ends with its last position."""

        def index() -> tuple[Tensor, ...]:
            slot_B1, start_B1, stop_B1 = np.array(spans).T[:, :, None]
            position_BW = np.minimum(start_B1 + np.arange((stop_B1 - start_B1).max()), stop_B1 - 1)
            return moved_together(
                self.ids_SC.device, np.broadcast_to(slot_B1, position_BW.shape), position_BW
            )

        return self.plans.get(("blocks", spans), index, 0)

    def hidden_positions(self, entries: Sequence[BatchEntry]) -> tuple[np.ndarray, Tensor, Tensor]:
        """Member, slot and position of every position to predict: the hidden ones of the current blocks, and
        the revealed ones of a block that is revised. The host knows how many, and the device which."""
        device = self.ids_SC.device
        slot_B, start_B, count_B = np.array(
            [(entry.slot, entry.start, entry.num_predicted) for entry in entries]
        ).T
        at = self.blocks(tuple((entry.slot, entry.start, entry.stop) for entry in entries))
        hidden_BW = self.hidden_SC[at]
        if any(entry.revise is not None for entry in entries):
            revise_B1 = moved(np.array([[entry.revise is not None] for entry in entries]), device)
            hidden_BW = hidden_BW | (revise_B1 & (self.step_SC[at] >= 0))
        order_BW = first_true(hidden_BW)  # what is not in the block comes after what is
        member_N = members(count_B)
        return member_N, moved(slot_B[member_N], device), first_by_order(order_BW, start_B, count_B)

    def read_at(
        self, lm: DiffusionLM, entries: Sequence[BatchEntry], member_N: np.ndarray, position_N: Tensor
    ) -> Tensor:
        """The positions whose rows of logits are read: with a logit shift those before, but visible positions
        whose quality is read are read at their own."""
        if not lm.logit_shift:
            return position_N
        read_N = position_N - 1
        if any(entry.revise == "quality" for entry in entries):
            slot_B, quality_B = np.array([(entry.slot, entry.revise == "quality") for entry in entries]).T
            slot_N, quality_N = moved_together(position_N.device, slot_B[member_N], quality_B[member_N])
            read_N = read_N + (~self.hidden_SC[slot_N, position_N] & (quality_N > 0))
        return read_N

    def add_all(self, texts: Sequence[tuple[list[int], list[bool]]]) -> list[int]:
        """Put sequences, of ids and which of these are hidden, into the next slots."""
        ids_RC = np.full((len(texts), self.ids_SC.shape[1]), self.mask_token_id)
        hidden_RC = np.zeros(ids_RC.shape, dtype=bool)
        for row, (ids, hidden) in enumerate(texts):
            ids_RC[row, : len(ids)], hidden_RC[row, : len(ids)] = ids, hidden
        added = slice(self.count, self.count + len(texts))
        self.count += len(texts)
        self.ids_SC[added] = moved(ids_RC, self.ids_SC.device)
        self.hidden_SC[added] = moved(hidden_RC, self.ids_SC.device)
        self.step_SC[added].fill_(-1)
        for table in (self.log_prob_SC, self.sampled_SC, self.entropy_SC, self.sum_S):
            table[added].zero_()
        return list(range(added.start, added.stop))

    def write(
        self, at: tuple[Tensor, Tensor], decision: Decision, index_J: Tensor | slice, step_J: Tensor
    ) -> None:
        """Reveal tokens of a decision, of its index `index_J`, at these slots and positions."""
        self.ids_SC[at], self.hidden_SC[at] = decision.token_N[index_J], self.shown
        self.step_SC[at] = step_J.to(self.step_SC.dtype)
        for name, field in RECORDS.items():
            if (values_N := getattr(decision, field)) is not None:
                getattr(self, name)[at] = values_N[index_J].to(TABLES[name])

    def remove(self, slot: int) -> int:
        """Free a slot: the last one in use moves there. Returns its old index."""
        self.count -= 1
        if slot != self.count:
            for table in (getattr(self, name) for name in self.tables):
                if table.numel():
                    table[slot] = table[self.count]
            for cache in self.caches:
                cache.copy(self.count, slot, cache.shape[1] + 1)
        return self.count

    def traces(self, finished: Sequence[tuple[int, Request, SamplerConfig]]) -> list[Trace]:
        """The traces of sequences in these slots, without the number of their forward passes."""
        if not finished:
            return []
        rows = slot_index([slot for slot, _, _ in finished], self.ids_SC.device)
        tables = [table[rows].tolist() for table in (self.ids_SC, self.step_SC, self.log_prob_SC)]
        traces = []
        for (slot, request, config), *columns in zip(finished, *tables, strict=True):
            at = (slot, slice(request.start, request.length))
            trace = Trace(*(column_C[at[1]] for column_C in columns))
            if config.trace:
                trace.sampled_log_probs = self.sampled_SC[at].tolist()
                trace.entropies = self.entropy_SC[at].tolist()
            if config.top_log_probs:
                trace.top_ids, trace.top_log_probs = self.most_probable("top", at, config.top_log_probs)
            if config.top_forbidden:
                trace.forbidden_ids, trace.forbidden_log_probs = self.most_probable(
                    "forbidden", at, config.top_forbidden
                )
            traces.append(trace)
        return traces

    def most_probable(
        self, which: Which, at: tuple[int, slice], count: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """At each of a slot's positions, the most probable tokens when it was revealed, at most `count`, and
        their log-probabilities; none where no token was revealed."""
        id_CK, log_prob_CK = (getattr(self, f"{which}_{of}_SCK")[at][:, :count] for of in ("id", "log_prob"))
        recorded_CK = self.step_SC[at].ge(0)[:, None].expand_as(id_CK)
        if which == "forbidden":
            recorded_CK = recorded_CK & (log_prob_CK > -torch.inf)
        number_C = recorded_CK.sum(1).tolist()
        ids, log_probs = (
            [each[:number] for each, number in zip(table_CK.tolist(), number_C, strict=True)]
            for table_CK in (id_CK, log_prob_CK)
        )
        return ids, log_probs

    def present(self, slot_B: Tensor, vocabulary: int) -> Tensor:
        """The tokens [B, V] that occur in the sequences of these slots, without the mask token."""
        ids_BC = self.ids_SC[slot_B]
        unseen_BC = self.hidden_SC[slot_B] | (ids_BC == self.mask_token_id)
        shown_BC = torch.where(unseen_BC, vocabulary, ids_BC)
        present_BV = torch.zeros(len(slot_B), vocabulary + 1, dtype=torch.bool, device=slot_B.device)
        return present_BV.scatter_(1, shown_BC, True)[:, :vocabulary]
