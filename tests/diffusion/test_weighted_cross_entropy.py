"""The supervised loss is the sum over views with their weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unmask.diffusion.log_probs import weighted_cross_entropy
from unmask.diffusion.views import Views


def a_case(seed: int) -> tuple[torch.Tensor, Views]:
    generator = torch.Generator().manual_seed(seed)
    log_prob_BMT = -torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
    hidden_BMT = torch.rand(2, 3, 4, generator=generator) < 0.7
    target_BMT = hidden_BMT & (torch.rand(2, 3, 4, generator=generator) < 0.8)
    weight_BMT = torch.where(target_BMT, 5 * torch.rand(2, 3, 4, generator=generator), 0)
    return log_prob_BMT.requires_grad_(), Views(hidden_BMT, target_BMT, weight_BMT)


@given(st.integers(0, 10**6))
def test_the_loss_and_its_gradient(seed):
    log_prob_BMT, views = a_case(seed)
    loss = weighted_cross_entropy(log_prob_BMT, views)
    cells = [(b, v, t) for b in range(2) for v in range(3) for t in range(4) if views.target_BMT[b, v, t]]
    assert loss.item() == pytest.approx(-sum(views.weight_BMT[cell].item() * log_prob_BMT[cell].item() for cell in cells))
    loss.backward()
    torch.testing.assert_close(log_prob_BMT.grad, -views.weight_BMT.double())


@given(st.integers(0, 10**6))
def test_losses_of_single_views_and_rows_add_up(seed):
    log_prob_BMT, views = a_case(seed)
    whole = weighted_cross_entropy(log_prob_BMT, views)
    by_view = [weighted_cross_entropy(log_prob_BMT[:, v : v + 1], views.select(slice(None), slice(v, v + 1))) for v in range(3)]
    by_row = [weighted_cross_entropy(log_prob_BMT[b : b + 1], views.select(slice(b, b + 1))) for b in range(2)]
    torch.testing.assert_close(sum(by_view), whole)
    torch.testing.assert_close(sum(by_row), whole)


def test_nothing_scored_is_no_loss():
    nothing_BMT = torch.zeros(2, 1, 3, dtype=torch.bool)
    loss = weighted_cross_entropy(torch.zeros(2, 1, 3), Views(nothing_BMT, nothing_BMT, nothing_BMT.float()))
    assert loss == 0
