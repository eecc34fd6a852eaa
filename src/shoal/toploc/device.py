"""`plain.select` for torch tensors: runs where the activations are, so that only points leave the device.

All chunks of one shape together: block maxima first, then only the values of the best blocks. Both steps compare
(magnitude, lowest index first) as one integer, so there are no ties, and all devices agree. Each of the `count` best
blocks has a larger value than any value outside them, so no such value is among the `count` largest.

G: chunks of one shape, S: values of one, B: blocks, K: points.
"""

import numpy as np
import torch
from torch import Tensor

from shoal.toploc.plain import BLOCK, QUIET_NAN, Bits, Ints

SLAB = 2**27  # values of one pass: bounds the memory besides the activations
LOW_32 = 2**32 - 1


def select(flat: Tensor, sizes: Ints, counts: Ints) -> tuple[Ints, Bits]:
    flat = flat.detach()
    starts, offsets = np.cumsum(sizes) - sizes, np.cumsum(counts) - counts
    packed = np.empty(int(counts.sum()), dtype=np.int64)
    for size, count in np.unique(np.stack([sizes, counts]), axis=1).T.tolist():
        same = np.flatnonzero((sizes == size) & (counts == count))  # chunks of one shape, as many as fit at once
        at_once = max(1, SLAB // max(1, size))
        for begin in range(0, len(same), at_once):
            chunks = same[begin : begin + at_once]
            pattern_GS = bfloat16_bits(_stack(flat, starts[chunks], size))
            packed[offsets[chunks][:, None] + np.arange(count)] = _largest(pattern_GS, count).cpu().numpy()
    return packed >> 16, (packed & 0xFFFF).astype(np.uint16)


def bfloat16_bits(values: Tensor) -> Tensor:
    """The bits of bfloat16 as int16, rounded to nearest even; every wider NaN becomes the one quiet NaN."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16)
    if values.dtype not in (torch.float16, torch.float32):
        raise TypeError(f"activations are bfloat16, float16 or float32, not {values.dtype}")
    raw = values.float().contiguous().view(torch.int32)
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    is_nan = (raw & 0x7FFFFFFF) > 0x7F800000
    return rounded.masked_fill_(is_nan, QUIET_NAN).to(torch.int16)


def _stack(flat: Tensor, starts: Ints, size: int) -> Tensor:
    """Chunks as rows; without a copy if they lie end to end."""
    first, last = int(starts[0]), int(starts[-1]) + size
    if last - first == len(starts) * size:
        return flat[first:last].view(len(starts), size)
    return torch.stack([flat[start : start + size] for start in starts.tolist()])


def _largest(pattern_GS: Tensor, count: int) -> Tensor:
    """[G, K] of index · 2^16 + bits, by ascending index."""
    magnitude_GS = pattern_GS & 0x7FFF
    padding = -magnitude_GS.shape[1] % BLOCK
    if padding:
        magnitude_GS = torch.nn.functional.pad(magnitude_GS, (0, padding), value=-1)  # below every magnitude
    magnitude_GBV = magnitude_GS.view(len(magnitude_GS), -1, BLOCK)
    n_blocks = magnitude_GBV.shape[1]
    blocks_GK = _first(magnitude_GBV.amax(dim=2), torch.arange(n_blocks, device=pattern_GS.device), count)
    values_GKV = magnitude_GBV.gather(1, blocks_GK[:, :, None].expand(-1, -1, BLOCK))
    places_GKV = blocks_GK[:, :, None] * BLOCK + torch.arange(BLOCK, device=pattern_GS.device)
    indices_GK = _first(values_GKV.flatten(1), places_GKV.flatten(1), count).sort(dim=1).values
    return indices_GK << 16 | (pattern_GS.gather(1, indices_GK).long() & 0xFFFF)


def _first(magnitudes: Tensor, places: Tensor, count: int) -> Tensor:
    keys = magnitudes.long() << 32 | (LOW_32 - places)
    best = keys.topk(min(count, keys.shape[1]), dim=1, sorted=False).values
    return LOW_32 - (best & LOW_32)
