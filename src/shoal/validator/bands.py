"""Honest bands: how far honest work of one kind of engine is off, as another sees it, and the limits that follow.

    cases with replays ─► Bands.of ─► joined over validators ─► limits_from ─► a `Profile`

The rule, for every limit: what was seen, with a margin, and never tighter than the float32 profile. Extremes get a
factor of 2, rates and means a quarter plus a few standard errors. A margin costs little: what the limits are to catch
is several times as far off (`calibrate` measures that too). Those of the dice come from `measured_tolerance`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.sampling import SeedTolerance
from shoal.sampling.check import distances, measured_tolerance
from shoal.toploc import Comparisons, ProofTolerance
from shoal.validator.case import Case
from shoal.validator.profiles import CertainLimits, LogprobLimits, Profile

EXTREME = 2.0
MARGIN = 1.25
STANDARD_ERRORS = 3.0
ODD_ERRORS = 4.0
MOST_ACCIDENTS = 1e-4  # more would be an excuse
SMALLER_IS_WIDER = ("tokens", "chunks", "values", "entropy_mean", "outside_probability_min")


@dataclass(frozen=True)
class Bands:
    """What honest work showed. Distances are in probability, mantissa errors in units of bfloat16's last bit.

    `outside_rate` of the tokens were outside their interval, by `outside_distance` on average and `distance_max` at
    most, the least probable of them with `outside_probability_min`. `*_chunk_max` are of single proofs; `group` bands
    are of whole submissions. `mantissa_spread` is the standard deviation of a mean error, as of one value (the mean of
    a proof or of a submission, whichever is larger); `exponent_dispersion` is the variance of the number of other
    exponents of a submission, as a multiple of a coin's.
    """

    tokens: int
    chunks: int
    values: int
    seed_limits: SeedTolerance
    entropy_mean: float
    outside_rate: float
    outside_distance: float
    distance_max: float
    outside_probability_min: float
    logprob_group_mean_max: float
    logprob_max: float
    exponent_rate: float
    exponent_chunk_max: float
    sign_chunk_max: float
    mantissa_mean: float
    mantissa_spread: float
    exponent_dispersion: float
    mantissa_chunk_mean_max: float
    mantissa_chunk_median_max: float
    outside_hits_max: int
    accidents: float

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Bands:
        """The bands of cases that have been replayed. Tokens that nobody drew say nothing of dice."""
        replays = [case.replayed for case in cases]
        uniforms_T, low_T, high_T, logprobs_T, entropy_T = (
            np.concatenate([getattr(case.replayed, name)[case.drawn] for case in cases])
            for name in ("uniforms", "low", "high", "logprobs", "entropy")
        )
        distance_T = distances(uniforms_T, low_T, high_T)
        outside_T = ~((low_T <= uniforms_T) & (uniforms_T < high_T))
        errors = [np.abs(case.claimed - case.replayed.logprobs)[case.drawn] for case in cases]
        strange_T = accidents_of(distance_T, entropy_T, np.concatenate(errors))
        distance_T, outside_T = np.where(strange_T, 0.0, distance_T), outside_T & ~strange_T
        errors = np.split(np.where(strange_T, 0.0, np.concatenate(errors)), np.cumsum([len(e) for e in errors])[:-1])
        compared = [replay.comparisons for replay in replays]
        k_C = np.concatenate([each.k for each in compared])
        mismatches_C = np.concatenate([each.exp_mismatches for each in compared])
        error_sum_C = np.concatenate([each.mant_err_sum for each in compared])
        means_C = error_sum_C / np.maximum(k_C - mismatches_C, 1)
        groups, rate = [_Group.of(each) for each in compared], float(mismatches_C.sum() / k_C.sum())
        mean = float(error_sum_C.sum() / max(1, (k_C - mismatches_C).sum()))
        return cls(
            tokens=len(uniforms_T),
            chunks=len(k_C),
            values=int(k_C.sum()),
            seed_limits=measured_tolerance(distance_T, outside_T, entropy_T, SeedTolerance()),
            entropy_mean=float(entropy_T.mean()),
            outside_rate=float(outside_T.mean()),
            outside_distance=float(distance_T[outside_T].mean()) if outside_T.any() else 0.0,
            distance_max=float(distance_T.max()),
            outside_probability_min=float(np.exp(logprobs_T[outside_T]).min()) if outside_T.any() else 1.0,
            logprob_group_mean_max=max(float(error.mean()) for error in errors),
            logprob_max=max(float(error.max()) for error in errors),
            exponent_rate=rate,
            exponent_chunk_max=float((mismatches_C / k_C).max()),
            sign_chunk_max=float((np.concatenate([each.sign_mismatches for each in compared]) / k_C).max()),
            mantissa_mean=mean,
            mantissa_spread=max(
                float(np.sqrt(((means_C - mean) ** 2 * k_C).mean())),
                math.sqrt(_mean([(g.mean - mean) ** 2 * g.values for g in groups])),
            ),
            exponent_dispersion=_mean([g.exponents_off(rate) for g in groups]) if rate else 0.0,
            mantissa_chunk_mean_max=float(means_C.max()),
            mantissa_chunk_median_max=float(np.concatenate([each.mant_err_median for each in compared]).max()),
            accidents=float(strange_T.mean()),
            outside_hits_max=int(np.concatenate([each.outside_hits for each in compared]).max()),
        )

    @property
    def accident_rate(self) -> float:
        """The share of tokens that are quite wrong, at most; none where nothing is far off at all, as in float32."""
        if self.seed_limits.outside_distance <= SeedTolerance.outside_distance:
            return 0.0
        count = self.accidents * self.tokens
        return min(MOST_ACCIDENTS, (count + STANDARD_ERRORS * math.sqrt(max(1.0, count))) / self.tokens)

    def joined(self, other: Bands) -> Bands:
        """The wider of two bands, number by number: a profile must hold for every validator."""
        mine, theirs = self._plain(), other._plain()
        pick: dict[str, Any] = {name: max(mine[name], theirs[name]) for name in mine}
        pick |= {name: min(mine[name], theirs[name]) for name in SMALLER_IS_WIDER}
        limits, others = asdict(self.seed_limits), asdict(other.seed_limits)
        widest = {name: max(limits[name], others[name]) for name in limits}
        return Bands(**pick, seed_limits=SeedTolerance(**widest))

    def _plain(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "seed_limits"}

    def numbers(self) -> dict[str, float]:
        """For the profile's `[measured]` table; four digits are enough."""
        return {name: float(f"{value:.4g}") for name, value in self._plain().items() if name != "tokens"}


@dataclass(frozen=True)
class _Group:
    """The proofs of one submission, summed."""

    values: int
    mismatches: int
    mean: float

    @classmethod
    def of(cls, compared: Comparisons) -> _Group:
        values, mismatches = int(compared.k.sum()), int(compared.exp_mismatches.sum())
        return cls(values, mismatches, float(compared.mant_err_sum.sum()) / max(1, values - mismatches))

    def exponents_off(self, rate: float) -> float:
        """How far the number of other exponents is off, squared, as a multiple of a coin's variance."""
        return (self.mismatches - rate * self.values) ** 2 / (self.values * rate * (1 - rate))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def accidents_of(
    distance_T: npt.NDArray[np.float64], entropy_T: npt.NDArray[np.float64], error_T: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Tokens that no tail of all the others explains (a distance that an exponential has once in 10⁹ tokens).

    Coarse arithmetic does that: a massive activation rounds the other way, and one position is quite another.
    """
    usual = distance_T <= np.quantile(distance_T, 0.999)
    limit = measured_tolerance(distance_T[usual], distance_T[usual] > 0, entropy_T[usual], SeedTolerance()).distance
    far = ODD_ERRORS * float(np.quantile(error_T, 0.999))
    strange: npt.NDArray[np.bool_] = (distance_T > limit) | (error_T > max(far, LogprobLimits().largest))
    return strange


def limits_from(bands: Bands, key: str) -> Profile:
    """The profile of this key that the bands ask for."""
    return Profile(
        key=key,
        sampling=_sampling(bands),
        certain=_certain(bands),
        proofs=_proofs(bands),
        logprobs=_logprobs(bands),
        accidents=_number(bands.accident_rate),
    )


def _sampling(bands: Bands) -> SeedTolerance:
    limits = bands.seed_limits
    return replace(
        limits,
        distance=_number(limits.distance),
        outside_rate=_number(limits.outside_rate),
        outside_distance=_number(limits.outside_distance),
        floor=min(limits.floor, bands.outside_probability_min / 1000),
    )


def _certain(bands: Bands) -> CertainLimits:
    usual = CertainLimits()
    return CertainLimits(
        distance=_number(max(usual.distance, EXTREME * bands.seed_limits.distance)), tokens=usual.tokens
    )


def _proofs(bands: Bands) -> ProofTolerance:
    usual, values = ProofTolerance(), bands.values
    exponents = bands.exponent_rate + STANDARD_ERRORS * math.sqrt(max(bands.exponent_rate, 1 / values) / values)
    mantissa = bands.mantissa_mean + STANDARD_ERRORS * bands.mantissa_spread / math.sqrt(values)
    return ProofTolerance(
        exponents=_number(max(usual.exponents, EXTREME * bands.exponent_chunk_max)),
        signs=_number(max(usual.signs, EXTREME * bands.sign_chunk_max)),
        boundary=usual.boundary,
        mantissa_mean=_number(max(usual.mantissa_mean, EXTREME * bands.mantissa_chunk_mean_max)),
        mantissa_median=max(usual.mantissa_median, math.ceil(EXTREME * bands.mantissa_chunk_median_max)),
        outside=usual.outside,
        drift_exponents=_number(max(usual.drift_exponents, MARGIN * exponents)),
        drift_mantissa=_number(max(usual.drift_mantissa, MARGIN * mantissa)),
        drift_spread=_number(max(usual.drift_spread, MARGIN * bands.mantissa_spread)),
        drift_dispersion=_number(max(usual.drift_dispersion, MARGIN * bands.exponent_dispersion)),
        sigmas=usual.sigmas,
    )


def _logprobs(bands: Bands) -> LogprobLimits:
    usual = LogprobLimits()
    return LogprobLimits(
        mean=_number(max(usual.mean, EXTREME * bands.logprob_group_mean_max)),
        largest=_number(max(usual.largest, EXTREME * bands.logprob_max)),
    )


def _number(value: float) -> float:
    """Three digits, rounded up: a limit with sixteen would claim to know more."""
    if value <= 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.3g}")
