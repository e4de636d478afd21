"""Advantages compare a completion with its group alone; the surrogate is exact at the first update and clipped after."""

from __future__ import annotations

import math
import statistics
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unmask.objectives.policy import AdvantageKind, advantages, clipped_surrogate

KINDS = get_args(AdvantageKind)
groups = st.lists(st.lists(st.none() | st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=5), min_size=1, max_size=4)


def flat(groups: list[list[float | None]]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = [math.nan if reward is None else reward for group in groups for reward in group]
    return torch.tensor(rewards), torch.tensor([7 * number - 3 for number, group in enumerate(groups) for _ in group])


def by_hand(group: list[float | None], kind: str) -> list[float]:
    scored = [reward for reward in group if reward is not None]
    out = []
    for reward in group:
        if reward is None or len(scored) == 1:
            out.append(0.0)
        elif kind == "leave-one-out":
            out.append(reward - (sum(scored) - reward) / (len(scored) - 1))
        else:
            scale = statistics.stdev(scored) + 1e-4 if kind == "z-score" else 1.0
            out.append((reward - statistics.fmean(scored)) / scale)
    return out


@pytest.mark.parametrize("kind", KINDS)
@given(groups=groups, order=st.randoms(use_true_random=False))
def test_advantages_are_those_within_the_group(kind, groups, order):
    reward_B, group_B = flat(groups)
    expected = [value for group in groups for value in by_hand(group, kind)]
    assert advantages(reward_B, group_B, kind).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    shuffled = order.sample(range(len(expected)), len(expected))
    moved_B = advantages(reward_B[shuffled], group_B[shuffled], kind)
    assert moved_B.tolist() == pytest.approx([expected[index] for index in shuffled], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@given(groups=groups)
def test_they_sum_to_zero_and_the_unscored_do_not_count(kind, groups):
    reward_B, group_B = flat(groups)
    value_B = advantages(reward_B, group_B, kind)
    assert value_B.isfinite().all() and value_B.dtype == torch.float32
    assert torch.zeros(30).index_add(0, group_B + 3, value_B).abs().max() < 1e-3
    scored_B = ~reward_B.isnan()
    assert (value_B[~scored_B] == 0).all()
    if scored_B.any():
        assert torch.equal(value_B[scored_B], advantages(reward_B[scored_B], group_B[scored_B], kind))


def surrogate(log_prob_BT, old_BT, reference_BT=None, advantage=(1.0, -2.0, 0.5), clip_low=0.2, clip_high=0.3, beta=0.1):
    advantage_B = torch.tensor(advantage)
    return clipped_surrogate(log_prob_BT, old_BT, reference_BT, advantage_B, clip_low=clip_low, clip_high=clip_high, beta=beta)


log_probs = st.integers(0, 10**6).map(lambda seed: -3 * torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)))


@given(log_probs)
def test_at_the_first_update_the_ratio_is_1_and_the_kl_0(log_prob_BT):
    """Bit for bit: policy, old policy and reference are then the same function."""
    policy_BT = log_prob_BT.clone().requires_grad_()
    loss = surrogate(policy_BT, log_prob_BT, log_prob_BT)
    assert (loss.ratio_BT == 1).all() and (loss.kl_BT == 0).all() and not loss.clipped_BT.any()
    advantage_BT = torch.tensor([1.0, -2.0, 0.5])[:, None].expand(3, 4)
    assert torch.equal(loss.loss_BT, -advantage_BT)
    loss.loss_BT.sum().backward()
    assert torch.equal(policy_BT.grad, -advantage_BT)  # the policy gradient; the KL has none at its minimum


@given(log_probs, log_probs)
def test_ratios_are_clipped_where_that_is_the_worse(policy_BT, old_BT):
    policy_BT = policy_BT.clone().requires_grad_()
    loss = surrogate(policy_BT, old_BT)
    loss.loss_BT.sum().backward()
    for row, advantage in enumerate((1.0, -2.0, 0.5)):
        for column in range(4):
            ratio = math.exp(policy_BT[row, column].item() - old_BT[row, column].item())
            outside = ratio > 1.3 if advantage > 0 else ratio < 0.8
            bounded = (1.3 if advantage > 0 else 0.8) if outside else ratio
            assert loss.ratio_BT[row, column].item() == pytest.approx(ratio, rel=1e-5)
            assert loss.clipped_BT[row, column].item() == outside
            assert loss.loss_BT[row, column].item() == pytest.approx(-advantage * bounded, rel=1e-5)
            assert policy_BT.grad[row, column].item() == pytest.approx(0.0 if outside else -advantage * ratio, rel=1e-5)
    assert not (loss.ratio_BT.requires_grad or loss.kl_BT.requires_grad)
    assert (loss.kl_BT == 0).all()


@given(log_probs, log_probs)
def test_the_kl_is_added_whatever_is_clipped(policy_BT, reference_BT):
    plain = surrogate(policy_BT, reference_BT)
    with_kl = surrogate(policy_BT, reference_BT, reference_BT, beta=0.25)
    gap_BT = (reference_BT - policy_BT).double()
    torch.testing.assert_close(with_kl.kl_BT.double(), gap_BT.expm1() - gap_BT, rtol=1e-4, atol=1e-6)
    assert (with_kl.kl_BT > -1e-6).all()
    torch.testing.assert_close(with_kl.loss_BT, plain.loss_BT + 0.25 * with_kl.kl_BT)


def test_the_kl_estimate_is_unbiased():
    """The mean of k3 over samples of the policy is the KL divergence from the policy to the reference."""
    logits_2V = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy_1V, reference_1V = logits_2V.log_softmax(1).split(1)
    kl_1V = surrogate(policy_1V, policy_1V, reference_1V, advantage=(0.0,)).kl_BT
    exact = (policy_1V.exp() * (policy_1V - reference_1V)).sum()
    torch.testing.assert_close((policy_1V.exp() * kl_1V).sum(), exact)
