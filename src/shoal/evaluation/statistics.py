"""Estimates with confidence intervals, and a significance test. Pure functions; randomness comes from a seed.

Samples of one task are not independent: a hard task fails them all. So every interval is over tasks.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
UPPER, POWER = 0.975, 0.8  # the upper end of a 95 % interval
RESAMPLINGS, ELEMENTS_AT_ONCE = 10_000, 2**22
BOOTSTRAP_TASKS = 20_000  # with more, the mean is practically normal, and resampling takes minutes
EXACT_FLIPS, RANDOM_FLIPS = 20, 100_000


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; `low` and `high` are NaN without one, for example for a single task."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        return f"{self.value:.3f}" if math.isnan(self.low) else f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def finite(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return None if math.isnan(value) else value


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """1 − C(n−c, k) / C(n, k): the probability that one of `k` samples, drawn without replacement, passes."""
    return 1.0 - math.comb(samples - passes, k) / math.comb(samples, k)


def wilson(passes: float, trials: int) -> Estimate:
    """A proportion of independent trials with Wilson's interval, which is valid for few trials and near 0 and 1."""
    z, p = NormalDist().inv_cdf(UPPER), passes / trials
    scale = 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / scale
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / scale
    low = 0.0 if passes == 0 else max(0.0, centre - half)
    return Estimate(p, low, 1.0 if passes == trials else min(1.0, centre + half))


def t_interval(values: Floats) -> Estimate:
    """Student's: exact for normal values."""
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean)
    half = t_quantile(UPPER, len(values) - 1) * standard_error(values)
    return Estimate(mean, mean - half, mean + half)


def standard_error(values: Floats) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def bootstrap_mean(values: Floats, seed: int) -> Estimate:
    """The mean with a bootstrap interval, widened like Student's, because plain percentiles are too narrow for few
    tasks; for very many tasks Student's interval."""
    if (tasks := len(values)) < 2 or tasks > BOOTSTRAP_TASKS:
        return t_interval(values)
    tail = NormalDist().cdf(-math.sqrt(tasks / (tasks - 1)) * t_quantile(UPPER, tasks - 1))
    generator, at_once, means = np.random.default_rng([tasks, seed]), max(1, ELEMENTS_AT_ONCE // tasks), []
    for start in range(0, RESAMPLINGS, at_once):
        rows = generator.integers(0, tasks, size=(min(at_once, RESAMPLINGS - start), tasks))
        means.append(values[rows].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Estimate(float(values.mean()), float(low), float(high))


def mean_estimate(values: Floats, seed: int) -> Estimate:
    """Wilson's interval if all values are 0 or 1, else the bootstrap's. Equal values cannot be resampled: between 0 and
    1 they get Wilson's interval, others none."""
    if len(values) and bool(np.isin(values, (0.0, 1.0)).all()):
        return wilson(int(values.sum()), len(values))
    if len(values) > 1 and bool((values == values[0]).all()):
        same = float(values[0])
        ends = wilson(same * len(values), len(values)) if 0 < same < 1 else Estimate(same)
        return Estimate(same, ends.low, ends.high)
    return bootstrap_mean(values, seed)


def sign_flip_p(differences: Floats, seed: int) -> float:
    """Two-sided p of the sign-flip test: how often is the mean as far from 0 with random signs? Exact for at most 20
    differences other than 0; else from 100,000 random flips and the observed one."""
    moved = differences[differences != 0]
    observed = abs(float(moved.sum()))
    near = 1e-9 * float(np.abs(moved).sum())  # sums in another order differ in their last digits
    if len(moved) <= EXACT_FLIPS:
        sums = np.zeros(1)
        for difference in moved:
            sums = np.concatenate([sums - difference, sums + difference])
        return float((np.abs(sums) >= observed - near).mean())
    generator, extreme = np.random.default_rng([len(moved), seed]), 1
    at_once = max(1, ELEMENTS_AT_ONCE // len(moved))
    for start in range(0, RANDOM_FLIPS, at_once):
        count = min(at_once, RANDOM_FLIPS - start)
        sums = (2.0 * generator.integers(0, 2, size=(count, len(moved))) - 1.0) @ moved
        extreme += int((np.abs(sums) >= observed - near).sum())
    return extreme / (RANDOM_FLIPS + 1)


def detectable_difference(differences: Floats) -> float:
    """The difference that is found in four of five comparisons with as many tasks and this spread."""
    if len(differences) < 2:
        return math.nan
    return (t_quantile(UPPER, len(differences) - 1) + NormalDist().inv_cdf(POWER)) * standard_error(differences)


def t_quantile(p: float, freedom: int) -> float:
    """Student's quantile, p from 0.5. Beyond 1000 degrees of freedom one correction is exact to five digits."""
    import mpmath  # type: ignore[import-untyped]

    if freedom > 1000:
        z = NormalDist().inv_cdf(p)
        return z + (z**3 + z) / (4 * freedom)

    def cdf(millionths: int) -> float:
        x = freedom / (freedom + (millionths / 1e6) ** 2)
        return 1 - 0.5 * float(mpmath.betainc(freedom / 2, 0.5, 0, x, regularized=True))

    return bisect_left(range(10**9), p, key=cdf) / 1e6
