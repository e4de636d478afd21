"""Noise schedules: from nothing hidden to everything, with the weight that their definition gives."""

from __future__ import annotations

import math

import pytest
import torch

from unmask.diffusion.schedules import SCHEDULES, SIGMA_MAX, SIGMA_MIN, get_schedule
from unmask.errors import ConfigError


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_weight_is_the_rate_of_hiding_per_hidden_token(name):
    schedule = get_schedule(name)
    time = torch.linspace(0.01, 0.99, 99, dtype=torch.float64, requires_grad=True)
    rate = schedule.mask_rate(time)
    slope = torch.autograd.grad(rate.sum(), time)[0]
    torch.testing.assert_close(schedule.weight(time.detach()), (slope / rate).detach(), rtol=1e-9, atol=0)
    assert (slope > 0).all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_is_hidden_at_0_and_everything_at_1(name):
    rate = get_schedule(name).mask_rate(torch.tensor([0.0, 1.0], dtype=torch.float64))
    at_0 = SIGMA_MIN if name == "geometric" else 1e-15
    assert 0 <= rate[0] <= at_0 and 1 - math.exp(-SIGMA_MAX) - 1e-15 <= rate[1] <= 1


def test_an_unknown_schedule_is_an_error():
    with pytest.raises(ConfigError, match=r"schedule: unknown schedule 'quadratic'.*linear, cosine, geometric"):
        get_schedule("quadratic")
