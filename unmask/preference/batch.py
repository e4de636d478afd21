"""A batch of preference data, as the loss reads it.

Shapes: N responses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unmask.diffusion.views import Views
from unmask.training.half_batches import select_rows
from unmask.training.trainer import Batch


@dataclass(frozen=True)
class PreferenceBatch:
    """Collated rows with the views of their responses.

    Attributes:
        rows: the output of the collator, on the device.
        views: the same for policy and reference.
        reference_N: log-probabilities of the responses under the reference, in nats; None before they are
            computed.
        baseline: for KTO, a scalar (`DPOTrainer.baseline`).
    """

    rows: Batch
    views: Views
    reference_N: Tensor | None = None
    baseline: Tensor | None = None

    def select_rows(self, rows: slice) -> PreferenceBatch:
        """These rows, with their views."""
        part = select_rows(self.rows, rows)
        reference_N = self.reference_N
        if reference_N is not None:  # the first response of every row, then the second
            count = len(self.rows["sample_id"])
            reference_N = reference_N.view(-1, count)[:, rows].flatten()
        return PreferenceBatch(part, self.views.select(rows, slice(None)), reference_N, self.baseline)
