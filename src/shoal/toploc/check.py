"""Decides whether proofs were made by running the model. `compare` measures, `check_proofs` decides.

At the verifier's own indices an honest proof has the prover's values: exponents agree, mantissas nearly. Elsewhere it
is noise, since k coefficients are used up by k points. A proof made without computing must have a likely exponent
everywhere, also outside the points: `outside_hits` counts that, at places that follow from the verifier's points.

    malformed   bytes that no honest prover writes
    forged      the same value everywhere: made without computing
    mismatch    a chunk differs more than rounding explains: other weights, other tokens, another chunk's proof

Chunks that pass one by one may differ too much together (weights of lower precision): `proof_sums` has the sums for
that decision. The limits come from a profile; the defaults are for float32 on both sides, where rarely a value at a
bfloat16 rounding boundary differs by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.toploc import backend
from shoal.toploc.plain import PRIME, Ints, least_modulus
from shoal.toploc.points import PointBatch, decode

Reason = Literal["malformed", "forged", "mismatch"]
CHANCE = 256 / PRIME  # a field element drawn at random has a given exponent: 128 mantissas, two signs
LARGEST_ERROR = 127
SEVERAL = 4  # chunks
OUTSIDE = 256
NO_MATCH = 2.0**64  # the mantissa error if no exponent agrees, as in the published package


@dataclass(frozen=True, eq=False)
class Comparisons:
    """One entry for each chunk. If `malformed` has a sentence, nothing agrees in the numbers. `k`: points.
    `exp_mismatches`: exponents that differ. Over the others: `mant_err_sum` and `mant_err_median` (the upper one) of
    the mantissas' differences, 0 to 127, and `sign_mismatches`. `outside_hits` of `outside_count` places outside the
    points have the points' most frequent exponent. `constant`: the proof is a constant, the points are not. (Equal
    points, such as zeros, give a constant: then nothing is counted outside.)"""

    k: Ints
    exp_mismatches: Ints
    mant_err_sum: Ints
    mant_err_median: npt.NDArray[np.float64]
    sign_mismatches: Ints
    outside_hits: Ints
    outside_count: Ints
    constant: npt.NDArray[np.bool_]
    malformed: list[str | None]

    def __len__(self) -> int:
        return len(self.k)

    @property
    def matches(self) -> Ints:
        return self.k - self.exp_mismatches

    def only(self, chosen: npt.NDArray[np.bool_]) -> Comparisons:
        columns = {name: value[chosen] for name, value in vars(self).items() if name != "malformed"}
        return Comparisons(**columns, malformed=[m for m, is_in in zip(self.malformed, chosen, strict=True) if is_in])

    @property
    def mant_err_mean(self) -> npt.NDArray[np.float64]:
        return np.where(self.matches > 0, self.mant_err_sum / np.maximum(self.matches, 1), NO_MATCH)


def compare(points: PointBatch, proofs: Sequence[bytes], outside: int = OUTSIDE) -> Comparisons:
    """Measure each proof against the verifier's points of its chunk. ProofError if their numbers differ."""
    polynomials = decode(proofs, points.counts)
    malformed = list(polynomials.malformed)
    floors = np.array([least_modulus(k) for k in points.counts.tolist()], dtype=np.int64)
    floors[points.sizes <= PRIME] = PRIME
    for c in np.flatnonzero(polynomials.moduli < floors).tolist():
        chunk = points[c : c + 1]
        needed, _ = backend.interpolate(chunk.indices, chunk.bits, chunk.counts)
        if polynomials.moduli[c] < needed[0]:
            malformed[c] = malformed[c] or f"the modulus {polynomials.moduli[c]} is below {floors[c]}"
    table = backend.measure(
        points.indices, points.bits, points.counts, points.sizes, polynomials.moduli, polynomials.coefficients, outside
    )
    bad = np.array([sentence is not None for sentence in malformed], dtype=bool)
    table[bad] = 0
    table[bad, 0] = points.counts[bad]
    matched = points.counts > table[:, 0]
    firsts = np.cumsum(points.counts) - points.counts
    # Chunks with equal points (zeros, NaN): their honest polynomial is a constant.
    equal = _none_of(points.bits != np.repeat(points.bits[firsts], points.counts), points.counts)
    table[equal, 4:] = 0
    higher = polynomials.coefficients != 0
    higher[firsts] = False  # of one point every polynomial is constant
    return Comparisons(
        k=points.counts, exp_mismatches=table[:, 0], mant_err_sum=table[:, 1],
        mant_err_median=np.where(matched, table[:, 2].astype(np.float64), NO_MATCH), sign_mismatches=table[:, 3],
        outside_hits=table[:, 4], outside_count=table[:, 5], constant=~bad & _none_of(higher, points.counts) & ~equal,
        malformed=malformed,
    )  # fmt: skip


def _none_of(marked: npt.NDArray[np.bool_], counts: Ints) -> npt.NDArray[np.bool_]:
    if not len(counts):
        return np.zeros(0, dtype=bool)
    none: npt.NDArray[np.bool_] = np.add.reduceat(marked.astype(np.int64), np.cumsum(counts) - counts) == 0
    return none


@dataclass(frozen=True)
class ProofTolerance:
    """The differences that rounding may explain in one chunk. `exponents`, `signs`: shares of its points; `boundary`
    points may always differ (ties at the k-th place). `mantissa_mean`, `mantissa_median`: errors of the others, in
    units of bfloat16's last bit. `outside`: the probability below which hits outside the points mean forged."""

    exponents: float = 0.05
    signs: float = 0.02
    boundary: int = 2
    mantissa_mean: float = 0.5
    mantissa_median: float = 0.0
    outside: float = 1e-9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, not {value}")


@dataclass(frozen=True)
class ProofCheck:
    """`values`: compared points. `chunk`: the worst one. `mantissa_mean` is over all values whose exponents agree,
    `mantissa_median` and `outside_hits` are the largest of all chunks; 2^64 if no exponent agrees."""

    reason: Reason | None
    detail: str
    chunks: int
    values: int
    exponent_mismatches: int
    mantissa_mean: float
    mantissa_median: float
    sign_mismatches: int
    outside_hits: int
    chunk: int | None

    @property
    def passed(self) -> bool:
        return self.reason is None


def check_proofs(comparisons: Comparisons, tolerance: ProofTolerance | None = None) -> ProofCheck:
    limits = tolerance or ProofTolerance()
    reason, detail, chunk = _verdict(comparisons, limits)
    matches = int(comparisons.matches.sum())
    return ProofCheck(
        reason=reason, detail=detail, chunks=len(comparisons), values=int(comparisons.k.sum()),
        exponent_mismatches=int(comparisons.exp_mismatches.sum()),
        mantissa_mean=int(comparisons.mant_err_sum.sum()) / matches if matches else 2.0**64,
        mantissa_median=float(comparisons.mant_err_median.max(initial=0.0)),
        sign_mismatches=int(comparisons.sign_mismatches.sum()),
        outside_hits=int(comparisons.outside_hits.max(initial=0)), chunk=chunk,
    )  # fmt: skip


def _verdict(comparisons: Comparisons, limits: ProofTolerance) -> tuple[Reason | None, str, int | None]:
    for chunk, sentence in enumerate(comparisons.malformed):
        if sentence is not None:
            return "malformed", f"the proof of chunk {chunk} is malformed: {sentence}", chunk
    if len(comparisons) == 0:
        return None, "no chunks", None
    # More hits than noise has; points that only the prover chose may hit, too: at most as many as exponents differ.
    noise = [outside_limit(count, limits.outside) for count in comparisons.outside_count.tolist()]
    hits = comparisons.outside_hits > np.array(noise, np.int64) + comparisons.exp_mismatches
    forged = comparisons.constant | hits
    if forged.any():
        chunk = int(np.argmax(forged))
        return "forged", f"the proof of chunk {chunk} has the same value outside its points: it was not computed", chunk
    severity = severity_of(comparisons, limits)
    worst = int(np.argmax(severity))
    if float(severity[worst]) <= 1:
        return None, "as computed here", worst
    detail = (
        f"{comparisons.exp_mismatches[worst]} of {comparisons.k[worst]} exponents differ,"
        f" {comparisons.sign_mismatches[worst]} signs, the mantissas by {comparisons.mant_err_mean[worst]:.3g}"
        f" on average (median {comparisons.mant_err_median[worst]:.3g})"
    )
    return "mismatch", f"the proof of chunk {worst} is not of these activations: {detail}", worst


@cache
def outside_limit(count: int, significance: float) -> int:
    """The number of hits that noise exceeds in `count` trials with less than this probability.

    >>> outside_limit(256, 1e-9)
    11
    """
    beyond, hits = 1.0, -1
    while hits < count and beyond >= significance:
        hits += 1
        term = math.comb(count, hits) * CHANCE**hits * (1 - CHANCE) ** (count - hits)
        beyond -= term
        if term < significance / 4 and hits > count * CHANCE:
            break
    return max(hits, 0)


def severity_of(comparisons: Comparisons, limits: ProofTolerance) -> npt.NDArray[np.float64]:
    """For each chunk the largest measure as a multiple of its limit. One mantissa error is ignored: a point that only
    the verifier chose, at a tie, is noise, which has the right exponent in one of 256 cases."""
    exponents = _ratio(comparisons.exp_mismatches, np.maximum(limits.boundary, limits.exponents * comparisons.k))
    signs = _ratio(comparisons.sign_mismatches, np.maximum(limits.boundary, limits.signs * comparisons.k))
    forgiven = np.maximum(comparisons.mant_err_sum - LARGEST_ERROR, 0)
    mean = _ratio(forgiven / np.maximum(comparisons.matches, 1), limits.mantissa_mean)
    median = _ratio(comparisons.mant_err_median, limits.mantissa_median)
    worst: npt.NDArray[np.float64] = np.max([exponents, signs, mean, median], axis=0)
    return np.where(comparisons.matches > 0, worst, np.inf)


def _ratio(
    values: npt.NDArray[np.int64] | npt.NDArray[np.float64], limit: float | npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """values / limit; 0 is within every limit, and a limit of 0 allows nothing else."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values == 0, 0.0, values / np.asarray(limit, dtype=np.float64))


@dataclass(frozen=True)
class ProofSums:
    """Sums over the chunks of a submission: `exponents` of `values` differ; the `matches` differ by `mantissa`."""

    values: int
    exponents: int
    matches: int
    mantissa: float


def proof_sums(comparisons: Comparisons, most: float = math.inf) -> ProofSums:
    """The sums that show weights of lower precision, without the effects of chance and ties. Subtracted are twice the
    mantissa errors that noise is expected to give, and of several chunks the worst one (of few chunks one error). One
    different exponent is ignored in every chunk: all rollouts of a group begin with the same state, which may have a
    tie at the k-th place. The mean error of a chunk counts up to `most`."""
    errors_C = np.minimum(comparisons.mant_err_sum, most * comparisons.matches)
    matches, errors = int(comparisons.matches.sum()), float(errors_C.sum())
    if len(comparisons) >= SEVERAL:
        worst = int(np.argmax(errors_C))
        errors -= float(errors_C[worst])
        matches -= int(comparisons.matches[worst])
    else:
        errors -= LARGEST_ERROR
    noise = 2 * CHANCE * LARGEST_ERROR * int(comparisons.exp_mismatches.sum())
    exponents = int(np.maximum(comparisons.exp_mismatches - 1, 0).sum())
    return ProofSums(int(comparisons.k.sum()), exponents, matches, mantissa=max(0.0, errors - noise))
