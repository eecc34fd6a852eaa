"""The uniform stream on a torch device: the same numbers as `stream`, bit for bit, made where they are used.

64-bit signed integers throughout: products wrap, which leaves their bits right, and a mask after every shift removes
the sign. The largest conversion to float64 is of 53 bits, which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.sampling.stream import ROUNDS

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW_32 = 0xFFFFFFFF


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on 32-bit words held in int64 tensors, which are broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c2 = ((product1 >> 32) & LOW_32) ^ c1 ^ k0, ((product0 >> 32) & LOW_32) ^ c3 ^ k1
        c1, c3 = product1 & LOW_32, product0 & LOW_32
        k0, k1 = (k0 + WEYL[0]) & LOW_32, (k1 + WEYL[1]) & LOW_32
    return c0, c1, c2, c3


def as_uniforms(word0: Tensor, word1: Tensor) -> Tensor:
    """53 bits of two words as float64 in [0, 1)."""
    return ((word0 >> 5) * 2**26 + (word1 >> 6)).double() * 2.0**-53


def seed_key(seeds: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The two key words of each seed."""
    words_S = np.asarray(seeds, dtype=np.uint64)
    halves = (words_S & np.uint64(LOW_32), words_S >> np.uint64(32))
    return torch.from_numpy(halves[0].astype(np.int64)).to(device), torch.from_numpy(halves[1].astype(np.int64)).to(
        device
    )


def uniforms_block(seeds: Sequence[int], start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """`stream.uniforms_matrix` on a device: float64 [seeds, count], from position `start` on."""
    if not all(0 <= seed < 2**64 for seed in seeds):
        raise ValueError("a seed is an unsigned 64-bit number")
    if start < 0 or count < 0:
        raise ValueError(f"positions start at 0, not {start}, and a count is not negative: {count}")
    key0_S, key1_S = seed_key(seeds, device)
    position_1T = torch.arange(start, start + count, dtype=torch.int64, device=device)[None, :]
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    counter = (position_1T & LOW_32, position_1T >> 32, zero, zero)
    word0, word1, *_ = philox4x32(counter, (key0_S[:, None], key1_S[:, None]))
    return as_uniforms(word0, word1)
