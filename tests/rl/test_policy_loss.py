"""The policy loss is that of the completions that are kept, and needs a reference for a divergence from it
alone.

Shapes: B completions, M views, T positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from tests.errors import raises
from tests.rl.methods.rollouts import LENGTH, masks, plan, tensors, usual
from unmask.diffusion.views import Views
from unmask.errors import ConfigError
from unmask.rl.losses import LossType
from unmask.rl.methods import get_method
from unmask.rl.policy_loss import policy_loss

ADVANTAGE_B = torch.tensor([1.5, -1.0, 3.0, 0.5, -2.0, -0.5])


@pytest.fixture(scope="module")
def rollout():
    return usual("bidirectional")[1]


@pytest.fixture(scope="module")
def views(rollout):
    return plan("trace-rl", rollout)


def made_up(views: Views, seed: int) -> torch.Tensor:
    """Random log-probabilities of the targets [B, M, T]."""
    random = torch.Generator().manual_seed(seed)
    return torch.where(views.target_BMT, -3 * torch.rand(views.target_BMT.shape, generator=random), 0)


@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_completions_that_are_not_kept_do_not_count(loss_type, rollout, views):
    """Neither in the sum nor in the number that it is divided by."""
    method = get_method("trace-rl")(loss_type=loss_type, beta=0.0)
    kept_B, given = torch.tensor([True, False, True, True, False, True]), {"max_completion_length": LENGTH}
    log_prob_BMT, old_BMT = made_up(views, 0).requires_grad_(), made_up(views, 1)
    found = policy_loss(
        method, rollout, views, log_prob_BMT, ADVANTAGE_B, old_BMT=old_BMT, kept_B=kept_B, **given
    )
    own = replace(rollout, **{name: part_BT[kept_B] for name, part_BT in tensors(rollout).items()})
    own_views = Views(*(part_BMT[kept_B] for part_BMT in masks(views)))
    of_own = [values[kept_B] for values in (log_prob_BMT, ADVANTAGE_B)]
    alone = policy_loss(method, own, own_views, *of_own, old_BMT=old_BMT[kept_B], **given)
    torch.testing.assert_close(found.total, alone.total)
    [gradient_BMT] = torch.autograd.grad(found.total, log_prob_BMT)
    assert torch.equal((gradient_BMT != 0).any(2).any(1), kept_B)


def test_only_a_divergence_from_the_reference_needs_one(rollout, views):
    log_prob_BMT = made_up(views, 0)

    def loss(**settings):
        method = get_method("trace-rl")(loss_type="dapo", **settings)
        return policy_loss(method, rollout, views, log_prob_BMT, ADVANTAGE_B, max_completion_length=LENGTH)

    assert loss(beta=0.1, kl_to="old").total == loss(beta=0.0, kl_to="reference").total
    with raises(ConfigError, where="reference_BMT"):
        loss(beta=0.1, kl_to="reference")
