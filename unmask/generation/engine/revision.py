"""Hiding tokens again: the least probable of those that were revealed (`remask_fraction`), and those that a
step's own predictions doubt (`revise`).

Shapes: B sequences, N positions with predictions, J some of them, W positions of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unmask.generation.engine.forward import run_passes
from unmask.generation.engine.host import (
    best_rows,
    first_by_order,
    first_true,
    members,
    moved,
    moved_together,
    padded,
)
from unmask.generation.engine.sequence import SequenceState, by_settings
from unmask.generation.engine.slots import BatchEntry, BatchState, Predictions
from unmask.generation.engine.steps import reveal
from unmask.generation.revise import doubts, present_log_probs
from unmask.models.diffusion_lm import DiffusionLM

At = tuple[Tensor, Tensor]  # slots and positions


def predict_with_quality(
    lm: DiffusionLM, slots: BatchState, entries: Sequence[BatchEntry], alone: bool
) -> Predictions:
    """`predict`, with the values of the quality head."""
    assert lm.quality_head is not None
    with lm.capturing() as states:
        predictions, source_N = run_passes(lm, slots, entries, alone)
    quality_N = logsigmoid(lm.quality_head(torch.cat(states)))
    return predictions._replace(quality_N=quality_N if source_N is None else quality_N[source_N])


def hide_and_reveal(slots: BatchState, sequences: list[SequenceState], predictions: Predictions) -> None:
    """A denoising step that also hides tokens again, and reveals as many more."""
    again = [sequence.num_remasked for sequence in sequences]
    hide_at = [_unlikely(slots, sequences, again)] if any(again) else []
    if any(sequence.num_revised for sequence in sequences):
        predictions, doubted_at, doubted = _doubted(slots, sequences, predictions)
        hide_at.append(doubted_at)
        again = [one + other for one, other in zip(again, doubted, strict=True)]
    reveal(slots, sequences, predictions, more=again)
    for at in hide_at:
        slots.ids_SC[at], slots.hidden_SC[at], slots.step_SC[at] = slots.mask_token_id, True, -1
    for sequence, count in zip(sequences, again, strict=True):
        sequence.num_hidden += count


def _unlikely(slots: BatchState, sequences: list[SequenceState], again: list[int]) -> At:
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


def _doubted(
    slots: BatchState, sequences: list[SequenceState], predictions: Predictions
) -> tuple[Predictions, At, list[int]]:
    """The predictions of hidden positions, the slots and positions of the visible tokens to hide, and how
    many these are in each sequence."""
    device, count_B = predictions.position_N.device, np.array([sequence.num_hidden for sequence in sequences])
    slot_B = np.array([sequence.slots[0] for sequence in sequences])
    order_N = first_true(slots.hidden_SC[moved(slot_B[predictions.member_N], device), predictions.position_N])
    visible_B = predictions.counts(len(sequences)) - count_B
    visible = predictions.take(order_N[count_B.sum() :], members(visible_B))
    priority_N = torch.full_like(visible.position_N, -torch.inf, dtype=torch.float32)
    for config, uses_B in by_settings(sequences):
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
    position_J = visible.position_N[best_rows(priority_N, visible_B, limits)]
    hidden = predictions.take(order_N[: count_B.sum()], members(count_B))
    return hidden, (moved(np.repeat(slot_B, limits), device), position_J), limits
