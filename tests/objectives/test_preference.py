"""DPO starts at log 2 and pulls chosen and rejected apart, the harder the more they are confused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unmask.objectives.preference import dpo

nats = st.floats(-200, 0)
betas = st.floats(0.01, 5)


def tensors(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in values]


@given(nats, nats, betas)
def test_a_policy_equal_to_its_reference_has_log_2(chosen, rejected, beta):
    loss = dpo(*tensors(chosen, rejected, chosen, rejected), beta=beta)
    assert loss.loss_P.item() == pytest.approx(math.log(2), abs=1e-15) and loss.margin_P.item() == 0


@given(nats, nats, nats, nats, betas)
def test_the_loss_and_its_gradients(chosen, rejected, reference_chosen, reference_rejected, beta):
    sides = tensors(chosen, rejected, reference_chosen, reference_rejected)
    loss = dpo(*sides, beta=beta)
    margin = (chosen - reference_chosen) - (rejected - reference_rejected)
    assert loss.margin_P.item() == pytest.approx(margin) and not loss.margin_P.requires_grad
    assert loss.loss_P.item() == pytest.approx(math.log1p(math.exp(-abs(beta * margin))) + max(0.0, -beta * margin))
    loss.loss_P.sum().backward()
    pull = beta / (1 + math.exp(min(700.0, beta * margin)))
    assert [side.grad.item() for side in sides] == pytest.approx([-pull, pull, pull, -pull], abs=1e-12)


@given(nats, nats, betas)
def test_beta_scales_the_margin(chosen, rejected, beta):
    scaled = dpo(*tensors(beta * chosen, beta * rejected, 0.0, 0.0), beta=1.0)
    assert dpo(*tensors(chosen, rejected, 0.0, 0.0), beta=beta).loss_P.item() == pytest.approx(scaled.loss_P.item())


@pytest.mark.parametrize("margin", [-1e6, 1e6])
def test_extreme_margins_stay_finite(margin):
    sides = [torch.tensor([value], requires_grad=True) for value in (margin, 0.0, 0.0, 0.0)]
    loss = dpo(*sides, beta=1.0).loss_P
    loss.sum().backward()
    assert loss.item() == max(0.0, -margin)
    assert sides[0].grad.item() == (-1.0 if margin < 0 else 0.0)
