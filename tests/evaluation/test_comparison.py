"""Comparisons of results: what is paired with what, how sure a difference is, and the picture."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from tests.errors import raises
from unmask.errors import ConfigError, DataError
from unmask.evaluation.comparison import Named, compare
from unmask.evaluation.forest_plot import check_picture, write_forest_plot
from unmask.evaluation.result_file import EvaluationResult, Item, Metric, TaskScores
from unmask.evaluation.statistics import holm


def part(scores, task="sudoku", *, groups=None, metric="solved", lower=False, **protocol):
    """The scores of a task from those of its items, by id."""
    items = [
        Item(id=name, group=(groups or {}).get(name, name), scores={} if score is None else {metric: score})
        for name, score in scores.items()
    ]
    return TaskScores(
        task=task,
        protocol=protocol,
        metrics={metric: Metric(mean=0.5, higher_is_better=not lower)},
        items=items,
    )


def result(name, *parts):
    return Named(name, EvaluationResult(model={"path": name}, arguments={}, tasks=list(parts)))


def numbered(values):
    return {f"{number:03}": value for number, value in enumerate(values)}


def test_shared_items_are_paired_by_id_whatever_their_order():
    before = part({"a": 0.0, "b": 0.0, "c": 1.0, "x": 1.0, "n": None})
    after = part({"n": 1.0, "c": 1.0, "y": 0.0, "z": 0.0, "b": 1.0, "a": 0.0})
    (difference,), (shared,) = compare([result("A", before), result("B", after)])
    assert (difference.items, difference.before, difference.after) == (
        3,
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
    )
    assert difference.change.mean == pytest.approx(1 / 3) and difference.fraction
    assert (shared.shared, shared.only_first, shared.only_other, shared.unscored) == (4, 1, 2, 1)


def test_the_order_of_files_of_items_changes_nothing_but_the_sign():
    rng = np.random.default_rng(0)
    before, after = (numbered(rng.integers(0, 2, 60).astype(float)) for _ in range(2))
    turned = dict(reversed(after.items()))
    (forth,), _ = compare([result("A", part(before)), result("B", part(after))])
    assert compare([result("A", part(before)), result("B", part(turned))]).differences == [forth]
    (back,), _ = compare([result("B", part(after)), result("A", part(before))])
    assert (back.change.low, back.change.high) == pytest.approx(
        (-forth.change.high, -forth.change.low)
    ) and back.p_value == forth.p_value


def test_items_of_one_group_count_as_one():
    groups = {f"{number:03}": str(number // 20) for number in range(100)}
    before, after = numbered([0.0] * 100), numbered([1.0] * 60 + [0.0] * 40)
    (alone,), _ = compare([result("A", part(before)), result("B", part(after))])
    (grouped,), _ = compare(
        [result("A", part(before, groups=groups)), result("B", part(after, groups=groups))]
    )
    assert alone.significant and alone.verdict == "better"
    assert grouped.change.mean == alone.change.mean and grouped.p_value == 0.25 and not grouped.verdict


def test_all_differences_are_corrected_together_and_lower_may_be_better():
    before = [part(numbered([0.0] * 8), task) for task in ("a", "b")] + [
        part(numbered([0.75] * 12), "c", metric="nats", lower=True)
    ]
    after = [part(numbered([1.0] * 8), task) for task in ("a", "b")] + [
        part(numbered([0.25] * 12), "c", metric="nats", lower=True)
    ]
    found, _ = compare([result("A", *before), result("B", *after), result("C", *before)])
    assert [(each.task, each.other) for each in found] == [(task, other) for other in "BC" for task in "abc"]
    assert [each.adjusted for each in found] == holm([each.p_value for each in found])
    assert found[0].p_value == 2 / 2**8 and found[0].adjusted == 5 * 2 / 2**8  # after that of c
    assert [each.verdict for each in found] == ["better", "better", "better", "", "", ""]
    assert not found[2].fraction and found[2].change.mean == -0.5


def test_other_protocols_are_compared_and_named():
    before = part({"a": 1.0}, seed=0, sampler={"steps": 8, "remasking": "low_confidence"}, shots=4)
    after = part({"a": 1.0}, seed=0, sampler={"steps": None, "remasking": "low_confidence"}, style="chat")
    assert compare([result("A", before), result("B", after)]).shared[0].settings == [
        ("sampler.steps", "8", "unset"),
        ("shots", "4", "unset"),
        ("style", "unset", "chat"),
    ]


def test_points_of_a_curve_are_compared_each_with_its_own():
    points = [part({"a": float(steps == 8)}, sampler={"steps": steps, "seed": 0}) for steps in (4, 8)]
    found, _ = compare([result("A", *points), result("B", *points)])
    assert [(each.task, each.before) for each in found] == [
        ("sudoku, steps 4", 0.0),
        ("sudoku, steps 8", 1.0),
    ]


@pytest.mark.parametrize(
    ("results", "where"),
    [
        ([result("A", part({"a": 1.0}))], "compare"),
        ([result("A", part({"a": 1.0})), result("B", part({"b": 1.0}))], "B"),
        ([result("A", part({"a": 1.0})), result("B", part({"a": 1.0}, "count"))], "B"),
        ([result("A", part({"a": 1.0})), result("B", part({"a": None}))], "B"),
        ([result("A", part({"a": 1.0})), result("B")], "B"),
        ([result("A", part({"a": 1.0}), part({"b": 1.0})), result("B", part({"a": 1.0}))], "A"),
    ],
)
def test_what_cannot_be_compared_is_one_error(results, where):
    with raises(DataError, where=where):
        compare(results)


def test_an_item_that_is_there_twice_is_an_error():
    one = part({"a": 1.0})
    twice = one.model_copy(update={"items": one.items * 2})
    with raises(DataError, where="B"):
        compare([result("A", one), result("B", twice)])


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say_where_items_depend_on_each_other():
    rng, trials, by_group, by_item = np.random.default_rng(1), 200, 0, 0
    for _ in range(trials):
        group = np.repeat(np.arange(50), rng.integers(1, 6, 50))
        ability = rng.uniform(size=50)[group]  # of the problem: common to both models
        # what the second model gains on this group; 0.05 on average
        shift = rng.choice([-0.4, 0.5], p=[0.5, 0.5], size=50)[group]
        before = rng.uniform(size=len(group)) < ability.clip(0.4, 0.5)
        after = rng.uniform(size=len(group)) < ability.clip(0.4, 0.5) + shift
        of_group = {f"{number:03}": str(name) for number, name in enumerate(group)}
        for groups in (of_group, None):
            sides = [
                result(name, part(numbered(side.astype(float)), groups=groups))
                for name, side in (("A", before), ("B", after))
            ]
            covered = not compare(sides).differences[0].change.excludes(0.05)
            if groups is None:
                by_item += covered
            else:
                by_group += covered
    assert 0.90 <= by_group / trials <= 0.98
    assert by_item < by_group


def test_the_picture_has_a_line_for_each_difference_and_text_is_escaped(tmp_path):
    rng = np.random.default_rng(2)
    tasks = ["sudoku", "<b>$x_1$</b> & more"]
    sides = [
        result(name, *(part(numbered(rng.uniform(size=20)), task) for task in tasks))
        for name in ("A", "B & <B>")
    ]
    comparison = compare(sides)
    for name in ("forest.svg", "forest.png", "again.svg"):
        write_forest_plot(comparison, "A", tmp_path / name)
    assert (tmp_path / "forest.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()
    assert (tmp_path / "forest.png").read_bytes().startswith(b"\x89PNG")
    ET.parse(tmp_path / "forest.svg")
    with raises(ConfigError, where="--picture"):
        check_picture(tmp_path / "forest.gif")


@pytest.mark.parametrize(
    ("metric", "fraction"),
    [("solved", True), ("acc_norm", True), ("nats per token", False), ("entropy", False), ("passes", False)],
)
def test_only_fractions_are_shown_in_percent(metric, fraction):
    parts = [result(name, part({"a": 0.2, "b": 0.9}, metric=metric)) for name in "AB"]
    assert compare(parts).differences[0].fraction == fraction


def test_an_item_with_an_infinite_score_is_not_compared():
    before, after = part({"a": 1.0, "b": math.inf, "c": 2.0}), part({"a": 2.0, "b": 1.0, "c": 3.0})
    (difference,) = compare([result("A", before), result("B", after)]).differences
    assert (difference.items, difference.change.mean) == (2, 1.0)
