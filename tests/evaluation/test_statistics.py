"""Confidence intervals: known values, coverage on simulated data, and invariances."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.helpers import partly_nightly, partly_slow
from unmask.errors import DataError
from unmask.evaluation import statistics
from unmask.evaluation.statistics import (
    Interval,
    group_interval,
    holm,
    mean_interval,
    paired_difference,
    ratio,
    sign_flip_p_value,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    # the last: Newcombe 1998, table I
    [(5, 10, 0.2366, 0.7634), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_gives_the_published_bounds(successes, total, low, high):
    interval = wilson_interval(successes, total)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert interval.mean == successes / total


@given(total=st.integers(1, 10_000), data=st.data())
def test_wilson_bounds_are_within_zero_and_one_and_symmetric(total, data):
    successes = data.draw(st.integers(0, total))
    interval, mirrored = wilson_interval(successes, total), wilson_interval(total - successes, total)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.low < interval.high
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - interval.high, 1 - interval.low))


@pytest.mark.parametrize(("successes", "total"), [(3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(successes, total):
    with pytest.raises(ValueError, match="k"):
        wilson_interval(successes, total)


POPULATIONS = {  # values, and their mean
    "normal": (lambda rng, size: rng.normal(5, 1, size), 5.0),
    "uniform": (lambda rng, size: rng.uniform(0, 10, size), 5.0),
    "gamma": (lambda rng, size: rng.gamma(4, 1, size), 4.0),
    "exponential": (lambda rng, size: rng.exponential(2, size), 2.0),
    "log-normal": (lambda rng, size: rng.lognormal(0, 0.5, size), math.exp(0.125)),
    "heavy tail": (lambda rng, size: rng.lognormal(0, 1, size), math.exp(0.5)),
    "laplace": (lambda rng, size: rng.laplace(0, 1, size), 0.0),
}
SCORES = {  # from 0 to 1
    "fractions": (lambda rng, size: rng.beta(0.5, 2, size), 0.2),
    "rare fractions": (lambda rng, size: rng.beta(0.3, 3, size), 0.3 / 3.3),
    "attempts": (lambda rng, size: rng.binomial(8, rng.beta(2, 2, size)) / 8, 0.5),
}
# of 93% to 98% (symmetric values in five rows), with two standard deviations of 2,000 trials
COVERAGE = (0.92, 0.99)


def coverage(draw, truth: float, trials: int = 2000) -> float:
    """How often intervals hold the truth."""
    rng = np.random.default_rng(1)
    return sum(not draw(rng).excludes(truth) for _ in range(trials)) / trials


@partly_nightly("count", [5, 10, 50], 3)
@partly_slow("population", list(POPULATIONS), 0, 3)
def test_the_interval_of_a_mean_holds_it_as_often_as_it_says(population, count):
    draw, truth = POPULATIONS[population]
    found = coverage(lambda rng: mean_interval(draw(rng, count), range(count)), truth)
    assert COVERAGE[0] - 0.01 * (population == "heavy tail") <= found <= COVERAGE[1]


@partly_nightly("count", [5, 10, 50], 3)
@partly_slow("population", list(SCORES), 0)
def test_the_interval_of_a_score_holds_it_at_least_as_often_as_it_says(population, count):
    draw, truth = SCORES[population]
    found = coverage(lambda rng: mean_interval(draw(rng, count), range(count)), truth, trials=600)
    assert found >= 0.94 and (count < 50 or found <= 0.99)


def chances(values, probabilities, count):
    """All samples of a discrete population, as often as they are drawn."""
    for numbers in itertools.product(range(count + 1), repeat=len(values)):
        if sum(numbers) == count:
            yield np.repeat(values, numbers), scipy.stats.multinomial.pmf(numbers, count, probabilities)


@partly_nightly("count", [5, 8, 15], 3)
@pytest.mark.parametrize(
    ("values", "probabilities"),
    [
        ((0.0, 0.1, 1.0), (0.2, 0.6, 0.2)),
        ((0.0, 0.1, 1.0), (0.1, 0.85, 0.05)),
        ((0.0, 0.1, 1.0), (0.02, 0.96, 0.02)),
        ((0.1, 1.0), (0.94, 0.06)),
        ((0.0, 0.25), (0.3, 0.7)),
        ((0.0, 0.5, 1.0), (0.1, 0.8, 0.1)),
    ],
)
def test_the_interval_of_graded_scores_leaves_room_for_a_rare_one(values, probabilities, count):
    truth = np.dot(values, probabilities)
    found = sum(
        chance
        for drawn, chance in chances(values, probabilities, count)
        if not mean_interval(drawn, range(count)).excludes(truth)
    )
    assert found >= 0.95 - 1e-9


@partly_nightly("count", [5, 15, 40], 3)
@pytest.mark.parametrize(
    ("values", "probabilities"),
    [((1.0, 1.1, 10.0), (0.1, 0.85, 0.05)), ((2.0, 3.0, 7.0), (0.5, 0.3, 0.2)), ((0.0, 10.0), (0.9, 0.1))],
)
def test_values_that_mostly_agree_have_an_interval_only_if_enough_differ(values, probabilities, count):
    truth = np.dot(values, probabilities)
    intervals = [
        (mean_interval(drawn, range(count)), chance)
        for drawn, chance in chances(values, probabilities, count)
        if drawn.max() > 1
    ]
    assert sum(chance for each, chance in intervals if each.excludes(truth)) <= 0.07
    assert mean_interval([3.0] * 21 + [4.0] * 20, range(41)).low > -math.inf
    assert mean_interval([3.0] * 21 + [4.0] * 19, range(40)).low == -math.inf


@pytest.mark.parametrize(("solved", "count"), [(0, 5), (1, 5), (3, 8), (20, 40), (5, 1000), (500, 1000)])
def test_the_interval_of_scores_is_clopper_and_pearsons_for_verdicts(solved, count):
    sums = np.stack([np.repeat([1.0, 0.0], [solved, count - solved]), np.ones(count)], axis=1)
    interval, exact = (
        statistics.score_interval(sums, 0.0, 1.0),
        scipy.stats.binomtest(solved, count).proportion_ci(0.95, "exact"),
    )
    assert (interval.low, interval.high) == pytest.approx((exact.low, exact.high), abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_of_scores_is_a_quantile_of_means_under_exponential_weights(seed):
    rng = np.random.default_rng(seed)
    count, weights = rng.integers(2, 60), rng.standard_exponential((20_000, 61))
    values = rng.beta(0.5, 0.5, count).round(2)
    weights, interval = weights[:, : count + 1], mean_interval(values, range(count))
    for end, quantile, bound in ((0.0, 0.025, interval.low), (1.0, 0.975, interval.high)):
        means = weights @ [*values, end] / weights.sum(axis=1)
        assert (means <= bound).mean() == pytest.approx(quantile, abs=0.005)


@partly_nightly("count", [5, 10, 20], 3)
def test_the_interval_of_a_rate_holds_it_as_often_as_it_says(count):
    """Over all rates: of a single one no interval can, as few counts are possible."""
    rates = np.linspace(0.005, 0.995, 199)
    intervals = [
        mean_interval([1.0] * solved + [0.0] * (count - solved), range(count)) for solved in range(count + 1)
    ]
    chances = [
        math.comb(count, solved) * rates**solved * (1 - rates) ** (count - solved)
        for solved in range(count + 1)
    ]
    held = sum(
        chance * [not each.excludes(rate) for rate in rates]
        for chance, each in zip(chances, intervals, strict=True)
    )
    assert 0.93 <= held.mean() <= 0.97


@pytest.mark.slow
@partly_nightly("count", [5, 10, 40], 3)
def test_the_interval_of_a_rate_in_groups_holds_it_as_often_as_it_says(count):
    def draw(rng):
        sizes = rng.integers(1, 8, count)
        groups = np.repeat(np.arange(count), sizes)
        return (rng.random(len(groups)) < rng.beta(1, 1, count)[groups]).astype(float), groups

    assert coverage(lambda rng: mean_interval(*draw(rng)), 0.5, trials=600) >= 0.94
    rows = coverage(
        lambda rng: (lambda values, groups: mean_interval(values, range(len(values))))(*draw(rng)), 0.5
    )
    assert rows < 0.9  # rows alone would say too much


@pytest.mark.slow
@partly_nightly("count", [5, 10, 40], 3)
def test_the_interval_of_a_difference_holds_it_as_often_as_it_says(count):
    def verdicts(rng):
        solved = rng.random((2, count)) < np.array([[0.4], [0.6]])
        return paired_difference(*solved.astype(float), range(count))

    def rewards(rng):
        skill = rng.normal(size=count)
        return paired_difference(skill, skill + 0.3 + 0.5 * rng.normal(size=count), range(count))

    def in_groups(rng):
        groups = np.repeat(np.arange(count), rng.integers(1, 6, count))
        return paired_difference(
            np.zeros(len(groups)), 0.3 + rng.normal(size=count)[groups] + rng.normal(size=len(groups)), groups
        )

    def skewed(rng):
        return paired_difference(np.zeros(count), rng.exponential(2, count), range(count))

    def attempts(rng):
        groups = np.repeat(np.arange(count), rng.integers(1, 20, count))
        solved = rng.random((2, len(groups))) < rng.beta(2, 2, count)[groups] * np.array([[0.5], [0.6]])
        return paired_difference(*solved.astype(float), groups)

    def fractions(rng):
        skill = rng.beta(0.5, 2, count)
        return paired_difference(skill, (skill + rng.beta(0.5, 2, count)) / 2, range(count))

    def graded(rng):
        scores = rng.choice([0.0, 0.1, 1.0], p=[0.1, 0.85, 0.05], size=(2, count))
        return paired_difference(*scores, range(count))

    assert COVERAGE[0] <= coverage(verdicts, 0.2) <= COVERAGE[1]
    assert COVERAGE[0] <= coverage(rewards, 0.3) <= COVERAGE[1]
    assert COVERAGE[0] <= coverage(in_groups, 0.3) <= COVERAGE[1]
    assert COVERAGE[0] <= coverage(skewed, 2.0) <= COVERAGE[1]
    assert COVERAGE[0] <= coverage(attempts, 0.05) <= COVERAGE[1]
    assert COVERAGE[0] <= coverage(fractions, 0.0) <= COVERAGE[1] + 0.01 * (count == 5)
    assert coverage(graded, 0.0, trials=600) >= 0.95


@partly_nightly("count", [5, 10, 40], 3)
@pytest.mark.parametrize("shape", [1, 4, 16])
def test_the_interval_of_a_ratio_holds_it_as_often_as_it_says(shape, count):
    """As of nats per token, over documents of other lengths."""

    def draw(rng):
        tokens = rng.integers(20, 200, count)
        nats = tokens * rng.gamma(shape, 3 / shape, count)
        return group_interval(np.stack([nats, tokens], axis=1), ratio, range(count))

    assert COVERAGE[0] <= coverage(draw, 3.0) <= COVERAGE[1]


@given(seed=st.integers(0, 1000))
def test_order_of_rows_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    for values in (rng.integers(0, 2, 40), rng.normal(size=40)):
        groups, order = rng.integers(0, 12, 40), rng.permutation(40)
        one, two = mean_interval(values, groups), mean_interval(values[order], groups[order])
        assert (one.mean, one.low, one.high) == pytest.approx((two.mean, two.low, two.high))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(1, 4))
def test_the_interval_of_fractions_is_of_fractions(values, copies):
    interval = mean_interval(values * copies, list(range(len(values))) * copies)
    assert (
        interval.low == -math.inf
        or 0 <= interval.low <= interval.mean + 1e-12 <= interval.high + 2e-12 <= 1 + 3e-12
    )


def test_values_without_skewness_have_students_interval():
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    interval = mean_interval(values, range(7))
    # a degree of freedom less, for the skewness
    half = scipy.stats.t.ppf(0.975, 5) * np.std(values, ddof=1) / math.sqrt(7)
    assert (interval.low, interval.high) == pytest.approx((4 - half, 4 + half))
    assert paired_difference(np.zeros(7), values, range(7)) == interval


def test_the_interval_of_a_skewed_mean_is_longer_on_the_side_of_its_tail():
    interval = mean_interval([1.0, 1.1, 1.2, 1.3, 9.0, 1.2, 1.15], range(7))
    assert interval.high - interval.mean > 1.5 * (interval.mean - interval.low)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("count", [5, 12, 60])
def test_the_bound_on_the_side_of_the_tail_is_halls(count, sign):
    """Hall's transformation maps its deviation to Student's. The other bound is Student's itself."""
    values = np.random.default_rng(count).lognormal(1, 1, count)
    interval, student = (
        mean_interval(sign * values, range(count)),
        scipy.stats.t.ppf(0.975, count - 2) / math.sqrt(count),
    )
    skewness = scipy.stats.skew(values, bias=False) * (1 + 4 / count)
    # of the mean from the bounds, in standard deviations
    highest, lowest = (
        (values.mean() - bound) / np.std(values, ddof=1)
        for bound in sorted([sign * interval.low, sign * interval.high])
    )
    assert highest == pytest.approx(student) and lowest < -student
    hall = lowest + skewness * lowest**2 / 3 + skewness**2 * lowest**3 / 27 + skewness / (6 * count)
    assert hall == pytest.approx(-student)


@pytest.mark.parametrize(
    "values", [np.random.default_rng(4).normal(size=50), np.random.default_rng(4).integers(0, 2, 50)]
)
def test_copies_of_a_row_within_its_group_add_no_certainty(values):
    once, copied = (
        mean_interval(values, np.arange(50)),
        mean_interval(np.repeat(values, 5), np.repeat(np.arange(50), 5)),
    )
    assert (copied.mean, copied.low, copied.high) == pytest.approx((once.mean, once.low, once.high), abs=0.01)


def test_values_that_agree_have_the_interval_of_scores_or_none():
    same = mean_interval([0.5] * 8, range(8))
    # the weight of one more
    assert same.high - 0.5 == pytest.approx(0.5 - same.low) == pytest.approx(0.5 * (1 - 0.025 ** (1 / 8)))
    assert mean_interval([7.0] * 8, range(8)) == Interval(7.0, -math.inf, math.inf)
    same = paired_difference([0.5] * 8, [0.5] * 8, range(8))
    assert same.mean == 0 and same.low == pytest.approx(-same.high) and 0 < same.high < 0.4
    assert paired_difference([7.0] * 8, [7.0] * 8, range(8)) == Interval(0.0, -math.inf, math.inf)
    assert paired_difference([7.0] * 8, [8.0] * 8, range(8)) == Interval(1.0, -math.inf, math.inf)


def test_pairing_finds_a_gain_that_two_intervals_would_miss():
    rng = np.random.default_rng(8)
    difficulty = rng.normal(size=200)
    before, after = difficulty, difficulty + 0.1 + 0.2 * rng.normal(size=200)
    gain = paired_difference(before, after, np.arange(200))
    assert gain.excludes(0.0) and gain.mean == pytest.approx((after - before).mean())
    assert not paired_difference(before, before, np.arange(200)).excludes(0.0)
    lost = paired_difference(after, before, np.arange(200))
    assert (lost.low, lost.high) == pytest.approx((-gain.high, -gain.low))
    assert mean_interval(before, np.arange(200)).high > mean_interval(after, np.arange(200)).low


def test_a_single_group_excludes_nothing():
    interval = mean_interval([1.0, 1.0, 0.0], ["a", "a", "a"])
    assert interval.mean == pytest.approx(2 / 3) and not interval.excludes(0.0) and not interval.excludes(1e9)


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        ([], []),
        ([1.0, math.nan], [0, 1]),
        ([1.0, 2.0], [0]),
        ([[1.0]], [0]),
    ],
)
def test_errors_name_values_that_cannot_be_averaged(values, groups):
    with raises(DataError, where=None):
        mean_interval(values, groups)


def test_different_shapes_are_refused():
    with raises(DataError, where=None):
        paired_difference([0, 1], [0, 1, 1], [0, 1, 2])


def test_an_interval_is_formatted_with_its_bounds():
    interval = Interval(0.934, 0.912, 0.951)
    assert f"{interval:.1%}" == "93.4% [91.2%, 95.1%]" and f"{interval:+.2f}" == "+0.93 [+0.91, +0.95]"
    assert (
        interval.excludes(0.0) and not interval.excludes(0.951) and not Interval(0.0, 0.0, 0.0).excludes(0.0)
    )


def test_holm_is_the_hand_calculation():
    # sorted: .01 * 4, .02 * 3, .03 * 2, .04 * 1; each at least the one before
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    # Aickin and Gensler 1996, table 2
    assert holm([0.005, 0.011, 0.02, 0.04, 0.13]) == pytest.approx([0.025, 0.044, 0.06, 0.08, 0.13])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([0.2]) == [0.2] and holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_between_no_correction_and_bonferroni_and_keeps_the_order(p_values):
    adjusted = holm(p_values)
    assert all(p <= q <= min(1.0, len(p_values) * p) + 1e-12 for p, q in zip(p_values, adjusted, strict=True))
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    assert [adjusted[index] for index in order] == sorted(adjusted)


def test_sign_flips_equal_their_enumeration():
    values, groups = np.array([0.5, 0.25, 1.0, -0.25, 0.75, 0.5, 0.0]), [0, 0, 1, 2, 3, 4, 5]
    sums = [0.75, 1.0, -0.25, 0.75, 0.5]
    flips = [
        abs(sum(sign * each for sign, each in zip(signs, sums, strict=True)))
        for signs in itertools.product((1, -1), repeat=5)
    ]
    exact = sum(flip >= abs(sum(sums)) for flip in flips) / len(flips)
    assert sign_flip_p_value(values, groups) == exact
    assert (
        sign_flip_p_value(values, groups)
        == sign_flip_p_value(-values, groups)
        == sign_flip_p_value(values[::-1], groups[::-1])
    )


@pytest.mark.parametrize(("count", "smallest"), [(1, 1.0), (2, 0.5), (5, 2 / 32)])
def test_few_groups_are_never_significant_by_themselves(count, smallest):
    assert sign_flip_p_value(np.ones(40), np.arange(40) % count) == smallest


def test_drawn_flips_agree_with_all_flips():
    values = np.random.default_rng(10).normal(0.3, 1.0, size=12)
    exact, drawn = sign_flip_p_value(values, range(12)), sign_flip_p_value(values, range(12), samples=4000)
    assert drawn != exact and abs(drawn - exact) < 4 * math.sqrt(exact / 4000)


def test_no_difference_has_p_value_one():
    assert sign_flip_p_value(np.zeros(5), range(5)) == 1.0


def test_true_hypotheses_are_rejected_at_most_as_often_as_stated_also_of_many_with_few_groups_that_differ():
    rng, trials, single, family = np.random.default_rng(9), 150, 0, 0
    for _ in range(trials):
        p_values = []
        for _ in range(4):  # tasks: two models of equal skill, that differ in a tenth of the groups
            groups = np.repeat(np.arange(40), rng.integers(1, 5, 40))
            change = rng.choice([-1, 0, 1], p=[0.05, 0.9, 0.05], size=40)[groups]
            p_values.append(sign_flip_p_value(change, groups, samples=600))
        single += p_values[0] <= 0.05
        family += min(holm(p_values)) <= 0.05
    assert single / trials <= 0.09 and family / trials <= 0.09  # 0.05 and two standard deviations


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (8, 2.306), (31, 2.040), (1000, 1.962)]
)
def test_students_quantiles_are_those_of_the_tables(degrees, expected):
    assert statistics.student_quantile(degrees) == pytest.approx(expected, abs=5e-4)
    assert statistics.student_quantile(0) == math.inf


@pytest.mark.filterwarnings("error")
def test_the_bounds_of_an_infinite_statistic_are_infinite():
    """As of a text with the mask token, which no model predicts."""
    found = group_interval(np.array([[math.inf, 1.0], [2.0, 1.0]] * 2), ratio, range(4))
    assert (found.mean, found.low, found.high) == (math.inf, -math.inf, math.inf)
