"""Supervised losses: weighted cross-entropy of views.

Shapes: B batch, V views, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from unmask.diffusion.views import Views


class SupervisedLoss(NamedTuple):
    """A loss and what to log beside it.

    Attributes:
        total: the weighted negative log-likelihood, summed (divide by the maskable tokens of the whole batch).
        cross_entropy: the mean over scored tokens without weights, in nats; a 1/t-weighted loss starts near 50.
    """

    total: Tensor
    cross_entropy: Tensor


def weighted_cross_entropy(log_prob_BVT: Tensor, views: Views) -> SupervisedLoss:
    """-sum(weight * log p): the negative ELBO where the views' weights say so (algorithms: Sahoo et al. 2024, MDLM)."""
    total = -(views.weight_BVT * log_prob_BVT).sum()
    scored = views.scored_BVT.sum().clamp_min(1)
    return SupervisedLoss(total, -(log_prob_BVT.detach() * views.scored_BVT).sum() / scored)
