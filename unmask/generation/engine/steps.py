"""What `Engine._denoise` does after the forward pass: decide on tokens, reveal the best (`reveal`), draft
later states (`draft_ahead`).

The host knows how many tokens each sequence reveals and hides again, and the device which: it sorts, and the
host takes the first ones. Only where predictions decide how many (`threshold`, `factor`, `entropy_bound`,
`early_commit`, `revise.below`), the host reads the number.

Shapes: B sequences, N positions of their blocks with predictions, J chosen ones, M the most of one sequence,
S slots, C columns (positions), W positions of a block, G drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from unmask.config.run import SamplerConfig
from unmask.generation.constraints.decide import decide_given, windows_of
from unmask.generation.engine.forward import Predictions
from unmask.generation.engine.host import (
    first_by_order,
    first_by_priority,
    first_true,
    members,
    moved,
    moved_together,
    padded,
)
from unmask.generation.engine.noise import numbers
from unmask.generation.engine.sequence import SequenceState
from unmask.generation.engine.slots import Draft, Slots
from unmask.generation.policies import Decision, decide_by, num_accepted
from unmask.generation.revise import doubts, present_log_probs

At = tuple[Tensor, Tensor]  # slots and positions


def reveal(slots: Slots, sequences: list[SequenceState], predictions: Predictions) -> None:
    """One denoising step, without its forward pass: hide the remasked tokens, and write the chosen ones to
    the slots."""
    device = predictions.position_N.device
    again = [sequence.num_remasked for sequence in sequences]
    hide_at = [_unlikely(slots, sequences, again)] if any(again) else []
    if any(sequence.num_revised for sequence in sequences):
        predictions, visible_at, revised = _revise(slots, sequences, predictions)
        hide_at, again = (
            [*hide_at, visible_at],
            [one + other for one, other in zip(again, revised, strict=True)],
        )
    decision = decide_all(slots, sequences, predictions)
    decision = decision._replace(log_prob_N=decision.log_prob_N.double())
    index_J, chosen = choose(sequences, predictions, decision, again=again)
    step_B = np.array([sequence.steps_done for sequence in sequences], dtype=np.int32)
    slot_J, step_J = predictions.slot_N[index_J], moved(np.repeat(step_B, chosen), device)
    for at in hide_at:
        slots.ids_SC[at], slots.hidden_SC[at], slots.step_SC[at] = slots.mask_token_id, True, -1
    slots.write((slot_J, predictions.position_N[index_J]), decision, index_J, step_J)
    slots.sum_S.index_add_(0, predictions.slot_N, decision.log_prob_N)
    for sequence, revealed, hidden in zip(sequences, chosen, again, strict=True):
        sequence.num_hidden += hidden - revealed
    if guided := [sequence for sequence in sequences if sequence.num_slots == 2]:
        _copy_blocks(slots, guided)


def _copy_blocks(slots: Slots, guided: list[SequenceState]) -> None:
    """Show what was decoded in the copies with a hidden prompt too."""
    spans = [(*sequence.slots, *sequence.span) for sequence in guided]
    slot_B, copy_B, start_B, stop_B = np.array(spans).T
    member_N = members(stop_B - start_B)
    position_N = np.concatenate([np.arange(start, stop) for _, _, start, stop in spans])
    slot_N, copy_N, column_N = moved_together(
        slots.ids_SC.device, slot_B[member_N], copy_B[member_N], position_N
    )
    at, copied = (slot_N, column_N), (copy_N, column_N)
    hidden_N, step_N = slots.hidden_SC[at], slots.step_SC[at]
    filled_N = hidden_N | (step_N >= 0)  # the other tokens belong to the prompt
    slots.ids_SC[copied] = torch.where(filled_N, slots.ids_SC[at], slots.mask_token_id)
    slots.hidden_SC[copied], slots.step_SC[copied] = hidden_N, step_N


def decide_all(
    slots: Slots, sequences: list[SequenceState], predictions: Predictions, ahead: int = 0
) -> Decision:
    """The token that would be revealed at each position, by the settings of its sequence."""
    member_N, device = predictions.member_N, predictions.position_N.device
    parts: list[tuple[Tensor | None, Decision]] = []
    for config, uses_B in _by_settings(sequences):
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
    slots: Slots, sequence: SequenceState, member: int, predictions: Predictions, ahead: int
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
    sequences: list[SequenceState],
    predictions: Predictions,
    decision: Decision,
    ahead: int = 0,
    again: list[int] | None = None,
) -> tuple[Tensor, list[int]]:
    """The predictions [J] to reveal, and how many these are of each sequence. `again`: how many tokens of
    each are hidden again."""
    count_B = predictions.counts(len(sequences))
    chosen = [sequence.tokens_to_reveal(ahead) for sequence in sequences]
    if again is not None:
        chosen = [count + more for count, more in zip(chosen, again, strict=True)]
    if any(sequence.config.parallel or sequence.config.early_commit is not None for sequence in sequences):
        chosen = _read_counts(sequences, decision, count_B, chosen)
    chosen = [min(count, int(most)) for count, most in zip(chosen, count_B, strict=True)]
    return first_by_priority(decision.priority_N, count_B, chosen), chosen


def _read_counts(
    sequences: list[SequenceState], decision: Decision, count_B: np.ndarray, planned: list[int]
) -> list[int]:
    """How many tokens each sequence reveals, where predictions decide it for some."""
    priority_BM = padded(decision.priority_N, count_B, -torch.inf)
    chosen_B = moved(np.array(planned), priority_BM.device)
    for config, uses in _by_settings(sequences):
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


def draft_ahead(slots: Slots, sequences: list[SequenceState], predictions: Predictions) -> None:
    """Draft the states after the next steps, as if the predictions stayed the same."""
    device = predictions.position_N.device
    start_B = np.array([sequence.span[0] for sequence in sequences])
    at = slots.blocks(tuple((sequence.slots[0], *sequence.span) for sequence in sequences))
    ids_BW, hidden_BW = slots.ids_SC[at], slots.hidden_SC[at]
    left, states = [[sequence.num_hidden for sequence in sequences]], list[tuple[Tensor, Tensor]]()
    for ahead in range(max(sequence.config.drafts for sequence in sequences)):
        member_N, start_N = moved_together(device, predictions.member_N, start_B[predictions.member_N])
        hidden_N = hidden_BW[member_N, predictions.position_N - start_N]
        if not any(left[-1]):
            break
        predictions = predictions.take(first_true(hidden_N)[: sum(left[-1])], members(left[-1]))
        decision = decide_all(slots, sequences, predictions, ahead)
        index_J, chosen = choose(sequences, predictions, decision, ahead)
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
        num_hidden = [counts[member] for counts in left[1 : 1 + sequence.config.drafts] if counts[member]]
        if count := len(num_hidden):
            size = sequence.span[1] - sequence.span[0]
            sequence.draft = Draft(
                ids_GBW[:count, member, :size], hidden_GBW[:count, member, :size], num_hidden
            )


def _by_settings(sequences: list[SequenceState]) -> Iterator[tuple[SamplerConfig, np.ndarray]]:
    """Each distinct config, and a mask [B] of the sequences that use it. The engine keeps equal configs as
    one object."""
    for config in {id(sequence.config): sequence.config for sequence in sequences}.values():
        yield config, np.array([sequence.config is config for sequence in sequences])


def _unlikely(slots: Slots, sequences: list[SequenceState], again: list[int]) -> At:
    """The least probable tokens among those that earlier steps of the blocks revealed."""
    device = slots.ids_SC.device
    spans = tuple((sequence.slots[0], *sequence.span) for sequence in sequences)
    slot_B, start_B, stop_B = np.array(spans).T
    _, position_BW = at = slots.blocks(spans)
    width = position_BW.shape[1]
    inside_BW = moved(np.arange(width) < (stop_B - start_B)[:, None], device)
    priority_BW = torch.where(
        inside_BW & (slots.step_SC[at] >= 0), -slots.log_prob_SC[at].float(), -torch.inf
    )
    order_BW = priority_BW.sort(dim=1, descending=True, stable=True).indices
    index_J = first_by_order(order_BW, np.arange(len(sequences)) * width, again)
    return moved(np.repeat(slot_B, again), device), position_BW.reshape(-1)[index_J]


def _revise(
    slots: Slots, sequences: list[SequenceState], predictions: Predictions
) -> tuple[Predictions, At, list[int]]:
    """The predictions of hidden positions, the slots and positions of the visible tokens to hide, and how
    many these are in each sequence."""
    device, count_B = predictions.position_N.device, np.array([sequence.num_hidden for sequence in sequences])
    slot_B = np.array([sequence.slots[0] for sequence in sequences])
    order_N = first_true(slots.hidden_SC[moved(slot_B[predictions.member_N], device), predictions.position_N])
    visible_B = predictions.counts(len(sequences)) - count_B
    visible = predictions.take(order_N[count_B.sum() :], members(visible_B))
    priority_N = torch.full_like(visible.position_N, -torch.inf, dtype=torch.float32)
    for config, uses_B in _by_settings(sequences):
        own_J = np.flatnonzero(uses_B[visible.member_N])
        if config.revise is None or not len(own_J):
            continue
        index_J, own = moved(own_J, device), [sequences[member] for member in visible.member_N[own_J]]
        drawn = np.array([(each.slots[0], each.request.key, each.steps_done) for each in own]).T
        slot_J, key_J, step_J = moved_together(device, *drawn)
        position_J = visible.position_N[index_J]
        if config.revise.by == "quality":
            assert visible.quality_N is not None
            log_prob_J = visible.quality_N[index_J]
        else:
            log_prob_J = present_log_probs(visible.logits_NV[index_J], slots.ids_SC[slot_J, position_J])
        priority_N[index_J] = doubts(log_prob_J, config.revise, config.seed, key_J, step_J, position_J)
    limits = [
        min(sequence.num_revised, int(most)) for sequence, most in zip(sequences, visible_B, strict=True)
    ]
    if any(
        sequence.config.revise is not None and sequence.config.revise.below is not None
        for sequence in sequences
    ):
        doubtful_B = (padded(priority_N, visible_B, -torch.inf) > -torch.inf).sum(1)
        limits = [min(limit, most) for limit, most in zip(limits, doubtful_B.tolist(), strict=True)]
    position_J = visible.position_N[first_by_priority(priority_N, visible_B, limits)]
    hidden = predictions.take(order_N[: count_B.sum()], members(count_B))
    return hidden, (moved(np.repeat(slot_B, limits), device), position_J), limits


def _merge(parts: list[tuple[Tensor | None, Decision]], count: int) -> Decision:
    """The decisions of groups of positions, in the order of all positions; fields that a group lacks are 0
    there."""
    merged: dict[str, Tensor] = {}
    for at, decision in parts:
        for name, values_N in decision._asdict().items():
            if values_N is not None:
                merged.setdefault(name, values_N.new_zeros(count, *values_N.shape[1:]))[at] = values_N
    return Decision(**merged)
