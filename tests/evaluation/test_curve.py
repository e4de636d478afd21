"""Curves of speed against quality: AUP against hand calculations, its interval, and what is no curve."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, DataError
from unmask.evaluation.curve import area_under, aup, curve_samplers, with_speed
from unmask.evaluation.result_file import Item, TaskScores


def test_aup_of_a_curve_without_loss_is_the_plain_area():
    # 1 * 80, and (3 - 1) * 80, and (5 - 3) * 80
    assert aup([1, 3, 5], [80, 80, 80]) == pytest.approx(400.0)


def test_aup_of_a_curve_that_loses_too_much_ends_before():
    # 75 = 80 - 5 counts at 2 tokens per pass, 74 at 4 does not. w(75) = exp(-3 * 5 / 80) = 0.829029, w(80) =
    # 1: 80 + (2 - 1) / 2 * (75 * 0.829029 + 80) = 80 + 0.5 * (62.177182 + 80) = 151.088591
    assert aup([1, 2, 4], [80, 75, 74]) == pytest.approx(151.088591, abs=1e-5)


def test_aup_of_a_curve_below_the_best_of_other_methods_with_a_gap_and_out_of_order():
    # In order: (2, 60), (3, 50), (4, 58), (8, 64); 50 < 60 - 5 is left out. With the best 100:
    # w(60) = exp(-1.2) = 0.301194, w(58) = exp(-1.26) = 0.283654, w(64) = exp(-1.08) = 0.339596
    # 2 * 60 + 2 / 2 * (58 * 0.283654 + 60 * 0.301194) + 4 / 2 * (64 * 0.339596 + 58 * 0.283654)
    #   = 120 + (16.451932 + 18.071653) + 2 * (21.734109 + 16.451932) = 230.895666
    assert aup([8, 2, 4, 3], [64, 60, 58, 50], best=100) == pytest.approx(230.895666, abs=1e-4)


def test_aup_of_a_single_point_and_of_a_model_that_solves_nothing():
    assert aup([2], [70]) == 140 and aup([1, 2], [0, 0]) == 0


points = st.lists(st.tuples(st.floats(0.5, 30), st.floats(1, 100)), min_size=1, max_size=7)


@given(points, st.none() | st.floats(50, 100))
def test_aup_is_the_published_formula(pairs, best):
    """Written from the formula, one point at a time."""
    pairs = sorted(pairs, key=lambda pair: pair[0])
    top = max(y for _, y in pairs) if best is None else best
    kept = [(rate, y, min(math.exp(-3 * (1 - y / top)), 1)) for rate, y in pairs if y >= pairs[0][1] - 5]
    sum_of_trapezoids = sum(
        (r - q) * (y * w + x * v) / 2 for (q, x, v), (r, y, w) in itertools.pairwise(kept)
    )
    assert aup(*zip(*pairs, strict=True), best=best) == pytest.approx(
        kept[0][0] * kept[0][1] + sum_of_trapezoids
    )


def point(solved, passes, *, tokens=8):
    items = [
        Item(id=str(n), group=str(n), scores={"solved": float(value)}, tokens=tokens, passes=passes)
        for n, value in enumerate(solved)
    ]
    return TaskScores(task="shuffle", protocol={}, metrics={}, items=items)


def test_the_area_of_points_is_that_of_their_scores_and_rates():
    solved = [1] * 8 + [0] * 2
    assert (
        area_under([point(solved, 8), point(solved, 2)])
        == pytest.approx(aup([1, 4], [80, 80]))
        == pytest.approx(320)
    )


def test_without_shared_items_there_is_no_area():
    other = TaskScores(
        task="shuffle",
        protocol={},
        metrics={},
        items=[Item(id="z", group="z", scores={"solved": 1.0}, tokens=1, passes=1)],
    )
    with raises(DataError, where="curve"):
        area_under([point([1], 8), other])


def test_speed_is_measured_over_all_items_together():
    items = [
        Item(id=str(n), group=str(n), tokens=tokens, passes=passes)
        for n, (tokens, passes) in enumerate([(8, 2), (2, 2), (8, 4)])
    ]
    metrics = with_speed(TaskScores(task="t", protocol={}, metrics={}, items=items)).metrics
    assert metrics["tokens per pass"].mean == 18 / 8 and metrics["passes"].mean == pytest.approx(8 / 3)
    assert metrics["tokens per pass"].low < 18 / 8 < metrics["tokens per pass"].high
    assert not metrics["passes"].higher_is_better


def test_passes_are_no_success_rate():
    """One pass for each item is no 100%, whose interval would reach below 1."""
    items = [Item(id=str(n), group=str(n), tokens=4, passes=1) for n in range(5)]
    passes = with_speed(TaskScores(task="t", protocol={}, metrics={}, items=items)).metrics["passes"]
    assert (passes.low, passes.mean, passes.high) == (None, 1, None)


def test_points_keep_the_rest_of_the_sampler():
    sampler = SamplerConfig(seed=3, remasking="entropy")
    samplers = curve_samplers(sampler, "entropy_bound=0.1, 0.5,1")
    assert [each.entropy_bound for each in samplers] == [0.1, 0.5, 1.0] and {
        each.remasking for each in samplers
    } == {"entropy"}
    assert {each.seed for each in samplers} == {3}
    assert [each.cache for each in curve_samplers(SamplerConfig(), "cache=exact,prefix,dual")] == [
        "exact",
        "prefix",
        "dual",
    ]
    for name in ("steps", "max_denoising_steps"):
        points = curve_samplers(SamplerConfig(), f"{name}=8,16")
        assert [getattr(each, name) for each in points] == [8, 16]


@pytest.mark.parametrize(
    ("curve", "where"),
    [
        ("step=8,16", "curve"),
        ("seed=1,2", "curve"),
        ("steps", "curve"),
        ("steps=8", "curve"),
        ("steps=8,8", "curve"),
        ("threshold=0.5,0.50", "curve"),
        ("steps=8,,16", "curve"),
        ("steps=8,x", "steps"),
        ("threshold=0.5,2", "threshold"),
        ("entropy_bound=0.1,x", "entropy_bound"),
        ("cache=exact,lossy", "cache"),
    ],
)
def test_what_is_no_curve_is_one_error(curve, where):
    with raises(ConfigError, where=where):
        curve_samplers(SamplerConfig(), curve)


def test_a_curve_contradicts_another_rule_of_the_sampler():
    with raises(ConfigError, where="threshold"):
        curve_samplers(SamplerConfig(threshold=0.9), "steps=8,16")
    with raises(ConfigError, where="steps"):
        curve_samplers(SamplerConfig(steps=4), "steps=8,16")
