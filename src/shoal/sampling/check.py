"""Does a sequence of tokens follow its seed? The validator asks, after a prefill of its own.

Between two machines logits differ by rounding, so an honest u can fall just outside the interval that the validator
computes. Four questions, each with its own evidence:

    beyond       is some u farther outside its token's interval than rounding can explain?
    implausible  does some token pass only by the tolerance although the policy would hardly ever say it?
                 (an interval of width 1e-12 next to u is "near", but no rounding error puts a token there)
    steered      are more tokens outside, or farther in sum, than rounding explains, each within the tolerance?
    drift        the same question of all that the node handed in of late, this included

The statistic. The noise of a CDF grows with the entropy of its distribution: where one token is certain, no rounding
moves anything; measured, the rate of honest tokens outside is near proportional to the entropy, and their distances
hardly depend on it. So of honest tokens whose distributions have E nats of entropy in sum, at most a Poisson number
with mean m = `outside_rate` · E is outside, each by a distance that is at most exponential with mean
`outside_distance`. Then

    P(at least k outside)   = the Poisson tail
    P(distances sum to s)  <= exp(-(sqrt(s / outside_distance) - sqrt(m))²)      (Chernoff's bound)

and the smaller of the two, times the number of questions asked, is below `significance` for that share of honest
submissions at most: a false alarm in a million, whatever the prompts and the number of rollouts.

The numbers are a profile's (model, engine, device, dtype). The defaults are for float32 on both sides: a model of 135 M
weights and 49,152 tokens, decoding against prefill, showed a rate of 5e-4 per nat, a mean distance of 3e-7 and none
that could exceed 4.5e-6; smaller vocabularies show less of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.protocol import Tally

Reason = Literal["beyond", "implausible", "steered", "drift"]
Floats = npt.NDArray[np.float64]

ROOM = 1.25  # other prompts, other batches, other machines of the same kind
TOKENS_PER_ACCIDENT = 1e9


@dataclass(frozen=True)
class SeedTolerance:
    """What rounding may explain.

    `distance`: how far u may lie outside its token's interval. `floor`: the smallest probability of a token that
    passes only by the tolerance. `outside_rate`: how often an honest token is outside at all, at most, per nat of
    entropy. `outside_distance`: by how much on average, if it is. `significance`: how unlikely the number of outside
    tokens or the sum of their distances must be under these two before the sequence is called steered.
    """

    distance: float = 5e-5
    floor: float = 1e-12
    outside_rate: float = 4e-3
    outside_distance: float = 1e-6
    significance: float = 1e-6

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (0 < value < math.inf or (name in ("distance", "floor") and value == 0)):
                raise ValueError(f"{name} must be a number above 0, not {value}")


@dataclass(frozen=True)
class SeedCheck:
    """The answer and its evidence. `position` is where the worst token is, None if every u is inside.

    `p_value` is that of these tokens (whole, and rollout by rollout), `record_p_value` that of the record with them.

    >>> check_seeded(np.array([0.5]), np.array([0.6]), np.array([0.9]), np.array([-1.2])).reason
    'beyond'
    """

    reason: Reason | None
    n_tokens: int
    n_outside: int
    sum_entropy: float
    sum_distance: float
    max_distance: float
    position: int | None
    min_probability_outside: float
    p_value: float
    record_p_value: float

    @property
    def passed(self) -> bool:
        return self.reason is None

    @property
    def tally(self) -> Tally:
        """What this sequence adds to its node's record."""
        return _tally(self.n_tokens, self.sum_entropy, self.n_outside, self.sum_distance)


def check_seeded(
    uniforms_T: Floats,
    low_T: Floats,
    high_T: Floats,
    logprobs_T: npt.NDArray[np.floating],
    tolerance: SeedTolerance | None = None,
    *,
    entropy_T: npt.NDArray[np.floating] | None = None,
    lengths: Sequence[int] | None = None,
    record: Tally | None = None,
) -> SeedCheck:
    """Check one sequence, or several laid end to end, of the given lengths.

    The statistic sees the whole, and each sequence by itself: one that is steered among many that are not would be
    lost in their noise. `entropy_T` is that of the distributions that the tokens were drawn from, in nats (without it
    each counts as one nat). `record` has the sums of what the node handed in before.
    """
    limits = tolerance or SeedTolerance()
    given = (uniforms_T, low_T, high_T, logprobs_T, *(() if entropy_T is None else (entropy_T,)))
    if uniforms_T.ndim != 1 or any(values_T.shape != uniforms_T.shape for values_T in given):
        raise ValueError("uniforms, interval ends, log-probabilities and entropies must be vectors of one length")
    distance_T = distances(uniforms_T, low_T, high_T)
    outside_T = ~((low_T <= uniforms_T) & (uniforms_T < high_T))
    summed_T = np.minimum(distance_T, 1.0)  # a distance in probability is at most 1, also where it is no number
    n_outside, sum_distance = int(outside_T.sum()), float(summed_T.sum())
    probability = float(np.exp(logprobs_T[outside_T].astype(np.float64)).min()) if n_outside else 1.0
    nats_T = np.ones(len(uniforms_T)) if entropy_T is None else np.maximum(entropy_T.astype(np.float64), 0.0)
    tally = _tally(len(uniforms_T), float(nats_T.sum()), n_outside, sum_distance)
    p_value = _submission_p_value(tally, _tallies(nats_T, outside_T, summed_T, lengths), limits)
    record_p_value = 1.0 if record is None else noise_p_value(record.plus(tally), limits)
    reason: Reason | None = None
    if not bool((distance_T <= limits.distance).all()):
        reason = "beyond"
    elif not probability >= limits.floor:
        reason = "implausible"
    elif p_value < limits.significance:
        reason = "steered"
    elif record_p_value < limits.significance:
        reason = "drift"
    return SeedCheck(
        reason=reason,
        n_tokens=len(uniforms_T),
        n_outside=n_outside,
        sum_entropy=tally.entropy,
        sum_distance=sum_distance,
        max_distance=float(distance_T.max()) if len(distance_T) else 0.0,
        position=int(np.argmax(distance_T)) if n_outside else None,
        min_probability_outside=probability,
        p_value=p_value,
        record_p_value=record_p_value,
    )


def measured_tolerance(
    distance_T: Floats, outside_T: npt.NDArray[np.bool_], entropy_T: npt.NDArray[np.floating], base: SeedTolerance
) -> SeedTolerance:
    """A tolerance from honest tokens: what they showed with a quarter more, and never below `base`.

    The largest distance allowed is one that an exponential distance exceeds once in a thousand million tokens.
    """
    count = int(outside_T.sum())
    if count == 0:
        return base
    outside = distance_T[outside_T]
    rate = max(base.outside_rate, ROOM * (count + 2.0 * math.sqrt(count)) / float(entropy_T.sum()))
    # An exponential of this mean has the mean, and the mean square, that was seen.
    mean = max(base.outside_distance, ROOM * float(max(outside.mean(), math.sqrt(np.square(outside).mean() / 2.0))))
    farthest = max(base.distance, mean * math.log(max(math.e, rate * TOKENS_PER_ACCIDENT)), 2.0 * float(outside.max()))
    return replace(base, outside_rate=rate, outside_distance=mean, distance=min(farthest, 1.0))


def distances(uniforms_T: Floats, low_T: Floats, high_T: Floats) -> Floats:
    """How far each u lies outside [low, high): 0 inside, infinite where a bound is no number."""
    outside_T = np.maximum(np.maximum(low_T - uniforms_T, uniforms_T - high_T), 0.0)
    return np.where(np.isfinite(outside_T), outside_T, np.inf)


def noise_p_value(tally: Tally, limits: SeedTolerance) -> float:
    """How likely honest rounding makes so many tokens outside, or distances of such a sum (an upper bound)."""
    expected = limits.outside_rate * tally.entropy
    by_count = poisson_tail(tally.outside, expected)
    by_sum = distance_tail(tally.distance / limits.outside_distance, expected)
    return min(1.0, 2.0 * min(by_count, by_sum))


def poisson_tail(count: int, expected: float) -> float:
    """P(X >= count) for X ~ Poisson(expected); 1.0 where it is no more than expected."""
    if count <= expected or count <= 0:
        return 1.0
    if expected <= 0:
        return 0.0
    term = math.exp(count * math.log(expected) - expected - math.lgamma(count + 1))
    total, k = 0.0, count
    while term > total * 1e-12:
        total, k = total + term, k + 1
        term *= expected / k
    return min(1.0, total)


def distance_tail(distance: float, expected: float) -> float:
    """A bound of P(sum >= distance) if a Poisson(expected) number of exponentials of mean 1 is summed.

    Their moment generating function gives exp(-x s + expected · x / (1 - x)), least at 1 - x = sqrt(expected / s).
    """
    excess = math.sqrt(distance) - math.sqrt(expected)
    return math.exp(-excess * excess) if excess > 0 else 1.0


def _tally(tokens: int, entropy: float, outside: int, distance: float) -> Tally:
    """Sums that were made of what is no number (they fail as "beyond") must still make a tally."""
    return Tally(tokens=tokens, entropy=entropy if math.isfinite(entropy) else 0.0, outside=outside, distance=distance)


def _tallies(
    nats_T: Floats, outside_T: npt.NDArray[np.bool_], summed_T: Floats, lengths: Sequence[int] | None
) -> list[Tally]:
    """One per sequence; none if there is only one, or if nobody said where they end."""
    if lengths is None or len(lengths) < 2:
        return []
    if sum(lengths) != len(outside_T) or min(lengths) <= 0:
        raise ValueError("the lengths must be positive and sum to the number of tokens")
    if not outside_T.any():
        return []  # most submissions are like this: no part of them can be improbable
    starts = np.cumsum([0, *lengths[:-1]])
    sums = (np.add.reduceat(values, starts).tolist() for values in (nats_T, outside_T.astype(np.int64), summed_T))
    return [_tally(*values) for values in zip(lengths, *sums, strict=True)]


def _submission_p_value(whole: Tally, parts: list[Tally], limits: SeedTolerance) -> float:
    """The smallest p-value of the whole and of each part, times the number of them that were looked at."""
    if not parts:
        return noise_p_value(whole, limits)
    least = min(noise_p_value(part, limits) for part in parts)
    return min(1.0, 2.0 * noise_p_value(whole, limits), 2.0 * len(parts) * least)
