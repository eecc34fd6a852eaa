"""Points → proofs, and the bytes of proofs back into numbers.

A proof of k points is 2 + 2k bytes, all numbers big-endian uint16: the modulus m, then the k coefficients, ascending
powers, of the polynomial over GF(65497) that is y at (x mod m) for every point (x, y). It depends on the set of points,
not on their order. There is no room for anything else: another length or a number >= 65497 is malformed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import ProofError
from shoal.toploc import backend
from shoal.toploc.plain import LEAST_MODULUS, PRIME, Bits, Ints
from shoal.toploc.points import PointBatch, chunk_rows, chunk_topk, top_points


@dataclass(frozen=True, eq=False)
class Polynomials:
    """Decoded proofs, their coefficients end to end. A malformed one has a sentence in `malformed`, zeros elsewhere."""

    moduli: Ints
    coefficients: Bits
    malformed: list[str | None]


def proof_size(k: int) -> int:
    return 2 + 2 * k


def compile_kernels() -> None:
    """Compile now what large work will need: the first time ever it takes some ten seconds."""
    from shoal.toploc.check import compare

    with contextlib.suppress(ImportError):  # of numba: then numpy does the work
        import shoal.toploc.kernels  # noqa: F401  from now on it does small work, too

    points = top_points(np.arange(1.0, 4097.0, dtype=np.float32).reshape(64, 64), [64], 8, 32)
    compare(points, commit(points))


def commit(points: PointBatch) -> list[bytes]:
    moduli, coefficients = backend.interpolate(points.indices, points.bits, points.counts)
    if not moduli.all():
        raise ProofError(f"the indices of chunk {int(np.argmin(moduli))} agree under every modulus: repeated points?")
    ends = np.cumsum(points.counts) + np.arange(1, len(points) + 1)
    starts = ends - points.counts - 1
    words = np.empty(len(coefficients) + len(points), dtype=">u2")
    is_coefficient = np.ones(len(words), dtype=bool)
    is_coefficient[starts] = False
    words[starts] = moduli
    words[is_coefficient] = coefficients
    data = words.tobytes()
    return [data[2 * start : 2 * end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def split_proofs(data: bytes, length: int, hidden: int, topk: int, rows: int) -> list[bytes]:
    """The proofs of one sequence of `length` rows, which lie back to back in `data`."""
    sizes = [proof_size(chunk_topk(r, hidden, topk, rows)) for r in chunk_rows(length, rows)]
    if len(data) != sum(sizes):
        raise ProofError(
            f"{len(data)} bytes of proofs, but {length} tokens in chunks of {rows} with {topk} points each"
            f" make {len(sizes)} proofs of {sum(sizes)} bytes together"
        )
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def decode(proofs: Sequence[bytes], counts: Ints) -> Polynomials:
    """Read proofs of `counts[c]` points each. Nothing is repaired: what is not canonical is malformed."""
    if len(proofs) != len(counts):
        raise ProofError(f"{len(proofs)} proofs for {len(counts)} chunks: there must be one for each")
    sizes = [proof_size(count) for count in counts.tolist()]
    malformed: list[str | None] = [None] * len(proofs)
    for c, size in enumerate(sizes):
        proof: object = proofs[c]
        if not isinstance(proof, bytes):
            malformed[c] = f"a proof is bytes, not {type(proof).__name__}"
        elif len(proof) != size:
            malformed[c] = f"{len(proof)} bytes, not {size}"
    whole = [bytes(size) if wrong else proof for proof, size, wrong in zip(proofs, sizes, malformed, strict=True)]
    words = np.frombuffer(b"".join(whole), dtype=">u2").astype(np.uint16)
    starts = np.cumsum(counts) - counts + np.arange(len(counts))
    is_coefficient = np.ones(len(words), dtype=bool)
    is_coefficient[starts] = False
    moduli, coefficients = words[starts].astype(np.int64), words[is_coefficient]
    for c in np.flatnonzero((moduli < LEAST_MODULUS) | (moduli > PRIME)).tolist():
        malformed[c] = malformed[c] or f"the modulus {moduli[c]} is not between {LEAST_MODULUS} and {PRIME}"
    chunk_of = np.repeat(np.arange(len(counts)), counts)
    for c in np.unique(chunk_of[coefficients >= PRIME]).tolist():
        malformed[c] = malformed[c] or f"a coefficient is not below {PRIME}"
    bad = np.array([sentence is not None for sentence in malformed], dtype=bool)
    if bad.any():
        moduli[bad] = PRIME
        coefficients[bad[chunk_of]] = 0
    return Polynomials(moduli, coefficients, malformed)
