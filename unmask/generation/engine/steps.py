"""What `Engine._denoise` does after the forward pass: decide on tokens, reveal the best (`reveal`), draft later states (`draft_ahead`).

Shapes: B sequences, N hidden positions of their blocks, J chosen ones, S slots, C columns (positions), W positions of a block, G drafts,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unmask.config.run import SamplerConfig
from unmask.generation.constraints.decide import decide_given, windows_of
from unmask.generation.engine.forward import Predictions
from unmask.generation.engine.slots import Draft, Slots, as_columns
from unmask.generation.policies import Decision, count_remasked, decide, first_by_priority, num_accepted
from unmask.generation.requests import Request
from unmask.generation.revise import doubts, present_log_probs


@dataclass
class Speculation:
    """The progress of a sequence in mode self-speculative."""

    position: int  # of the first token that is not decided
    num_drafter_cached: int  # positions whose keys the drafting model has cached, where another one verifies
    draft_G: Tensor  # the tokens of the first nodes of the tree
    drafted_DKV: Tensor  # the distributions that the candidates at each depth were drawn from
    num_drafted: int = 0  # tokens so far that were verified
    num_accepted: int = 0  # and kept


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
    draft: Draft | None = None  # the predicted states after the next steps
    speculation: Speculation | None = None  # in mode self-speculative

    @property
    def span(self) -> tuple[int, int]:
        return self.request.blocks[self.block]

    @property
    def counts(self) -> list[int]:
        """Tokens to reveal at each step of the block; empty where the predictions decide."""
        return self.request.counts[self.block] if self.request.counts else []

    def tokens_to_reveal(self, ahead: int) -> int:
        """The count of the step that comes `ahead` steps after the current one; 0 after the last step."""
        step = self.step + ahead
        return self.counts[step] if step < len(self.counts) else 0

    @property
    def num_remasked(self) -> int:
        """The number of tokens that the step hides again. It reveals as many more than its count."""
        return count_remasked(self.counts, self.step, self.config.remask)

    @property
    def num_revised(self) -> int:
        """The most tokens that the step hides again by its own predictions. It reveals as many more than its count."""
        return self.request.revisions[self.block][self.step] if self.request.revisions else 0

    @property
    def num_slots(self) -> int:
        """2 with guidance, else 1."""
        return 1 + (self.config.guidance > 0)


def reveal(slots: Slots, sequences: list[SequenceState], predictions: Predictions) -> None:
    """One denoising step, without its forward pass: hide the remasked tokens, and write the chosen ones to the slots."""
    device = predictions.member_N.device
    hide_at = more_B = None
    if any(sequence.num_revised for sequence in sequences):
        predictions, hide_at, more_B = _revise(slots, sequences, predictions)
    decision = decide_all(slots, sequences, predictions)
    index_J, _ = choose(sequences, predictions, decision, more_B=more_B)
    again = [sequence.num_remasked for sequence in sequences]
    if any(again):
        _remask(slots, sequences, again)
    if hide_at is not None:
        _hide(slots, hide_at)
    slot_B, step_B = torch.tensor([(sequence.slots[0], sequence.steps_done) for sequence in sequences], device=device).unbind(1)
    member_J = predictions.member_N[index_J]
    at = (slot_B[member_J], predictions.position_N[index_J])
    slots.write(at, decision, index_J, step_B[member_J])
    for sequence in sequences:
        if sequence.num_slots == 2:
            slot, unconditional = sequence.slots
            block = slice(*sequence.span)
            filled_W = slots.hidden_SC[slot, block] | (slots.step_SC[slot, block] >= 0)  # the other tokens belong to the prompt
            slots.ids_SC[unconditional, block] = torch.where(filled_W, slots.ids_SC[slot, block], slots.mask_token_id)
            slots.hidden_SC[unconditional, block] = slots.hidden_SC[slot, block]
            slots.step_SC[unconditional, block] = slots.step_SC[slot, block]


def decide_all(slots: Slots, sequences: list[SequenceState], predictions: Predictions, ahead: int = 0) -> Decision:
    """The token that would be revealed at each position, by the settings of its sequence."""
    per_sequence = [(sequence.request.key, sequence.steps_done + ahead, sequence.slots[0]) for sequence in sequences]
    key_N, step_N, slot_N = torch.tensor(per_sequence, device=predictions.member_N.device)[predictions.member_N].unbind(1)
    parts: list[tuple[Any, Decision]] = []
    for config, uses_B in _by_settings(sequences, key_N.device):
        if config.constraint is not None:
            members = [member for member, sequence in enumerate(sequences) if sequence.config is config]
            parts += [_decide_given(slots, sequences[member], member, predictions, key_N, step_N) for member in members]
            continue
        at = slice(None) if uses_B is None else uses_B[predictions.member_N].nonzero().squeeze(1)
        logits_NV = predictions.logits_NV[at]
        present_NV = slots.present(slot_N[at], logits_NV.shape[1]) if config.repetition_penalty != 1 else None
        parts.append((at, decide(logits_NV, config, key_N[at], step_N[at], predictions.position_N[at], present_NV)))
    return parts[0][1] if len(parts) == 1 else _merge(parts, len(key_N))


def _decide_given(
    slots: Slots, sequence: SequenceState, member: int, predictions: Predictions, key_N: Tensor, step_N: Tensor
) -> tuple[Tensor, Decision]:
    """The predictions of one sequence, and its tokens given its constraint."""
    index_J = (predictions.member_N == member).nonzero().squeeze(1)
    slot, length, config = sequence.slots[0], sequence.request.length, sequence.config
    ids, hidden = slots.ids_SC[slot, :length].tolist(), slots.hidden_SC[slot, :length].tolist()
    windows = windows_of(sequence.request.gaps, sequence.span, ids, hidden, index_J.device)
    logits_JV = predictions.logits_NV[index_J]
    slot_J = torch.full_like(index_J, slot)
    present_JV = slots.present(slot_J, logits_JV.shape[1]) if config.repetition_penalty != 1 else None
    position_J = predictions.position_N[index_J]
    return index_J, decide_given(logits_JV, config, key_N[index_J], step_N[index_J], position_J, present_JV, windows)


def choose(
    sequences: list[SequenceState], predictions: Predictions, decision: Decision, ahead: int = 0, more_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The predictions [J] to reveal, and their columns in the block. `more_B`: how many more than planned."""
    start_B = torch.tensor([sequence.span[0] for sequence in sequences], device=predictions.member_N.device)
    column_N = predictions.position_N - start_B[predictions.member_N]
    width = max(stop - start for start, stop in (sequence.span for sequence in sequences))
    priority_BW = torch.full((len(sequences), width), -torch.inf, device=column_N.device)
    priority_BW[predictions.member_N, column_N] = decision.priority_N
    fixed = [sequence.tokens_to_reveal(ahead) + sequence.num_remasked for sequence in sequences]
    count_B = torch.tensor(fixed, device=column_N.device)
    count_B = count_B if more_B is None else count_B + more_B
    for config, uses_B in _by_settings(sequences, column_N.device):
        if uses_B is None:
            uses_B = torch.ones_like(count_B, dtype=torch.bool)
        if config.parallel:
            count_B = torch.where(uses_B, num_accepted(priority_BW, config), count_B)
        if config.early_commit is not None:
            assert decision.margin_N is not None
            margin_BW = torch.full(priority_BW.shape, torch.inf, device=column_N.device)
            margin_BW[predictions.member_N, column_N] = decision.margin_N.float()
            count_B = torch.where(uses_B & (margin_BW.amin(1) >= config.early_commit), width, count_B)
    index_J = first_by_priority(priority_BW, count_B)[predictions.member_N, column_N].nonzero().squeeze(1)
    return index_J, column_N[index_J]


def draft_ahead(slots: Slots, sequences: list[SequenceState], predictions: Predictions) -> None:
    """Draft the states after the next steps, as if the predictions stayed the same."""
    states: list[tuple[Tensor, Tensor]] = []
    spans = [(sequence.slots[0], slice(*sequence.span)) for sequence in sequences]
    width = max(span.stop - span.start for _, span in spans)
    ids_BW = torch.full((len(spans), width), slots.mask_token_id, device=predictions.member_N.device)
    hidden_BW = torch.zeros_like(ids_BW, dtype=torch.bool)
    for member, (slot, span) in enumerate(spans):
        ids_BW[member, : span.stop - span.start] = slots.ids_SC[slot, span]
        hidden_BW[member, : span.stop - span.start] = slots.hidden_SC[slot, span]
    start_B = torch.tensor([span.start for _, span in spans], device=predictions.member_N.device)
    for ahead in range(max(sequence.config.drafts for sequence in sequences)):
        predictions = predictions.where(hidden_BW[predictions.member_N, predictions.position_N - start_B[predictions.member_N]])
        if len(predictions.member_N) == 0:
            break
        decision = decide_all(slots, sequences, predictions, ahead)
        index_J, column_J = choose(sequences, predictions, decision, ahead)
        at = (predictions.member_N[index_J], column_J)
        ids_BW[at], hidden_BW[at] = decision.token_N[index_J], False
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
    slot_B1, start_B1, stop_B1 = as_columns([(s.slots[0], *s.span) for s in sequences], device)
    position_BW = start_B1 + torch.arange(max(stop - start for start, stop in (s.span for s in sequences)), device=device)
    inside_BW, position_BW = position_BW < stop_B1, position_BW.clamp_max(slots.ids_SC.shape[1] - 1)
    earlier_BW = inside_BW & (slots.step_SC[slot_B1, position_BW] >= 0)
    priority_BW = torch.where(earlier_BW, -slots.log_prob_SC[slot_B1, position_BW].float(), -torch.inf)
    member_J, column_J = first_by_priority(priority_BW, torch.tensor(again, device=device)).nonzero(as_tuple=True)
    _hide(slots, (slot_B1[member_J, 0], position_BW[member_J, column_J]))


def _revise(slots: Slots, sequences: list[SequenceState], predictions: Predictions) -> tuple[Predictions, tuple[Tensor, Tensor], Tensor]:
    """The predictions of hidden positions, the slots and positions of the visible tokens to hide, and how many these are in each
    sequence."""
    device = predictions.member_N.device
    slot_B, key_B, step_B, start_B, limit_B = torch.tensor(
        [(s.slots[0], s.request.key, s.steps_done, s.span[0], s.num_revised) for s in sequences], device=device
    ).unbind(1)
    hidden_N = slots.hidden_SC[slot_B[predictions.member_N], predictions.position_N]
    visible = predictions.where(~hidden_N)
    member_N, position_N = visible.member_N, visible.position_N
    priority_BW = torch.full((len(sequences), max(stop - start for start, stop in (s.span for s in sequences))), -torch.inf, device=device)
    for config, uses_B in _by_settings(sequences, device):
        if config.revise is None:
            continue
        own_N = torch.ones_like(member_N, dtype=torch.bool) if uses_B is None else uses_B[member_N]
        member_J, position_J = member_N[own_N], position_N[own_N]
        if config.revise.by == "quality":
            assert visible.quality_N is not None
            log_prob_J = visible.quality_N[own_N]
        else:
            log_prob_J = present_log_probs(visible.logits_NV[own_N], slots.ids_SC[slot_B[member_J], position_J])
        drawn = (config.seed, key_B[member_J], step_B[member_J], position_J)
        priority_BW[member_J, position_J - start_B[member_J]] = doubts(log_prob_J, config.revise, *drawn)
    chosen_BW = first_by_priority(priority_BW, limit_B)
    member_J, column_J = chosen_BW.nonzero(as_tuple=True)
    return predictions.where(hidden_N), (slot_B[member_J], start_B[member_J] + column_J), chosen_BW.sum(1)


def _hide(slots: Slots, at: tuple[Tensor, Tensor]) -> None:
    """Hide the tokens of these slots and positions."""
    slots.ids_SC[at], slots.hidden_SC[at], slots.step_SC[at] = slots.mask_token_id, True, -1


def _merge(parts: list[tuple[Any, Decision]], count: int) -> Decision:
    """The decisions of groups of positions, in the order of all positions; fields that a group lacks are 0 there."""
    merged: dict[str, Tensor] = {}
    for at, decision in parts:
        for name, values_N in decision._asdict().items():
            if values_N is not None:
                merged.setdefault(name, values_N.new_zeros(count, *values_N.shape[1:]))[at] = values_N
    return Decision(**merged)
