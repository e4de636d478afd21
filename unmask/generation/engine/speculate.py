"""A round of mode self-speculative: verify the drafts of sequences, reveal the tokens, and draft the next ones. One forward pass.

Shapes: B sequences, G drafts, J = G + 1 verified positions, V vocabulary, N positions of several sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from unmask.generation.engine.forward import buckets
from unmask.generation.engine.slots import Slots, SpeculativeEntry, as_columns
from unmask.generation.engine.speculative_forward import draft_pass, speculative_pass
from unmask.generation.engine.steps import SequenceState, Speculation
from unmask.generation.output import end_of
from unmask.generation.policies import Decision
from unmask.generation.requests import Request
from unmask.generation.speculation import draw_drafts, num_drafts, probabilities, verify
from unmask.models.diffusion_lm import DiffusionLM


def begin(lm: DiffusionLM, request: Request) -> Speculation:
    """The state before the first round, which has no drafts."""
    none = torch.zeros(0, dtype=torch.long, device=lm.device)
    return Speculation(request.start, request.start, none, torch.zeros(0, lm.config.vocab_size, dtype=lm.log_prob_dtype, device=lm.device))


def speculate(
    lm: DiffusionLM, verifier: DiffusionLM | None, slots: Slots, sequences: Sequence[SequenceState], alone: bool
) -> list[SequenceState]:
    """One round of each sequence. Those of different settings or very different lengths have separate passes; with `alone`, all have.
    Returns the finished ones. `verifier`: the causal model that verifies; None: the model itself."""
    finished: list[SequenceState] = []
    for config in {id(sequence.config): sequence.config for sequence in sequences}.values():
        alike = [sequence for sequence in sequences if sequence.config is config]
        for bucket in buckets([_state(sequence).position - sequence.num_cached for sequence in alike], alone):
            members = [alike[index] for index in bucket]
            finished += _round(lm, slots, members) if verifier is None else _round_of_two(lm, verifier, slots, members)
    return finished


def _state(sequence: SequenceState) -> Speculation:
    assert sequence.speculation is not None
    return sequence.speculation


def _round(lm: DiffusionLM, slots: Slots, sequences: list[SequenceState]) -> list[SequenceState]:
    states = [_state(sequence) for sequence in sequences]
    width = num_drafts(lm, sequences[0].config) + 1
    entries = [
        SpeculativeEntry(each.slots[0], each.request.length, min(each.num_cached, state.position - 1), state.position, state.draft_G, width)
        for each, state in zip(sequences, states, strict=True)
    ]
    causal_BJV, masked_BJGV = speculative_pass(lm, slots, entries)
    refused, finished = _reveal(lm, slots, sequences, causal_BJV)
    going_on = [member for member, sequence in enumerate(sequences) if sequence not in finished]
    if going_on:
        at = torch.tensor([(member, refused[member]) for member in going_on], device=masked_BJGV.device)
        _draft(slots, [sequences[member] for member in going_on], masked_BJGV[at[:, 0], at[:, 1]])
    return finished


def _round_of_two(lm: DiffusionLM, verifier: DiffusionLM, slots: Slots, sequences: list[SequenceState]) -> list[SequenceState]:
    """A round of two models, of a pass each: the tokens are known when the next ones are drafted."""
    states, count = [_state(sequence) for sequence in sequences], num_drafts(lm, sequences[0].config)
    entries = [
        SpeculativeEntry(each.slots[0], each.request.length, min(each.num_cached, state.position - 1), state.position, state.draft_G, 0)
        for each, state in zip(sequences, states, strict=True)
    ]
    causal_BJV, _ = speculative_pass(verifier, slots, entries, cache=slots.verifier_cache)
    _, finished = _reveal(lm, slots, sequences, causal_BJV)
    going_on = [sequence for sequence in sequences if sequence not in finished]
    if going_on:
        entries = []
        for sequence in going_on:
            state = _state(sequence)
            first, none = min(state.num_drafter_cached, state.position - 1), state.draft_G[:0]
            entries.append(SpeculativeEntry(sequence.slots[0], sequence.request.length, first, state.position, none, count + 1))
            state.num_drafter_cached = state.position
        _draft(slots, going_on, draft_pass(lm, slots, entries)[:, :count])
    return finished


def _reveal(lm: DiffusionLM, slots: Slots, sequences: list[SequenceState], logits_BJV: Tensor) -> tuple[list[int], list[SequenceState]]:
    """Reveal the tokens that are decided. Returns the number of drafts before the first refused one, and the finished sequences."""
    decision, kept_B = _verify(slots, sequences, logits_BJV)
    shape = logits_BJV.shape[:2]
    *token_JB, kept = torch.cat([decision.token_N.view(shape), kept_B[:, None]], 1).T.tolist()
    finished, revealed = [], []
    for member, (sequence, tokens) in enumerate(zip(sequences, zip(*token_JB, strict=True), strict=True)):
        state, request = _state(sequence), sequence.request
        tokens = tokens[: min(kept[member] + 1, request.length - state.position)]
        ends = lm.eos_token_ids if request.stop_at_eos else ()
        count = end_of(tokens, ends)
        revealed += [(member, column, sequence.slots[0], state.position + column, sequence.steps_done) for column in range(count)]
        state.num_drafted, state.num_accepted = state.num_drafted + len(state.draft_G), state.num_accepted + min(kept[member], count)
        state.position += count
        if state.position == request.length or tokens[count - 1] in ends:
            finished.append(sequence)
        sequence.num_cached = state.position - 1
        sequence.steps_done, sequence.num_forward_passes = sequence.steps_done + 1, sequence.num_forward_passes + 1
    member_N, column_N, slot_N, position_N, step_N = torch.tensor(revealed, device=kept_B.device).unbind(1)
    slots.write((slot_N, position_N), decision, member_N * shape[1] + column_N, step_N)
    return kept, finished


def _verify(slots: Slots, sequences: list[SequenceState], logits_BJV: Tensor) -> tuple[Decision, Tensor]:
    """The token of each position [B * J] if all drafts before it are kept, and the number of drafts [B] before the first refused one."""
    config, states = sequences[0].config, [_state(sequence) for sequence in sequences]
    draft_BJ = F.pad(pad_sequence([state.draft_G for state in states], batch_first=True), (0, 1))
    drafted_BJV = F.pad(pad_sequence([state.drafted_GV for state in states], batch_first=True), (0, 0, 0, 1))
    key_N, position_N = _keys(sequences, logits_BJV.shape[1])
    present_NV = None
    if config.repetition_penalty != 1:
        earlier_BJV = F.one_hot(draft_BJ, logits_BJV.shape[2]).cumsum(1).roll(1, 1)
        earlier_BJV[:, 0] = 0
        present_NV = _present(slots, sequences, *logits_BJV.shape[1:]) | (earlier_BJV > 0).flatten(0, 1)
    decision, accepted_N = verify(
        logits_BJV.flatten(0, 1), drafted_BJV.flatten(0, 1), draft_BJ.flatten(), config, key_N, position_N, present_NV
    )
    return decision, accepted_N.view_as(draft_BJ).long().cumprod(1).sum(1)


def _draft(slots: Slots, sequences: list[SequenceState], logits_BGV: Tensor) -> None:
    """Draw the next drafts, as far as the sequence goes."""
    config, (count, vocabulary) = sequences[0].config, logits_BGV.shape[1:]
    key_N, position_N = _keys(sequences, count)
    present_NV = _present(slots, sequences, count, vocabulary) if config.repetition_penalty != 1 else None
    drafted_NV = probabilities(logits_BGV.flatten(0, 1), config, present_NV)
    draft_BG = draw_drafts(drafted_NV, config, key_N, position_N).view(-1, count)
    for sequence, draft_G, drafted_GV in zip(sequences, draft_BG, drafted_NV.view_as(logits_BGV), strict=True):
        state = _state(sequence)
        rest = sequence.request.length - state.position
        state.draft_G, state.drafted_GV = draft_G[:rest], drafted_GV[:rest]


def _keys(sequences: list[SequenceState], count: int) -> tuple[Tensor, Tensor]:
    """Key and position, for `count` positions of each sequence from the first one on that is not decided."""
    states = [_state(sequence) for sequence in sequences]
    device = states[0].draft_G.device
    key_B1, position_B1 = as_columns([(each.request.key, state.position) for each, state in zip(sequences, states, strict=True)], device)
    return key_B1.repeat(1, count).flatten(), (position_B1 + torch.arange(count, device=device)).flatten()


def _present(slots: Slots, sequences: list[SequenceState], count: int, vocabulary: int) -> Tensor:
    """The tokens that occur in each sequence [B * count, V]."""
    slot_B = torch.tensor([sequence.slots[0] for sequence in sequences], device=slots.ids_SC.device)
    return slots.present(slot_B, vocabulary).repeat_interleave(count, 0)
