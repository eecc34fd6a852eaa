"""Weighted turns without dice: which of several parts has position i, and how many positions it had before.

Every prefix of the sequence holds each part in proportion to its weight, up to a few positions; any position is
computed by itself, in as many steps as the parts' number has bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

FEISTEL_ROUNDS = 4


@dataclass(frozen=True)
class Turn:
    """A position's part, and how many earlier positions were that part's."""

    part: int
    nth: int


class Schedule:
    """Positions dealt out by weights: the parts are split in two halves, again and again, each time evenly spread.

    >>> [Schedule([2, 1]).turn(position).part for position in range(6)]
    [1, 0, 0, 1, 0, 0]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = [Fraction(weight).limit_denominator(10**6) or Fraction(1, 10**6) for weight in weights]
        self._sums = [Fraction(0)]
        for weight in self._weights:
            self._sums.append(self._sums[-1] + weight)

    def turn(self, position: int) -> Turn:
        first, last, nth = 0, len(self._weights), position
        while last - first > 1:
            middle = (first + last) // 2
            before, after = self._left(first, middle, last, nth), self._left(first, middle, last, nth + 1)
            if after > before:
                last, nth = middle, before
            else:
                first, nth = middle, nth - before
        return Turn(first, nth)

    def counts(self, positions: int) -> list[int]:
        """How many of the first `positions` each part has."""
        found = [0] * len(self._weights)
        self._count(0, len(self._weights), positions, found)
        return found

    def _count(self, first: int, last: int, positions: int, found: list[int]) -> None:
        if last - first == 1:
            found[first] = positions
            return
        middle = (first + last) // 2
        left = self._left(first, middle, last, positions)
        self._count(first, middle, left, found)
        self._count(middle, last, positions - left, found)

    def _left(self, first: int, middle: int, last: int, positions: int) -> int:
        """How many of so many positions go to the left half: rounded down, so that each step is 0 or 1."""
        left, whole = self._sums[middle] - self._sums[first], self._sums[last] - self._sums[first]
        return int(positions * left / whole)


def permute(position: int, size: int, key: str) -> int:
    """Where `position` of `range(size)` goes under the permutation that `key` names; each number is met once.

    >>> sorted(permute(position, 5, "any") for position in range(5))
    [0, 1, 2, 3, 4]
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = _feistel(position, half_bits, key)
    while value >= size:  # a permutation of a larger range, walked until it is inside: it must come back
        value = _feistel(value, half_bits, key)
    return value


def _feistel(value: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(FEISTEL_ROUNDS):
        digest = hashlib.sha256(f"shoal/mix/v1\n{key}\n{turn}\n{right}".encode()).digest()
        left, right = right, left ^ (int.from_bytes(digest[:8], "big") & mask)
    return (left << half_bits) | right
