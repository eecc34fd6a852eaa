"""The arithmetic of proofs in numpy. `kernels` has the same three functions compiled, for large work. All functions
take batches: C chunks whose points lie end to end, `counts[c]` of them for chunk c."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

PRIME = 65497  # the products of two elements, and one element more, still fit into 32 bits
LEAST_MODULUS = 2**15 + 1  # no search for a modulus goes lower

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint16]

BLOCK = 64  # values that are looked at by their largest only
AT_ONCE = 64  # chunks that are measured together: bounds the memory
QUIET_NAN = 0x7FC0


@cache
def inverses() -> npt.NDArray[np.uint32]:
    """1/d for every d of the field (0 for 0), by 1/d = -(p // d) / (p mod d)."""
    plain = [0, 1]
    for value in range(2, PRIME):
        plain.append((PRIME - PRIME // value) * plain[PRIME % value] % PRIME)
    table = np.array(plain, dtype=np.uint32)
    table.flags.writeable = False
    return table


@cache
def least_modulus(k: int) -> int:
    """The modulus below which an honest proof of `k` points falls less than once in 10^18. A modulus fails if two of
    the k indices agree under it. For indices without structure that happens with probability 1 - exp(-k(k-1) / 2p),
    hardly depending on its neighbours: 12 % for k = 128, so that 64 failures in a row are never seen, and 65433 is the
    bound. Above k = 300 more are allowed. (Indices with structure can do worse: `compare` also accepts the modulus that
    the verifier's own points need.)"""
    failure = -math.expm1(-k * (k - 1) / (2 * PRIME))
    tries = 64.0
    if failure > 0:
        tries = max(tries, math.log(1e-18) / math.log(failure)) if failure < 1 else math.inf
    return int(max(LEAST_MODULUS, PRIME - min(tries, PRIME)))


def bfloat16_bits(values: npt.NDArray[np.float32]) -> Bits:
    """float32 → the bits of bfloat16, rounded to nearest even; every NaN becomes the one quiet NaN."""
    raw = values.view(np.uint32)
    rounded = (raw + (np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    is_nan = (raw & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint32(QUIET_NAN), rounded).astype(np.uint16)


def select(flat: npt.NDArray[Any], starts: Ints, sizes: Ints, counts: Ints) -> tuple[Ints, Bits]:
    """The `counts[c]` largest magnitudes of each chunk flat[start : start + size], by ascending index. `flat` is
    float32, or uint16 holding bfloat16 bits. Of equal magnitudes the one with the lowest index comes first."""
    indices, bits = [np.empty(0, np.int64)], [np.empty(0, np.uint16)]
    for start, size, count in zip(starts.tolist(), sizes.tolist(), counts.tolist(), strict=True):
        chunk = flat[start : start + size]
        pattern: Bits = bfloat16_bits(chunk) if chunk.dtype == np.float32 else chunk
        chosen = _largest(pattern & np.uint16(0x7FFF), count)
        indices.append(chosen)
        bits.append(pattern[chosen])
    return np.concatenate(indices), np.concatenate(bits)


def _largest(magnitudes: Bits, count: int) -> Ints:
    n_blocks = len(magnitudes) // BLOCK
    floor = 0
    if n_blocks >= count:
        maxima = magnitudes[: n_blocks * BLOCK].reshape(BLOCK, n_blocks).max(axis=0)
        floor = int(np.partition(maxima, n_blocks - count)[n_blocks - count])
    candidates = np.flatnonzero(magnitudes >= floor)
    order = np.argsort(-magnitudes[candidates].astype(np.int32), kind="stable")[:count]
    return np.sort(candidates[order])


def interpolate(indices: Ints, bits: Bits, counts: Ints) -> tuple[Ints, Bits]:
    """For each chunk its modulus (0: not found) and the coefficients of the polynomial through its points."""
    all_moduli = np.zeros(len(counts), dtype=np.int64)
    coefficients = np.zeros(len(indices), dtype=np.uint16)
    for chunks, at in _by_count(counts):
        x_CK = indices[at]
        moduli = _moduli(x_CK)
        all_moduli[chunks] = moduli
        residues_CK = x_CK % np.maximum(moduli, 1)[:, None]
        coefficients[at] = _newton(residues_CK, bits[at].astype(np.int64) % PRIME)
    return all_moduli, coefficients


def _by_count(counts: Ints) -> Iterator[tuple[Ints, Ints]]:
    offsets = np.concatenate([[0], np.cumsum(counts)])
    for count in np.unique(counts).tolist():
        chunks = np.flatnonzero(counts == count)
        yield chunks, offsets[chunks][:, None] + np.arange(count)


def _moduli(x_CK: Ints) -> Ints:
    moduli = np.zeros(len(x_CK), dtype=np.int64)
    waiting = np.arange(len(x_CK))
    for modulus in range(PRIME, LEAST_MODULUS - 1, -1):
        residues = np.sort(x_CK[waiting] % modulus, axis=1)
        different = (residues[:, 1:] != residues[:, :-1]).all(axis=1)
        moduli[waiting[different]] = modulus
        waiting = waiting[~different]
        if not len(waiting):
            break
    return moduli


def _newton(x_CK: Ints, y_CK: Ints) -> Ints:
    count = x_CK.shape[1]
    table = inverses().astype(np.int64)
    newton = y_CK.copy()
    for step in range(1, count):
        distance = (x_CK[:, step:] - x_CK[:, : count - step]) % PRIME
        newton[:, step:] = (newton[:, step:] - newton[:, step - 1 : -1]) % PRIME * table[distance] % PRIME
    result = np.zeros_like(newton)
    for step in range(count - 1, -1, -1):
        shifted = np.zeros_like(result)
        shifted[:, 1:] = result[:, :-1]
        result = (shifted - result * x_CK[:, step : step + 1]) % PRIME
        result[:, 0] = (result[:, 0] + newton[:, step]) % PRIME
    return result


def measure(
    indices: Ints, bits: Bits, counts: Ints, sizes: Ints, moduli: Ints, coefficients: Bits, outside: int
) -> Ints:
    """How far proofs are from points: [C, 6] exponent mismatches, sum of mantissa errors over the others, their upper
    median, sign mismatches among them, hits of the modal exponent at up to `outside` residues that none of the points
    has, and how many there are. Where these start follows from the points: who has not computed them cannot know."""
    results = np.zeros((len(counts), 6), dtype=np.int64)
    for chunks, at in _by_count(counts):
        for begin in range(0, len(chunks), AT_ONCE):
            some, where = chunks[begin : begin + AT_ONCE], at[begin : begin + AT_ONCE]
            x_CK, own_CK = indices[where] % moduli[some][:, None], bits[where].astype(np.int64)
            polynomials_CK = coefficients[where].astype(np.int64)
            results[some, :4] = _errors(evaluate(polynomials_CK, x_CK), own_CK)
            start_C = ((indices[where] + 1) * (own_CK + 1)).sum(axis=1)
            places_CW, counted_CW = _outside(start_C, np.minimum(sizes[some], moduli[some]), x_CK, outside)
            exponents_CK = (own_CK >> 7 & 0xFF) + np.arange(len(own_CK))[:, None] * 256  # apart by chunk
            histogram_CE = np.bincount(exponents_CK.reshape(-1), minlength=256 * len(own_CK)).reshape(-1, 256)
            modal_C1 = histogram_CE.argmax(axis=1)[:, None]  # the most frequent exponent, the lowest of several
            hits_CW = (evaluate(polynomials_CK, places_CW) >> 7 & 0xFF) == modal_C1
            results[some, 4] = (hits_CW & counted_CW).sum(axis=1)
            results[some, 5] = counted_CW.sum(axis=1)
    return results


def evaluate(polynomials_CK: Ints, x_CN: Ints) -> Ints:
    """Horner's rule: each polynomial at its row of places."""
    values_CN = np.zeros_like(x_CN)
    for power in range(polynomials_CK.shape[1] - 1, -1, -1):
        values_CN = (values_CN * x_CN + polynomials_CK[:, power : power + 1]) % PRIME
    return values_CN


def _errors(claimed_CK: Ints, own_CK: Ints) -> Ints:
    """[C, 4]: exponent mismatches; over the others the sum and upper median of mantissa errors, and sign mismatches."""
    same_CK = (claimed_CK >> 7 & 0xFF) == (own_CK >> 7 & 0xFF)
    matches_C = same_CK.sum(axis=1)
    error_CK = np.abs((claimed_CK & 0x7F) - (own_CK & 0x7F))
    ordered_CK = np.sort(np.where(same_CK, error_CK, 0x7FFF), axis=1)
    median_C = ordered_CK[np.arange(len(ordered_CK)), np.minimum(matches_C // 2, ordered_CK.shape[1] - 1)]
    sums_C = np.where(same_CK, error_CK, 0).sum(axis=1)
    signs_C = (same_CK & (claimed_CK >> 15 != own_CK >> 15)).sum(axis=1)
    return np.stack([own_CK.shape[1] - matches_C, sums_C, np.where(matches_C > 0, median_C, 0), signs_C], axis=1)


def _outside(start_C: Ints, span_C: Ints, x_CK: Ints, wanted: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Places evenly spread over the residues, and which of them count: up to `wanted` that no point has."""
    width = wanted + x_CK.shape[1] if wanted else 0
    candidates_C = np.minimum(span_C, width)
    numbers_W = np.arange(width)
    stride_C: Ints = span_C // np.maximum(candidates_C, 1)
    places_CW: Ints = np.remainder(start_C[:, None] + numbers_W * stride_C[:, None], span_C[:, None])
    apart_C1 = np.arange(len(x_CK))[:, None] * PRIME  # so that one search serves all chunks
    is_point_CW = np.isin(places_CW + apart_C1, x_CK + apart_C1)
    free_CW = (numbers_W < candidates_C[:, None]) & ~is_point_CW
    return places_CW, free_CW & (free_CW.cumsum(axis=1) <= wanted)
