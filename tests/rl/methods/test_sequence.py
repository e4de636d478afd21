"""UniGRPO, ESPO, GDPO and BGPO: estimates of sequence likelihoods, and losses of their ratios.

Shapes: B completions, M views, T positions; L tokens of a group, k of them hidden.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.enumeration import PROMPT, bound_of, estimates, listed_counts, tables_of
from tests.errors import raises
from tests.helpers import each_once
from tests.rl.methods.rollouts import (
    LENGTH,
    assert_loss,
    clipped,
    config,
    k3,
    made_up,
    plan,
    rollout_of,
    stopping,
    usual,
    whole,
)
from unmask.diffusion.views import group_sizes
from unmask.errors import ConfigError

# Expectations over all masks.


@pytest.fixture(scope="module", params=["bidirectional", "bidirectional with a shift", "blocks of three"])
def tables(request):
    return tables_of(request.param)


def mean_over_all_masks(name, tables, samples):
    """The mean of a method's estimate of a likelihood."""
    groups, by_group = tables
    draw = listed_counts(groups.shape[1])
    rollout = whole(groups.expand(len(draw.time_N), -1))
    total_N = estimates(config(name, samples=samples).build_method().plan(rollout, draw), by_group).sum(1)
    assert total_N.std() > 1e-3
    return total_N.mean().item()


@pytest.mark.parametrize(
    ("name", "samples"), [("espo", 1), ("espo", 2), ("bgpo", 1), ("bgpo", 4), ("bgpo", 16)]
)
def test_estimates_average_to_the_exact_bound(tables, name, samples):
    assert mean_over_all_masks(name, tables, samples) == pytest.approx(bound_of(tables[1]), rel=1e-6)


def scores_by_count(tables):
    """L/k times the mean log-probability of k hidden tokens over all sets of them, for k = 1..L, of each
    group."""
    made = []
    for positions, table in tables:
        size = len(positions)
        sets = [
            [sum(1 << i for i in chosen) for chosen in itertools.combinations(range(size), k)]
            for k in range(1, size + 1)
        ]
        made.append([size / k * table[of_k].sum(1).mean().item() for k, of_k in enumerate(sets, 1)])
    return made


def quadrature_by_hand(tables, nodes):
    node_M, weight_M = (
        (np.polynomial.legendre.leggauss(nodes)[part] + shift) / 2 for part, shift in ((0, 1), (1, 0))
    )
    total = 0.0
    for by_count in scores_by_count(tables):
        counts = [int(np.ceil(node * len(by_count))) for node in node_M]
        total += sum(weight * by_count[count - 1] for weight, count in zip(weight_M, counts, strict=True))
    return total


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_gdpo_averages_to_its_quadrature(tables, nodes):
    assert mean_over_all_masks("gdpo", tables, nodes) == pytest.approx(
        quadrature_by_hand(tables[1], nodes), rel=1e-6
    )


def test_the_bias_of_the_quadrature_goes_to_zero_with_the_nodes(tables):
    exact = bound_of(tables[1])
    assert exact == pytest.approx(
        sum(sum(by_count) / len(by_count) for by_count in scores_by_count(tables[1]))
    )
    bias = {nodes: abs(quadrature_by_hand(tables[1], nodes) / exact - 1) for nodes in (1, 4, 16, 64, 512)}
    assert 1e-4 < bias[1] < 0.2 and bias[64] < 0.01 and bias[512] < 1e-3
    assert mean_over_all_masks("gdpo", tables, 64) == pytest.approx(exact, rel=0.01)


def test_two_nodes_are_exact_for_two_tokens():
    """Each count then has its own node, with half the weight."""
    group_BT = torch.tensor([[-1, 0, 0, -1, 1, 1, 2]]).expand(5, -1)
    views = plan("gdpo", whole(group_BT), samples=2)
    assert (views.hidden_BMT[:, :, 1:3].sum(2) == torch.tensor([1, 2])).all() and (
        views.hidden_BMT[:, :, 6].all()
    )
    weights = [[1.0, 0.5] if count == 2 else [0.5, 0.5] for count in (2, 1)]
    assert (
        weights[1] == views.weight_BMT[0, :, 6].tolist()
        and weights[0] == views.weight_BMT[0].amax(1)[:2].tolist()
    )


# What each plan hides.


def counted(views, rollout, group=0):
    """How many tokens of a group each view hides [B, M]."""
    return (views.target_BMT & (rollout.group_BT == group)[:, None]).sum(2)


@pytest.mark.parametrize("iterations", [1, 2, 5, 12])
def test_uni_grpo_spreads_its_times_evenly_over_the_inner_iterations(iterations):
    size, count = 1000, 20
    rollout = whole(torch.zeros(count, size, dtype=torch.long))
    views = [
        plan("uni-grpo", rollout, iteration=iteration, num_iterations=iterations)
        for iteration in range(iterations)
    ]
    assert all(view.count == 1 and torch.equal(view.weight_BMT, view.target_BMT.float()) for view in views)
    time_BI = torch.cat([counted(view, rollout) for view in views], 1) / size
    assert time_BI.min() > 0 and time_BI.max() <= 1
    sorted_BI = time_BI.sort(1).values
    gaps_BI = torch.cat([sorted_BI[:, 1:], sorted_BI[:, :1] + 1], 1) - sorted_BI  # around the circle
    torch.testing.assert_close(gaps_BI, torch.full_like(gaps_BI, 1 / iterations), rtol=0, atol=1.01 / size)
    steps_BI = (time_BI.diff(dim=1) % 1.0 - 1 / iterations).abs()
    assert (torch.minimum(steps_BI, 1 - steps_BI) < 1.01 / size).all()
    assert time_BI[:, 0].max() - time_BI[:, 0].min() > 0.5 and len(time_BI[:, 0].unique()) > count / 2


def test_uni_grpo_hides_something_of_every_group():
    _, rollout = usual("block_causal", 3)
    hidden_BT = plan("uni-grpo", rollout).target_BMT[:, 0]
    for row, token in rollout.completion_BT.nonzero().tolist():
        assert (hidden_BT[row] & (rollout.group_BT[row] == rollout.group_BT[row, token])).any()


@pytest.mark.parametrize("samples", [1, 3])
def test_espo_scores_the_whole_canvas_once_in_each_pair_where_it_is_learnt(samples):
    _, rollout = usual("bidirectional", stop_at_eos=False)
    assert rollout.beyond_BT.any() and torch.equal(
        rollout.revealed_BT, (rollout.document_BT > 0) & ~rollout.prompt_BT
    )
    rollout = rollout.whole()
    views = plan("espo", rollout, samples=samples)
    assert views.count == 2 * samples and torch.equal(views.hidden_BMT, views.target_BMT)
    for first, second in zip(range(samples), range(samples, 2 * samples), strict=True):
        pair_BT = views.target_BMT[:, first].int() + views.target_BMT[:, second]
        assert torch.equal(pair_BT, rollout.revealed_BT.int())
    count_BM = counted(views, rollout)
    expected_BMT = (LENGTH + 1) / count_BM[:, :, None] / (2 * samples)
    torch.testing.assert_close(views.weight_BMT, torch.where(views.target_BMT, expected_BMT, 0))


def test_espos_counts_are_spread_over_its_pairs():
    rollout = whole(torch.zeros(300, LENGTH, dtype=torch.long))
    count_BM = counted(plan("espo", rollout, samples=3), rollout)[:, :3]
    for stratum, count_B in enumerate(count_BM.unbind(1)):
        assert set(count_B.tolist()) == set(range(3 * stratum, 3 * stratum + 3))  # of 0..8


@pytest.mark.parametrize("name", ["gdpo", "bgpo"])
def test_views_of_exact_counts_weigh_what_they_promise(name):
    _, rollout = usual("block_causal", 3)
    views = plan(name, rollout, samples=5)
    _, weight_M = np.polynomial.legendre.leggauss(5)
    share_M = torch.from_numpy(weight_M) / 2 if name == "gdpo" else torch.full((5,), 0.2, dtype=torch.float64)
    size_BT = group_sizes(rollout.noised_groups_BT)
    for row, view, token in views.target_BMT.nonzero().tolist():
        together_T = (rollout.group_BT[row] == rollout.group_BT[row, token]) & views.target_BMT[row, view]
        expected = share_M[view] * size_BT[row, token] / together_T.sum()
        assert views.weight_BMT[row, view, token].item() == pytest.approx(expected.item(), rel=1e-6)


# Losses.


def bound(completion, log_prob_MT, weigh):
    """The sum over views and groups of `weigh(view, size, hidden)` times the log-probability."""
    total = 0.0
    for view, hidden in enumerate(completion.hidden):
        for group in {completion.groups[token] for token in hidden}:
            together = [token for token in hidden if completion.groups[token] == group]
            size = sum(completion.groups[token] == group for token in completion.tokens)
            total = total + weigh(view, size, len(together)) * sum(
                log_prob_MT[view, token] for token in together
            )
    return total


def mean(values):
    return sum(values) / len(values)


def uni_grpo(batch, args):
    def loss(c):
        [masked] = c.hidden
        ratio = mean([c.policy[0, t] - c.old[0, t] for t in masked]).exp()
        return clipped(ratio, c.advantage, 0.5, 0.5)

    return mean([loss(c) for c in batch])


def espo(batch, args):
    def loss(c):
        new, old, reference = (
            bound(c, part, lambda _, size, k: (size + 1) / k / c.views)
            for part in (c.policy, c.old, c.reference)
        )
        length = len(c.tokens)
        return clipped(((new - old) / length).exp(), c.advantage, 0.2, 0.2) + 1e-3 * (
            new - reference
        ) ** 2 / (2 * length)

    return mean([loss(c) for c in batch])


def gdpo(batch, args):
    _, weight_M = np.polynomial.legendre.leggauss(3)

    def loss(c):
        new, old, reference = (
            bound(c, part, lambda v, size, k: weight_M[v] / 2 * size / k)
            for part in (c.policy, c.old, c.reference)
        )
        if args.importance_sampling_level == "product":
            return (clipped((new - old).exp(), c.advantage, 0.5, 0.5) + 0.04 * k3(reference, new)) / len(
                c.tokens
            )
        length = len(c.tokens)
        return clipped(((new - old) / length).exp(), c.advantage, 0.5, 0.5) + 0.04 * k3(
            reference / length, new / length
        )

    return mean([loss(c) for c in batch])


def bgpo(batch, args):
    def loss(c, view):
        new, old = (bound(c, part, lambda v, size, k: size / k * (v == view)) for part in (c.policy, c.old))
        delta = (new - old) / len(c.tokens)
        return -c.advantage * (1 + delta if c.advantage > 0 else min(delta.exp(), torch.tensor(3.0)))

    return mean([mean([loss(c, view) for view in range(args.samples)]) for c in batch])


def test_uni_grpo_has_one_ratio_over_the_masked_tokens():
    assert_loss("uni-grpo", uni_grpo)


@pytest.mark.parametrize("samples", [1, 2])
def test_espo_compares_bounds_by_the_token_and_holds_them_by_half_their_squared_difference(samples):
    assert_loss("espo", espo, samples=samples)


@pytest.mark.parametrize("level", ["sequence", "product"])
def test_gdpo_compares_whole_bounds_by_the_token_or_by_their_product(level):
    assert_loss("gdpo", gdpo, beta=0.04, importance_sampling_level=level)
    with raises(ConfigError, where="importance_sampling_level"):
        config("gdpo", importance_sampling_level="token")


def test_both_ratios_of_gdpo_have_the_same_gradient_at_the_first_update():
    _, rollout = usual("bidirectional")
    gradients = []
    for level in ("sequence", "product"):
        args = config("gdpo", importance_sampling_level=level)
        scores, _ = made_up(rollout, plan("gdpo", rollout), args)
        same = replace(scores, old_BMT=scores.policy_BMT.detach())
        gradients.append(torch.autograd.grad(args.build_method().loss(same).total, scores.policy_BMT)[0])
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
    assert (gradients[0] != 0).any()


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_bounds_that_are_far_apart_leave_the_loss_finite(kl):
    _, rollout = usual("bidirectional")
    args = config("gdpo", importance_sampling_level="product", beta=0.04, kl=kl)
    scores, _ = made_up(rollout, plan("gdpo", rollout), args, spread=500.0)
    policy_BMT = scores.policy_BMT.detach().float().requires_grad_()
    total = args.build_method().loss(replace(scores, policy_BMT=policy_BMT)).total
    assert total.isfinite() and torch.autograd.grad(total, policy_BMT)[0].isfinite().all()


def far_apart(name, by, **settings):
    """The loss and its gradient in float32, as in training, after the policy moved this many nats for each
    token."""
    _, rollout = usual("bidirectional")
    args = config(name, **settings)
    scores, _ = made_up(rollout, plan(name, rollout, **settings), args)
    policy_BMT = (
        torch.where(scores.views.target_BMT, scores.policy_BMT.detach() + by, 0).float().requires_grad_()
    )
    parts = {part: getattr(scores, part) for part in ("old_BMT", "reference_BMT", "advantage_BT")}
    single = {part: None if value is None else value.float() for part, value in parts.items()}
    total = args.build_method().loss(replace(scores, policy_BMT=policy_BMT, **single)).total
    return total, torch.autograd.grad(total, policy_BMT)[0]


@pytest.mark.parametrize("by", [-30.0, 30.0])
def test_k3_of_espos_whole_bounds_is_bounded(by):
    """30 nats per token are 240 in all, whose exponential overflows float32."""
    assert config("espo", kl="k3").log_ratio_clamp == 20.0 and config("espo").log_ratio_clamp is None
    for total in far_apart("espo", by, kl="k3", beta=0.1):
        assert total.isfinite().all()
    closer, held = (
        far_apart("espo", by, kl="k3", beta=0.1, log_ratio_clamp=2.0),
        far_apart("espo", by, kl="k3", beta=0.1),
    )
    assert abs(closer[0]) <= abs(held[0]) and (by > 0 or closer[0] < 1e-3 * held[0])


@each_once("name, by", ["diffu-grpo", "uni-grpo", "cj-grpo"], [-30.0, 30.0])
def test_a_product_over_all_tokens_is_bounded_in_every_method(name, by):
    assert (
        config(name, importance_sampling_level="product").log_ratio_clamp == 20.0
        and config(name).log_ratio_clamp is None
    )
    assert config(name, importance_sampling_level="product", log_ratio_clamp=3.0).log_ratio_clamp == 3.0
    for total in far_apart(name, by, importance_sampling_level="product"):
        assert total.isfinite().all()


def test_bgpo_has_a_gradient_wherever_the_policy_has_gone():
    for total in far_apart("bgpo", 300.0):
        assert total.isfinite().all()


def test_bgpo_is_linear_where_the_advantage_is_positive_and_exponential_up_to_3_where_it_is_negative():
    assert_loss("bgpo", bgpo, samples=3)
    assert_loss("bgpo", bgpo, samples=3, spread=6.0)  # some ratios above 3


def test_bgpos_loss_lies_above_that_of_the_ratio_of_means():
    """It is a bound, as promised."""
    _, rollout = rollout_of(stopping("bidirectional"))
    args = config("bgpo", delta=None)
    scores, _ = made_up(rollout, plan("bgpo", rollout), args, spread=2.0)
    gap_BT = scores.of_tokens(scores.policy_BMT - scores.old_BMT)
    exact = -(
        scores.weight_B1 * scores.advantage_B1 * (gap_BT.sum(1, keepdim=True) / scores.length_B1).exp()
    ).sum()
    assert args.build_method().loss(scores).total > exact + 0.01


def test_the_prompt_is_never_hidden():
    group_BT = torch.tensor([[-1] * PROMPT + [0] * 6]).expand(3, -1)
    for name in ("uni-grpo", "espo", "gdpo", "bgpo"):
        assert not plan(name, whole(group_BT)).hidden_BMT[..., :PROMPT].any()
