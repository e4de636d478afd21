"""The supervised loss is the weighted sum that the views ask for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unmask.diffusion.log_probs import weighted_cross_entropy
from unmask.diffusion.views import Views


def a_case(seed: int) -> tuple[torch.Tensor, Views]:
    generator = torch.Generator().manual_seed(seed)
    log_prob_BVT = -torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
    hidden_BVT = torch.rand(2, 3, 4, generator=generator) < 0.7
    scored_BVT = hidden_BVT & (torch.rand(2, 3, 4, generator=generator) < 0.8)
    weight_BVT = torch.where(scored_BVT, 5 * torch.rand(2, 3, 4, generator=generator), 0)
    return log_prob_BVT.requires_grad_(), Views(hidden_BVT, scored_BVT, weight_BVT)


@given(st.integers(0, 10**6))
def test_the_loss_and_its_gradient(seed):
    log_prob_BVT, views = a_case(seed)
    loss = weighted_cross_entropy(log_prob_BVT, views)
    cells = [(b, v, t) for b in range(2) for v in range(3) for t in range(4) if views.scored_BVT[b, v, t]]
    assert loss.item() == pytest.approx(-sum(views.weight_BVT[cell].item() * log_prob_BVT[cell].item() for cell in cells))
    loss.backward()
    torch.testing.assert_close(log_prob_BVT.grad, -views.weight_BVT.double())


@given(st.integers(0, 10**6))
def test_losses_of_single_views_and_rows_add_up(seed):
    log_prob_BVT, views = a_case(seed)
    whole = weighted_cross_entropy(log_prob_BVT, views)
    by_view = [weighted_cross_entropy(log_prob_BVT[:, v : v + 1], views.piece(slice(None), slice(v, v + 1))) for v in range(3)]
    by_row = [weighted_cross_entropy(log_prob_BVT[b : b + 1], views.piece(slice(b, b + 1))) for b in range(2)]
    torch.testing.assert_close(sum(by_view), whole)
    torch.testing.assert_close(sum(by_row), whole)


def test_nothing_scored_is_no_loss():
    nothing_BVT = torch.zeros(2, 1, 3, dtype=torch.bool)
    loss = weighted_cross_entropy(torch.zeros(2, 1, 3), Views(nothing_BVT, nothing_BVT, nothing_BVT.float()))
    assert loss == 0
