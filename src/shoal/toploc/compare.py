"""Proofs against the points that the verifier computed: numbers, no judgement (that is `check`).

Evaluated at the verifier's own indices, an honest proof gives back the prover's values: exponents agree, mantissas
nearly. Elsewhere it gives noise, since k coefficients went into k points. A proof made without computing anything must
instead give a likely exponent everywhere, so it does so outside the points too: `outside_hits` counts that, at places
that follow from the verifier's points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.toploc import backend
from shoal.toploc.plain import PRIME, Ints, least_modulus
from shoal.toploc.points import PointBatch
from shoal.toploc.proofs import Polynomials, decode

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
