"""The two loops of `delta`, compiled by numba: large payloads are compared and changed at memory speed.

The results are those of `delta`'s own code, which small payloads use, because importing numba takes a second.
"""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., int]) -> Callable[..., int]:
    fast: Callable[..., int] = numba.njit(cache=True, nogil=True)(function)
    return fast


@compiled
def compare(old: Any, new: Any, words: Any, lowest: int, gaps: Any, codes: Any) -> int:
    """Write the gaps before all values that differ, and the zigzag codes of their steps; returns their number. `words`
    are old and new as 64-bit words, since most are equal; `lowest` is the smallest signed value."""
    count, before = 0, -1
    old_words, new_words = words
    lanes = 8 // old.itemsize
    for word in range(old_words.size + 1):
        at, end = word * lanes, (word + 1) * lanes
        if word == old_words.size:
            end = old.size
        elif old_words[word] == new_words[word]:
            continue
        for index in range(at, end):
            was, now = numba.int64(old[index]), numba.int64(new[index])
            if was != now:
                was = was if was >= 0 else lowest - was - 1
                now = now if now >= 0 else lowest - now - 1
                step = now - was
                gaps[count] = index - before - 1
                codes[count] = ((step << 1) ^ (step >> 63)) - 1
                count, before = count + 1, index
    return count


@compiled
def change(bits: Any, gaps: Any, codes: Any, lowest: int, where: Any) -> int:
    """Change the values at these gaps by these steps, and write their positions; returns the number of changed values,
    which is too small if one would leave the block or the line."""
    at = -1
    for count in range(where.size):
        gap, code = numba.int64(0), numba.int64(0)
        for plane in range(gaps.shape[0]):
            gap |= numba.int64(gaps[plane, count]) << (8 * plane)
        for plane in range(codes.shape[0]):
            code |= numba.int64(codes[plane, count]) << (8 * plane)
        at += gap + 1
        if at >= bits.size:
            return count
        value = numba.int64(bits[at])
        value = value if value >= 0 else lowest - value - 1
        value += ((code + 1) >> 1) ^ -((code + 1) & 1)
        if value < lowest or value > -lowest - 1:
            return count
        bits[at] = value if value >= 0 else lowest - value - 1
        where[count] = at
    return int(where.size)
