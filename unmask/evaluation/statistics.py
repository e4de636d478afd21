"""Confidence intervals for evaluation: a success rate, a mean over rows in groups, a paired difference. Tests of many differences.

Shapes: N rows, C columns that are summed (2: the values, and ones that count them), G groups, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from unmask.errors import DataError

CONFIDENCE = 0.95
"""Of all intervals."""
SAMPLES = 10_000
"""Resamples of an interval, and flips of a test."""
RESAMPLED_AT_ONCE = 2_000_000  # groups drawn at once: 16 MB of indices


@dataclass(frozen=True)
class Interval:
    """A mean, or another statistic, and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether `value` is outside the bounds; a difference that excludes 0 is significant."""
        return not self.low <= value <= self.high

    def __format__(self, spec: str) -> str:
        """Mean and bounds, each formatted by `spec`, as in `93.4% [91.2%, 95.1%]`."""
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t, for 3 degrees of freedom or more to 1% at 95%; infinite for none.

    Source: M. Abramowitz, I. A. Stegun, "Handbook of Mathematical Functions" (1964), 26.7.5.
    """
    if degrees < 1:
        return math.inf
    z = NormalDist().inv_cdf(probability)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def wilson_interval(successes: int, total: int) -> Interval:
    """Wilson's score interval of a success rate. Its bounds are within 0 and 1, and differ at 0% and 100% too. Raises DataError unless
    0 <= successes <= total, and total > 0.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    if not 0 <= successes <= total or total == 0:
        raise DataError(f"{successes} successes out of {total}", remedy="Evaluate at least one row, and count each success once")
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    rate = successes / total
    centre = (rate + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total))
    # Rounding may move a bound that is exactly 0 or 1 to the wrong side of the rate.
    return Interval(rate, min(max(centre - half, 0.0), rate), max(min(centre + half, 1.0), rate))


def group_bootstrap_mean(values: ArrayLike, groups: Sequence[int] | Sequence[str], samples: int = SAMPLES) -> Interval:
    """Percentile bootstrap interval of the mean of `values` [N], resampling whole groups.

    Rows of one group (puzzles with the same solution, completions of one prompt) are not independent. If all values are equal, the interval
    has no width: use `wilson_interval` for 0% or 100% solved. With a single group the bounds are infinite.

    Source: A. C. Davison, D. V. Hinkley, "Bootstrap Methods and their Application" (1997), sections 2.4 and 3.8.

    Raises:
        DataError: there are no values, one is not finite, or `groups` does not have one group per value.
    """
    row_values = np.asarray(values, dtype=np.float64)
    if row_values.ndim != 1 or row_values.size == 0:
        raise DataError(f"cannot average values of shape {row_values.shape}", remedy="Give one number per row, at least one row")
    if not (finite := np.isfinite(row_values)).all():
        raise DataError(f"value {int(np.argmin(finite))} to average is not finite", remedy="Drop the row or fix its value")
    values_N2 = np.stack([row_values, np.ones_like(row_values)], axis=1)
    return group_bootstrap(values_N2, lambda sums_R2: sums_R2[:, 0] / sums_R2[:, 1], groups, samples)


def group_bootstrap(
    values_NC: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    groups: Sequence[int] | Sequence[str],
    samples: int = SAMPLES,
) -> Interval:
    """As `group_bootstrap_mean`, for a statistic of the sums over rows: it maps the sums [R, C] of R resamples to values [R]. The
    bounds of a statistic that is not finite are infinite."""
    names, group_of_row = np.unique(np.asarray(groups), return_inverse=True)
    if group_of_row.shape != values_NC.shape[:1]:
        what = f"{group_of_row.size} groups for {len(values_NC)} values"
        raise DataError(what, remedy="Give one group (a number or a string) per value")
    value, num_groups = float(statistic(values_NC.sum(axis=0, keepdims=True))[0]), len(names)
    if num_groups == 1 or not math.isfinite(value):
        return Interval(value, -math.inf, math.inf)
    sums_CG = [np.bincount(group_of_row, weights=values_N) for values_N in values_NC.T]
    rng = np.random.default_rng(0)
    chunk = max(1, RESAMPLED_AT_ONCE // num_groups)
    resampled = []
    for start in range(0, samples, chunk):
        group_RG = rng.integers(num_groups, size=(min(chunk, samples - start), num_groups))
        resampled.append(statistic(np.stack([sums_G[group_RG].sum(axis=1) for sums_G in sums_CG], axis=1)))
    low, high = np.quantile(np.concatenate(resampled), [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Interval(value, float(low), float(high))


def mean_interval(values: Sequence[float], groups: Sequence[str]) -> Interval:
    """A mean with its bootstrap interval over groups; Wilson's interval of the groups if all values are 0 or all are 1."""
    if set(values) not in ({0.0}, {1.0}):
        return group_bootstrap_mean(values, groups)
    count = len(set(groups))
    return wilson_interval(int(values[0]) * count, count)


def paired_difference(before: ArrayLike, after: ArrayLike, groups: Sequence[int] | Sequence[str]) -> Interval:
    """Interval of the mean of `after - before` on the same rows. It is far narrower than a comparison of two intervals. Raises DataError if
    their shapes differ, or as `group_bootstrap_mean`."""
    row_before, row_after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if row_before.shape != row_after.shape:
        what = f"{row_before.size} values before and {row_after.size} after"
        raise DataError(what, remedy="Evaluate both on the same rows, in the same order")
    return group_bootstrap_mean(row_after - row_before, groups)


def sign_flip_p_value(differences: ArrayLike, groups: Sequence[int] | Sequence[str], samples: int = SAMPLES) -> float:
    """The two-sided p-value of "the two sides of each pair are exchangeable", by flipping the signs of whole groups of `differences` [N]:
    the fraction of flips whose sum is as far from 0 as the observed one, which counts too. If there are more than `samples` flips, that
    many are drawn.

    At most the nominal fraction of true hypotheses is rejected, with any number of groups. (A bootstrap rejects too many where few groups
    differ at all.)

    Source: B. Phipson, G. K. Smyth, "Permutation P-values Should Never Be Zero" (2010); A. M. Winkler et al., "Multi-level block
    permutation" (2015) for groups.
    """
    _, group_of_row = np.unique(np.asarray(groups), return_inverse=True)
    sums_G = np.bincount(group_of_row, weights=np.asarray(differences, dtype=np.float64))
    sums_G = sums_G[sums_G != 0]
    if not sums_G.size:
        return 1.0
    observed = abs(sums_G.sum()) - 1e-9 * np.abs(sums_G).sum()  # rounding must not tell equal sums apart
    if 2**sums_G.size <= samples:  # all flips
        sign_RG = 1 - 2 * (np.arange(2**sums_G.size)[:, None] >> np.arange(sums_G.size) & 1)
        return float((np.abs(sign_RG @ sums_G) >= observed).mean())
    rng, chunk, extreme = np.random.default_rng(0), max(1, RESAMPLED_AT_ONCE // sums_G.size), 0
    for start in range(0, samples, chunk):
        sign_RG = 2 * rng.integers(2, size=(min(chunk, samples - start), sums_G.size)) - 1
        extreme += int((np.abs(sign_RG @ sums_G) >= observed).sum())
    return (1 + extreme) / (1 + samples)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for their number, in the same order. If those up to a level are called significant, the probability that any of
    them is so by chance is at most this level, however the tests depend on each other.

    Source: S. Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
