"""Honest bands: how much honest work of one kind of engine deviates, as another sees it, and the limits that follow.

Limits of single tokens and proofs are exceeded by one token in three million: the tail from the 99 % and 99.9 %
quantiles is continued as a power (measured on 169,523 and 250,396 tokens: each further decade is 1.5 to 1.8 times as
far). What is beyond counts as an accident. Limits of sums: the largest mean of the first, second and later parts of
rollouts (next to the prompt two engines of one format agree to the bit), plus a quarter and three standard errors; and
the variance between rollouts and between submissions. No limit is tighter than that of the float32 profile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.protocol.lease import format_of
from shoal.sampling import SeedTolerance
from shoal.toploc import Comparisons, ProofTolerance
from shoal.toploc.check import LARGEST_ERROR
from shoal.validator import profiles
from shoal.validator.case import Case, joined
from shoal.validator.evidence import COUNTS, MOST_NATS, SEEDS, SUM_VARIANCE, Measures, weights
from shoal.validator.profiles import AccidentLimits, CertainLimits, ChannelLimits, LogprobLimits, NoiseLimits, Profile

Floats = npt.NDArray[np.float64]

ROOM: Mapping[str, float] = {"exponents": 1.5}  # they grow with the context, by 1.35 at 1,024 tokens
USUAL_ROOM = 1.25
STANDARD_ERRORS = 3.0
TOKEN_DECADES, PROOF_DECADES = 3.5, 2.0  # from the 99.9 % quantile to one token in 3 million, one proof in 10⁵
TAIL_RATIO = (1.2, 1.8)
MOST = {"distance": 8.0, "logprobs": 16.0, "mantissa": 4.0}  # means that one token or proof counts for
WHOLE_PROOF = 64  # values: shares and means of fewer have tails of their own
FEW_OUTSIDE = 8  # tokens outside their interval: of fewer a policy's limits of seeds cannot be told
ACCIDENTS = AccidentLimits(first=2e-3, later=1e-4)  # assumed in coarse formats
MOST_ACCIDENTS = AccidentLimits(first=0.02, later=2e-3)  # a higher rate would excuse cheats
MOST_SHARED = 0.5  # if a group has too few events to estimate it


@dataclass(frozen=True)
class Bands:
    """What honest work showed. Distances are probabilities; mantissa errors are units of bfloat16's last bit. `limits`
    have no room for other machines yet; the other fields are for people."""

    tokens: int
    limits: Profile
    outside_rate: float
    outside_distance: float
    distance_max: float
    logprob_mean: float
    logprob_max: float
    exponent_rate: float
    mantissa_mean: float
    accidents: int

    @classmethod
    def of(cls, cases: Sequence[Case], others: Sequence[Sequence[Case]] = ()) -> Bands:
        """`others` are shorter series by other kernels: they count for single tokens and proofs, and raise means.
        Variances come from the main series alone: estimates from few tokens are too wide."""
        pool = _Pool.of(cases)
        is_exact = format_of(cases[0].lease.profile) == "float32"
        single = _single_limits(_Pool.of([case for series in (cases, *others) for case in series]), is_exact)
        judged, *beside = ([replace(case, profile=single) for case in series] for series in (cases, *others))
        every = [case for series in (judged, *beside) for case in series]
        outlier_C = np.concatenate([case.outliers.worst > 0 for case in every])
        limits, accidents = _sum_limits(single, judged), single.accidents
        if accidents.first > 0:  # how often parts of rollouts are outliers
            first_C = np.concatenate([case.part for case in every]) == 0
            first = min(MOST_ACCIDENTS.first, accidents.first + _accident_rate(outlier_C[first_C]))
            later = min(MOST_ACCIDENTS.later, accidents.later + _accident_rate(outlier_C[~first_C]))
            limits = limits.model_copy(update={"accidents": AccidentLimits(first=first, later=later)})
        if not is_exact and int(pool.outside.sum()) < FEW_OUTSIDE:
            usual = profiles.ON_REQUEST["torch/cuda/bfloat16"]
            wider, noises = profiles.widest(limits, usual), (limits.noise, usual.noise)
            seeds = {each: max((getattr(noise, each) for noise in noises), key=lambda one: one.rate) for each in SEEDS}
            noise = limits.noise.model_copy(update=seeds)
            limits = limits.model_copy(update={"sampling": wider.sampling, "certain": wider.certain, "noise": noise})
        compared = pool.compared
        mismatches, values = int(compared.exp_mismatches.sum()), int(compared.k.sum())
        return cls(
            tokens=len(pool.distance), limits=functools.reduce(_with_raised_means, beside, limits),
            outside_rate=float(pool.outside.mean()),
            outside_distance=float(pool.distance.sum()) / max(1, int(pool.outside.sum())),
            distance_max=float(pool.distance.max()), logprob_mean=float(np.abs(pool.delta).mean()),
            logprob_max=float(np.abs(pool.delta).max()), exponent_rate=mismatches / values,
            mantissa_mean=float(compared.mant_err_sum.sum()) / max(1, values - mismatches),
            accidents=int(outlier_C.sum()),
        )  # fmt: skip

    def joined(self, other: Bands) -> Bands:
        """The wider of both in everything: limits for validators of either kind."""
        worst = {name: max(value, getattr(other, name)) for name, value in self._plain().items()}
        limits, tokens = profiles.widest(self.limits, other.limits), min(self.tokens, other.tokens)
        return Bands(**{**vars(self), **worst, "tokens": tokens, "limits": limits})

    def numbers(self) -> dict[str, float]:
        return {name: float(f"{value:.4g}") for name, value in self._plain().items()}

    def _plain(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name not in ("limits", "tokens")}


@dataclass(frozen=True, eq=False)
class _Pool:
    """All drawn tokens and proofs of the cases, end to end, without outliers. `part` and `proof_part` count the proofs
    before it in its rollout."""

    distance: Floats
    outside: npt.NDArray[np.bool_]
    nats: Floats
    logprobs: Floats
    delta: Floats
    part: npt.NDArray[np.int64]
    compared: Comparisons
    proof_part: npt.NDArray[np.int64]

    @classmethod
    def of(cls, cases: Sequence[Case]) -> _Pool:
        def gathered(pick: Callable[[Case], npt.NDArray[Any]]) -> npt.NDArray[Any]:
            return np.concatenate([pick(case)[case.kept.tokens] for case in cases])

        def replayed(name: str) -> Floats:
            return gathered(lambda case: getattr(case.replayed, name))

        return cls(
            distance=replayed("distance"), outside=gathered(lambda case: case.replayed.outside),
            nats=np.clip(replayed("entropy"), 0.0, MOST_NATS), logprobs=replayed("logprobs"),
            delta=gathered(lambda case: case.claimed - case.replayed.logprobs),
            part=gathered(lambda case: case.part[case.chunk_of]),
            compared=joined([case.replayed.comparisons.only(case.kept.chunks) for case in cases]),
            proof_part=np.concatenate([case.part[case.kept.chunks] for case in cases]),
        )  # fmt: skip


def _single_limits(pool: _Pool, is_exact: bool) -> Profile:
    """There are no accidents if the worker `is_exact` and no token exceeds float32 limits."""
    usual, compared = Profile(key="torch/cpu/float32"), pool.compared
    whole = compared.k >= min(WHOLE_PROOF, int(np.median(compared.k)))
    chance = 0 if compared.k[whole].min() >= WHOLE_PROOF else LARGEST_ERROR  # as `severity_of` forgives it
    shares = (compared.exp_mismatches / compared.k)[whole]
    means = (np.maximum(compared.mant_err_sum - chance, 0) / np.maximum(compared.matches, 1))[whole]
    distance = max(usual.sampling.distance, _tail(pool.distance[pool.outside], TOKEN_DECADES))
    mantissa = max(usual.proofs.mantissa_mean, _tail(means, PROOF_DECADES))
    is_coarse = not is_exact or distance > usual.sampling.distance
    error_T = np.abs(pool.delta) / weights(pool.logprobs)
    floor = float(np.exp(pool.logprobs[pool.outside]).min(initial=1.0)) / 1000
    furthest = min(max(usual.certain.distance, 2 * distance), 0.7)
    return Profile(
        key=usual.key,
        sampling=SeedTolerance(distance=min(distance, 0.5), floor=min(usual.sampling.floor, floor)),
        certain=CertainLimits(distance=furthest, tokens=usual.certain.tokens),
        proofs=ProofTolerance(
            exponents=max(usual.proofs.exponents, _tail(shares, PROOF_DECADES)),
            signs=max(usual.proofs.signs, 2.0 * float((compared.sign_mismatches / compared.k)[whole].max())),
            boundary=usual.proofs.boundary + is_coarse,
            mantissa_mean=mantissa,
            mantissa_median=max(usual.proofs.mantissa_median, math.ceil(mantissa)) if is_coarse else 0.0,
        ),
        logprobs=LogprobLimits(largest=max(usual.logprobs.largest, _tail(error_T, TOKEN_DECADES))),
        accidents=ACCIDENTS if is_coarse else usual.accidents,
        noise=_with_caps(pool, error_T, means) if is_coarse else usual.noise,
    )


def _with_caps(pool: _Pool, error_T: Floats, means: Floats) -> NoiseLimits:
    """The float32 limits, with the most that one token or proof counts for."""
    distance = float(pool.distance.sum()) / max(1, int(pool.outside.sum()))
    seen = {"distance": distance, "logprobs": float(error_T.mean()), "mantissa": float(means.mean())}
    most = {name: MOST[name] * mean for name, mean in seen.items() if mean > 0}
    usual = NoiseLimits()
    capped = {name: getattr(usual, name).model_copy(update={"most": each}) for name, each in most.items()}
    return NoiseLimits(**capped)


def _tail(values: Floats, decades: float) -> float:
    """The value that one in 1,000 · 10^decades exceeds."""
    if not len(values):
        return 0.0
    near, far = (float(np.quantile(values, share)) for share in (0.99, 0.999))
    return far * min(max(far / near, TAIL_RATIO[0]), TAIL_RATIO[1]) ** decades if near > 0 else far


def _sum_limits(single: Profile, cases: Sequence[Case]) -> Profile:
    measures, pool, noise = [case.measures for case in cases], _Pool.of(cases), {}
    logprobs = _logprob_moments(measures, pool, single.logprobs)
    for name in NoiseLimits.model_fields:
        most = getattr(single.noise, name).most
        noise[name] = _channel(name, measures, pool, logprobs).model_copy(update={"most": most})
    return single.model_copy(update={"logprobs": logprobs, "noise": NoiseLimits(**noise)})


def _with_raised_means(limits: Profile, cases: Sequence[Case]) -> Profile:
    """Variances grow with the means."""
    measures = [replace(case, profile=limits).measures for case in cases]
    noise = {}
    for name in NoiseLimits.model_fields:
        own: ChannelLimits = getattr(limits.noise, name)
        seen = sum(float(each.seen(name, limits.logprobs).sum()) for each in measures)
        expected = sum(float(each.expected(name, own).sum()) for each in measures)
        factor = max(1.0, seen / expected) if expected > 0 else 1.0  # without a nat there is nothing to go by
        grown = ["rate", "curve", *(["unit"] if name not in COUNTS else []), *(["most"] if name in MOST else [])]
        noise[name] = own.model_copy(update={each: factor * getattr(own, each) for each in grown})
    return limits.model_copy(update={"noise": NoiseLimits(**noise)})


def _accident_rate(odd: npt.NDArray[np.bool_]) -> float:
    count = int(odd.sum())
    return (count + 2 * math.sqrt(count)) / max(1, len(odd))


def _logprob_moments(measures: Sequence[Measures], pool: _Pool, usual: LogprobLimits) -> LogprobLimits:
    """Of one token, and those that the tokens of a rollout share."""
    weight_T = weights(pool.logprobs)
    lean = float(pool.delta.sum() / weight_T.sum())
    spread = math.sqrt(_largest(np.square(pool.delta - lean * weight_T), np.square(weight_T), pool.part))
    names = ("weight", "weight2", "bias")
    weight_R, weight2_R, bias_R = (np.concatenate([getattr(m, name) for m in measures]) for name in names)
    own_R = spread**2 * weight2_R
    chance = 2 * math.sqrt(2 * float(np.square(own_R).sum()))
    excess = float((np.square(bias_R - lean * weight_R) - own_R).sum()) + chance
    drift = math.sqrt(max(0.0, excess) / float(np.square(weight_R).sum()))
    return LogprobLimits(
        largest=usual.largest, spread=max(LogprobLimits().spread, spread),
        lean=lean if spread > LogprobLimits().spread else 0.0, drift=max(LogprobLimits().drift, drift),
    )  # fmt: skip


def _largest(seen: Floats, exposure: Floats, part: npt.NDArray[np.int64]) -> float:
    """The largest rate of the first, second and later parts, of those with a tenth of the exposure."""
    bands = [part == 0, part == 1, part >= 2, part >= 0]
    found = [(float(seen[band].sum()), float(exposure[band].sum())) for band in bands]
    return max(x / e for x, e in found if e >= 0.1 * float(exposure.sum()) and e > 0)


def _channel(name: str, measures: Sequence[Measures], pool: _Pool, logprobs: LogprobLimits) -> ChannelLimits:
    """Mean, unit and shared error of one channel; never below those of float32."""
    usual: ChannelLimits = getattr(NoiseLimits(), name)
    rate, curve = _rates(name, measures, pool, logprobs)
    if rate + curve <= 0:
        return usual
    shape = ChannelLimits(rate=max(rate, 1e-300), curve=curve, unit=1.0)
    pairs = [(m.seen(name, logprobs), m.expected(name, shape)) for m in measures]
    seen_G, mean_G = (np.array([pair[i].sum() for pair in pairs]) for i in (0, 1))
    seen, mean = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    if (terms := _proof_terms(name, pool)) is not None:
        seen, mean = terms[0], rate * terms[1]
    dispersion = _above(seen, mean) / float(mean.mean())
    chance = 2 * math.sqrt(2 / len(pairs)) * dispersion * float(mean_G.mean())
    excess = _above(seen_G, mean_G) - dispersion * float(mean_G.mean()) + chance
    shared = min(MOST_SHARED, math.sqrt(max(0.0, excess) / float((mean_G**2).mean())))
    widened = 1 + STANDARD_ERRORS * math.sqrt(dispersion / float(mean_G.sum()) + shared**2 / len(pairs))
    return ChannelLimits(
        rate=max(usual.rate, rate * widened), curve=curve * widened,
        unit=max(usual.unit, dispersion / (1 if name in COUNTS else SUM_VARIANCE)), shared=shared,
    )  # fmt: skip


def _above(seen: Floats, mean: Floats) -> float:
    """The variance above the mean. Below it are parts that two engines compute equally to the bit."""
    return 2 * float((np.maximum(seen - mean, 0.0) ** 2).mean())


def _proof_terms(name: str, pool: _Pool) -> tuple[Floats, Floats] | None:
    """What was seen per proof and its exposure, for the channels of proofs; None for channels by rollout."""
    compared = pool.compared
    if name == "exponents":
        return np.maximum(compared.exp_mismatches - 1.0, 0.0), compared.k.astype(np.float64)
    if name == "mantissa":
        return compared.mant_err_sum.astype(np.float64), compared.matches.astype(np.float64)
    return None


def _rates(name: str, measures: Sequence[Measures], pool: _Pool, logprobs: LogprobLimits) -> tuple[float, float]:
    if name in SEEDS:
        seen_T = pool.outside.astype(np.float64) if name == "outside" else np.minimum(pool.distance, 1.0)
        line, curve = _line_and_curve(seen_T, pool.nats)
        scale = _largest(seen_T, line * pool.nats + curve * pool.nats**2, pool.part) if line + curve > 0 else 0.0
        return line * scale, curve * scale
    if (terms := _proof_terms(name, pool)) is not None:
        return _largest(*terms, pool.proof_part), 0.0
    if name == "logprobs":
        error_T = np.abs(pool.delta) / weights(pool.logprobs)
        return _largest(error_T, np.ones(len(error_T)), pool.part), 0.0
    return float(np.concatenate([m.seen("bias", logprobs) for m in measures]).mean()), 0.0


def _line_and_curve(seen_T: Floats, nats_T: Floats) -> tuple[float, float]:
    """seen = line · nats + curve · nats² by least squares (noise grows with the nats); neither is negative."""
    weight_T = 1 / (nats_T + 0.1)
    powers = [float((weight_T * nats_T**n).sum()) for n in (2, 3, 4)]
    sums = [float((weight_T * nats_T**n * seen_T).sum()) for n in (1, 2)]
    if powers[0] <= 0:
        return 0.0, 0.0
    determinant = powers[0] * powers[2] - powers[1] ** 2
    line = (sums[0] * powers[2] - sums[1] * powers[1]) / determinant if determinant > 0 else 0.0
    curve = (sums[1] * powers[0] - sums[0] * powers[1]) / determinant if determinant > 0 else 0.0
    if curve <= 0:
        return sums[0] / powers[0], 0.0
    return (0.0, sums[1] / powers[2]) if line <= 0 else (line, curve)


def limits_from(bands: Bands, key: str) -> Profile:
    """With room for other prompts, batches and machines."""
    noise = {}
    for name in NoiseLimits.model_fields:
        limits, usual = getattr(bands.limits.noise, name), getattr(NoiseLimits(), name)
        room = ROOM.get(name, USUAL_ROOM)
        is_usual = limits.rate <= usual.rate / room
        wider = {"rate": usual.rate} if is_usual else {"rate": room * limits.rate, "curve": room * limits.curve}
        noise[name] = limits.model_copy(update=wider)
    return _rounded(bands.limits.model_copy(update={"key": key, "noise": NoiseLimits(**noise)}))


def _rounded(profile: Profile) -> Profile:

    def leaf(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: leaf(each) for key, each in value.items()}
        if not isinstance(value, float) or value <= 0:
            return value
        unit = 10.0 ** (math.floor(math.log10(value)) - 2)
        return float(f"{math.ceil(value / unit - 1e-9) * unit:.3g}")

    return Profile.model_validate(leaf(profile.model_dump()))
