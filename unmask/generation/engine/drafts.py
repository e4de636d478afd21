"""Drafts of later states: one pass also predicts the states that a block is expected to reach after one, two,
... more steps. A drafted state that is reached needs no pass of its own.

Shapes: B sequences, N predictions, J some of them, W positions of a block, G drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from unmask.generation.engine.host import first_true, members, moved, moved_together, ranks
from unmask.generation.engine.sequence import SequenceState
from unmask.generation.engine.slots import BatchEntry, BatchState, Draft, Predictions
from unmask.generation.engine.steps import choose, decide_all


def add_drafted(
    entries: Sequence[BatchEntry], member_N: np.ndarray, slot_N: Tensor, position_N: Tensor
) -> tuple[np.ndarray, Tensor, Tensor, np.ndarray]:
    """The hidden positions, then those of drafts: member, slot, position and steps ahead."""
    ahead_N, device = np.zeros_like(member_N), position_N.device
    for member, entry in enumerate(entries):
        if entry.draft is not None:
            number_J, counts = members(entry.draft.num_hidden), entry.draft.num_hidden
            draft_J, rank_J = moved_together(device, number_J, ranks(counts))
            drafted_J = first_true(entry.draft.hidden_GW)[draft_J, rank_J] + entry.start
            position_N = torch.cat([position_N, drafted_J])
            slot_N = torch.cat([slot_N, torch.full_like(draft_J, entry.slot)])
            member_N = np.append(member_N, np.full_like(number_J, member))
            ahead_N = np.append(ahead_N, 1 + number_J)
    return member_N, slot_N, position_N, ahead_N


def denoise_with_drafts(
    slots: BatchState,
    sequences: list[SequenceState],
    predictions: Predictions,
    step: Callable[[list[SequenceState], Predictions], None],
) -> None:
    """Make a denoising step, and one more for every draft that equals the state reached. Then draft the next
    states of the sequences that stay in their block, from the predictions for the last draft that each
    used."""
    step(sequences, predictions.at(np.flatnonzero(predictions.ahead_N == 0)))
    used, active = dict.fromkeys(range(len(sequences)), 0), list(range(len(sequences)))
    for ahead in range(1, 1 + max(sequence.config.num_speculative_tokens for sequence in sequences)):
        active = confirmed(slots, [i for i in active if sequences[i].step], sequences, ahead)
        if not active:
            break
        used |= dict.fromkeys(active, ahead)
        own = _predictions_of(predictions, active, sequences, predictions.ahead_N == ahead)
        step([sequences[i] for i in active], own)
    for sequence in sequences:
        sequence.draft = None
    drafting = [
        i for i, sequence in enumerate(sequences) if sequence.step and sequence.config.num_speculative_tokens
    ]
    if drafting:
        used_B = np.array(list(used.values()))
        latest_N = predictions.ahead_N == used_B[predictions.member_N]
        latest = _predictions_of(predictions, drafting, sequences, latest_N)
        _draft(slots, [sequences[i] for i in drafting], latest)


def _predictions_of(
    predictions: Predictions, active: list[int], sequences: list[SequenceState], keep_N: np.ndarray
) -> Predictions:
    """The predictions of some members, renumbered, with their present slots: these move when others
    leave."""
    number_B, slot_B = np.full(len(sequences), -1), np.array([sequences[i].slots[0] for i in active])
    number_B[active] = np.arange(len(active))
    member_N = number_B[predictions.member_N]
    index_J = np.flatnonzero(keep_N & (member_N >= 0))
    # those of drafts came last
    part = predictions.at(index_J[np.argsort(member_N[index_J], kind="stable")], number_B)
    return part._replace(slot_N=moved(slot_B[part.member_N], part.position_N.device))


def confirmed(
    slots: BatchState, candidates: list[int], sequences: list[SequenceState], ahead: int
) -> list[int]:
    """The candidates whose draft of the state `ahead` steps after the forward pass equals the state that was
    reached."""
    drafted, equal = list[int](), list[Tensor]()
    for i in candidates:
        draft = sequences[i].draft
        if draft is not None and len(draft.ids_GW) >= ahead:
            at = (sequences[i].slots[0], slice(*sequences[i].span))
            same_W = (slots.ids_SC[at] == draft.ids_GW[ahead - 1]) & (
                slots.hidden_SC[at] == draft.hidden_GW[ahead - 1]
            )
            drafted.append(i)
            equal.append(same_W.all())
    if not equal:
        return []
    return [i for i, same in zip(drafted, torch.stack(equal).tolist(), strict=True) if same]


def _draft(slots: BatchState, sequences: list[SequenceState], predictions: Predictions) -> None:
    """Draft the states after the next steps, as if the predictions stayed the same."""
    device = predictions.position_N.device
    start_B = np.array([sequence.span[0] for sequence in sequences])
    at = slots.blocks(tuple((sequence.slots[0], *sequence.span) for sequence in sequences))
    ids_BW, hidden_BW = slots.ids_SC[at], slots.hidden_SC[at]
    left, states = [[sequence.num_hidden for sequence in sequences]], list[tuple[Tensor, Tensor]]()
    for ahead in range(max(sequence.config.num_speculative_tokens for sequence in sequences)):
        member_N, start_N = moved_together(device, predictions.member_N, start_B[predictions.member_N])
        hidden_N = hidden_BW[member_N, predictions.position_N - start_N]
        if not any(left[-1]):
            break
        predictions = predictions.take(first_true(hidden_N)[: sum(left[-1])], members(left[-1]))
        decision = decide_all(slots, sequences, predictions, ahead)
        planned = [sequence.tokens_to_reveal(ahead) for sequence in sequences]
        index_J, chosen = choose(sequences, predictions, decision, planned)
        member_J, start_J = moved_together(device, members(chosen), np.repeat(start_B, chosen))
        changed = (member_J, predictions.position_N[index_J] - start_J)
        ids_BW[changed], hidden_BW[changed] = decision.token_N[index_J], slots.shown
        states.append((ids_BW.clone(), hidden_BW.clone()))
        left.append([before - count for before, count in zip(left[-1], chosen, strict=True)])
    if not states:
        return
    ids_GBW, hidden_GBW = (torch.stack(tables) for tables in zip(*states, strict=True))
    for member, sequence in enumerate(sequences):
        # without, it needs no pass
        num_hidden = [
            counts[member]
            for counts in left[1 : 1 + sequence.config.num_speculative_tokens]
            if counts[member]
        ]
        if count := len(num_hidden):
            size = sequence.span[1] - sequence.span[0]
            sequence.draft = Draft(
                ids_GBW[:count, member, :size], hidden_GBW[:count, member, :size], num_hidden
            )
