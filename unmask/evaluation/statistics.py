"""Confidence intervals for evaluation: a success rate, a mean over rows in groups, a paired difference. Tests of many differences.

Shapes: N rows, C columns that are summed (2: the values, and ones that count them), G groups, R sets of sums or signs.
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
"""Of all intervals."""
SAMPLES = 10_000
"""Flips of a test."""
FLIPPED_AT_ONCE = 2_000_000  # signs of groups: 16 MB
ROUNDING = 1e-12  # relative: a smaller error is none


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
        """Mean and bounds, each formatted by `spec`, as in `93.4% [91.2%, 95.1%]`; the mean alone where the bounds are not known."""
        known = math.isfinite(self.low) or math.isfinite(self.high)
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]" if known else f"{self.mean:{spec}}"


def student_quantile(degrees: float) -> float:
    """The quantile of Student's t at the upper end of an interval, in standard errors; infinite for no degree of freedom. Raises
    ConfigError without SciPy."""
    require("scipy", "train", where="confidence intervals")
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2)) if degrees > 0 else math.inf


def wilson_interval(successes: int, total: int) -> Interval:
    """Wilson's score interval of a success rate. Its bounds are within 0 and 1, and differ at 0% and 100% too. Raises DataError unless
    0 <= successes <= total, and total > 0.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    if not 0 <= successes <= total or total == 0:
        raise DataError(f"{successes} successes out of {total}", remedy="Evaluate at least one row, and count each success once")
    return _wilson(successes / total, total)


def _wilson(rate: float, number: float) -> Interval:
    """Of a rate in an effective number of trials."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    centre = (rate + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * math.sqrt(rate * (1 - rate) / number + z * z / (4 * number * number))
    # Rounding may move a bound that is exactly 0 or 1 to the wrong side of the rate.
    return Interval(rate, min(max(centre - half, 0.0), rate), max(min(centre + half, 1.0), rate))


def mean_interval(values: ArrayLike, groups: Sequence[int] | Sequence[str]) -> Interval:
    """Interval of the mean of `values` [N]. Rows of one group (puzzles with the same solution, completions of one prompt) are not
    independent; its rows together are one observation.

    If all values are within 0 and 1, it is Wilson's, with the number of trials that would give the variance between groups, corrected for
    the degrees of freedom of that variance. Otherwise it is that of `group_interval`.

    Source: E. L. Korn, B. I. Graubard, "Confidence Intervals for Proportions With Small Expected Number of Positive Counts Estimated From
    Survey Data" (1998), for the number of trials.

    Raises:
        DataError: there are no values, one is not finite, or `groups` does not have one group per value.
    """
    row_values = np.asarray(values, dtype=np.float64)
    if row_values.ndim != 1 or row_values.size == 0:
        raise DataError(f"cannot average values of shape {row_values.shape}", remedy="Give one number per row, at least one row")
    if not (finite := np.isfinite(row_values)).all():
        raise DataError(f"value {int(np.argmin(finite))} to average is not finite", remedy="Drop the row or fix its value")
    values_N2 = np.stack([row_values, np.ones_like(row_values)], axis=1)
    if row_values.min() < 0 or row_values.max() > 1:
        return group_interval(values_N2, ratio, groups)
    sums_G2 = _group_sums(values_N2, groups)
    mean, number = row_values.mean(), len(sums_G2)
    if number == len(row_values) and set(row_values.tolist()) <= {0.0, 1.0}:
        return wilson_interval(round(row_values.sum()), number)
    part_G = (sums_G2[:, 0] - mean * sums_G2[:, 1]) * number / len(row_values)
    variance = part_G.var(ddof=1) / number if number > 1 else 0.0
    if variance <= ROUNDING**2 * mean**2:  # the groups agree
        return _wilson(float(mean), number) if number > 1 or mean in (0, 1) else Interval(float(mean), -math.inf, math.inf)
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    return _wilson(float(mean), mean * (1 - mean) / variance * (z / student_quantile(number - 1)) ** 2)


def ratio(sums_R2: np.ndarray) -> np.ndarray:
    """The statistic of `group_interval` that is a sum over another: a mean, with ones in the second column."""
    ratio_R: np.ndarray = sums_R2[:, 0] / sums_R2[:, 1]
    return ratio_R


def _group_sums(values_NC: np.ndarray, groups: Sequence[int] | Sequence[str]) -> np.ndarray:
    """The sums of rows by group [G, C]. Raises DataError if there is not one group per row."""
    names, group_of_row = np.unique(np.asarray(groups), return_inverse=True)
    if group_of_row.shape != values_NC.shape[:1]:
        what = f"{group_of_row.size} groups for {len(values_NC)} values"
        raise DataError(what, remedy="Give one group (a number or a string) per value")
    return np.stack([np.bincount(group_of_row, weights=values_N, minlength=len(names)) for values_N in values_NC.T], axis=1)


def group_interval(values_NC: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], groups: Sequence[int] | Sequence[str]) -> Interval:
    """Interval of a smooth statistic of the sums over rows, which maps sums [R, C] to values [R]. Rows of one group are one observation.

    The jackknife, which leaves out each group in turn, gives the standard error and the skewness; the interval is Student's, with one
    degree of freedom less for the skewness and corrected for it. The bounds are infinite where the groups tell nothing: there are fewer
    than three, all agree, or a value is not finite.

    Source: P. Hall, "On the Removal of Skewness by Transformation", JRSS B 54 (1992); B. Efron, "The Jackknife, the Bootstrap and Other
    Resampling Plans" (1982), chapter 3.
    """
    sums_GC = _group_sums(values_NC, groups)
    number, total_1C = len(sums_GC), sums_GC.sum(axis=0, keepdims=True)
    with np.errstate(all="ignore"):
        value = float(statistic(total_1C)[0])
        part_G = (number - 1) * (value - statistic(total_1C - sums_GC)) if number > 2 else np.full(1, math.nan)
    part_G = part_G - part_G.mean()
    error = math.sqrt(float(np.square(part_G).sum()) / max(number - 1, 1)) / math.sqrt(number)
    if not math.isfinite(value) or not error > ROUNDING * number * abs(value):
        return Interval(value, -math.inf, math.inf)
    skewness = number * float((part_G**3).sum()) / ((number - 1) * (number - 2)) / (error * math.sqrt(number)) ** 3
    ends = [_without_skewness(sign * student_quantile(number - 2) / math.sqrt(number), skewness, number) for sign in (1, -1)]
    low, high = (value - error * math.sqrt(number) * end for end in ends)
    return Interval(value, low, high)


def _without_skewness(deviation: float, skewness: float, number: int) -> float:
    """The deviation of a mean, in standard deviations, that Hall's transformation maps to this one."""
    if abs(skewness) < ROUNDING:
        return deviation
    return 3 / skewness * float(np.cbrt(1 + skewness * (deviation - skewness / (6 * number))) - 1)


def paired_difference(before: ArrayLike, after: ArrayLike, groups: Sequence[int] | Sequence[str]) -> Interval:
    """Interval of the mean of `after - before` on the same rows. It is far narrower than a comparison of two intervals.

    It is Student's over groups; for verdicts of 0 and 1 with a group for each row, and where values from 0 to 1 are all equal or all as
    different as they can be, that of Agresti and Min. The bounds are infinite for a single group, and where others differ alike.

    Source: A. Agresti, Y. Min, "Simple improved confidence intervals for comparing matched proportions" (2005).

    Raises:
        DataError: their shapes differ, or as `mean_interval`.
    """
    row_before, row_after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if row_before.shape != row_after.shape:
        what = f"{row_before.size} values before and {row_after.size} after"
        raise DataError(what, remedy="Evaluate both on the same rows, in the same order")
    change = row_after - row_before
    mean, sums_G2 = mean_interval(change, groups).mean, _group_sums(np.stack([change, np.ones_like(change)], axis=1), groups)
    number, values = len(sums_G2), {*row_before.tolist(), *row_after.tolist()}
    verdicts = values <= {0.0, 1.0} and number == len(change)
    alike = set(change.tolist()) in ({-1.0}, {0.0}, {1.0}) and 0 <= min(values) <= max(values) <= 1
    if number > 1 and (verdicts or alike):
        gained, lost = (float((sign * sums_G2[:, 0] > 0).sum() + 0.5) / (number + 2) for sign in (1, -1))
        half = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * math.sqrt((gained + lost - (gained - lost) ** 2) / (number + 2))
        return Interval(mean, max(min(gained - lost - half, mean), -1.0), min(max(gained - lost + half, mean), 1.0))
    part_G = (sums_G2[:, 0] - mean * sums_G2[:, 1]) * number / len(change)
    half = student_quantile(number - 1) * float(np.sqrt(np.square(part_G).sum() / max(number - 1, 1) / number))
    return Interval(mean, mean - half, mean + half) if half > ROUNDING * number * abs(mean) else Interval(mean, -math.inf, math.inf)


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
    rng, chunk, extreme = np.random.default_rng(0), max(1, FLIPPED_AT_ONCE // sums_G.size), 0
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
