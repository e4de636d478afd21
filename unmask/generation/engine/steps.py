"""What a denoising step does after its forward pass: decide on tokens, and reveal the best.

The host knows how many tokens each sequence reveals, and the device which: it sorts, and the host takes the
first ones. Only where predictions decide how many (`threshold`, `factor`, `entropy_bound`, `early_commit`),
the host reads the number.

Shapes: B sequences, N positions of their blocks with predictions, J chosen ones, M the most of one sequence,
V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unmask.generation.constraints.decide import decide_given, windows_of
from unmask.generation.engine.host import Counts, best_rows, moved, padded
from unmask.generation.engine.noise import numbers
from unmask.generation.engine.sequence import SequenceState, by_settings
from unmask.generation.engine.slots import BatchState, Predictions
from unmask.generation.policies import Decision, decide_by, num_accepted


def reveal(
    slots: BatchState, sequences: list[SequenceState], predictions: Predictions, more: Counts | None = None
) -> None:
    """One denoising step, without its forward pass; `more`: tokens that each sequence reveals beyond its
    count."""
    decision = decide_all(slots, sequences, predictions)
    decision = decision._replace(log_prob_N=decision.log_prob_N.double())
    planned = [sequence.tokens_to_reveal() for sequence in sequences]
    if more is not None:
        planned = [count + other for count, other in zip(planned, more, strict=True)]
    index_J, chosen = choose(sequences, predictions, decision, planned)
    step_B = np.array([sequence.steps_done for sequence in sequences], dtype=np.int32)
    slot_J, step_J = predictions.slot_N[index_J], moved(np.repeat(step_B, chosen), index_J.device)
    slots.write((slot_J, predictions.position_N[index_J]), decision, index_J, step_J)
    slots.sum_S.index_add_(0, predictions.slot_N, decision.log_prob_N)
    for sequence, count in zip(sequences, chosen, strict=True):
        sequence.num_hidden -= count


def decide_all(
    slots: BatchState, sequences: list[SequenceState], predictions: Predictions, ahead: int = 0
) -> Decision:
    """The token that would be revealed at each position, by the settings of its sequence."""
    member_N, device = predictions.member_N, predictions.position_N.device
    parts: list[tuple[Tensor | None, Decision]] = []
    for config, uses_B in by_settings(sequences):
        if config.constraint is not None:
            parts += [
                _decide_given(slots, sequences[member], member, predictions, ahead)
                for member in np.flatnonzero(uses_B).tolist()
            ]
            continue
        own, at = predictions, None
        if not uses_B.all():
            own_J = np.flatnonzero(uses_B[member_N])
            at = moved(own_J, device)
            own = predictions.take(at, member_N[own_J])
        present_NV = None
        if config.repetition_penalty != 1:
            slot_B = moved(np.array([sequence.slots[0] for sequence in sequences]), device)
            present_NV = slots.present(slot_B, own.logits_NV.shape[1])[moved(own.member_N, device)]
        parts.append(
            (at, decide_by(own.logits_NV, config, numbers(slots, sequences, config, own, ahead), present_NV))
        )
    return parts[0][1] if len(parts) == 1 else _merge(parts, len(member_N))


def _decide_given(
    slots: BatchState, sequence: SequenceState, member: int, predictions: Predictions, ahead: int
) -> tuple[Tensor, Decision]:
    """The predictions of one sequence, and its tokens given its constraint. The host reads which are hidden,
    and the chances of texts."""
    index_J = moved(np.flatnonzero(predictions.member_N == member), predictions.position_N.device)
    slot, length, config = sequence.slots[0], sequence.request.length, sequence.config
    ids, hidden = slots.ids_SC[slot, :length].tolist(), slots.hidden_SC[slot, :length].tolist()
    windows = windows_of(sequence.request.gaps, sequence.span, ids, hidden, index_J.device)
    logits_JV, position_J = predictions.logits_NV[index_J], predictions.position_N[index_J]
    key_J, step_J = (
        torch.full_like(index_J, sequence.request.key),
        torch.full_like(index_J, sequence.steps_done + ahead),
    )
    present_JV = None
    if config.repetition_penalty != 1:
        present_JV = slots.present(index_J.new_tensor([slot]), logits_JV.shape[1]).expand(len(index_J), -1)
    return index_J, decide_given(logits_JV, config, key_J, step_J, position_J, present_JV, windows)


def choose(
    sequences: list[SequenceState], predictions: Predictions, decision: Decision, planned: list[int]
) -> tuple[Tensor, list[int]]:
    """The predictions [J] to reveal, and how many these are of each sequence."""
    count_B = predictions.counts(len(sequences))
    if any(sequence.config.parallel or sequence.config.early_commit is not None for sequence in sequences):
        planned = _read_counts(sequences, decision, count_B, planned)
    chosen = [min(count, int(most)) for count, most in zip(planned, count_B, strict=True)]
    return best_rows(decision.priority_N, count_B, chosen), chosen


def _read_counts(
    sequences: list[SequenceState], decision: Decision, count_B: np.ndarray, planned: list[int]
) -> list[int]:
    """How many tokens each sequence reveals, where predictions decide it for some."""
    priority_BM = padded(decision.priority_N, count_B, -torch.inf)
    chosen_B = moved(np.array(planned), priority_BM.device)
    for config, uses in by_settings(sequences):
        uses_B = moved(uses, priority_BM.device)
        if config.parallel:
            chosen_B = torch.where(uses_B, num_accepted(priority_BM, config), chosen_B)
        if config.early_commit is not None:
            assert decision.margin_N is not None
            margin_BM = padded(decision.margin_N.float(), count_B, torch.inf)
            chosen_B = torch.where(
                uses_B & (margin_BM.amin(1) >= config.early_commit), priority_BM.shape[1], chosen_B
            )
    return chosen_B.tolist()


def _merge(parts: list[tuple[Tensor | None, Decision]], count: int) -> Decision:
    """The decisions of groups of positions, in the order of all positions; fields that a group lacks are 0
    there."""
    merged: dict[str, Tensor] = {}
    for at, decision in parts:
        for name, values_N in decision._asdict().items():
            if values_N is not None:
                merged.setdefault(name, values_N.new_zeros(count, *values_N.shape[1:]))[at] = values_N
    return Decision(**merged)
