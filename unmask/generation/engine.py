"""Continuous batching: sequences enter and leave between steps, and those in work share forward passes wherever they stand.

Shapes: B sequences in work, N hidden rows of their current blocks, W positions of a block, V vocabulary.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unmask.config import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation.cached import commit
from unmask.generation.passes import Rows, buckets, predict
from unmask.generation.policies import Decision, decide, first_by_priority, hidden_again, how_many
from unmask.generation.reference import guide
from unmask.generation.requests import Request
from unmask.generation.slots import Slots, Window
from unmask.generation.trace import Trace
from unmask.models.diffusion_lm import DiffusionLM, evaluating


@dataclass(eq=False)
class Sequence:
    """One request in work.

    Attributes:
        slots: its own, and with guidance that of its twin with a hidden prompt.
        block, step: the decoding block in work, and how many steps it has had.
        done: denoising steps in all.
        clean: the first position that the cache lacks.
    """

    ticket: int
    request: Request
    config: SamplerConfig
    slots: list[int] = field(default_factory=list)
    block: int = 0
    step: int = 0
    done: int = 0
    clean: int = 0

    @property
    def span(self) -> tuple[int, int]:
        return self.request.blocks[self.block]

    @property
    def counts(self) -> list[int]:
        """Tokens to reveal at each step of the block; nothing where the predictions decide."""
        return self.request.counts[self.block] if self.request.counts else []

    @property
    def size(self) -> int:
        """How many slots it takes."""
        return 1 + (self.config.guidance > 0)


class Engine:
    """Sequences of one model, each with settings of its own. What comes out does not depend on what else is in work.

    Args:
        batch_size: sequences in work at once.
        max_batch_tokens: sequences in work times the longest of them; None: no bound but batch_size.

    Use: `submit`, then `step` until what you wait for is among the finished.
    """

    def __init__(self, lm: DiffusionLM, *, batch_size: int = 64, max_batch_tokens: int | None = None):
        self.lm, self.batch_size, self.max_batch_tokens = lm, batch_size, max_batch_tokens
        self.slots = Slots(lm.device, lm.mask_token_id)
        self.exact_cache = lm.attention != "bidirectional"
        if self.exact_cache:
            self.slots.keep_keys()
        self.waiting: deque[Sequence] = deque()
        self.working: list[Sequence] = []
        self.passes = 0
        self._owners: list[Sequence] = []  # by slot
        self._tickets = 0

    def submit(self, request: Request, config: SamplerConfig) -> int:
        """Accept a request; the number that names it.

        Raises:
            GenerationError: it alone passes the memory that the engine may use.
        """
        sequence = Sequence(self._tickets, request, config)
        if self.max_batch_tokens is not None and sequence.size * request.length > self.max_batch_tokens:
            what = f"{request.length} tokens{' twice, for guidance,' if config.guidance else ''} pass {self.max_batch_tokens}"
            raise GenerationError(what, where="max_batch_tokens", remedy="Raise it, or shorten the request")
        if config.cache != "exact":
            self.slots.keep_keys()
        self._tickets += 1
        self.waiting.append(sequence)
        return sequence.ticket

    def cancel(self, ticket: int) -> bool:
        """Forget a request; its slot is free at the next step. False where it is unknown or finished."""
        for sequence in [*self.waiting, *self.working]:
            if sequence.ticket == ticket:
                if sequence in self.working:
                    self._leave(sequence)
                else:
                    self.waiting.remove(sequence)
                return True
        return False

    def run(self) -> Iterator[tuple[int, Trace]]:
        """All that is accepted, as it finishes."""
        while self.waiting or self.working:
            yield from self.step()

    @torch.no_grad()
    def step(self) -> list[tuple[int, Trace]]:
        """One denoising step of everything in work; what finished with it, by ticket."""
        self._admit()
        if not self.working:
            return []
        with evaluating(self.lm):
            rows = self._predict()
            self._reveal(rows, self._decide(rows))
        return self._advance()

    def _admit(self) -> None:
        """Let waiting requests in, in their order, as long as there is room."""
        entering: list[Sequence] = []
        members, length = len(self._owners), max((sequence.request.length for sequence in self.working), default=0)
        while self.waiting and len(self.working) + len(entering) < self.batch_size:
            room = members + self.waiting[0].size, max(length, self.waiting[0].request.length)
            if self.max_batch_tokens is not None and room[0] * room[1] > self.max_batch_tokens:
                break
            entering.append(self.waiting.popleft())
            members, length = room
        if not entering:
            return
        slots, columns = self.slots.ids_SC.shape
        if members > slots or length > columns:
            grown = max(members, slots), max(length, columns)
            fits = self.max_batch_tokens is None or grown[0] * grown[1] <= self.max_batch_tokens
            self.slots.reserve(*(grown if fits else (members, length)))
        for sequence in entering:
            request = sequence.request
            blind = [[self.lm.mask_token_id] * request.length] * (sequence.size - 1)
            sequence.slots = [self.slots.add(ids, request.hidden) for ids in (request.ids, *blind)]
            self._owners += [sequence] * sequence.size
            self.working.append(sequence)
        if self.exact_cache:
            self._prefill(entering)

    def _prefill(self, entering: list[Sequence]) -> None:
        """Read prompts into the cache: each once, also where an earlier request has it in work."""
        assert self.slots.cache is not None
        known: dict[tuple[int, ...], int] = {}
        reading: list[Window] = []
        copies: list[tuple[int, int, int]] = []
        for sequence in self.working:
            first = sequence.request.blocks[0][0]
            base = first - first % (self.lm.block_size or 1)  # what is hidden from there on differs once it is revealed
            for slot in sequence.slots:
                ids = sequence.request.ids if slot == sequence.slots[0] else [self.lm.mask_token_id] * sequence.request.length
                if sequence not in entering:
                    known.setdefault(tuple(ids[:base]), slot)
                elif tuple(ids[:base]) in known:
                    copies.append((known[tuple(ids[:base])], slot, base))
                elif base:
                    known[tuple(ids[:base])] = slot
                    reading.append(Window(slot, base, base, base))
            sequence.clean = base if sequence in entering else sequence.clean
        with evaluating(self.lm), torch.no_grad():
            alone = any(sequence.config.deterministic for sequence in self.working)
            for bucket in buckets([window.start for window in reading], alone):
                commit(self.lm, self.slots, [reading[index] for index in bucket])
                self.passes += 1
        for source, slot, columns in copies:
            self.slots.cache.copy(source, [slot], columns)

    def _predict(self) -> Rows:
        """Logits at every hidden position of the blocks in work."""
        guided = [sequence for sequence in self.working if sequence.size == 2]
        members = [(sequence, sequence.slots[0]) for sequence in self.working] + [(sequence, sequence.slots[1]) for sequence in guided]
        windows = [self._window(sequence, slot) for sequence, slot in members]
        rows = predict(self.lm, self.slots, windows, alone=any(sequence.config.deterministic for sequence in self.working))
        self.passes += 1
        if not guided:
            return rows
        index = {sequence: number for number, sequence in enumerate(guided)}
        blind_B = torch.tensor([len(self.working) + index[s] if s in index else -1 for s in self.working], device=rows.member_N.device)
        weight_B = rows.logits_NV.new_tensor([sequence.config.guidance for sequence in self.working])
        own_N = rows.member_N < len(self.working)
        start_of = torch.searchsorted(rows.member_N, torch.arange(len(members), device=rows.member_N.device))
        member_N, position_N = rows.member_N[own_N], rows.position_N[own_N]
        place_N = torch.arange(len(member_N), device=member_N.device) - start_of[member_N]
        other_N = torch.where(
            blind_B[member_N] >= 0, start_of[blind_B[member_N]] + place_N, torch.arange(len(member_N), device=member_N.device)
        )
        logits_NV = rows.logits_NV[: len(member_N)]
        return Rows(guide(logits_NV, rows.logits_NV[other_N], weight_B[member_N][:, None]), member_N, position_N)

    def _window(self, sequence: Sequence, slot: int) -> Window:
        (start, stop), length, config = sequence.span, sequence.request.length, sequence.config
        if config.cache != "exact":
            anew = sequence.step % (config.refresh_interval or sys.maxsize) == 0
            return Window(slot, length, start, stop, read=(0, length) if anew else (start, stop if config.cache == "dual" else length))
        state = None if self.exact_cache else (tuple(sequence.request.prompt), slot == sequence.slots[0], start, stop, sequence.done)
        return Window(slot, length, start, stop, sequence.clean, state=state)

    def _decide(self, rows: Rows) -> Decision:
        """What would be revealed at each row, by the settings of its sequence."""
        device = rows.member_N.device
        key_N = torch.tensor([sequence.request.key for sequence in self.working], device=device)[rows.member_N]
        step_N = torch.tensor([sequence.done for sequence in self.working], device=device)[rows.member_N]
        slot_N = torch.tensor([sequence.slots[0] for sequence in self.working], device=device)[rows.member_N]
        kinds = {id(sequence.config): sequence.config for sequence in self.working}
        kind_N = torch.tensor([list(kinds).index(id(sequence.config)) for sequence in self.working], device=device)[rows.member_N]
        parts = []
        for number, config in enumerate(kinds.values()):
            at = slice(None) if len(kinds) == 1 else (kind_N == number).nonzero().squeeze(1)
            logits_NV = rows.logits_NV[at]
            present_NV = self.slots.present(slot_N[at], logits_NV.shape[1]) if config.repetition_penalty != 1 else None
            parts.append((at, decide(logits_NV, config, key_N[at], step_N[at], rows.position_N[at], present_NV)))
        return parts[0][1] if len(parts) == 1 else _merge(parts, len(key_N))

    def _reveal(self, rows: Rows, decision: Decision) -> None:
        device = rows.member_N.device
        start_B = torch.tensor([sequence.span[0] for sequence in self.working], device=device)
        slot_B = torch.tensor([sequence.slots[0] for sequence in self.working], device=device)
        width = max(stop - start for start, stop in (sequence.span for sequence in self.working))
        column_N = rows.position_N - start_B[rows.member_N]
        priority_BW = torch.full((len(self.working), width), -torch.inf, device=device)
        priority_BW[rows.member_N, column_N] = decision.priority_N
        count_B = self._counts(priority_BW, rows.member_N, column_N, decision)
        chosen_N = first_by_priority(priority_BW, count_B)[rows.member_N, column_N]
        again = [hidden_again(sequence.counts, sequence.step, sequence.config.remask) for sequence in self.working]
        if any(again):
            self._hide_again(slot_B, start_B, width, torch.tensor(again, device=device))
        member_C, position_C = rows.member_N[chosen_N], rows.position_N[chosen_N]
        at = (slot_B[member_C], position_C)
        slots = self.slots
        slots.ids_SC[at] = decision.token_N[chosen_N]
        slots.hidden_SC[at] = False
        slots.step_SC[at] = torch.tensor([sequence.done for sequence in self.working], dtype=torch.int16, device=device)[member_C]
        slots.log_prob_SC[at] = decision.log_prob_N[chosen_N].double()
        for table, values_N in ((slots.sampled_SC, decision.sampled_log_prob_N), (slots.entropy_SC, decision.entropy_N)):
            if values_N is not None:
                table[at] = values_N[chosen_N].double()
        for sequence in self.working:
            if sequence.size == 2:
                own, blind = sequence.slots
                start, stop = sequence.span
                shown = torch.tensor(sequence.request.hidden[start:stop], device=device)
                slots.ids_SC[blind, start:stop] = torch.where(shown, slots.ids_SC[own, start:stop], self.lm.mask_token_id)
                slots.hidden_SC[blind, start:stop] = slots.hidden_SC[own, start:stop]

    def _counts(self, priority_BW: Tensor, member_N: Tensor, column_N: Tensor, decision: Decision) -> Tensor:
        """How many tokens each sequence reveals now."""
        fixed = [
            sequence.counts[sequence.step] + hidden_again(sequence.counts, sequence.step, sequence.config.remask) if sequence.counts else 0
            for sequence in self.working
        ]
        count_B = torch.tensor(fixed, device=priority_BW.device)
        kinds = {id(sequence.config): sequence.config for sequence in self.working}
        for kind, config in kinds.items():
            mine_B = torch.tensor([id(sequence.config) == kind for sequence in self.working], device=priority_BW.device)
            if config.parallel:
                count_B = torch.where(mine_B, how_many(priority_BW, config), count_B)
            if config.early_commit is not None:
                assert decision.margin_N is not None
                margin_BW = torch.full(priority_BW.shape, torch.inf, device=priority_BW.device)
                margin_BW[member_N, column_N] = decision.margin_N.float()
                sure_B = mine_B & (margin_BW.amin(1) >= config.early_commit)
                count_B = torch.where(sure_B, priority_BW.shape[1], count_B)
        return count_B

    def _hide_again(self, slot_B: Tensor, start_B: Tensor, width: int, again_B: Tensor) -> None:
        """Hide the least probable tokens that earlier steps of the blocks revealed."""
        at_BW = start_B[:, None] + torch.arange(width, device=slot_B.device)
        at_BW = at_BW.clamp_max(self.slots.ids_SC.shape[1] - 1)
        stop_B1 = torch.tensor([[sequence.span[1]] for sequence in self.working], device=slot_B.device)
        inside_BW = start_B[:, None] + torch.arange(width, device=slot_B.device) < stop_B1
        earlier_BW = inside_BW & (self.slots.step_SC[slot_B[:, None], at_BW] >= 0)
        priority_BW = torch.where(earlier_BW, -self.slots.log_prob_SC[slot_B[:, None], at_BW], -torch.inf)
        member_C, column_C = first_by_priority(priority_BW, again_B).nonzero(as_tuple=True)
        at = (slot_B[member_C], at_BW[member_C, column_C])
        self.slots.ids_SC[at], self.slots.hidden_SC[at], self.slots.step_SC[at] = self.lm.mask_token_id, True, -1

    def _advance(self) -> list[tuple[int, Trace]]:
        """Go on to the next step or block; sequences that are through leave."""
        ended = self._ended()
        finished = []
        for sequence, through in zip(list(self.working), ended, strict=True):
            first = sequence.span[0]
            sequence.clean = max(sequence.clean, first - first % (self.lm.block_size or 1))
            sequence.step, sequence.done = sequence.step + 1, sequence.done + 1
            if through:
                sequence.block, sequence.step = sequence.block + 1, 0
        stopped = self._stopped([sequence for sequence, through in zip(self.working, ended, strict=True) if through])
        for sequence in [s for s in self.working if s in stopped or s.block == len(s.request.blocks)]:
            finished.append((sequence.ticket, self.slots.trace(sequence.slots[0], sequence.request, sequence.done, sequence.config.trace)))
            self._leave(sequence)
        return finished

    def _ended(self) -> list[bool]:
        """Whether the block in work of each sequence has nothing hidden left."""
        fixed = [sequence.step + 1 == len(sequence.counts) for sequence in self.working]
        asking = [i for i, sequence in enumerate(self.working) if sequence.config.parallel or sequence.config.early_commit is not None]
        left = [self.slots.hidden_SC[self.working[i].slots[0], slice(*self.working[i].span)].any() for i in asking]
        for i, some in zip(asking, torch.stack(left).tolist() if left else [], strict=True):
            fixed[i] = not some
        return fixed

    def _stopped(self, sequences: list[Sequence]) -> set[Sequence]:
        """Those of them that have produced EOS."""
        eos = self.lm.eos_token_id
        asking = [sequence for sequence in sequences if sequence.request.stops]
        if eos is None or not asking:
            return set()
        spans = [(s.slots[0], slice(s.request.start, s.request.blocks[s.block - 1][1])) for s in asking]
        found = [self.slots.ids_SC[span].eq(eos).any() for span in spans]
        return {sequence for sequence, stops in zip(asking, torch.stack(found).tolist(), strict=True) if stops}

    def _leave(self, sequence: Sequence) -> None:
        self.working.remove(sequence)
        for slot in sorted(sequence.slots, reverse=True):
            moved = self.slots.remove(slot)
            owner = self._owners.pop()
            if moved != slot:
                self._owners[slot] = owner
                owner.slots[owner.slots.index(moved)] = slot


def _merge(parts: list[tuple[Any, Decision]], count: int) -> Decision:
    """Decisions of some rows each, in the order of all."""
    merged = []
    for values in zip(*(decision for _, decision in parts), strict=True):
        present = [(at, value) for (at, _), value in zip(parts, values, strict=True) if value is not None]
        whole = None
        for at, value in present:
            whole = value.new_zeros(count) if whole is None else whole
            whole[at] = value
        merged.append(whole)
    return Decision(*merged)  # type: ignore[arg-type]
