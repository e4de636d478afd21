"""Noise schedules go from nothing hidden to everything, with the weights of their definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests import enumeration
from tests.diffusion.test_views import GROUPS, Listed, estimates
from tests.errors import raises
from unmask.diffusion.schedules import SCHEDULES, SIGMA_MAX, SIGMA_MIN, Noise, get_schedule
from unmask.diffusion.views import MaskRNG, complementary_pair, random_views
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
    with raises(ConfigError, where="schedule"):
        get_schedule("quadratic")


@pytest.mark.parametrize(("low", "high"), [(1e-3, 1.0), (0.3, 0.8), (0.5, 0.5)])
@pytest.mark.parametrize("timesteps", [None, 10, 64])
def test_times_are_drawn_from_their_band_alone(low, high, timesteps):
    noise = Noise(get_schedule("linear"), low, high, timesteps)
    times = noise.time(torch.arange(10_000, dtype=torch.float64) / 10_000)
    if timesteps is None:
        assert times[0] == low and torch.allclose(
            times, torch.linspace(low, high, 10_001, dtype=torch.float64)[:-1]
        )
        return
    allowed = [
        step / timesteps for step in range(1, timesteps + 1) if low - 1e-9 <= step / timesteps <= high + 1e-9
    ]
    assert times.unique().tolist() == pytest.approx(allowed, abs=1e-12)
    counts = times.unique(return_counts=True)[1].double() / 10_000
    assert (counts - 1 / len(allowed)).abs().max() <= 1e-4


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("weighting", "expected"), [("uniform", lambda t: torch.ones_like(t)), ("1/t", lambda t: 1 / t)]
)
def test_other_weightings_are_what_they_are_called(schedule, weighting, expected):
    times = torch.linspace(0.01, 1, 50, dtype=torch.float64)
    for timesteps in (None, 50):
        noise = Noise(get_schedule(schedule), 0.25, 0.75, timesteps, weighting)
        torch.testing.assert_close(noise.weight(times), expected(times))
        plan = random_views(GROUPS, MaskRNG(0, torch.arange(5)), noise, num_views=3)
        weight = plan.weight_BMT[plan.hidden_BMT] * 3
        assert (weight >= 1 - 1e-6).all() and (weight <= (1 + 1e-6 if weighting == "uniform" else 4)).all()
    torch.testing.assert_close(
        Noise(get_schedule("linear"), weighting="1/t").weight(times),
        Noise(get_schedule("linear")).weight(times),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_weights_of_a_pair_are_those_of_both_rates(schedule):
    groups, draw = torch.zeros(200, 8, dtype=torch.long), MaskRNG(0, torch.arange(200))
    pairs = {
        weighting: complementary_pair(groups, draw, Noise(get_schedule(schedule), weighting=weighting))
        for weighting in ("1/t", "uniform")
    }
    first, second = pairs["uniform"].weight_BMT.unbind(1)
    assert torch.equal(first + second, torch.full_like(first, 0.5))
    both = (pairs["1/t"].hidden_BMT.any(-1)).all(-1)
    per_view = pairs["1/t"].weight_BMT[both].amax(-1).double() * 2
    assert both.sum() > 20
    time = 1 / per_view[:, 0]
    rate = get_schedule(schedule).mask_rate(time)
    torch.testing.assert_close(per_view[:, 1], rate / (1 - rate) / time, rtol=1e-3, atol=1e-6)


# Discrete times: a distribution over a few binary tokens is its own best model, so that every bound is known.

TOKENS = 3
SETS = list(itertools.product([False, True], repeat=TOKENS))


def distribution():
    """Every sequence: its probability, and the conditionals of its tokens as `enumeration.conditionals` gives
    them."""
    joint = (
        torch.randn([2] * TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        .mul(1.5)
        .flatten()
        .softmax(0)
    )
    joint = joint.view([2] * TOKENS)
    for row in itertools.product([0, 1], repeat=TOKENS):
        table = torch.zeros(2**TOKENS, TOKENS, dtype=torch.float64)
        for number in range(2**TOKENS):
            hidden = [number >> i & 1 == 1 for i in range(TOKENS)]
            seen = joint[
                tuple(slice(None) if hide else slice(x, x + 1) for hide, x in zip(hidden, row, strict=True))
            ]
            for i in [i for i in range(TOKENS) if hidden[i]]:
                table[number, i] = seen.narrow(i, row[i], 1).sum().log() - seen.sum().log()
        yield joint[row].item(), table


def planned(schedule, timesteps, table):
    """The expectation of the plan."""
    noise, groups = (
        Noise(get_schedule(schedule), timesteps=timesteps),
        torch.zeros(len(SETS), TOKENS, dtype=torch.long),
    )
    hidden, total = torch.tensor(SETS), 0.0
    for step in range(1, timesteps + 1):
        middle = torch.full((len(SETS),), (step - 0.5) / timesteps, dtype=torch.float64)
        plan = random_views(groups, Listed(middle, torch.where(hidden, 0.0, 1 - 2.0**-53).double()), noise)
        rate = noise.schedule.mask_rate(torch.tensor(step / timesteps, dtype=torch.float64))
        assert rate == 1 or torch.equal(plan.hidden_BMT[:, 0], hidden)
        share = rate ** hidden.sum(1) * (1 - rate) ** (TOKENS - hidden.sum(1)) / timesteps
        total += (share * estimates(plan, [(list(range(TOKENS)), table)])[:, 0]).sum().item()
    return total


def defined(schedule, timesteps, table):
    """sum over i of (alpha(i - 1) - alpha(i)) / (1 - alpha(i)) times the expected log-probability of what is
    hidden at i."""
    total = 0.0
    for step in range(1, timesteps + 1):
        last, now = (
            1 - SCHEDULES[schedule].mask_rate(torch.tensor(s / timesteps, dtype=torch.float64)).item()
            for s in (step - 1, step)
        )
        for number in range(2**TOKENS):
            hide = number.bit_count()
            total += (
                (last - now)
                / (1 - now)
                * (1 - now) ** hide
                * now ** (TOKENS - hide)
                * table[number].sum().item()
            )
    return total


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_discrete_times_average_to_their_bound_which_rises_to_the_continuous_one(schedule):
    exact, bounds = 0.0, dict.fromkeys((1, 2, 4, 8, 16, 32), 0.0)
    for probability, table in distribution():
        continuous = enumeration.lower_bound(table)
        # its conditionals fit together: there is no gap
        assert continuous == pytest.approx(math.log(probability), rel=1e-9)
        exact += probability * continuous
        for timesteps in bounds:
            discrete = defined(schedule, timesteps, table)
            assert planned(schedule, timesteps, table) == pytest.approx(discrete, rel=1e-6)
            bounds[timesteps] += probability * discrete
    gaps = [exact - bound for bound in bounds.values()]
    assert all(more > fewer > 0 for more, fewer in itertools.pairwise(gaps)) and gaps[-1] < gaps[0] / 10


def test_bands_and_pairs_that_cannot_be_are_refused():
    linear = get_schedule("linear")
    for settings, where in [
        ({"low": 0.8, "high": 0.2}, "min_time, max_time"),
        ({"high": 1.5}, "min_time, max_time"),
        ({"timesteps": 0}, "num_timesteps"),
        ({"low": 0.3, "high": 0.4, "timesteps": 4}, "num_timesteps"),
        ({"weighting": "2/t"}, "weighting"),
    ]:
        with raises(ConfigError, where=where):
            Noise(linear, **settings)
    for noise, where in [
        (Noise(linear, timesteps=8), "num_timesteps"),
        (Noise(linear, 0.6, 0.9), "min_time"),
    ]:
        with raises(ConfigError, where=where):
            complementary_pair(GROUPS, MaskRNG(0, torch.arange(5)), noise)


def test_plans_of_all_kinds_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    for weighting, timesteps in itertools.product(("elbo", "cart"), (None, 7)):
        noise = Noise(get_schedule("geometric"), 0.2, 0.9, timesteps, weighting)
        random_views(GROUPS, MaskRNG(0, torch.arange(5), rows_before_B=torch.arange(5)), noise, num_views=2)
    assert torch.equal(torch.get_rng_state(), before)
