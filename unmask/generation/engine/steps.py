"""Parts of a denoising step (`Engine._denoise`) after the forward pass: choose tokens, reveal the best, draft the states of later steps.

Shapes: B sequences, N hidden positions of their blocks, C chosen ones (in tables `_SC` columns of slots), W positions of a block, G drafts,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unmask.config.run import SamplerConfig
from unmask.generation.engine.forward import Rows
from unmask.generation.engine.slots import Draft, Slots
from unmask.generation.policies import Decision, count_remasked, decide, first_by_priority, how_many
from unmask.generation.requests import Request


@dataclass(eq=False)
class SequenceState:
    """A request and its progress."""

    ticket: int
    request: Request
    config: SamplerConfig
    num_columns: int  # KV-cache columns reserved for the sequence: positions and drafts
    slots: list[int] = field(default_factory=list)  # its slot, and with guidance that of the copy with a hidden prompt
    block: int = 0  # the current decoding block
    step: int = 0  # denoising steps of this block so far
    steps_done: int = 0  # denoising steps of all blocks so far
    num_forward_passes: int = 0
    num_cached: int = 0  # positions whose keys and values are cached, from the first one on
    draft: Draft | None = None  # of its next states

    @property
    def span(self) -> tuple[int, int]:
        return self.request.blocks[self.block]

    @property
    def counts(self) -> list[int]:
        """Tokens to reveal at each step of the block; empty where the predictions decide."""
        return self.request.counts[self.block] if self.request.counts else []

    def tokens_to_reveal(self, ahead: int) -> int:
        """The number at the step `ahead` of the current one; 0 after the last step."""
        step = self.step + ahead
        return self.counts[step] if step < len(self.counts) else 0

    @property
    def num_remasked(self) -> int:
        """The number of tokens that the step hides again."""
        return count_remasked(self.counts, self.step, self.config.remask)

    @property
    def num_slots(self) -> int:
        """2 with guidance, else 1."""
        return 1 + (self.config.guidance > 0)


def reveal(slots: Slots, sequences: list[SequenceState], rows: Rows) -> None:
    """Reveal the chosen tokens of one denoising step, and record them."""
    decision = decide_rows(slots, sequences, rows)
    device = rows.member_N.device
    row_C, _ = choose(sequences, rows, decision)
    again = [sequence.num_remasked for sequence in sequences]
    if any(again):
        _remask(slots, sequences, again)
    slot_B, step_B = torch.tensor([(sequence.slots[0], sequence.steps_done) for sequence in sequences], device=device).unbind(1)
    member_C = rows.member_N[row_C]
    at = (slot_B[member_C], rows.position_N[row_C])
    slots.ids_SC[at], slots.hidden_SC[at] = decision.token_N[row_C], False
    slots.step_SC[at] = step_B[member_C].to(slots.step_SC.dtype)
    records = (decision.log_prob_N, decision.sampled_log_prob_N, decision.entropy_N)
    for table, values_N in zip((slots.log_prob_SC, slots.sampled_SC, slots.entropy_SC), records, strict=True):
        if values_N is not None:
            table[at] = values_N[row_C].double()
    for sequence in sequences:
        if sequence.num_slots == 2:
            slot, unconditional = sequence.slots
            block = slice(*sequence.span)
            filled_W = slots.hidden_SC[slot, block] | (slots.step_SC[slot, block] >= 0)  # the other tokens belong to the prompt
            slots.ids_SC[unconditional, block] = torch.where(filled_W, slots.ids_SC[slot, block], slots.mask_token_id)
            slots.hidden_SC[unconditional, block] = slots.hidden_SC[slot, block]


def decide_rows(slots: Slots, sequences: list[SequenceState], rows: Rows, ahead: int = 0) -> Decision:
    """The token that would be revealed at each row, by the settings of its sequence."""
    per_sequence = [(sequence.request.key, sequence.steps_done + ahead, sequence.slots[0]) for sequence in sequences]
    key_N, step_N, slot_N = torch.tensor(per_sequence, device=rows.member_N.device)[rows.member_N].unbind(1)
    parts = []
    for config, uses_B in _by_settings(sequences, key_N.device):
        at = slice(None) if uses_B is None else uses_B[rows.member_N].nonzero().squeeze(1)
        logits_NV = rows.logits_NV[at]
        present_NV = slots.present(slot_N[at], logits_NV.shape[1]) if config.repetition_penalty != 1 else None
        parts.append((at, decide(logits_NV, config, key_N[at], step_N[at], rows.position_N[at], present_NV)))
    return parts[0][1] if len(parts) == 1 else _merge(parts, len(key_N))


def choose(sequences: list[SequenceState], rows: Rows, decision: Decision, ahead: int = 0) -> tuple[Tensor, Tensor]:
    """The rows [C] to reveal, and their columns in the block."""
    start_B = torch.tensor([sequence.span[0] for sequence in sequences], device=rows.member_N.device)
    column_N = rows.position_N - start_B[rows.member_N]
    width = max(stop - start for start, stop in (sequence.span for sequence in sequences))
    priority_BW = torch.full((len(sequences), width), -torch.inf, device=column_N.device)
    priority_BW[rows.member_N, column_N] = decision.priority_N
    fixed = [sequence.tokens_to_reveal(ahead) + sequence.num_remasked for sequence in sequences]
    count_B = torch.tensor(fixed, device=column_N.device)
    for config, uses_B in _by_settings(sequences, column_N.device):
        if uses_B is None:
            uses_B = torch.ones_like(count_B, dtype=torch.bool)
        if config.parallel:
            count_B = torch.where(uses_B, how_many(priority_BW, config), count_B)
        if config.early_commit is not None:
            assert decision.margin_N is not None
            margin_BW = torch.full(priority_BW.shape, torch.inf, device=column_N.device)
            margin_BW[rows.member_N, column_N] = decision.margin_N.float()
            count_B = torch.where(uses_B & (margin_BW.amin(1) >= config.early_commit), width, count_B)
    row_C = first_by_priority(priority_BW, count_B)[rows.member_N, column_N].nonzero().squeeze(1)
    return row_C, column_N[row_C]


def draft_ahead(slots: Slots, sequences: list[SequenceState], rows: Rows) -> None:
    """Draft the next states, as if the predictions stayed the same."""
    states: list[tuple[Tensor, Tensor]] = []
    spans = [(sequence.slots[0], slice(*sequence.span)) for sequence in sequences]
    width = max(span.stop - span.start for _, span in spans)
    ids_BW = torch.full((len(spans), width), slots.mask_token_id, device=rows.member_N.device)
    hidden_BW = torch.zeros_like(ids_BW, dtype=torch.bool)
    for member, (slot, span) in enumerate(spans):
        ids_BW[member, : span.stop - span.start] = slots.ids_SC[slot, span]
        hidden_BW[member, : span.stop - span.start] = slots.hidden_SC[slot, span]
    start_B = torch.tensor([span.start for _, span in spans], device=rows.member_N.device)
    for ahead in range(max(sequence.config.drafts for sequence in sequences)):
        rows = rows.where(hidden_BW[rows.member_N, rows.position_N - start_B[rows.member_N]])
        if len(rows.member_N) == 0:
            break
        decision = decide_rows(slots, sequences, rows, ahead)
        row_C, column_C = choose(sequences, rows, decision, ahead)
        at = (rows.member_N[row_C], column_C)
        ids_BW[at], hidden_BW[at] = decision.token_N[row_C], False
        states.append((ids_BW.clone(), hidden_BW.clone()))
    if not states:
        return
    ids_GBW, hidden_GBW = (torch.stack(tables) for tables in zip(*states, strict=True))
    open_B = hidden_GBW.any(2).sum(0).tolist()  # a state without hidden tokens needs no pass
    for member, sequence in enumerate(sequences):
        count, size = min(open_B[member], sequence.config.drafts), sequence.span[1] - sequence.span[0]
        if count:
            sequence.draft = Draft(ids_GBW[:count, member, :size], hidden_GBW[:count, member, :size])


def _by_settings(sequences: list[SequenceState], device: torch.device) -> Iterator[tuple[SamplerConfig, Tensor | None]]:
    """Each distinct config, and a mask [B] of the sequences that use it; None: all do. The engine keeps equal configs as one object."""
    configs = list({id(sequence.config): sequence.config for sequence in sequences}.values())
    for config in configs:
        uses = [sequence.config is config for sequence in sequences]
        yield config, None if len(configs) == 1 else torch.tensor(uses, device=device)


def _remask(slots: Slots, sequences: list[SequenceState], again: list[int]) -> None:
    """Hide the least probable tokens among those that earlier steps of the blocks revealed."""
    device = slots.ids_SC.device
    slot_B1, start_B1, stop_B1 = torch.tensor([(s.slots[0], *s.span) for s in sequences], device=device)[:, :, None].unbind(1)
    position_BW = start_B1 + torch.arange(max(stop - start for start, stop in (s.span for s in sequences)), device=device)
    inside_BW, position_BW = position_BW < stop_B1, position_BW.clamp_max(slots.ids_SC.shape[1] - 1)
    earlier_BW = inside_BW & (slots.step_SC[slot_B1, position_BW] >= 0)
    priority_BW = torch.where(earlier_BW, -slots.log_prob_SC[slot_B1, position_BW].float(), -torch.inf)
    member_C, column_C = first_by_priority(priority_BW, torch.tensor(again, device=device)).nonzero(as_tuple=True)
    at = (slot_B1[member_C, 0], position_BW[member_C, column_C])
    slots.ids_SC[at], slots.hidden_SC[at], slots.step_SC[at] = slots.mask_token_id, True, -1


def _merge(parts: list[tuple[Any, Decision]], count: int) -> Decision:
    """The decisions of groups of rows, in the order of all rows; fields that a group lacks are 0 there."""
    merged: dict[str, Tensor] = {}
    for at, decision in parts:
        for name, values_N in decision._asdict().items():
            if values_N is not None:
                merged.setdefault(name, values_N.new_zeros(count))[at] = values_N
    return Decision(**merged)
