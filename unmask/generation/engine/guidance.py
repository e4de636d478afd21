"""Guidance: a sequence has a second slot, in which its prompt is hidden, and its logits move away from those
there (Nie et al. 2025).

Shapes: B entries of a pass, N predictions, J some of them, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from unmask.generation.engine.host import members, moved, moved_together, starts
from unmask.generation.engine.sequence import SequenceState
from unmask.generation.engine.slots import BatchEntry, BatchState, Predictions
from unmask.generation.policies import guide


def guided_predictions(
    sequences: list[SequenceState], entries: list[BatchEntry], predictions: Predictions
) -> Predictions:
    """The predictions of the sequences after guidance. `entries`: one for each sequence, then one for the
    copy of each with guidance."""
    count, member_N = len(sequences), predictions.member_N
    copy_B = np.arange(count)
    copy_B[[len(sequence.texts) == 2 for sequence in sequences]] = np.arange(count, len(entries))
    index_J = np.flatnonzero(member_N < count)
    member_J, row_B = member_N[index_J], starts([entry.num_predicted for entry in entries])
    is_guided_J = copy_B[member_J] >= count
    row_J = np.where(is_guided_J, row_B[copy_B[member_J]] + index_J - row_B[member_J], index_J)
    conditional, device = predictions.at(index_J), predictions.position_N.device
    weight_B = predictions.logits_NV.new_tensor([sequence.config.cfg_scale for sequence in sequences])
    weight_J1 = weight_B[moved(member_J, device)][:, None]
    unconditional_JV = predictions.logits_NV[moved(row_J, device)]
    return conditional._replace(logits_NV=guide(conditional.logits_NV, unconditional_JV, weight_J1))


def show_in_copies(slots: BatchState, sequences: list[SequenceState]) -> None:
    """Show what was decoded in the copies with a hidden prompt, which these sequences have, too."""
    spans = [(*sequence.slots, *sequence.span) for sequence in sequences]
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
