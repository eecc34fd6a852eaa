"""The uniform stream: u[t] = the first 53 bits of Philox4x32-10 at counter t under a 64-bit seed. Philox is a
counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): any position can be
computed alone, on any machine, with 32-bit integer multiplications only. Of the four words of a position, 0 and 1 make
the uniform; 2 and 3 are unused, so that position = counter."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW_32 = 0xFFFFFFFF

Words = npt.NDArray[np.uint64]


def philox4x32(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, ...]:
    """Ten rounds of Philox4x32 on broadcast 32-bit words: in arrays of uint64, so that products never overflow, or in
    tensors of int64, whose products wrap, which leaves their bits right (the masks remove the sign)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c2 = ((product1 >> 32) ^ c1 ^ k0) & LOW_32, ((product0 >> 32) ^ c3 ^ k1) & LOW_32
        c1, c3 = product1, product0  # their upper halves are masked with the next c0 and c2
        k0, k1 = (k0 + WEYL[0]) & LOW_32, (k1 + WEYL[1]) & LOW_32
    return c0, c1 & LOW_32, c2, c3 & LOW_32


def uniforms(seed: int, start: int, count: int) -> npt.NDArray[np.float64]:
    """`count` uniforms in [0, 1) of one seed, from position `start` on.

    >>> float(uniforms(0, 0, 1)[0]) == (0x6627E8D5 >> 5) * 2.0**-27 + (0xE169C58D >> 6) * 2.0**-53
    True
    """
    if not 0 <= seed < 2**64 or start < 0 or count < 0:
        raise ValueError(f"seed, start and count must not be negative, the seed below 2**64: {seed}, {start}, {count}")
    return uniforms_at(np.array([seed], dtype=np.uint64), np.arange(start, start + count, dtype=np.uint64))


def uniforms_at(seeds: Words, positions: Words) -> npt.NDArray[np.float64]:
    """The uniform of each (seed, position), both uint64, of shapes that broadcast: for rows of unequal lengths."""
    zero = np.zeros((1,) * seeds.ndim, dtype=np.uint64)
    w0, w1, *_ = philox4x32((positions & LOW_32, positions >> 32, zero, zero), (seeds & LOW_32, seeds >> 32))
    values: npt.NDArray[np.float64] = (w0 >> 5).astype(np.float64) * 2.0**-27 + (w1 >> 6).astype(np.float64) * 2.0**-53
    return values
