"""A keyed permutation, one position at a time: which task a unit has, in a run and in a mixture."""

import hashlib


def permute(position: int, size: int, key: str, rounds: int) -> int:
    """The image of `position` under a permutation of `range(size)` that `key` determines: a Feistel network over the
    next power of four, applied until the result is inside. It leaves the range at most 3 times out of 4 on average, and
    ends, because it is one cycle."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = position >> half_bits, position & mask
        for turn in range(rounds):
            digest = hashlib.sha256(f"{key}\n{turn}\n{right}".encode()).digest()
            left, right = right, left ^ (int.from_bytes(digest[:8], "big") & mask)
        position = (left << half_bits) | right
        if position < size:
            return position
