"""Evidence: one statistical test per node, which may be evaluated after every submission (anytime-valid).

    a submission ─► measures ─► per channel: seen, expected, shared ─► added to the node's record ─► log-evidence

A channel is a sum of small errors. For honest work of a measured kind its mean is at most `expected` (limits ×
exposure: nats of entropy, values, tokens, rollouts), it varies in lumps of one unit, and all of a submission shares a
relative error of standard deviation `shared`, because it shares a prompt. Then for every bet θ

    exp(θ · seen − ψ(θ) · expected − ψ(θ)² · shared² / 2),     ψ(θ) = e^θ − 1 for counts, θ / (1 − θ) for sums,

has a mean of at most 1; so has the product over submissions, and the mean over bets. By Ville's inequality such a
product ever exceeds 1/α with a probability of at most α. ψ = e^θ − 1 is that of a Poisson number of units, θ / (1 − θ)
that of a Poisson number of exponential ones: both have heavier tails than a normal distribution.

A record whose sum is below what is expected begins again (`reputation.recent`), so nobody can save up honest work. In n
submissions there are at most n beginnings, and an honest node is struck with a probability of at most n · α.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shoal.protocol import Sums
from shoal.toploc.check import ProofSums, proof_sums, severity_of
from shoal.validator.profiles import CHANNELS, AccidentLimits, ChannelLimits, LogprobLimits, NoiseLimits, Profile

if TYPE_CHECKING:
    from shoal.validator.case import Replay

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

COUNTS = frozenset({"outside", "exponents", "accidents"})
ALPHA = 1e-6  # of one beginning: in 10⁴ nodes × 10³ groups 10 strikes are expected, and 0.005 nodes with two
STRIKE = math.log(len(CHANNELS) / ALPHA)
CERTAIN = math.log(1e12)
DOUBT = math.log(100)
COUNT_BETS = np.log([1.05, 1.15, 1.5, 3.0, 12.0, 128.0])
SUM_BETS = np.array([0.03, 0.08, 0.2, 0.4, 0.6, 0.8])
SUM_VARIANCE = 2.0  # the variance of such a sum, in units, by its mean
NEARLY_CERTAIN = 0.03
ENDS = 2.0  # additional noise of a rollout, in tokens: the log-probability of its end is special
MOST_POINTS = 6
MOST_NATS = 9.0  # beyond it nearly every token is outside already
MOST_SCORE = 8.0  # cap of the bias of one rollout, in standard deviations
SEEDS = ("outside", "distance")


def log_evidence(channel: str, sums: Sums) -> float:
    """The logarithm of the evidence against honest work; negative if all is well."""
    return float(log_evidences(channel, *(np.array([x]) for x in (sums.seen, sums.expected, sums.shared)))[0])


def log_evidences(channel: str, seen_N: Floats, expected_N: Floats, shared_N: Floats) -> Floats:
    bets_B = COUNT_BETS if channel in COUNTS else SUM_BETS
    cost_B = np.expm1(bets_B) if channel in COUNTS else bets_B / (1 - bets_B)
    exponents_NB = np.outer(seen_N, bets_B) - np.outer(expected_N, cost_B) - np.outer(shared_N, cost_B**2) / 2
    found = _log_mean_exp(exponents_NB)
    return np.where(expected_N > 0, found, np.where(seen_N > 0, np.inf, 0.0))


def log_evidence_of_seeds(accidents: Sums, *sums: Sums) -> float:
    """The strongest of: accidents, each sum over the rest, and both together. Given which parts are accidents, honest
    work is as honest in the others, so the product has a mean of at most 1, too."""
    beyond = log_evidence("accidents", accidents)
    within = np.array([log_evidence(name, each) for name, each in zip(SEEDS, sums, strict=True)])
    return max(beyond, float(within.max()), beyond + float(_log_mean_exp(within)))


def _log_mean_exp(values: Floats) -> Floats:
    """Infinite if one of the values is: the shift stays finite, because inf − inf is NaN."""
    largest = np.minimum(values.max(axis=-1), np.finfo(np.float64).max)
    found: Floats = largest + np.log(np.exp(values - largest[..., None]).mean(axis=-1))
    return found


def logprob_errors(claimed_T: Floats, logprobs_T: Floats) -> Floats:
    """claimed − logprobs, infinite where either is not finite (−inf − −inf would be NaN, which passes no limit)."""
    found_T = np.where((claimed_T == -np.inf) & (logprobs_T > -np.inf), -np.inf, np.inf)
    return np.subtract(claimed_T, logprobs_T, out=found_T, where=np.isfinite(claimed_T) & np.isfinite(logprobs_T))


@dataclass(frozen=True, eq=False)
class Kept:
    """Which tokens and proofs enter the sums."""

    tokens: Bits
    chunks: Bits


@dataclass(frozen=True, eq=False)
class Outliers:
    """Parts of rollouts (the tokens of one proof) that are far off, in points: one for a token far outside its
    interval, or outside it and implausible, or with a log-probability that is far off; two for a proof, times the ratio
    to its limit; at most six. `tokens` are those with a point."""

    seeds: Ints
    logprobs: Ints
    proofs: Ints
    tokens: Bits

    @classmethod
    def of(cls, replay: Replay, claimed_T: Floats, drawn_T: Bits, chunk_of_T: Ints, limits: Profile) -> Outliers:
        distance_T = replay.distance
        implausible_T = (distance_T > 0) & (replay.logprobs < math.log(max(limits.sampling.floor, 1e-300)))
        far_T = (distance_T > limits.sampling.distance) | implausible_T
        error_T = np.abs(logprob_errors(claimed_T, replay.logprobs)) / weights(replay.logprobs)
        off_T = error_T > limits.logprobs.largest

        def points(odd_T: Bits) -> Ints:
            counts_C = np.bincount(chunk_of_T[drawn_T & odd_T], minlength=len(replay.comparisons))
            return np.minimum(counts_C, MOST_POINTS)

        severity_C = np.minimum(severity_of(replay.comparisons, limits.proofs), MOST_POINTS)
        proofs_C = np.minimum(np.where(severity_C > 1, np.ceil(2 * severity_C), 0).astype(np.int64), MOST_POINTS)
        return cls(points(far_T), points(off_T), proofs_C, far_T | off_T)

    @property
    def unseeded(self) -> Ints:
        """The points of parts that have tokens far outside their intervals. There the proof's points count, too."""
        return np.where(self.seeds > 0, self.worst, 0)

    @property
    def worst(self) -> Ints:
        """By part, the largest of the three: they are one event."""
        return np.maximum(np.maximum(self.seeds, self.logprobs), self.proofs)

    def kept(self, drawn_T: Bits, chunk_of_T: Ints, limits: AccidentLimits) -> Kept:
        """What enters the sums: all that was drawn. Where accidents are possible, without outliers: single tokens, or
        the whole part if its proof is off."""
        if limits.first == 0:
            return Kept(drawn_T, np.ones(len(self.proofs), dtype=np.bool_))
        kept_C = self.proofs == 0
        return Kept(drawn_T & kept_C[chunk_of_T] & ~self.tokens, kept_C)


def accident_sums(points_C: Ints, rollout_of_C: Ints, limits: AccidentLimits, most: float = MOST_POINTS) -> Sums:
    """The points of all parts, halved, because an accident of one or two points is the usual one. An error stays in the
    context of all that follows, so the parts of one rollout count together for at most `most`."""
    points_R = np.minimum(np.bincount(rollout_of_C, points_C), most)
    rollouts = len(np.unique(rollout_of_C))
    expected = limits.first * rollouts + limits.later * (len(points_C) - rollouts)
    return Sums(seen=float(points_R.sum()) / 2, expected=expected)


@dataclass(frozen=True, eq=False)
class Measures:
    """What a replay showed, summed by rollout; proofs over the submission. Single errors are capped by the limits,
    because their tails are heavier than those of the test.

    `nats` and `nats2`: entropy and its squares. `outside`: tokens outside their interval, by `distance` in sum.
    `error`: |δ| / w, where δ is the error of the reported log-probability and w = 1 − p + 0.03. `bias`, `weight` and
    `weight2`: the sums of δ, w and w².
    """

    tokens: Floats
    nats: Floats
    nats2: Floats
    outside: Floats
    distance: Floats
    error: Floats
    bias: Floats
    weight: Floats
    weight2: Floats
    proofs: ProofSums

    @classmethod
    def of(cls, replay: Replay, claimed_T: Floats, starts: Ints, kept: Kept, limits: NoiseLimits) -> Measures:
        kept_T = kept.tokens
        weight_T = weights(replay.logprobs)
        error_T = logprob_errors(claimed_T, replay.logprobs)
        delta_T = np.where(kept_T, np.nan_to_num(error_T, posinf=1e9, neginf=-1e9), 0.0)
        nats_T = np.clip(replay.entropy, 0.0, MOST_NATS)
        distance_T = np.minimum(replay.distance, min(1.0, limits.distance.most))
        error_T = np.minimum(np.abs(delta_T) / weight_T, limits.logprobs.most)

        def summed(values_T: npt.NDArray[np.generic]) -> Floats:
            found: Floats = np.add.reduceat(np.where(kept_T, values_T, 0.0), starts, dtype=np.float64)
            return found

        return cls(
            tokens=summed(kept_T), nats=summed(nats_T), nats2=summed(nats_T**2), outside=summed(replay.outside),
            distance=summed(distance_T), error=summed(error_T), bias=summed(delta_T),
            weight=summed(weight_T), weight2=summed(weight_T**2),
            proofs=proof_sums(replay.comparisons.only(kept.chunks), limits.mantissa.most),
        )  # fmt: skip

    def seen(self, channel: str, limits: LogprobLimits) -> Floats:
        """By rollout (for proofs: one number)."""
        if channel == "bias":
            return np.minimum(self.scores(limits) ** 2, MOST_SCORE**2)
        if channel in ("exponents", "mantissa"):
            return np.array([float(getattr(self.proofs, channel))])
        found: Floats = self.error if channel == "logprobs" else getattr(self, channel)
        return found

    def expected(self, channel: str, limits: ChannelLimits) -> Floats:
        """The mean of honest work at most, likewise."""
        if channel in SEEDS:
            return limits.rate * self.nats + limits.curve * self.nats2
        if channel in ("exponents", "mantissa"):
            exposure = self.proofs.values if channel == "exponents" else self.proofs.matches
            return limits.rate * np.array([float(exposure)])
        is_there = np.minimum(self.tokens, 1.0)
        return limits.rate * (is_there if channel == "bias" else self.tokens + ENDS * is_there)

    def scores(self, limits: LogprobLimits) -> Floats:
        """For each rollout, the error of the sum of its log-probabilities in standard deviations."""
        variance = limits.spread**2 * (self.weight2 + ENDS**2) + (limits.drift * self.weight) ** 2
        found: Floats = (self.bias - limits.lean * self.weight) / np.sqrt(variance)
        return found

    def sums(self, channel: str, profile: Profile) -> Sums:
        """Of the whole submission, in units."""
        limits = getattr(profile.noise, channel)
        seen, expected = self.seen(channel, profile.logprobs), self.expected(channel, limits)
        return in_units(float(seen.sum()), float(expected.sum()), limits)

    def by_rollout(self, channel: str, profile: Profile) -> float:
        """The mean evidence of single rollouts (its logarithm), to find one that is steered among many."""
        limits = getattr(profile.noise, channel)
        mean_R = self.expected(channel, limits) / limits.unit
        seen_R = self.seen(channel, profile.logprobs) / limits.unit
        return float(_log_mean_exp(log_evidences(channel, seen_R, mean_R, (limits.shared * mean_R) ** 2)))


def in_units(seen: float, expected: float, limits: ChannelLimits) -> Sums:
    mean = expected / limits.unit
    return Sums(seen=min(seen / limits.unit, 1e12), expected=mean, shared=(limits.shared * mean) ** 2)


def weights(logprobs_T: Floats) -> Floats:
    """1 − p + 0.03: the noise of a log-probability is proportional to it, measured for p from 0.001 to 0.97."""
    return 1.0 - np.exp(np.minimum(logprobs_T, 0.0)) + NEARLY_CERTAIN
