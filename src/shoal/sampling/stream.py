"""The uniform stream: u[t] = the first 53 bits of Philox4x32-10 at counter t under a 64-bit seed.

Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): any
position can be computed alone, in any order, on any machine, with 32-bit integer multiplications only. One block of
four words per position; words 0 and 1 make the uniform, words 2 and 3 are left unused so that position = counter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW_32 = np.uint64(0xFFFFFFFF)
SHIFT_32 = np.uint64(32)

Words = npt.NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds of Philox4x32 on arrays of 32-bit words (held in uint64, so that products never overflow)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c2 = (product1 >> SHIFT_32) ^ c1 ^ k0, (product0 >> SHIFT_32) ^ c3 ^ k1
        c1, c3 = product1 & LOW_32, product0 & LOW_32
        k0, k1 = (k0 + WEYL[0]) & LOW_32, (k1 + WEYL[1]) & LOW_32
    return c0, c1, c2, c3


def uniforms(seed: int, start: int, count: int) -> npt.NDArray[np.float64]:
    """`count` uniforms in [0, 1) of one seed, from position `start` on.

    >>> float(uniforms(0, 0, 1)[0]) == (0x6627E8D5 >> 5) * 2.0**-27 + (0xE169C58D >> 6) * 2.0**-53
    True
    """
    row: npt.NDArray[np.float64] = uniforms_matrix((seed,), start, count)[0]
    return row


def uniforms_matrix(seeds: Sequence[int], start: int, count: int) -> npt.NDArray[np.float64]:
    """Uniforms of many seeds at once: row i is `uniforms(seeds[i], start, count)`."""
    if not all(0 <= seed < 2**64 for seed in seeds):
        raise ValueError("a seed is an unsigned 64-bit number")
    if start < 0 or count < 0:
        raise ValueError(f"positions start at 0, not {start}, and a count is not negative: {count}")
    seed_S1 = np.asarray(seeds, dtype=np.uint64)[:, None]
    position_1T = np.arange(start, start + count, dtype=np.uint64)[None, :]
    return uniforms_at(seed_S1, position_1T)


def uniforms_at(seeds: Words, positions: Words) -> npt.NDArray[np.float64]:
    """The uniform of each (seed, position), both uint64, of shapes that broadcast: for rows of unequal lengths."""
    zero = np.zeros((1,) * seeds.ndim, dtype=np.uint64)
    counter = (positions & LOW_32, positions >> SHIFT_32, zero, zero)
    w0, w1, *_ = philox4x32(counter, (seeds & LOW_32, seeds >> SHIFT_32))
    high_27 = (w0 >> np.uint64(5)).astype(np.float64)
    low_26 = (w1 >> np.uint64(6)).astype(np.float64)
    values: npt.NDArray[np.float64] = high_27 * 2.0**-27 + low_26 * 2.0**-53
    return values
