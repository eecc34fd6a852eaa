"""The numbers of a proof: the prime field, its inverses, and the moduli that an honest proof can have."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt

PRIME = 65497  # the products of two elements, and one element more, still fit into 32 bits
LEAST_MODULUS = 2**15 + 1  # no search for a modulus goes lower

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint16]


@cache
def inverses() -> npt.NDArray[np.uint32]:
    """1/d for every d of the field (0 for 0), by 1/d = -(p // d) / (p mod d)."""
    table = np.zeros(PRIME, dtype=np.uint32)
    plain = [0, 1]
    for value in range(2, PRIME):
        plain.append((PRIME - PRIME // value) * plain[PRIME % value] % PRIME)
    table[:] = plain
    table.flags.writeable = False
    return table


@cache
def least_modulus(k: int) -> int:
    """The modulus below which an honest proof of `k` points falls less than once in 10^18.

    A modulus fails if two of the k indices agree under it. For indices without structure that happens with probability
    1 - exp(-k(k-1) / 2p), hardly depending on its neighbours: 12 % for k = 128, so that 64 failures in a row are never
    seen, and 65433 is the bound. Above k = 300 more are allowed. (Indices with structure can do worse: `compare` also
    accepts the modulus that the verifier's own points need.)
    """
    failure = -math.expm1(-k * (k - 1) / (2 * PRIME))
    tries = 64.0
    if failure > 0:
        tries = max(tries, math.log(1e-18) / math.log(failure)) if failure < 1 else math.inf
    return int(max(LEAST_MODULUS, PRIME - min(tries, PRIME)))
