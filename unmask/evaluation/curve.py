"""Speed against quality: the score of a model at several settings of its sampler, and the area under that
curve.

Shapes: N items, M points of a curve, R sets of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from unmask.config.sampler import SamplerConfig
from unmask.config.yaml import parse_yaml
from unmask.errors import ConfigError, DataError, did_you_mean
from unmask.evaluation.result_file import Metric, TaskScores
from unmask.evaluation.statistics import group_interval, ratio

SETTINGS = (
    "steps",
    "tokens_per_step",
    "threshold",
    "factor",
    "entropy_bound",
    "max_denoising_steps",
    "cache",
    "refresh_interval",
    "early_commit",
)
"""The settings of a sampler that trade quality for speed."""
SPEEDS = ("passes", "tokens per pass")
"""The metrics that `with_speed` adds."""
PENALTY, TOLERATED = 3.0, 5.0  # of AUP: alpha, and the points of accuracy that a curve may lose
AUP = "AUP"
"""The metric of `curve_scores`."""


def curve_samplers(sampler: SamplerConfig, curve: str) -> list[SamplerConfig]:
    """The sampler at each point of a curve such as "steps=8,16,32".

    Raises:
        ConfigError: the text is no such curve, its setting is not among SETTINGS or is set besides, or a
            value does not fit the rest of the sampler.
    """
    name, _, text = curve.partition("=")
    values = [value.strip() for value in text.split(",")]
    if name not in SETTINGS:
        remedy = did_you_mean(name, SETTINGS)
        raise ConfigError(f"{name!r} is no setting of speed", where="curve", remedy=remedy)
    if name in sampler.model_fields_set:
        what = "contradicts the curve, which sets it at each point"
        raise ConfigError(what, where=name, remedy="Leave one of them out")
    points = [
        SamplerConfig(**{**sampler.model_dump(exclude_unset=True), name: parse_yaml(value, "curve")})
        for value in values
        if value
    ]
    if len({getattr(point, name) for point in points}) < max(2, len(values)):
        remedy = "Give two different values or more, as steps=8,16,32"
        raise ConfigError(f"{text!r} are not the points of a curve", where="curve", remedy=remedy)
    return points


def with_speed(scores: TaskScores) -> TaskScores:
    """The scores with two more metrics: forward passes per item, which are a score of each item too, and
    tokens per forward pass (of all items together)."""
    groups = [item.group for item in scores.items]
    passes = [(item.passes, 1.0) for item in scores.items]
    work = [(item.tokens, float(item.passes)) for item in scores.items]
    per_item, per_pass = (group_interval(np.array(sums_N2), ratio, groups) for sums_N2 in (passes, work))
    speeds = (Metric.of(per_item, higher_is_better=False), Metric.of(per_pass))
    items = [
        item.model_copy(
            update={"scores": item.scores | {"passes": float(item.passes)} if item.scores else {}}
        )
        for item in scores.items
    ]
    metrics = scores.metrics | dict(zip(SPEEDS, speeds, strict=True))
    return scores.model_copy(update={"metrics": metrics, "items": items})


def aup(tokens_per_pass: ArrayLike, percent: ArrayLike, best: float | None = None) -> np.ndarray:
    """Accuracy under parallelism: the area under the curve of accuracy against parallelism, in which points
    count less the further they are below the best accuracy. Points more than 5 percentage points below the
    slowest one are left out. Accuracies of exp(-3 (1 - y / best)) and tokens per pass r, in ascending order
    of r:

        r_1 y_1 + sum over i > 1 of (r_i - r_(i-1)) (y_i w(y_i) + y_(i-1) w(y_(i-1))) / 2

    Args:
        tokens_per_pass: [..., M], positive.
        percent: [..., M], accuracies from 0 to 100.
        best: the best accuracy on the task, of any method that is compared; None: that of this curve.

    Returns:
        [...], in percentage points times tokens per pass.

    Source: Y.-Y. Qian et al., "d3LLM: Ultra-Fast Diffusion LLM using Pseudo-Trajectory Distillation" (2026).
    Their code refuses a curve whose fastest point is left out; their text, and this, leave the point out.
    """
    rate_M, percent_M = np.asarray(tokens_per_pass, dtype=np.float64), np.asarray(percent, dtype=np.float64)
    order_M = np.argsort(rate_M, axis=-1, kind="stable")
    rate_M, percent_M = np.take_along_axis(rate_M, order_M, -1), np.take_along_axis(percent_M, order_M, -1)
    top = percent_M.max(-1, keepdims=True) if best is None else np.float64(best)
    # A point that is left out repeats the last one that counts: between equal points there is no area.
    kept_M = np.where(percent_M >= percent_M[..., :1] - TOLERATED, np.arange(rate_M.shape[-1]), 0)
    kept_M = np.maximum.accumulate(kept_M, axis=-1)
    rate_M, percent_M = np.take_along_axis(rate_M, kept_M, -1), np.take_along_axis(percent_M, kept_M, -1)
    weighted_M = percent_M * np.minimum(np.exp(-PENALTY * (1 - percent_M / np.where(top > 0, top, 1.0))), 1.0)
    areas_M = np.diff(rate_M, axis=-1) * (weighted_M[..., 1:] + weighted_M[..., :-1]) / 2
    area: np.ndarray = rate_M[..., 0] * percent_M[..., 0] + areas_M.sum(-1)
    return area


def area_under(points: Sequence[TaskScores]) -> float:
    """AUP of the points of a curve, over the items that are scored at all of them. Its best accuracy is that
    of the curve. It has no interval: it jumps where a point is left out, and neither jackknife nor bootstrap
    holds the truth as often as it says.

    Raises:
        DataError: no item is scored at all points.
    """
    scored = [{item.id: item for item in point.items if "solved" in item.scores} for point in points]
    shared = sorted(set.intersection(*(set(items) for items in scored))) if scored else []
    if not shared:
        raise DataError(
            "no item has the score 'solved' at all points",
            where="curve",
            remedy="Evaluate all points on the same problems",
        )
    parts = [[items[name] for name in shared] for items in scored]
    rates = [sum(item.tokens for item in part) / sum(item.passes for item in part) for part in parts]
    percent = [100 * sum(item.scores["solved"] for item in part) / len(part) for part in parts]
    return float(aup(rates, percent))


def curve_scores(curve: str, points: Sequence[TaskScores]) -> TaskScores | None:
    """AUP of a task's points as a part of the result file, which has no items of its own; None if no item has
    a verdict at all points.

    Args:
        curve: as of `curve_samplers`.
    """
    try:
        area = area_under(points)
    except DataError:
        return None
    protocol = {"task": points[0].task, "curve": curve, "penalty": PENALTY, "tolerated_points": TOLERATED}
    return TaskScores(task=f"{points[0].task}, curve", protocol=protocol, metrics={AUP: Metric(mean=area)})
