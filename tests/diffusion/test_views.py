"""Plans of views: what they hide, and that the weighted scores average to the exact ELBO.

Shapes: N listed cases, M views, T tokens.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.enumeration import LENGTH, PROMPT, Listed, bound_of, estimates, listed_counts, tables_of
from tests.helpers import partly_slow
from unmask.diffusion.rng import RngStream, uniform
from unmask.diffusion.schedules import SCHEDULES, Noise, get_schedule
from unmask.diffusion.views import (
    MaskRNG,
    all_masked_views,
    cart_weights,
    complementary_pair,
    elbo_views,
    exact_count_pair,
    exact_count_views,
    pairs_of_counts,
    random_views,
)
from unmask.models.attention import Layout, segments

# Rows of groups: one, several of different sizes, ones that are not in one piece, single tokens, nothing at
# all.
GROUPS = torch.tensor(
    [
        [-1, -1, 0, 0, 0, 0, 0, 0],
        [-1, 0, 0, 1, 1, 1, 1, 2],
        [0, 0, -1, 0, -1, 3, 3, 3],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [-1, -1, -1, -1, -1, -1, -1, -1],
    ]
)
SIZES = torch.tensor([[(row == group).sum() if group >= 0 else 1 for group in row] for row in GROUPS])


def linear(views):
    return lambda groups, draw: random_views(groups, draw, Noise(get_schedule("linear")), num_views=views)


PLANS = {
    "random": linear(1),
    "random, stratified": linear(4),
    "random, cosine": lambda groups, draw: random_views(
        groups, draw, Noise(get_schedule("cosine")), num_views=2
    ),
    "complementary": lambda groups, draw: complementary_pair(groups, draw, Noise(get_schedule("linear"))),
    "exact count": lambda groups, draw: exact_count_views(groups, draw, num_views=1),
    "exact count, stratified": lambda groups, draw: exact_count_views(groups, draw, num_views=4),
    "exact count, complementary": exact_count_pair,
    "pairs of counts": lambda groups, draw: pairs_of_counts(groups, draw, pairs=2),
    "elbo, one view": lambda groups, draw: elbo_views(groups, draw, num_views=1),
    "elbo, even": lambda groups, draw: elbo_views(groups, draw, num_views=4),
    "elbo, odd": lambda groups, draw: elbo_views(groups, draw, num_views=5),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def many(row, count=300):
    """The same row of groups for many sequences, and their draw."""
    return torch.tensor(row).expand(count, -1), MaskRNG(0, torch.arange(count))


def counts(hidden_BMT, groups_BT, group):
    return (hidden_BMT & (groups_BT == group)[:, None]).sum(-1)


def parts(views):
    return views.hidden_BMT, views.target_BMT, views.weight_BMT


# What every plan keeps.


@every_plan
def test_only_maskable_tokens_are_hidden_and_all_that_is_hidden_is_scored(plan):
    views = plan(GROUPS, MaskRNG(0, torch.arange(5)))
    assert views.hidden_BMT.shape == (5, views.count, 8)
    assert not (views.hidden_BMT & (GROUPS < 0)[:, None]).any()
    assert torch.equal(views.target_BMT, views.hidden_BMT) and views.weight_BMT.dtype == torch.float32
    assert torch.equal(views.weight_BMT > 0, views.target_BMT) and views.weight_BMT.isfinite().all()


@every_plan
def test_a_plan_does_not_depend_on_the_rest_of_the_batch(plan):
    keys = torch.tensor([11, 3, 8, 900, 2**60])
    together = plan(GROUPS, MaskRNG(5, keys))
    order = torch.tensor([3, 0, 4, 1, 2])
    for one, other in zip(
        parts(together.select(order)), parts(plan(GROUPS[order], MaskRNG(5, keys[order]))), strict=True
    ):
        assert torch.equal(one, other)
    padded = plan(torch.cat([GROUPS, torch.full((5, 3), -1)], 1), MaskRNG(5, keys))
    for one, other in zip(parts(together), parts(padded), strict=True):
        assert torch.equal(one, other[..., :8])
    for row in range(5):
        alone = plan(GROUPS[row : row + 1], MaskRNG(5, keys[row : row + 1]))
        for one, other in zip(parts(together.select(slice(row, row + 1))), parts(alone), strict=True):
            assert torch.equal(one, other)


@every_plan
def test_seed_key_and_iteration_each_give_another_plan(plan):
    groups, _ = many([0, 0, 0, 0, 0, 0, 0, 0], 20)
    keys = torch.arange(20)
    plans = [
        plan(groups, draw).hidden_BMT
        for draw in (MaskRNG(0, keys), MaskRNG(1, keys), MaskRNG(0, keys + 20), MaskRNG(0, keys, 1))
    ]
    assert torch.equal(plans[0], plan(groups, MaskRNG(0, keys)).hidden_BMT)
    for one, other in itertools.combinations(plans, 2):
        assert not torch.equal(one, other)


@every_plan
def test_the_global_generator_is_left_alone(plan):
    before = torch.get_rng_state()
    plan(GROUPS, MaskRNG(0, torch.arange(5)))
    assert torch.equal(torch.get_rng_state(), before)


# What each plan promises.


@pytest.mark.parametrize("views", [1, 3, 4])
def test_exact_count_views_hide_one_number_of_tokens_per_group_with_its_weight(views):
    plan = exact_count_views(GROUPS, MaskRNG(2, torch.arange(5)), num_views=views)
    for row, group in [(r, g) for r in range(5) for g in GROUPS[r].unique().tolist() if g >= 0]:
        member = GROUPS[row] == group
        number = plan.hidden_BMT[row][:, member].sum(-1)
        assert (number >= 1).all() and (number <= member.sum()).all()
        expected = torch.where(plan.hidden_BMT[row][:, member], (member.sum() / number / views)[:, None], 0)
        torch.testing.assert_close(plan.weight_BMT[row][:, member], expected)


def test_exact_counts_are_stratified_over_the_views():
    groups, draw = many([-1, 0, 0, 0, 0, 1, 1, 1])
    plan = exact_count_views(groups, draw, num_views=4)
    assert torch.equal(counts(plan.hidden_BMT, groups, 0), torch.tensor([1, 2, 3, 4]).expand(300, 4))
    odd = counts(plan.hidden_BMT, groups, 1)
    assert (odd.diff(dim=1) >= 0).all() and (odd[:, 0] == 1).all() and (odd[:, 3] == 3).all()
    assert set(odd[:, 1].tolist()) == {1, 2} and set(odd[:, 2].tolist()) == {2, 3}


@pytest.mark.parametrize("views", [1, 4])
def test_random_views_have_one_time_per_group_stratified_over_the_views(views):
    groups, draw = many([0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    plan = random_views(groups, draw, Noise(get_schedule("linear"), 0.2, 0.6), num_views=views)
    times = []
    for at in (slice(0, 6), slice(6, 12)):
        weight = plan.weight_BMT[..., at].amax(-1)  # 1 / t / views, and 0 where nothing was hidden
        assert torch.equal(
            plan.weight_BMT[..., at], torch.where(plan.hidden_BMT[..., at], weight[..., None], 0)
        )
        times.append(torch.where(weight > 0, 1 / (weight * views), torch.nan))
    start = 0.2 + 0.4 * torch.arange(views) / views
    within = torch.stack(times)[~torch.stack(times).isnan().any(-1)]
    assert (within > start - 1e-5).all() and (within < start + 0.4 / views + 1e-5).all()
    assert within.std(dim=0).min() > 0.08 / views
    assert (times[0] != times[1]).all()


def test_random_views_hide_at_the_rate_of_their_schedule():
    groups, draw = many([0] * 8, 5000)
    for schedule, low, high in [("linear", 0.3, 0.3), ("cosine", 0.5, 0.5)]:
        hidden = random_views(groups, draw, Noise(get_schedule(schedule), low, high)).hidden_BMT
        rate = {"linear": 0.3, "cosine": math.cos(math.pi / 4)}[schedule]
        assert hidden.double().mean().item() == pytest.approx(
            rate, abs=5 * math.sqrt(rate * (1 - rate) / 40000)
        )
        # tokens independently
        assert torch.corrcoef(hidden.squeeze(1).T.double()).fill_diagonal_(0).abs().max() < 5 / math.sqrt(
            5000
        )


@pytest.mark.parametrize("name", ["complementary", "exact count, complementary"])
def test_a_complementary_pair_hides_every_token_once(name):
    plan = PLANS[name](GROUPS, MaskRNG(0, torch.arange(5)))
    assert plan.count == 2 and torch.equal(plan.hidden_BMT.sum(1), (GROUPS >= 0).long())


@pytest.mark.parametrize("views", [2, 3, 4, 5, 8, 9])
def test_elbo_views_are_all_masked_then_complementary_pairs(views):
    hidden = elbo_views(GROUPS, MaskRNG(0, torch.arange(5)), num_views=views).hidden_BMT
    assert hidden.shape[1] == views and torch.equal(hidden[:, 0], GROUPS >= 0)
    pairs, several = (views - 1) // 2, (GROUPS >= 0) & (SIZES > 1)
    for pair in range(pairs):
        first, second = hidden[:, 1 + pair], hidden[:, views - pairs + pair]
        assert torch.equal(first ^ second, several) and not (first & second).any()
    assert not (hidden[:, 1:] & ~several[:, None]).any()  # a group of one token has only one mask
    for row, group in [(r, g) for r in range(5) for g in GROUPS[r].unique().tolist() if g >= 0]:
        number = hidden[row][1:, GROUPS[row] == group].sum(-1)
        assert SIZES[row].max() == 1 or (number < (GROUPS[row] == group).sum()).all()


def test_all_masked_views_score_the_completion_and_hide_a_share_of_the_prompt():
    completion = torch.zeros(2000, 10, dtype=torch.bool)
    completion[:, 6:] = True
    prompt = torch.zeros_like(completion)
    prompt[:, 1:6] = True
    plan = all_masked_views(completion, prompt, MaskRNG(0, torch.arange(2000)), prompt_rate=0.15)
    assert torch.equal(plan.target_BMT[:, 0], completion) and torch.equal(
        plan.weight_BMT, plan.target_BMT.float()
    )
    assert plan.hidden_BMT[..., 6:].all() and not plan.hidden_BMT[..., 0].any()
    assert plan.hidden_BMT[..., 1:6].double().mean().item() == pytest.approx(
        0.15, abs=5 * math.sqrt(0.15 * 0.85 / 10000)
    )
    plain = all_masked_views(completion)
    assert torch.equal(plain.hidden_BMT[:, 0], completion)


def test_views_are_taken_apart_by_view_and_by_row():
    plan = exact_count_views(GROUPS, MaskRNG(0, torch.arange(5)), num_views=3)
    for *pieces, whole in zip(
        *(parts(plan.select(slice(None), slice(index, index + 1))) for index in range(3)),
        parts(plan),
        strict=True,
    ):
        assert torch.equal(torch.cat(pieces, 1), whole)
    chosen = plan.select(torch.tensor([4, 1]))
    assert torch.equal(chosen.hidden_BMT, plan.hidden_BMT[[4, 1]]) and chosen.count == 3


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
@pytest.mark.parametrize(
    ("pattern", "block_size"), [("bidirectional", None), ("block_causal", 3), ("causal", None)]
)
def test_cart_weighs_by_the_visible_tokens_near(pattern, block_size, p):
    documents = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
    run = segments(Layout.of(documents), pattern, block_size)
    plan = random_views(
        torch.where(documents > 0, run, -1),
        MaskRNG(0, torch.arange(2)),
        Noise(get_schedule("linear"), weighting="cart"),
        num_views=3,
    )
    weights = cart_weights(plan, run, documents, p=p)
    assert torch.equal(weights.hidden_BMT, plan.hidden_BMT) and weights.weight_BMT.dtype == torch.float32
    for row, view, at in plan.hidden_BMT.nonzero().tolist():
        near = 0.0
        for other in range(12):
            clean = run[row, other] < run[row, at] or (
                run[row, other] == run[row, at] and not plan.hidden_BMT[row, view, other]
            )
            if documents[row, other] == documents[row, at] and clean:
                near += p / 2 * (1 - p) ** (abs(other - at) - 1)
        assert weights.weight_BMT[row, view, at].item() == pytest.approx(near / 3, rel=1e-5, abs=1e-6)
    assert not weights.weight_BMT[~plan.hidden_BMT].any()


# Expectations. A model is known by the tables of its conditionals, one table per group.


@pytest.fixture(scope="module", params=["bidirectional", "bidirectional with a shift", "blocks of three"])
def tables(request):
    return tables_of(request.param)


EXACT_PLANS = {
    "exact count": (exact_count_views, [1, 2, 3, 5, 8]),
    "exact count, complementary": (lambda groups, draw, num_views: exact_count_pair(groups, draw), [2]),
    "elbo": (elbo_views, [1, 2, 3, 4, 5, 8]),
    "pairs of counts": (
        lambda groups, draw, num_views: pairs_of_counts(groups, draw, pairs=num_views // 2),
        [2, 4],
    ),
}


@pytest.mark.parametrize(
    ("plan", "views"), [(plan, views) for plan, counts in EXACT_PLANS.values() for views in counts]
)
def test_plans_of_exact_counts_average_to_the_exact_bound(tables, plan, views):
    groups, by_group = tables
    draw = listed_counts(groups.shape[1])
    total = estimates(plan(groups.expand(len(draw.time_N), -1), draw, num_views=views), by_group).sum(1)
    assert total.mean().item() == pytest.approx(bound_of(by_group), rel=1e-6)
    assert total.std() > 1e-3


def listed_subsets(width, rate, views, low, high, points=30):
    """Every set of hidden tokens at the nodes of a quadrature over time, and the probability [N, V] of each.

    Times of several views are stratified, so a set has another probability in each view.
    """
    nodes, shares = (torch.from_numpy(numbers) for numbers in np.polynomial.legendre.leggauss(points))
    sets = torch.tensor(list(itertools.product([False, True], repeat=LENGTH)))
    time_N = ((nodes + 1) / 2).repeat_interleave(len(sets))
    noise_NT = torch.zeros(len(time_N), width, dtype=torch.float64)
    noise_NT[:, PROMPT:] = torch.where(sets.repeat(len(nodes), 1), 0.0, 1 - 2.0**-53)
    rate_NM = rate(low + (high - low) * (torch.arange(views) + time_N[:, None]) / views)
    number_N1 = sets.sum(1).repeat(len(nodes))[:, None]
    probability_NM = rate_NM**number_N1 * (1 - rate_NM) ** (LENGTH - number_N1)
    return Listed(time_N, noise_NT), probability_NM * (shares / 2).repeat_interleave(len(sets))[:, None]


RATES = {name: schedule.mask_rate for name, schedule in SCHEDULES.items()}
EXACT_SCHEDULES = ["linear", "cosine"]  # the geometric one hides some tokens at time 0 already


def expected_random(groups, tables, schedule, views=1, low=0.0, high=1.0, points=30):
    draw, probability_NM = listed_subsets(groups.shape[1], RATES[schedule], views, low, high, points)
    plan = random_views(
        groups.expand(len(draw.time_N), -1), draw, Noise(get_schedule(schedule), low, high), num_views=views
    )
    return (probability_NM * estimates(plan, tables)).sum().item()


def expected_pair(groups, tables, schedule, low):
    draw, probability_N1 = listed_subsets(groups.shape[1], RATES[schedule], 1, low, 1 - low)
    plan = complementary_pair(groups.expand(len(draw.time_N), -1), draw, Noise(get_schedule(schedule), low))
    return (probability_N1 * estimates(plan, tables)).sum().item()


@pytest.mark.parametrize("views", [1, 2, 3])
@pytest.mark.parametrize("schedule", EXACT_SCHEDULES)
def test_random_views_average_to_the_exact_bound(tables, schedule, views):
    assert expected_random(*tables, schedule, views) == pytest.approx(bound_of(tables[1]), rel=1e-6)


def test_the_geometric_schedule_leaves_out_next_to_nothing(tables):
    exact = bound_of(tables[1])
    assert 1e-6 < abs(expected_random(*tables, "geometric", points=200) / exact - 1) < 1e-3


@pytest.mark.parametrize("schedule", EXACT_SCHEDULES)
def test_complementary_pairs_average_to_the_exact_bound(tables, schedule):
    assert expected_pair(*tables, schedule, low=0.0) == pytest.approx(bound_of(tables[1]), rel=1e-6)


@pytest.mark.parametrize("schedule", EXACT_SCHEDULES)
def test_the_bias_of_leaving_out_the_smallest_times_is_of_their_size(tables, schedule):
    exact = bound_of(tables[1])
    for expected in (expected_random, expected_pair):
        large, small = (expected(*tables, schedule, low=low) / exact - 1 for low in (1e-2, 1e-3))
        assert 1e-6 < abs(small) < 3e-3 and 5 < large / small < 20


@partly_slow("plan", PLANS.values(), *range(0, len(PLANS), 3), ids=PLANS.keys())
def test_with_real_random_numbers_the_average_is_the_same(plan):
    groups, tables = tables_of("blocks of three")
    number = 20_000
    total = estimates(plan(groups.expand(number, -1), MaskRNG(0, torch.arange(number))), tables).sum(1)
    exact, error = bound_of(tables), total.std().item() / math.sqrt(number)
    assert error < 0.01 * abs(exact)
    # + the bias of the smallest times
    assert total.mean().item() == pytest.approx(exact, abs=5 * error + 1e-3 * abs(exact))


def test_plans_of_exact_counts_vary_far_less_than_independent_times_at_equal_cost(tables):
    groups, by_group = tables
    number, views = 5000, 8
    groups, keys = groups.expand(number, -1), torch.arange(number)

    def variance(*plans):
        return sum(estimates(plan, by_group).sum(1) for plan in plans).var().item() / len(plans) ** 2

    independent = variance(
        *[
            random_views(groups, MaskRNG(0, keys, iteration), Noise(get_schedule("linear")))
            for iteration in range(views)
        ]
    )
    assert independent > 5 * variance(exact_count_views(groups, MaskRNG(0, keys), num_views=views))
    assert independent > 10 * variance(elbo_views(groups, MaskRNG(0, keys), num_views=views))


SUCCESSIVE = 64


def visited(start, count, groups=1, seed=0, views=1):
    """The times [N, V] of successive sequences and their groups, recovered from masks whose random numbers
    are all equal."""
    group = torch.arange(groups).expand(count, -1)
    draw = MaskRNG(
        seed, torch.zeros(count, dtype=torch.long), rows_before_B=torch.arange(start, start + count)
    )
    noise = Noise(replace(get_schedule("linear"), mask_rate=torch.ones_like, weight=lambda t: t), low=0.0)
    return (
        random_views(group, draw, noise, num_views=views).weight_BMT.double().transpose(1, 2).flatten(0, 1)
        * views
    )


def star_discrepancy(times):
    ordered, count = times.sort().values, len(times)
    rank = torch.arange(count) / count
    return max((rank + 1 / count - ordered).max(), (ordered - rank).max()).item()


def test_times_of_successive_rows_are_spread_more_evenly_than_random_ones():
    keys, seeds = torch.arange(200)[:, None], range(20)
    random = [
        star_discrepancy(times)
        for times in uniform(0, keys, position=torch.arange(SUCCESSIVE), stream=RngStream.TIME)
    ]
    typical = sum(random) / len(random)
    for start in (0, 1, 64, 999):
        assert (
            sum(star_discrepancy(visited(start, SUCCESSIVE, seed=seed)[:, 0]) for seed in seeds) / len(seeds)
            < typical / 3
        )
        blocks = [
            star_discrepancy(visited(start, SUCCESSIVE // 16, groups=16, seed=seed)[:, 0]) for seed in seeds
        ]
        assert sum(blocks) / len(seeds) < 0.4 * typical
    for view in range(4):  # within its stretch of time
        assert star_discrepancy(visited(0, SUCCESSIVE, views=4)[:, view] * 4 - view) < typical / 2


def test_they_are_uniform_over_seeds_and_the_same_however_a_run_is_cut_into_batches():
    one = torch.stack([visited(5, 1, seed=seed)[0, 0] for seed in range(400)])
    assert star_discrepancy(one) < 1.6 / math.sqrt(400)
    whole = visited(10, 12, groups=3, views=2)
    assert torch.equal(torch.cat([visited(10 + start, 4, groups=3, views=2) for start in (0, 4, 8)]), whole)
    assert torch.equal(torch.cat([visited(10 + start, 1, groups=3, views=2) for start in range(12)]), whole)
