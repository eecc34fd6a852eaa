"""The uniform stream on a torch device: the same numbers as `stream`, bit for bit, made where they are used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.sampling.stream import LOW_32, check_range, philox4x32

__all__ = ["LOW_32", "as_uniforms", "philox4x32", "seed_key", "uniforms_block"]


def as_uniforms(word0: Tensor, word1: Tensor) -> Tensor:
    """53 bits of two words as float64 in [0, 1)."""
    return ((word0 >> 5) * 2**26 + (word1 >> 6)).double() * 2.0**-53


def seed_key(seeds: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
    low, high = ([seed >> shift & LOW_32 for seed in seeds] for shift in (0, 32))
    return torch.tensor(low, dtype=torch.int64, device=device), torch.tensor(high, dtype=torch.int64, device=device)


def uniforms_block(seeds: Sequence[int], start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """`stream.uniforms_matrix` on a device: float64 [seeds, count], from position `start` on."""
    check_range(seeds, start, count)
    key0_S, key1_S = seed_key(seeds, device)
    position_1T = torch.arange(start, start + count, dtype=torch.int64, device=device)[None, :]
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    counter = (position_1T & LOW_32, position_1T >> 32, zero, zero)
    word0, word1, *_ = philox4x32(counter, (key0_S[:, None], key1_S[:, None]))
    return as_uniforms(word0, word1)
