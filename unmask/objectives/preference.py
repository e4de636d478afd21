"""Preference losses on log-likelihoods (or their bounds) of whole responses.

Shapes: P pairs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class PreferenceLoss(NamedTuple):
    """A loss per pair and what to log beside it."""

    loss_P: Tensor
    margin_P: Tensor


def dpo(chosen_P: Tensor, rejected_P: Tensor, reference_chosen_P: Tensor, reference_rejected_P: Tensor, *, beta: float) -> PreferenceLoss:
    """-log sigmoid(beta * margin), the margin being (policy - reference) of chosen less that of rejected.

    With ELBO estimates on the same masks for policy and reference this is VRPO (Zhu et al. 2025, LLaDA 1.5, eq. 5).
    """
    margin_P = (chosen_P - reference_chosen_P) - (rejected_P - reference_rejected_P)
    return PreferenceLoss(-F.logsigmoid(beta * margin_P), margin_P.detach())
