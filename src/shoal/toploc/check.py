"""Were these proofs made by running the model? Measurements in, one answer with its evidence out.

    malformed   bytes that no honest prover writes
    forged      a proof that says the same everywhere: made without computing anything
    mismatch    some chunk differs more than rounding explains: other weights, other tokens, another chunk's proof

Whether chunks that pass one by one differ too much together (weights of lower precision) is for whoever knows how
honest ones vary: `proof_sums` has the sums for it.

The numbers are a profile's (model, engine, device, dtype). The defaults are for float32 on both sides, where only
values next to a bfloat16 rounding boundary differ, by one, and seldom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.toploc.compare import Comparisons
from shoal.toploc.plain import PRIME

Reason = Literal["malformed", "forged", "mismatch"]
CHANCE = 256 / PRIME  # a field element drawn at random has a given exponent: 128 mantissas, two signs
LARGEST_ERROR = 127
SEVERAL = 4  # chunks


@dataclass(frozen=True)
class ProofTolerance:
    """What rounding may explain. One chunk: `exponents` and `signs` are the shares of its k points that may differ,
    though `boundary` points always may (values tied at the k-th place, where prover and verifier can choose
    differently); `mantissa_mean` and `mantissa_median` bound the errors of the others, in units of the last of
    bfloat16's 7 bits. `outside`: how unlikely the hits outside the points must be for a polynomial of noise before the
    proof is called forged."""

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
    """The answer and its evidence. `values`: points compared. `chunk`: the worst one, None if there are none.
    `mantissa_mean` is over all values whose exponents agree, `mantissa_median` is the largest of the chunks' medians;
    2^64 where none agree. `outside_hits` is the largest of the chunks'."""

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
    """Of each chunk, the largest of its measures as a multiple of what is allowed: above 1 is too much. A point that
    only the verifier chose, at a tie, gives noise, which in one of 256 cases has the right exponent, and any mantissa:
    one such error is forgiven."""
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
    return ProofSums(
        values=int(comparisons.k.sum()),
        exponents=int(np.maximum(comparisons.exp_mismatches - 1, 0).sum()),
        matches=matches,
        mantissa=max(0.0, errors - noise),
    )
