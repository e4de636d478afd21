"""Confidence intervals: known values, coverage on simulated data, and invariances."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.errors import DataError
from unmask.evaluation import statistics
from unmask.evaluation.statistics import Interval, group_bootstrap_mean, holm, paired_difference, sign_flip_p_value, wilson_interval


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [(5, 10, 0.2366, 0.7634), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],  # the last: Newcombe 1998, table I
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


@pytest.mark.parametrize(("successes", "total"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(successes, total):
    with pytest.raises(DataError, match=f"{successes} successes out of {total}"):
        wilson_interval(successes, total)


def grouped_rows(rng: np.random.Generator, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with mean 0 in groups of different sizes; the effect common to a group is as large as the noise."""
    sizes = rng.integers(1, 8, num_groups)
    groups = np.repeat(np.arange(num_groups), sizes)
    return rng.normal(size=num_groups)[groups] + rng.normal(size=len(groups)), groups


def test_coverage_is_near_nominal_and_rows_alone_would_cover_too_little():
    rng, trials, by_group, by_row = np.random.default_rng(1), 300, 0, 0
    for _ in range(trials):
        values, groups = grouped_rows(rng, num_groups=60)
        by_group += not group_bootstrap_mean(values, groups, samples=400).excludes(0.0)
        by_row += not group_bootstrap_mean(values, np.arange(len(values)), samples=400).excludes(0.0)
    assert 0.90 <= by_group / trials <= 0.98
    assert by_row / trials < 0.85


@given(seed=st.integers(0, 1000))
def test_order_of_rows_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    solved, groups = rng.integers(0, 2, 40), rng.integers(0, 12, 40)
    order = rng.permutation(40)
    assert group_bootstrap_mean(solved, groups, samples=50) == group_bootstrap_mean(solved[order], groups[order], samples=50)


def test_groups_of_one_row_are_the_ordinary_bootstrap():
    values = np.random.default_rng(2).normal(size=200)
    interval = group_bootstrap_mean(values, [f"row {i}" for i in range(200)], samples=20_000)
    ordinary = np.random.default_rng(3).choice(values, size=(20_000, 200)).mean(axis=1)
    assert (interval.low, interval.high) == pytest.approx(np.quantile(ordinary, [0.025, 0.975]), abs=0.01)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(200), rel=0.05)


def test_copies_of_a_row_within_its_group_add_no_certainty():
    values = np.random.default_rng(4).normal(size=50)
    once = group_bootstrap_mean(values, np.arange(50))
    copied = group_bootstrap_mean(np.repeat(values, 5), np.repeat(np.arange(50), 5))
    assert (copied.mean, copied.low, copied.high) == pytest.approx((once.mean, once.low, once.high))


def test_memory_bound_does_not_change_the_result(monkeypatch):
    values, groups = grouped_rows(np.random.default_rng(5), num_groups=20)
    whole = group_bootstrap_mean(values, groups, samples=100)
    monkeypatch.setattr(statistics, "RESAMPLED_AT_ONCE", 60)
    assert group_bootstrap_mean(values, groups, samples=100) == whole


def test_pairing_finds_a_gain_that_two_intervals_would_miss():
    rng = np.random.default_rng(8)
    difficulty = rng.normal(size=200)
    before, after = difficulty, difficulty + 0.1 + 0.2 * rng.normal(size=200)
    gain = paired_difference(before, after, np.arange(200))
    assert gain.excludes(0.0) and gain.mean == pytest.approx((after - before).mean())
    assert not paired_difference(before, before, np.arange(200)).excludes(0.0)
    lost = paired_difference(after, before, np.arange(200))
    assert (lost.low, lost.high) == pytest.approx((-gain.high, -gain.low))
    assert group_bootstrap_mean(before, np.arange(200)).high > group_bootstrap_mean(after, np.arange(200)).low


def test_a_single_group_excludes_nothing():
    interval = group_bootstrap_mean([1.0, 1.0, 0.0], ["a", "a", "a"])
    assert interval.mean == pytest.approx(2 / 3) and not interval.excludes(0.0) and not interval.excludes(1e9)


@pytest.mark.parametrize(
    ("values", "groups", "named"),
    [
        ([], [], "shape"),
        ([1.0, math.nan], [0, 1], "value 1 to average is not finite"),
        ([1.0, 2.0], [0], "1 groups for 2 values"),
        ([[1.0]], [0], "shape"),
    ],
)
def test_errors_name_values_that_cannot_be_averaged(values, groups, named):
    with pytest.raises(DataError, match=named):
        group_bootstrap_mean(values, groups)


def test_different_shapes_are_refused():
    with pytest.raises(DataError, match="2 values before and 3 after"):
        paired_difference([0, 1], [0, 1, 1], [0, 1, 2])


def test_an_interval_is_formatted_with_its_bounds():
    interval = Interval(0.934, 0.912, 0.951)
    assert f"{interval:.1%}" == "93.4% [91.2%, 95.1%]" and f"{interval:+.2f}" == "+0.93 [+0.91, +0.95]"
    assert interval.excludes(0.0) and not interval.excludes(0.951) and not Interval(0.0, 0.0, 0.0).excludes(0.0)


def test_holm_is_the_hand_calculation():
    # sorted: .01 * 4, .02 * 3, .03 * 2, .04 * 1; each at least the one before
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.005, 0.011, 0.02, 0.04, 0.13]) == pytest.approx([0.025, 0.044, 0.06, 0.08, 0.13])  # Aickin and Gensler 1996, table 2
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
    flips = [abs(sum(sign * each for sign, each in zip(signs, sums, strict=True))) for signs in itertools.product((1, -1), repeat=5)]
    exact = sum(flip >= abs(sum(sums)) for flip in flips) / len(flips)
    assert sign_flip_p_value(values, groups) == exact
    assert sign_flip_p_value(values, groups) == sign_flip_p_value(-values, groups) == sign_flip_p_value(values[::-1], groups[::-1])


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


@pytest.mark.parametrize(("degrees", "expected"), [(3, 3.182), (8, 2.306), (31, 2.040), (1000, 1.962)])
def test_students_quantiles_are_those_of_the_tables(degrees, expected):
    assert statistics.student_quantile(0.975, degrees) == pytest.approx(expected, rel=0.012 if degrees < 5 else 1e-3)
    assert statistics.student_quantile(0.975, 0) == math.inf


@pytest.mark.filterwarnings("error")
def test_the_bounds_of_an_infinite_statistic_are_infinite():
    """As of a text with the mask token, which no model predicts."""
    found = statistics.group_bootstrap(np.array([[math.inf, 1.0], [2.0, 1.0]]), lambda sums_R2: sums_R2[:, 0] / sums_R2[:, 1], ["a", "b"])
    assert (found.mean, found.low, found.high) == (math.inf, -math.inf, math.inf)
