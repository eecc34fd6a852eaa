"""The three functions of `plain`, compiled by numba, with the same results. Types are written out because numba widens
integer expressions to 64 bits: a cast back to 16 or 32 bits lets the loops run in wide registers. One thread, without
the interpreter's lock."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from shoal.toploc.plain import BLOCK, LEAST_MODULUS, PRIME, QUIET_NAN, Bits, Ints, inverses

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
Array = TypeVar("Array", bound=npt.NDArray[Any])
Words = npt.NDArray[np.uint32]

P32, MAGNITUDE = np.uint32(PRIME), np.uint16(0x7FFF)


def compiled(function: Compiled) -> Compiled:
    fast: Compiled = numba.njit(cache=True, nogil=True)(function)
    return fast


def select(flat: npt.NDArray[Any], starts: Ints, sizes: Ints, counts: Ints) -> tuple[Ints, Bits]:
    indices = np.empty(int(counts.sum()), dtype=np.int64)
    bits = np.empty(len(indices), dtype=np.uint16)
    room = np.empty(int(sizes.max(initial=0)), dtype=np.int32)
    layout = _frozen(starts), _frozen(sizes), _frozen(counts)
    if flat.dtype == np.float32:
        rounded = np.empty(len(room), dtype=np.uint16)
        _select_float32(_frozen(flat.view(np.uint32)), *layout, rounded, room, indices, bits)
    else:
        _select_bits(_frozen(flat), *layout, room, indices, bits)
    return indices, bits


def interpolate(indices: Ints, bits: Bits, counts: Ints) -> tuple[Ints, Bits]:
    moduli = np.zeros(len(counts), dtype=np.int64)
    coefficients = np.empty(len(indices), dtype=np.uint16)
    _interpolate(_frozen(indices), _frozen(bits), _frozen(counts), inverses(), moduli, coefficients)
    return moduli, coefficients


def measure(
    indices: Ints, bits: Bits, counts: Ints, sizes: Ints, moduli: Ints, coefficients: Bits, outside: int
) -> Ints:
    results = np.zeros((len(counts), 6), dtype=np.int64)
    points = _frozen(indices), _frozen(bits), _frozen(counts), _frozen(sizes)
    _measure(*points, _frozen(moduli), _frozen(coefficients), outside, results)
    return results


def _frozen(array: Array) -> Array:
    """A view that cannot be written to: to numba a type of its own, so that one compilation serves all inputs."""
    view: Array = array.view()
    view.flags.writeable = False
    return view


@compiled
def _select_bits(
    flat: Bits, starts: Ints, sizes: Ints, counts: Ints, room: npt.NDArray[np.int32], indices: Ints, bits: Bits
) -> None:
    at = 0
    for c in range(len(starts)):
        chunk = flat[starts[c] : starts[c] + sizes[c]]
        _largest(chunk, counts[c], room, indices[at : at + counts[c]], bits[at : at + counts[c]])
        at += counts[c]


@compiled
def _select_float32(
    flat: Words, starts: Ints, sizes: Ints, counts: Ints, rounded: Bits, room: npt.NDArray[np.int32],
    indices: Ints, bits: Bits,
) -> None:  # fmt: skip
    at = 0
    for c in range(len(starts)):
        chunk = flat[starts[c] : starts[c] + sizes[c]]
        for i in range(len(chunk)):
            raw = chunk[i]
            nearest = np.uint16(
                np.uint32(raw + np.uint32(0x7FFF) + (raw >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
            )
            is_nan = np.uint32(raw & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            rounded[i] = np.uint16(QUIET_NAN) if is_nan else nearest
        _largest(rounded[: sizes[c]], counts[c], room, indices[at : at + counts[c]], bits[at : at + counts[c]])
        at += counts[c]


@compiled
def _largest(chunk: Bits, count: int, room: npt.NDArray[np.int32], indices: Ints, bits: Bits) -> None:
    """Block maxima → a floor that few values reach → those values → the exact threshold among them."""
    maxima = _block_maxima(chunk)
    floor = np.uint16(0)
    if len(maxima) >= count:
        floor = _floor(maxima, count)
    found = 0
    for b in range(len(maxima)):
        if maxima[b] >= floor:
            for i in range(b * BLOCK, min((b + 1) * BLOCK, len(chunk))):
                if np.uint16(chunk[i] & MAGNITUDE) >= floor:
                    room[found] = i
                    found += 1
    magnitudes = np.empty(found, dtype=np.uint16)
    for i in range(found):
        magnitudes[i] = np.uint16(chunk[room[i]] & MAGNITUDE)
    threshold, ties = _threshold(magnitudes, count)
    at = 0
    for i in range(found):
        wanted = magnitudes[i] > threshold
        if magnitudes[i] == threshold and ties > 0:
            ties -= 1
            wanted = True
        if wanted:
            indices[at] = room[i]
            bits[at] = chunk[room[i]]
            at += 1


@compiled
def _block_maxima(chunk: Bits) -> Bits:
    """The largest magnitude of each block, the last one perhaps shorter. Doubling a value drops its sign. The inner
    loop has a fixed length and calls nothing: that is what makes it run in wide registers, ten times faster."""
    full = len(chunk) // BLOCK
    maxima = np.zeros((len(chunk) + BLOCK - 1) // BLOCK, dtype=np.uint16)
    for b in range(full):
        highest = np.uint16(0)
        for i in range(BLOCK):
            doubled = np.uint16(chunk[b * BLOCK + i] << 1)
            if doubled > highest:
                highest = doubled
        maxima[b] = highest >> 1
    for i in range(full * BLOCK, len(chunk)):
        maxima[full] = max(maxima[full], np.uint16(chunk[i] & MAGNITUDE))
    return maxima


@compiled
def _floor(maxima: Bits, count: int) -> np.uint16:
    """A magnitude that at least `count` of the maxima reach, and few more: bins of four magnitudes, from the top."""
    bins = np.zeros(2**13, dtype=np.int32)
    highest = np.uint16(0)
    for value in maxima:
        bins[value >> np.uint16(2)] += 1
        highest = max(highest, value)
    at = np.int64(highest >> np.uint16(2))
    left = count - bins[at]
    while left > 0:
        at -= 1
        left -= bins[at]
    return np.uint16(at << 2)


@compiled
def _threshold(magnitudes: Bits, count: int) -> tuple[np.uint16, int]:
    """The count-th largest magnitude, and how many values equal to it are among the `count` largest."""
    exponents = np.zeros(256, dtype=np.int64)
    for value in magnitudes:
        exponents[value >> 7] += 1
    left, exponent = count, 255
    while exponents[exponent] < left:
        left -= exponents[exponent]
        exponent -= 1
    mantissas = np.zeros(128, dtype=np.int64)
    for value in magnitudes:
        if value >> 7 == exponent:
            mantissas[value & 127] += 1
    mantissa = 127
    while mantissas[mantissa] < left:
        left -= mantissas[mantissa]
        mantissa -= 1
    return np.uint16(exponent << 7 | mantissa), left


@compiled
def _modulus(x: Ints, seen: npt.NDArray[np.int32], stamp: int) -> tuple[int, int]:
    """The largest modulus under which all x differ (0: none), and the next free stamp. `seen` is marked by stamps."""
    for modulus in range(PRIME, LEAST_MODULUS - 1, -1):
        different = True
        for value in x:
            residue = value % modulus
            if seen[residue] == stamp:
                different = False
                break
            seen[residue] = stamp
        stamp += 1
        if different:
            return modulus, stamp
    return 0, stamp


@compiled
def _interpolate(indices: Ints, bits: Bits, counts: Ints, table: Words, moduli: Ints, coefficients: Bits) -> None:
    """Lagrange's form: P = M · Σ w/(X - x), where M = Π (X - x) and w = y / M'(x). Expanded at infinity, w/(X - x) is Σ
    w x^t / X^(t+1). So the coefficient of X^j in P is Σ M[j+1+t] s[t], with the power sums s[t] = Σ w x^t. Every inner
    loop runs over independent elements; only k inverses are looked up."""
    seen = np.zeros(PRIME, dtype=np.int32)
    stamp, at = 1, 0
    for c in range(len(counts)):
        count = counts[c]
        moduli[c], stamp = _modulus(indices[at : at + count], seen, stamp)
        modulus = max(moduli[c], 1)
        x = np.empty(count, dtype=np.uint32)
        for i in range(count):
            x[i] = np.uint32(indices[at + i] % modulus)
        master = _master(x)
        slopes = np.empty(count, dtype=np.uint32)
        for i in range(count):
            slopes[i] = np.uint32(np.uint32(master[i + 1] * np.uint32(i + 1)) % P32)
        terms = np.empty(count, dtype=np.uint32)
        _horner(slopes, x, terms)
        for i in range(count):
            terms[i] = np.uint32(np.uint32(bits[at + i]) % P32 * table[terms[i]] % P32)
        sums = _power_sums(terms, x)
        for j in range(count):
            total = np.uint64(0)
            upper = master[j + 1 :]
            for t in range(count - j):
                total += np.uint64(upper[t]) * np.uint64(sums[t])
            coefficients[at + j] = np.uint16(total % np.uint64(PRIME))
        at += count


@compiled
def _master(x: Words) -> Words:
    old, new = np.zeros(len(x) + 1, dtype=np.uint32), np.zeros(len(x) + 1, dtype=np.uint32)
    old[0] = np.uint32(1)
    for n in range(len(x)):
        minus = np.uint32(P32 - x[n])
        new[0] = np.uint32(np.uint32(old[0] * minus) % P32)
        higher, target = old[1:], new[1:]
        for i in range(n + 1):
            target[i] = np.uint32(np.uint32(np.uint32(higher[i] * minus) + old[i]) % P32)
        old, new = new, old
    return old


@compiled
def _power_sums(terms: Words, x: Words) -> Words:
    """Σ terms · x^t for t = 0 … k-1; `terms` is used up. k · p < 2^32 for k < 65536."""
    sums = np.empty(len(x), dtype=np.uint32)
    for t in range(len(x)):
        total = np.uint32(0)
        for i in range(len(x)):
            total = np.uint32(total + terms[i])
            terms[i] = np.uint32(np.uint32(terms[i] * x[i]) % P32)
        sums[t] = np.uint32(total % P32)
    return sums


@compiled
def _horner(polynomial: npt.NDArray[Any], x: Words, values: Words) -> None:
    values[:] = np.uint32(0)
    for power in range(len(polynomial) - 1, -1, -1):
        coefficient = np.uint32(polynomial[power])
        for i in range(len(x)):
            values[i] = np.uint32(np.uint32(np.uint32(values[i] * x[i]) + coefficient) % P32)


@compiled
def _measure(
    indices: Ints, bits: Bits, counts: Ints, sizes: Ints, moduli: Ints, coefficients: Bits, outside: int, results: Ints
) -> None:
    seen = np.zeros(PRIME, dtype=np.int32)
    at = 0
    for c in range(len(counts)):
        count, modulus = counts[c], moduli[c]
        own = bits[at : at + count]
        polynomial = coefficients[at : at + count]
        x = np.empty(count, dtype=np.uint32)
        start = 0
        for i in range(count):
            x[i] = np.uint32(indices[at + i] % modulus)
            seen[x[i]] = c + 1
            start += (indices[at + i] + 1) * (np.int64(own[i]) + 1)
        values = np.empty(count, dtype=np.uint32)
        _horner(polynomial, x, values)
        modal = _errors(values, own, results[c])
        span = min(sizes[c], modulus)
        places = _places(start, span, count, outside, seen, c + 1)
        noise = np.empty(len(places), dtype=np.uint32)
        _horner(polynomial, places, noise)
        for value in noise:
            results[c, 4] += value >> 7 & 0xFF == modal
        results[c, 5] = len(places)
        at += count


@compiled
def _errors(values: Words, own: Bits, result: Ints) -> int:
    """Fill in the first four results; return the most frequent exponent of the verifier's own values."""
    errors = np.zeros(128, dtype=np.int64)
    exponents = np.zeros(256, dtype=np.int64)
    matches = 0
    for i in range(len(own)):
        claimed, mine = np.int64(values[i]), np.int64(own[i])
        exponents[mine >> 7 & 0xFF] += 1
        if claimed >> 7 & 0xFF == mine >> 7 & 0xFF:
            error = abs((claimed & 0x7F) - (mine & 0x7F))
            errors[error] += 1
            matches += 1
            result[1] += error
            result[3] += claimed >> 15 != mine >> 15
    result[0] = len(own) - matches
    if matches > 0:
        below, median = errors[0], 0
        while below <= matches // 2:
            median += 1
            below += errors[median]
        result[2] = median
    return int(np.argmax(exponents))


@compiled
def _places(start: int, span: int, count: int, outside: int, seen: npt.NDArray[np.int32], stamp: int) -> Words:
    """Up to `outside` residues that no point has, evenly spread; where they begin follows from the points."""
    candidates = min(span, outside + count) if outside > 0 else 0
    places = np.empty(outside, dtype=np.uint32)
    found = 0
    for i in range(candidates):
        place = (start + i * (span // candidates)) % span
        if found < outside and seen[place] != stamp:
            places[found] = place
            found += 1
    return places[:found]
