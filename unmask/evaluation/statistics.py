"""Confidence intervals for evaluation: a success rate, a mean over rows in groups, a paired difference. Tests
of many differences.

Shapes: N rows, C columns that are summed (2: the values, and ones that count them), G groups, R sets of sums
or signs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from unmask.errors import DataError, require

CONFIDENCE = 0.95
"""The confidence level of all intervals."""
SAMPLES = 10_000
"""Flips of a test."""
FLIPPED_AT_ONCE = 2_000_000  # signs of groups: 16 MB
ROUNDING = 1e-12  # relative: a smaller error is none
FEWEST_THAT_DIFFER = 20
"""Groups of which an interval is made if most others agree."""


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
        """Mean and bounds, each formatted by `spec`, as in `93.4% [91.2%, 95.1%]`; the mean alone where the
        bounds are not known."""
        known = math.isfinite(self.low) or math.isfinite(self.high)
        return (
            f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]" if known else f"{self.mean:{spec}}"
        )


def student_quantile(degrees: float) -> float:
    """The quantile of Student's t at the upper end of an interval, in standard errors; infinite for no degree
    of freedom. Raises ConfigError without SciPy."""
    require("scipy", where="confidence intervals")
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2)) if degrees > 0 else math.inf


def wilson_interval(successes: int, total: int) -> Interval:
    """Wilson's score interval of a success rate. Its bounds are within 0 and 1, and differ at 0% and 100%
    too. Raises ValueError unless 0 <= successes <= total, and total > 0.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22
    (1927).
    """
    require("scipy", where="confidence intervals")
    from scipy.stats import binomtest

    rate, found = successes / total, binomtest(successes, total).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(rate, min(float(found.low), rate), max(float(found.high), rate))


def mean_interval(values: ArrayLike, groups: Sequence[int] | Sequence[str]) -> Interval:
    """Interval of the mean of `values` [N]. Rows of one group (puzzles with the same solution, completions of
    one prompt) are not independent; its rows together are one observation.

    If all values are within 0 and 1, the mean is taken to be that of scores which always are. Verdicts of 0
    and 1 have Wilson's interval, other scores that of `score_interval`. Any other values have that of
    `group_interval`.

    Raises:
        DataError: there are no values, one is not finite, or `groups` does not have one group per value.
    """
    row_values = np.asarray(values, dtype=np.float64)
    if row_values.ndim != 1 or row_values.size == 0:
        raise DataError(
            f"cannot average values of shape {row_values.shape}",
            remedy="Give one number per row, at least one row",
        )
    if not (finite := np.isfinite(row_values)).all():
        raise DataError(
            f"value {int(np.argmin(finite))} to average is not finite", remedy="Drop the row or fix its value"
        )
    values_N2 = np.stack([row_values, np.ones_like(row_values)], axis=1)
    if row_values.min() < 0 or row_values.max() > 1:
        return group_interval(values_N2, ratio, groups)
    sums_G2 = _group_sums(values_N2, groups)
    solved_G, size_G = sums_G2.T
    if (size_G == size_G[0]).all() and np.isin(solved_G, (0, size_G[0])).all():  # each group is one verdict
        return wilson_interval(int((solved_G > 0).sum()), len(solved_G))
    return score_interval(sums_G2, 0.0, 1.0)


def score_interval(sums_G2: np.ndarray, least: float, most: float) -> Interval:
    """Interval of the mean of scores from `least` to `most`; `sums_G2` are the sum and the number of those of
    each group.

    The groups may have missed a rare score, so the variance between them says too little. Each bound is that
    of the groups and one more of average size, which has the worst possible score: a quantile of the mean
    under random weights (exponential, as in the Bayesian bootstrap). For verdicts this is the interval of
    Clopper and Pearson. It holds the truth in 95% of cases or more, and mostly more. The bounds are infinite
    for a single group.

    Source: N. Gaffke, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a
    nonnegative variable" (2005); E. Learned-Miller, P. S. Thomas, "A New Confidence Interval for the Mean of
    a Bounded Random Variable" (2019).
    """
    mean = float(sums_G2[:, 0].sum() / sums_G2[:, 1].sum())
    if len(sums_G2) < 2:
        return Interval(mean, -math.inf, math.inf)
    low, high = (
        _bound(sums_G2, least, most, least, 0.5 - CONFIDENCE / 2),
        _bound(sums_G2, least, most, most, 0.5 + CONFIDENCE / 2),
    )
    return Interval(mean, min(low, mean), max(high, mean))


def _bound(sums_G2: np.ndarray, least: float, most: float, worst: float, quantile: float) -> float:
    """The quantile of the mean of groups, and of one more with the score `worst`, under exponential
    weights."""
    require("scipy", where="confidence intervals")
    from scipy.optimize import brentq

    size = sums_G2[:, 1].mean()
    all_G2, count_G = np.unique(np.concatenate([sums_G2, [[worst * size, size]]]), axis=0, return_counts=True)
    if (all_G2[:, 0] == worst * all_G2[:, 1]).all():
        return worst
    return float(
        brentq(
            lambda mean: _chance_below_zero(all_G2[:, 0] - mean * all_G2[:, 1], count_G) - quantile,
            least,
            most,
        )
    )


def _chance_below_zero(scale_G: np.ndarray, count_G: np.ndarray) -> float:
    """The probability that a sum of exponential variables, `count` with each scale, is below zero.

    It is the integral of Gil-Pelaez over the characteristic function, over the logarithm of its argument,
    where the trapezoidal rule converges exponentially. Far from the mean, where the integrand oscillates, it
    is 0 or 1, within 2% (Cantelli's inequality).
    """
    mean, deviation = float(count_G @ scale_G), math.sqrt(float(count_G @ np.square(scale_G)))
    if abs(mean) > 7 * deviation:
        return float(mean < 0)
    step = 0.1
    argument_K = np.exp(np.arange(-16, 12, step)) / deviation
    scaled_GK = np.outer(scale_G, argument_K)
    angle_K, log_size_K = count_G @ np.arctan(scaled_GK), count_G @ np.log1p(np.square(scaled_GK)) / 2
    return 0.5 - float((np.sin(angle_K) * np.exp(-log_size_K)).sum()) * step / math.pi


def ratio(sums_R2: np.ndarray) -> np.ndarray:
    """The statistic of `group_interval` that is a sum over another: a mean, with ones in the second
    column."""
    ratio_R: np.ndarray = sums_R2[:, 0] / sums_R2[:, 1]
    return ratio_R


def _group_sums(values_NC: np.ndarray, groups: Sequence[int] | Sequence[str]) -> np.ndarray:
    """The sums of rows by group [G, C]. Raises DataError if there is not one group per row."""
    names, group_of_row = np.unique(np.asarray(groups), return_inverse=True)
    if group_of_row.shape != values_NC.shape[:1]:
        what = f"{group_of_row.size} groups for {len(values_NC)} values"
        raise DataError(what, remedy="Give one group (a number or a string) per value")
    return np.stack(
        [np.bincount(group_of_row, weights=values_N, minlength=len(names)) for values_N in values_NC.T],
        axis=1,
    )


def group_interval(
    values_NC: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    groups: Sequence[int] | Sequence[str],
) -> Interval:
    """Interval of a smooth statistic of the sums over rows, which maps sums [R, C] to values [R]. Rows of one
    group are one observation.

    The jackknife, which leaves out each group in turn, gives the standard error and the skewness. The bounds
    are the wider ones of two intervals: Student's, with one degree of freedom less for the skewness, and the
    same corrected for skewness, which is increased as few groups show too little of it. The bounds are
    infinite where the groups do not support any: there are fewer than three, a value is not finite, or at
    least half of the groups agree and fewer than `FEWEST_THAT_DIFFER` do not, so that these may have missed a
    rare value.

    Source: P. Hall, "On the Removal of Skewness by Transformation", JRSS B 54 (1992); B. Efron, "The
    Jackknife, the Bootstrap and Other Resampling Plans" (1982), chapter 3.
    """
    sums_GC = _group_sums(values_NC, groups)
    number, total_1C = len(sums_GC), sums_GC.sum(axis=0, keepdims=True)
    with np.errstate(all="ignore"):
        value = float(statistic(total_1C)[0])
        part_G = (
            (number - 1) * (value - statistic(total_1C - sums_GC)) if number > 2 else np.full(1, math.nan)
        )
    part_G = part_G - part_G.mean()
    error = math.sqrt(float(np.square(part_G).sum()) / max(number - 1, 1)) / math.sqrt(number)
    if (
        not math.isfinite(value)
        or not error > ROUNDING * number * abs(value)
        or _mostly_agree(part_G / error)
    ):
        return Interval(value, -math.inf, math.inf)
    skewness = (
        number
        * float((part_G**3).sum())
        / ((number - 1) * (number - 2))
        / (error * math.sqrt(number)) ** 3
        * (1 + 4 / number)
    )
    deviation = student_quantile(number - 2) / math.sqrt(number)
    highest, lowest = (_without_skewness(sign * deviation, skewness, number) for sign in (1, -1))
    spread = error * math.sqrt(number)
    return Interval(value, value - spread * max(highest, deviation), value - spread * min(lowest, -deviation))


def _mostly_agree(part_G: np.ndarray) -> bool:
    """Whether at least half of the groups agree, and few do not."""
    most = int(np.unique(part_G.round(6), return_counts=True)[1].max())
    return 2 * most >= len(part_G) and len(part_G) - most < FEWEST_THAT_DIFFER


def _without_skewness(deviation: float, skewness: float, number: int) -> float:
    """The deviation of a mean, in standard deviations, that Hall's transformation maps to this one."""
    if abs(skewness) < ROUNDING:
        return deviation
    return 3 / skewness * float(np.cbrt(1 + skewness * (deviation - skewness / (6 * number))) - 1)


def paired_difference(before: ArrayLike, after: ArrayLike, groups: Sequence[int] | Sequence[str]) -> Interval:
    """Interval of the mean of `after - before` on the same rows. It is far narrower than a comparison of two
    intervals.

    For verdicts of 0 and 1 with a group for each row it is that of Agresti and Min, otherwise that of
    `group_interval`. Where this gives none for values from 0 to 1, it is that of `score_interval`.

    Source: A. Agresti, Y. Min, "Simple improved confidence intervals for comparing matched proportions"
    (2005).

    Raises:
        DataError: their shapes differ, or as `mean_interval`.
    """
    row_before, row_after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if row_before.shape != row_after.shape:
        what = f"{row_before.size} values before and {row_after.size} after"
        raise DataError(what, remedy="Evaluate both on the same rows, in the same order")
    change = row_after - row_before
    mean, change_N2 = mean_interval(change, groups).mean, np.stack([change, np.ones_like(change)], axis=1)
    sums_G2, values = _group_sums(change_N2, groups), {*row_before.tolist(), *row_after.tolist()}
    number = len(sums_G2)
    if not values <= {0.0, 1.0} or number < len(change) or number == 1:
        interval = group_interval(change_N2, ratio, groups)
        if not 0 <= min(values) <= max(values) <= 1:
            return interval
        if interval.low == -math.inf:
            return score_interval(sums_G2, -1.0, 1.0)
        return Interval(mean, max(interval.low, -1.0), min(interval.high, 1.0))
    gained, lost = (float((sign * change > 0).sum() + 0.5) / (number + 2) for sign in (1, -1))
    half = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * math.sqrt(
        (gained + lost - (gained - lost) ** 2) / (number + 2)
    )
    return Interval(
        mean, max(min(gained - lost - half, mean), -1.0), min(max(gained - lost + half, mean), 1.0)
    )


def sign_flip_p_value(
    differences: ArrayLike, groups: Sequence[int] | Sequence[str], samples: int = SAMPLES
) -> float:
    """The two-sided p-value of "the two sides of each pair are exchangeable", by flipping the signs of whole
    groups of `differences` [N]: the fraction of flips whose sum is as far from 0 as the observed one, which
    counts too. If there are more than `samples` flips, that many are drawn.

    At most the nominal fraction of true hypotheses is rejected, with any number of groups. (A bootstrap
    rejects too many where few groups differ at all.)

    Source: B. Phipson, G. K. Smyth, "Permutation P-values Should Never Be Zero" (2010); A. M. Winkler et al.,
    "Multi-level block permutation" (2015) for groups.
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
    rng, chunk, extreme = np.random.default_rng(0), max(1, FLIPPED_AT_ONCE // sums_G.size), 0
    for start in range(0, samples, chunk):
        sign_RG = 2 * rng.integers(2, size=(min(chunk, samples - start), sums_G.size)) - 1
        extreme += int((np.abs(sign_RG @ sums_G) >= observed).sum())
    return (1 + extreme) / (1 + samples)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for their number, in the same order. If those up to a level are called
    significant, the probability that any of them is so by chance is at most this level, however the tests
    depend on each other.

    Source: S. Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
