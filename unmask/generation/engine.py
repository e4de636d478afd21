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
from unmask.generation.slots import Guess, Slots, Window
from unmask.generation.trace import Trace
from unmask.models.diffusion_lm import DiffusionLM, evaluating


@dataclass(eq=False)
class Sequence:
    """One request in work.

    Attributes:
        slots: its own, and with guidance that of its twin with a hidden prompt.
        block, step: the decoding block in work, and how many steps it has had.
        done: denoising steps in all.
        passes: that it has been in.
        clean: the first position that the cache lacks.
        guess: what its next states may be.
    """

    ticket: int
    request: Request
    config: SamplerConfig
    slots: list[int] = field(default_factory=list)
    block: int = 0
    step: int = 0
    done: int = 0
    passes: int = 0
    clean: int = 0
    guess: Guess | None = None

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
        if config.cache != "exact" or config.drafts:
            self.slots.keep_keys(spare=config.drafts * (self.lm.block_size or 1))
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
        finished: list[tuple[int, Trace]] = []
        with evaluating(self.lm):
            everyone, rows = list(self.working), self._predict()
            began, last = [sequence.block for sequence in everyone], torch.zeros(len(everyone), dtype=torch.long, device=self.lm.device)
            active = list(range(len(everyone)))
            for ahead in range(1 + max(sequence.config.drafts for sequence in everyone)):
                if ahead:
                    active = self._confirmed([i for i in active if everyone[i].block == began[i]], everyone, ahead)
                if not active:
                    break
                last[active] = ahead
                some = [everyone[i] for i in active]
                own = self._of(rows, active, len(everyone), rows.ahead_N == ahead)
                self._reveal(some, own, self._decide(some, own))
                finished += self._advance(some)
            staying = [i for i, s in enumerate(everyone) if s.config.drafts and s in self.working and s.block == began[i]]
            for sequence in everyone:
                sequence.guess = None
            if staying:
                self._guess([everyone[i] for i in staying], self._of(rows, staying, len(everyone), rows.ahead_N == last[rows.member_N]))
        return finished

    @staticmethod
    def _of(rows: Rows, members: list[int], count: int, keep_N: Tensor) -> Rows:
        """The rows of some members, which are numbered anew."""
        if len(members) == count and not rows.ahead_N.any():
            return rows
        number_B = torch.full((count,), -1, device=keep_N.device)
        number_B[members] = torch.arange(len(members), device=keep_N.device)
        return rows.where(keep_N & (number_B[rows.member_N] >= 0), number_B)

    def _confirmed(self, candidates: list[int], everyone: list[Sequence], ahead: int) -> list[int]:
        """Those of them whose guess of so many steps ago has come true."""
        same, asked = [], []
        for index in candidates:
            sequence, guess = everyone[index], everyone[index].guess
            if guess is not None and len(guess.ids_GW) >= ahead:
                at = (sequence.slots[0], slice(*sequence.span))
                equal = (self.slots.ids_SC[at] == guess.ids_GW[ahead - 1]) & (self.slots.hidden_SC[at] == guess.hidden_GW[ahead - 1])
                same.append(equal.all())
                asked.append(index)
        return [index for index, true in zip(asked, torch.stack(same).tolist() if same else [], strict=True) if true]

    def _guess(self, sequences: list[Sequence], rows: Rows) -> None:
        """What the next states would be if the predictions stayed as they are."""
        states: list[tuple[Tensor, Tensor]] = []
        spans = [(sequence.slots[0], slice(*sequence.span)) for sequence in sequences]
        width = max(span.stop - span.start for _, span in spans)
        ids_BW = torch.full((len(spans), width), self.lm.mask_token_id, device=self.lm.device)
        hidden_BW = torch.zeros_like(ids_BW, dtype=torch.bool)
        for member, (slot, span) in enumerate(spans):
            ids_BW[member, : span.stop - span.start] = self.slots.ids_SC[slot, span]
            hidden_BW[member, : span.stop - span.start] = self.slots.hidden_SC[slot, span]
        start_B = torch.tensor([span.start for _, span in spans], device=self.lm.device)
        for ahead in range(max(sequence.config.drafts for sequence in sequences)):
            rows = rows.where(hidden_BW[rows.member_N, rows.position_N - start_B[rows.member_N]])
            if len(rows.member_N) == 0:
                break
            decision = self._decide(sequences, rows, ahead)
            chosen_N, column_N = self._choose(sequences, rows, decision, ahead)
            at = (rows.member_N[chosen_N], column_N[chosen_N])
            ids_BW[at], hidden_BW[at] = decision.token_N[chosen_N], False
            states.append((ids_BW.clone(), hidden_BW.clone()))
        if not states:
            return
        ids_GBW, hidden_GBW = (torch.stack(tables) for tables in zip(*states, strict=True))
        open_B = hidden_GBW.any(2).sum(0).tolist()  # a state with nothing left to predict is not worth a pass
        for member, sequence in enumerate(sequences):
            count, size = min(open_B[member], sequence.config.drafts), sequence.span[1] - sequence.span[0]
            if count:
                sequence.guess = Guess(ids_GBW[:count, member, :size], hidden_GBW[:count, member, :size])

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
            self._prefill(set(entering))

    def _prefill(self, entering: set[Sequence]) -> None:
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
        for sequence in self.working:
            sequence.passes += 1
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
        return Rows(guide(logits_NV, rows.logits_NV[other_N], weight_B[member_N][:, None]), member_N, position_N, rows.ahead_N[own_N])

    def _window(self, sequence: Sequence, slot: int) -> Window:
        (start, stop), length, config = sequence.span, sequence.request.length, sequence.config
        if config.cache != "exact":
            anew = sequence.step % (config.refresh_interval or sys.maxsize) == 0
            return Window(slot, length, start, stop, read=(0, length) if anew else (start, stop if config.cache == "dual" else length))
        state = None if self.exact_cache else (tuple(sequence.request.prompt), slot == sequence.slots[0], start, stop, sequence.done)
        return Window(slot, length, start, stop, sequence.clean, state=state, guess=sequence.guess)

    def _decide(self, sequences: list[Sequence], rows: Rows, ahead: int = 0) -> Decision:
        """What would be revealed at each row, by the settings of its sequence."""
        facts = [(sequence.request.key, sequence.done + ahead, sequence.slots[0]) for sequence in sequences]
        key_N, step_N, slot_N = torch.tensor(facts, device=rows.member_N.device)[rows.member_N].unbind(1)
        kinds = {id(sequence.config): sequence.config for sequence in sequences}
        kind_N = torch.tensor([list(kinds).index(id(sequence.config)) for sequence in sequences], device=key_N.device)[rows.member_N]
        parts = []
        for number, config in enumerate(kinds.values()):
            at = slice(None) if len(kinds) == 1 else (kind_N == number).nonzero().squeeze(1)
            logits_NV = rows.logits_NV[at]
            present_NV = self.slots.present(slot_N[at], logits_NV.shape[1]) if config.repetition_penalty != 1 else None
            parts.append((at, decide(logits_NV, config, key_N[at], step_N[at], rows.position_N[at], present_NV)))
        return parts[0][1] if len(parts) == 1 else _merge(parts, len(key_N))

    def _choose(self, sequences: list[Sequence], rows: Rows, decision: Decision, ahead: int = 0) -> tuple[Tensor, Tensor]:
        """Which rows [N] are revealed, and their column in the block."""
        start_B = torch.tensor([sequence.span[0] for sequence in sequences], device=rows.member_N.device)
        column_N = rows.position_N - start_B[rows.member_N]
        width = max(stop - start for start, stop in (sequence.span for sequence in sequences))
        priority_BW = torch.full((len(sequences), width), -torch.inf, device=column_N.device)
        priority_BW[rows.member_N, column_N] = decision.priority_N
        fixed = [
            sum(sequence.counts[sequence.step + ahead :][:1]) + hidden_again(sequence.counts, sequence.step, sequence.config.remask)
            for sequence in sequences
        ]
        count_B = torch.tensor(fixed, device=column_N.device)
        kinds = {id(sequence.config): sequence.config for sequence in sequences}
        for kind, config in kinds.items():
            mine_B = torch.tensor([id(sequence.config) == kind for sequence in sequences], device=column_N.device)
            if config.parallel:
                count_B = torch.where(mine_B, how_many(priority_BW, config), count_B)
            if config.early_commit is not None:
                assert decision.margin_N is not None
                margin_BW = torch.full(priority_BW.shape, torch.inf, device=column_N.device)
                margin_BW[rows.member_N, column_N] = decision.margin_N.float()
                count_B = torch.where(mine_B & (margin_BW.amin(1) >= config.early_commit), width, count_B)
        return first_by_priority(priority_BW, count_B)[rows.member_N, column_N], column_N

    def _reveal(self, sequences: list[Sequence], rows: Rows, decision: Decision) -> None:
        slots, device = self.slots, rows.member_N.device
        chosen_N, _ = self._choose(sequences, rows, decision)
        again = [hidden_again(sequence.counts, sequence.step, sequence.config.remask) for sequence in sequences]
        if any(again):
            self._hide_again(sequences, torch.tensor(again, device=device))
        slot_B, step_B = torch.tensor([(sequence.slots[0], sequence.done) for sequence in sequences], device=device).unbind(1)
        member_C = rows.member_N[chosen_N]
        at = (slot_B[member_C], rows.position_N[chosen_N])
        slots.ids_SC[at], slots.hidden_SC[at] = decision.token_N[chosen_N], False
        slots.step_SC[at] = step_B[member_C].to(slots.step_SC.dtype)
        records = (decision.log_prob_N, decision.sampled_log_prob_N, decision.entropy_N)
        for table, values_N in zip((slots.log_prob_SC, slots.sampled_SC, slots.entropy_SC), records, strict=True):
            if values_N is not None:
                table[at] = values_N[chosen_N].double()
        for sequence in sequences:
            if sequence.size == 2:
                own, blind = sequence.slots
                start, stop = sequence.span
                shown = torch.tensor(sequence.request.hidden[start:stop], device=device)
                slots.ids_SC[blind, start:stop] = torch.where(shown, slots.ids_SC[own, start:stop], self.lm.mask_token_id)
                slots.hidden_SC[blind, start:stop] = slots.hidden_SC[own, start:stop]

    def _hide_again(self, sequences: list[Sequence], again_B: Tensor) -> None:
        """Hide the least probable tokens that earlier steps of the blocks revealed."""
        slot_B1, start_B1, stop_B1 = torch.tensor([(s.slots[0], *s.span) for s in sequences], device=again_B.device)[:, :, None].unbind(1)
        at_BW = start_B1 + torch.arange(int((stop_B1 - start_B1).max()), device=again_B.device)
        inside_BW, at_BW = at_BW < stop_B1, at_BW.clamp_max(self.slots.ids_SC.shape[1] - 1)
        earlier_BW = inside_BW & (self.slots.step_SC[slot_B1, at_BW] >= 0)
        priority_BW = torch.where(earlier_BW, -self.slots.log_prob_SC[slot_B1, at_BW], -torch.inf)
        member_C, column_C = first_by_priority(priority_BW, again_B).nonzero(as_tuple=True)
        at = (slot_B1[member_C, 0], at_BW[member_C, column_C])
        self.slots.ids_SC[at], self.slots.hidden_SC[at], self.slots.step_SC[at] = self.lm.mask_token_id, True, -1

    def _advance(self, sequences: list[Sequence]) -> list[tuple[int, Trace]]:
        """Go on to the next step or block; sequences that are through leave."""
        ended = self._ended(sequences)
        for sequence, through in zip(sequences, ended, strict=True):
            first = sequence.span[0]
            sequence.clean = max(sequence.clean, first - first % (self.lm.block_size or 1))
            sequence.step, sequence.done = sequence.step + 1, sequence.done + 1
            if through:
                sequence.block, sequence.step = sequence.block + 1, 0
        stopped = self._stopped([sequence for sequence, through in zip(sequences, ended, strict=True) if through])
        finished = []
        for sequence in [s for s in sequences if s in stopped or s.block == len(s.request.blocks)]:
            finished.append(
                (sequence.ticket, self.slots.trace(sequence.slots[0], sequence.request, sequence.passes, sequence.config.trace))
            )
            self._leave(sequence)
        return finished

    def _ended(self, sequences: list[Sequence]) -> list[bool]:
        """Whether the block in work of each sequence has nothing hidden left."""
        ended = [sequence.step + 1 == len(sequence.counts) for sequence in sequences]
        asking = [i for i, sequence in enumerate(sequences) if sequence.config.parallel or sequence.config.early_commit is not None]
        left = [self.slots.hidden_SC[sequences[i].slots[0], slice(*sequences[i].span)].any() for i in asking]
        for i, some in zip(asking, torch.stack(left).tolist() if left else [], strict=True):
            ended[i] = not some
        return ended

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
