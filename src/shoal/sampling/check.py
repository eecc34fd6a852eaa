"""Does a sequence of tokens follow its seed? The validator asks, after a prefill of its own.

Between two machines logits differ by rounding, so an honest u can fall just outside the interval that the validator
computes. Three questions, each with its own evidence:

    beyond       is some u farther outside its token's interval than rounding can explain?
    implausible  does some token pass only by the tolerance although the policy would hardly ever say it?
                 (an interval of width 1e-12 next to u is "near", but no rounding error puts a token there)
    steered      are more tokens outside than rounding explains, each within the tolerance?

The numbers are a profile's (model, engine, device, dtype). The defaults are for float32 on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Reason = Literal["beyond", "implausible", "steered"]


@dataclass(frozen=True)
class SeedTolerance:
    """What rounding may explain.

    `distance`: how far u may lie outside its token's interval. `floor`: the smallest probability of a token that
    passes only by the tolerance. `outside_rate`: how often an honest token is outside at all. `significance`: how
    unlikely the number of outside tokens must be under that rate before the sequence is called steered.
    """

    distance: float = 1e-4
    floor: float = 1e-6
    outside_rate: float = 1e-4
    significance: float = 1e-6


@dataclass(frozen=True)
class SeedCheck:
    """The answer and its evidence. `position` is where the worst token is, None if every u is inside.

    >>> check_seeded(np.array([0.5]), np.array([0.6]), np.array([0.9]), np.array([-1.2])).reason
    'beyond'
    """

    reason: Reason | None
    n_tokens: int
    n_outside: int
    max_distance: float
    position: int | None
    min_probability_outside: float
    p_value: float

    @property
    def passed(self) -> bool:
        return self.reason is None


def check_seeded(
    uniforms_T: npt.NDArray[np.float64],
    low_T: npt.NDArray[np.float64],
    high_T: npt.NDArray[np.float64],
    logprobs_T: npt.NDArray[np.floating],
    tolerance: SeedTolerance | None = None,
) -> SeedCheck:
    """Check one sequence, or several laid end to end (the statistic is the sharper the more tokens it sees)."""
    limits = tolerance or SeedTolerance()
    if not uniforms_T.shape == low_T.shape == high_T.shape == logprobs_T.shape or uniforms_T.ndim != 1:
        raise ValueError("uniforms, interval ends and log-probabilities must be vectors of one length")
    distance_T = distances(uniforms_T, low_T, high_T)
    outside_T = ~((low_T <= uniforms_T) & (uniforms_T < high_T))
    n_outside = int(outside_T.sum())
    probability = float(np.exp(logprobs_T[outside_T].astype(np.float64)).min()) if n_outside else 1.0
    p_value = binomial_tail(n_outside, len(uniforms_T), limits.outside_rate)
    reason: Reason | None = None
    if not bool((distance_T <= limits.distance).all()):
        reason = "beyond"
    elif not probability >= limits.floor:
        reason = "implausible"
    elif p_value < limits.significance:
        reason = "steered"
    worst = int(np.argmax(distance_T)) if n_outside else None
    largest = float(distance_T.max()) if len(distance_T) else 0.0
    return SeedCheck(reason, len(uniforms_T), n_outside, largest, worst, probability, p_value)


def distances(
    uniforms_T: npt.NDArray[np.float64], low_T: npt.NDArray[np.float64], high_T: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """How far each u lies outside [low, high): 0 inside, infinite where a bound is no number."""
    outside_T = np.maximum(np.maximum(low_T - uniforms_T, uniforms_T - high_T), 0.0)
    return np.where(np.isfinite(outside_T), outside_T, np.inf)


def binomial_tail(successes: int, trials: int, rate: float) -> float:
    """P(X >= successes) for X ~ Binomial(trials, rate), 0 < rate < 1: summed from the largest term down."""
    if successes <= 0:
        return 1.0
    total = 0.0
    for k in range(successes, trials + 1):
        log_term = (
            math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
            + k * math.log(rate) + (trials - k) * math.log1p(-rate)
        )  # fmt: skip
        term = math.exp(log_term)
        total += term
        if k > trials * rate and term < total * 1e-12:
            break
    return min(1.0, total)
