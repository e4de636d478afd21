"""Advantages compare a completion with its group only; surrogates, KL estimators and token weights equal
their formulas.

Shapes: B completions, T tokens, V categories.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import examples
from unmask.rl.advantages import ScaleRewards, advantages, kept_groups, overlong_penalty
from unmask.rl.losses import (
    Divergence,
    LossType,
    clipped_surrogate,
    count_items,
    kl_divergence,
    token_weights,
)

KINDS = get_args(ScaleRewards)
groups = st.lists(
    st.lists(st.none() | st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


# Advantages.


def flat(groups: list[list[float | None]]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = [math.nan if reward is None else reward for group in groups for reward in group]
    return torch.tensor(rewards), torch.tensor(
        [7 * number - 3 for number, group in enumerate(groups) for _ in group]
    )


def softmax_by_hand(values: list[float], temperature: float) -> list[float]:
    weights = [math.exp((value - max(values)) / temperature) for value in values]
    return [weight / sum(weights) for weight in weights]


def by_hand(group: list[float | None], kind: str, temperature: float = 1.0) -> list[float]:
    scored = [reward for reward in group if reward is not None]
    if kind == "softmax":
        likely, unlikely = (
            iter(softmax_by_hand([sign * reward for reward in scored], temperature)) for sign in (1, -1)
        )
    out = []
    for reward in group:
        if reward is None or len(scored) == 1:
            out.append(0.0)
        elif kind == "softmax":
            out.append(next(likely) - next(unlikely))
        elif kind == "leave-one-out":
            out.append(reward - (sum(scored) - reward) / (len(scored) - 1))
        else:
            scale = {
                "group": statistics.stdev(scored) + 1e-4,
                "population": statistics.pstdev(scored) or 1.0,
            }.get(kind, 1.0)
            out.append((reward - statistics.fmean(scored)) / scale)
    return out


@pytest.mark.parametrize("kind", KINDS)
@examples(30)
@given(groups=groups, order=st.randoms(use_true_random=False))
def test_advantages_are_those_within_the_group(kind, groups, order):
    reward_B, group_B = flat(groups)
    expected = [value for group in groups for value in by_hand(group, kind)]
    assert advantages(reward_B, group_B, kind).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    shuffled = order.sample(range(len(expected)), len(expected))
    moved_B = advantages(reward_B[shuffled], group_B[shuffled], kind)
    assert moved_B.tolist() == pytest.approx([expected[index] for index in shuffled], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@examples(30)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 6, 7])
def test_equal_rewards_give_no_advantage_though_their_mean_is_rounded(kind, size):
    reward_B = torch.full((size,), 0.1, dtype=torch.float64)
    torch.testing.assert_close(
        advantages(reward_B, torch.zeros(size).long(), kind), torch.zeros(size), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [(1.0, 0.3), (0.1, 0.2, 0.7), (1e3, 3e-1)])
def test_rewards_that_differ_by_rounding_are_equal(kind, weights):
    """Sums of the same parts in another order, and beside them a group that differs."""
    sums = [sum(torch.tensor(order).unbind()) for order in itertools.permutations(weights)]
    equal_B = torch.stack([*sums, torch.nextafter(sums[0], torch.tensor(0.0))])
    reward_B = torch.cat([equal_B, equal_B * torch.linspace(1, 1.001, len(equal_B))])
    group_B = torch.arange(2).repeat_interleave(len(equal_B))
    value_B = advantages(reward_B, group_B, kind)
    assert (value_B[: len(equal_B)] == 0).all() and (value_B[len(equal_B) :] != 0).any()
    assert torch.equal(kept_groups(reward_B, group_B, -torch.inf, torch.inf, spread=True), group_B == 1)
    assert kept_groups(reward_B, group_B, -torch.inf, torch.inf, spread=False).all()


@examples(30)
@given(groups=groups, temperature=st.sampled_from([1e-5, 1e-3, 0.1, 3.0, 1e3]))
def test_a_softmax_has_any_temperature(groups, temperature):
    """The lower it is, the more the weight is on the best and the worst completions."""
    expected = [value for group in groups for value in by_hand(group, "softmax", temperature)]
    value_B = advantages(*flat(groups), "softmax", temperature=temperature)
    assert value_B.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@examples(30)
@given(
    groups=groups,
    low=st.sampled_from([-1.0, 0.0, 0.25]),
    width=st.sampled_from([0.0, 0.5, 1.0]),
    spread=st.booleans(),
)
def test_groups_are_kept_whole_by_their_mean_and_their_spread(groups, low, width, spread):
    expected = []
    for group in groups:
        scored = [reward for reward in group if reward is not None]
        kept = bool(scored) and low <= statistics.fmean(scored) <= low + width
        expected += [kept and not (spread and len(set(scored)) == 1)] * len(group)
    assert kept_groups(*flat(groups), low, low + width, spread=spread).tolist() == expected


def test_a_mean_that_equals_a_bound_is_kept_however_both_are_rounded():
    reward_B = torch.tensor([1.0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    kept_B = kept_groups(reward_B, torch.arange(3).repeat_interleave(5), 0.2, 0.8, spread=False)
    assert kept_B.tolist() == [True] * 10 + [False] * 5


def test_what_is_nearly_too_long_loses_up_to_one():
    length_B = torch.tensor([0.0, 70.0, 80.0, 85.0, 90.0, 99.0, 100.0, 101.0, 500.0])
    assert overlong_penalty(length_B, 100, 20).tolist() == pytest.approx(
        [0, 0, 0, -0.25, -0.5, -0.95, -1, -1, -1]
    )


# Surrogates and divergences.

gaps = st.integers(0, 10**6).map(
    lambda seed: 2 * torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) - 1
)
ADVANTAGE_B1 = torch.tensor([[1.0], [-2.0], [0.5]])


def surrogate(gap_BT, delta=None):
    return clipped_surrogate(gap_BT, ADVANTAGE_B1, epsilon=0.2, epsilon_high=0.3, delta=delta)


@examples(30)
@given(gaps)
def test_at_the_first_update_the_ratio_is_1_and_the_kl_0(log_prob_BT):
    """They are exact: policy, old policy and reference are then the same function."""
    policy_BT = log_prob_BT.clone().requires_grad_()
    made = surrogate(policy_BT - log_prob_BT)
    assert (made.ratio == 1).all() and not made.clipped.any()
    assert torch.equal(made.loss, -ADVANTAGE_B1.expand(3, 4))
    made.loss.sum().backward()
    assert torch.equal(policy_BT.grad, -ADVANTAGE_B1.expand(3, 4))  # the policy gradient
    assert not any((kl_divergence(log_prob_BT - policy_BT, kind) != 0).any() for kind in get_args(Divergence))


@pytest.mark.parametrize("delta", [None, 1.5])
@examples(30)
@given(gaps)
def test_ratios_are_clipped_where_that_is_the_worse_and_twice_where_there_is_no_bound(delta, gap_BT):
    gap_BT = gap_BT.clone().requires_grad_()
    made = surrogate(gap_BT, delta)
    made.loss.sum().backward()
    for row, advantage in enumerate(ADVANTAGE_B1.flatten().tolist()):
        for column in range(4):
            ratio = math.exp(gap_BT[row, column].item())
            low, high = (0.0, 1.3) if advantage > 0 else (0.8, delta or math.inf)
            outside = not low <= ratio <= high
            assert made.ratio[row, column].item() == pytest.approx(ratio, rel=1e-5)
            assert made.clipped[row, column].item() == outside
            assert made.loss[row, column].item() == pytest.approx(
                -advantage * min(max(ratio, low), high), rel=1e-5
            )
            assert gap_BT.grad[row, column].item() == pytest.approx(
                0.0 if outside else -advantage * ratio, rel=1e-5
            )
    assert not made.ratio.requires_grad


def test_what_is_clipped_has_no_gradient_however_large_its_ratio():
    """exp(100) overflows float32, and 0 times infinity is NaN."""
    for delta, advantages_ in ((None, [1.0, 0.0]), (3.0, [1.0, 0.0, -1.0])):
        gap = torch.full((len(advantages_),), 100.0, requires_grad=True)
        made = clipped_surrogate(gap, torch.tensor(advantages_), epsilon=0.2, epsilon_high=0.2, delta=delta)
        made.loss.sum().backward()
        assert made.loss.tolist() == pytest.approx([-1.2, 0.0, 3.0][: len(advantages_)])
        assert gap.grad.tolist() == [0.0] * len(advantages_)


def categorical(seed):
    """A policy over six categories [V] with gradients, and a reference."""
    logits_2V = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    theta_V = logits_2V[0].requires_grad_()
    return theta_V, theta_V.log_softmax(0), logits_2V[1].detach().log_softmax(0)


def mean_over_samples(policy_V, values_V):
    """The mean over samples from the policy, without a gradient of the sampling."""
    return (policy_V.detach().exp() * values_V).sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_mean_of_k1_and_of_k3_is_the_divergence(kind, seed):
    _, policy_V, reference_V = categorical(seed)
    exact = (policy_V.exp() * (policy_V - reference_V)).sum()
    torch.testing.assert_close(
        mean_over_samples(policy_V, kl_divergence(reference_V - policy_V, kind)), exact
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["k1", "k2"])
def test_the_mean_gradient_of_k1_and_of_k2_is_that_of_the_divergence(kind, seed):
    theta_V, policy_V, reference_V = categorical(seed)
    [exact_V] = torch.autograd.grad(
        (policy_V.exp() * (policy_V - reference_V)).sum(), theta_V, retain_graph=True
    )
    [mean_V] = torch.autograd.grad(
        mean_over_samples(policy_V, kl_divergence(reference_V - policy_V, kind)), theta_V
    )
    torch.testing.assert_close(mean_V, exact_V)


def test_the_mean_gradient_of_k3_is_that_of_the_divergence_of_the_reference_from_the_policy():
    theta_V, policy_V, reference_V = categorical(0)
    [reverse_V] = torch.autograd.grad(
        (reference_V.exp() * (reference_V - policy_V)).sum(), theta_V, retain_graph=True
    )
    [mean_V] = torch.autograd.grad(
        mean_over_samples(policy_V, kl_divergence(reference_V - policy_V, "k3")), theta_V
    )
    torch.testing.assert_close(mean_V, reverse_V)


@examples(30)
@given(gaps)
def test_divergences_are_their_formulas(gap_BT):
    exact_BT = gap_BT.double()
    for kind, expected_BT in {
        "k1": -exact_BT,
        "k2": exact_BT**2 / 2,
        "k3": exact_BT.expm1() - exact_BT,
    }.items():
        torch.testing.assert_close(kl_divergence(gap_BT, kind).double(), expected_BT, rtol=1e-4, atol=1e-6)


# Loss types.

TRAINED = torch.tensor(
    [
        [0, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
).bool()
STEPS = torch.tensor(
    [
        [-1, 0, 0, 2, 2, 2, 5, -1],
        [7, 7, 0, 3, 0, 0, 0, 0],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]
)
ONE, TENTH = [0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0.1, 0, 0, 0]
LIMIT = 10
BY_HAND = {
    "dapo": ([[0, 1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0], ONE], 9),
    "grpo": ([[0, 1 / 5, 1 / 5, 1 / 5, 1 / 5, 1 / 5, 0, 0], [1 / 3, 1 / 3, 0, 1 / 3, 0, 0, 0, 0], ONE], 3),
    "step": ([[0, 1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6, 0, 0], [1 / 4, 1 / 4, 0, 1 / 2, 0, 0, 0, 0], ONE], 3),
    "dr_grpo": ([[0, 0.1, 0.1, 0.1, 0.1, 0.1, 0, 0], [0.1, 0.1, 0, 0.1, 0, 0, 0, 0], TENTH], 3),
    "view": ([[0, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3, 0, 0], [1 / 2, 1 / 2, 0, 1, 0, 0, 0, 0], ONE], 5),
    "view-constant": ([[0, 0.1, 0.1, 0.1, 0.1, 0.1, 0, 0], [0.1, 0.1, 0, 0.1, 0, 0, 0, 0], TENTH], 5),
    "sum": ([[0, 1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0], ONE], 3),
}


@pytest.mark.parametrize("kind", get_args(LossType))
def test_each_token_has_its_share_and_each_batch_its_items(kind):
    expected, items = BY_HAND[kind]
    weight_BT = token_weights(TRAINED, kind, STEPS, LIMIT)
    torch.testing.assert_close(weight_BT, torch.tensor([*expected, [0] * 8], dtype=torch.float32))
    assert count_items(TRAINED, kind, STEPS) == items
