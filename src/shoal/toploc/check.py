"""Were these proofs made by running the model? `compare` measures, `check_proofs` answers with its evidence.

Evaluated at the verifier's own indices, an honest proof gives back the prover's values: exponents agree, mantissas
nearly. Elsewhere it gives noise, since k coefficients went into k points. A proof made without computing anything must
instead give a likely exponent everywhere, so it does so outside the points too: `outside_hits` counts that, at places
that follow from the verifier's points.

    malformed   bytes that no honest prover writes
    forged      a proof that says the same everywhere: made without computing anything
    mismatch    some chunk differs more than rounding explains: other weights, other tokens, another chunk's proof

Whether chunks that pass one by one differ too much together (weights of lower precision) is for whoever knows how
honest ones vary: `proof_sums` has the sums for it. The limits are a profile's; the defaults are for float32 on both
sides, where only values next to a bfloat16 rounding boundary differ, by one, and seldom.
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
from shoal.toploc.points import PointBatch, Polynomials, decode

Reason = Literal["malformed", "forged", "mismatch"]
CHANCE = 256 / PRIME  # a field element drawn at random has a given exponent: 128 mantissas, two signs
LARGEST_ERROR = 127
SEVERAL = 4  # chunks
OUTSIDE = 256
NO_MATCH = 2.0**64  # the mantissa error where no exponent agrees, as the published package has it


@dataclass(frozen=True, eq=False)
class Comparisons:
    """One entry for each chunk. Where `malformed` has a sentence the numbers say "nothing agrees". `k`: points.
    `exp_mismatches`: how many exponents differ. Over the others: `mant_err_sum` and `mant_err_median` (the upper one)
    of the mantissas' differences, 0 to 127, and `sign_mismatches`. `outside_hits` of `outside_count` places outside the
    points have the points' most frequent exponent. `constant`: the proof is a constant, the points are not. (Points
    that are all equal, zeros for instance, honestly give a constant: then nothing is counted outside.)"""

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
    malformed = _small_moduli(points, polynomials)
    table = backend.measure(
        points.indices, points.bits, points.counts, points.sizes, polynomials.moduli, polynomials.coefficients, outside
    )
    bad = np.array([sentence is not None for sentence in malformed], dtype=bool)
    table[bad] = 0
    table[bad, 0] = points.counts[bad]
    matched = points.counts > table[:, 0]
    firsts = np.cumsum(points.counts) - points.counts
    # Chunks with one value at all their points (zeros, NaN): their honest polynomial is a constant.
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


def _small_moduli(points: PointBatch, polynomials: Polynomials) -> list[str | None]:
    """What is malformed, the moduli included that are lower than chance explains and than these points need. A chunk of
    no more than p values needs no modulus below p: then there is one proof, and no second way to write it."""
    malformed = list(polynomials.malformed)
    floors = np.array([least_modulus(k) for k in points.counts.tolist()], dtype=np.int64)
    floors[points.sizes <= PRIME] = PRIME
    for c in np.flatnonzero(polynomials.moduli < floors).tolist():
        chunk = points[c : c + 1]
        needed, _ = backend.interpolate(chunk.indices, chunk.bits, chunk.counts)
        if polynomials.moduli[c] < needed[0]:
            malformed[c] = malformed[c] or f"the modulus {polynomials.moduli[c]} is below {floors[c]}"
    return malformed


def _none_of(marked: npt.NDArray[np.bool_], counts: Ints) -> npt.NDArray[np.bool_]:
    """Of which chunks no point is marked."""
    if not len(counts):
        return np.zeros(0, dtype=bool)
    none: npt.NDArray[np.bool_] = np.add.reduceat(marked.astype(np.int64), np.cumsum(counts) - counts) == 0
    return none


@dataclass(frozen=True)
class ProofTolerance:
    """What rounding may explain in one chunk. `exponents`, `signs`: the shares of its points that may differ, though
    `boundary` points always may (ties at the k-th place). `mantissa_mean`, `mantissa_median`: the errors of the others,
    in units of bfloat16's last bit. `outside`: how unlikely hits outside the points must be before it is forged."""

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
    """`values`: points compared. `chunk`: the worst one, if any. `mantissa_mean` is over all values whose exponents
    agree, `mantissa_median` and `outside_hits` are the largest of the chunks'; 2^64 where no exponent agrees."""

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
    """The gravest complaint, in a sentence, and the chunk that shows it best."""
    for chunk, sentence in enumerate(comparisons.malformed):
        if sentence is not None:
            return "malformed", f"the proof of chunk {chunk} is malformed: {sentence}", chunk
    if len(comparisons) == 0:
        return None, "no chunks", None
    # More hits than noise has, and than points that only the prover chose: no more of these than exponents differ.
    noise = [outside_limit(count, limits.outside) for count in comparisons.outside_count.tolist()]
    hits = comparisons.outside_hits > np.array(noise, np.int64) + comparisons.exp_mismatches
    forged = comparisons.constant | hits
    if forged.any():
        chunk = int(np.argmax(forged))
        return "forged", f"the proof of chunk {chunk} says the same outside its points: nothing was computed", chunk
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
    """The hits that noise has more of, in `count` trials, with less than this probability.

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
    """Of each chunk, the largest of its measures as a multiple of what is allowed. One mantissa error is forgiven: a
    point that only the verifier chose, at a tie, is noise, which in one of 256 cases has the right exponent."""
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
    """values / limit, where 0 is within every limit and a limit of 0 allows nothing else."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values == 0, 0.0, values / np.asarray(limit, dtype=np.float64))


@dataclass(frozen=True)
class ProofSums:
    """Over the chunks of a submission: `exponents` of `values` differ; the `matches` are off by `mantissa` in sum."""

    values: int
    exponents: int
    matches: int
    mantissa: float


def proof_sums(comparisons: Comparisons, most: float = math.inf) -> ProofSums:
    """The sums that show weights of lower precision, without what chance and ties put into them. Forgiven are twice the
    mantissa errors that noise is expected to give, and one more: of several chunks the worst is left out of the
    mantissas' sum, of few it counts for one error less. So is one other exponent in every chunk: rollouts of a group
    begin with the same state, and where that has a tie at the k-th place, all of them have it. No chunk counts for more
    than a mean error of `most`."""
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
