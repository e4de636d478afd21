"""Supervised losses: weighted cross-entropy of views.

Shapes: B batch, V views, T tokens.
"""

from __future__ import annotations

from torch import Tensor

from unmask.diffusion.views import Views


def weighted_cross_entropy(log_prob_BVT: Tensor, views: Views) -> Tensor:
    """-sum(weight * log p), to be divided by the maskable tokens of the whole batch: the negative ELBO where the views' weights
    say so (Sahoo et al. 2024, MDLM)."""
    return -(views.weight_BVT * log_prob_BVT).sum()
