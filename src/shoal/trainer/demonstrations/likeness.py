"""Whether two demonstrations are the same, or nearly.

The same: equal texts but for how much white space there is, case and width (SHA-256 of what is left). Who says a text
counts, and so does where it ends: each begins with a mark that cannot be part of one.
Nearly: MinHash. A text is the set of its runs of 8 bytes (after the same normalisation); two texts are as alike as the
share of runs that they have in common (Jaccard). 128 hash functions estimate it with a standard error of 0.044 at most.
Candidates are those that agree in all hashes of a band, of which there are as few as find texts that are just as alike
as the threshold in 999 of 1,000 cases (`bands_for`). Of rows that agree in a band, the newest 32 that were kept are
remembered: rows that share a form agree in some bands by the thousand, and each would have to be compared with all
before it. What is nearly the same shares rarer bands, too; it is missed only if 32 or more came between in every band
that the two share. So a row costs the same however many came before. Everything follows from the texts and the order
of the rows, of which the first stays; there is no generator.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from hashlib import sha256
from itertools import repeat

import numpy as np
import numpy.typing as npt

RUN_BYTES = 8
HASHES = 128
MISSED = 1e-3  # of pairs that are just as alike as the threshold
PER_BUCKET = 32  # rows that are remembered of those that agree in a band
PORTION = 4096  # runs hashed at a time: memory stays small for a long text
Signature = npt.NDArray[np.uint32]


MARKS = {"system": "\x1c", "user": "\x1d", "assistant": "\x1e", "": "\x1f"}
"""Before a text, by who says it. They are white space to Python, so that no text has one when space is made even."""


def plain_text(texts: Iterable[str], marks: Iterable[str] = repeat(MARKS[""])) -> bytes:
    """Texts as one, each behind its mark, without what does not tell them apart.

    >>> plain_text(["What is  2 + 2?", "Four"])
    b'\\x1fwhat is 2 + 2?\\x1ffour'
    """
    even = (" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in texts)
    return "".join(mark + text for text, mark in zip(even, marks, strict=False)).encode(errors="surrogatepass")


def digest_of(plain: bytes) -> bytes:
    return sha256(plain).digest()[:16]


def bands_for(threshold: float) -> tuple[int, int]:
    """How many bands of how many hashes: the longest that miss few enough of what is as alike as the threshold.

    >>> bands_for(0.9), bands_for(0.8), bands_for(0.5)
    ((16, 8), (25, 5), (64, 2))
    """
    sizes = (size for size in range(HASHES, 1, -1) if (1 - threshold**size) ** (HASHES // size) <= MISSED)
    size = next(sizes, 1)
    return HASHES // size, size


class Lookalikes:
    """Remembers texts by row, and says which earlier one a text resembles."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._bands, self._size = bands_for(threshold)
        self._signatures: Signature = np.zeros((1024, HASHES), np.uint32)
        self._rows: list[int] = []
        self._buckets: list[dict[bytes, list[int]]] = [{} for _ in range(self._bands)]
        self.compared = 0  # pairs that were looked at, for tests and people who measure

    def earlier(self, row: int, plain: bytes, about: bytes = b"") -> int | None:
        """The first remembered row that is at least as alike as the threshold; if there is none, this one is kept.

        Texts that are `about` different things are never alike.
        """
        signature = signature_of(plain)
        keys = [about + signature[start : start + self._size].tobytes() for start in self._starts]
        found = {place for bucket, key in zip(self._buckets, keys, strict=True) for place in bucket.get(key, ())}
        self.compared += len(found)
        places = np.array(sorted(found), np.intp)
        alike = np.count_nonzero(self._signatures[places] == signature, axis=1) / HASHES >= self._threshold
        if alike.any():
            return self._rows[int(places[np.argmax(alike)])]
        self._remember(row, signature, keys)
        return None

    @property
    def _starts(self) -> range:
        return range(0, self._bands * self._size, self._size)

    def _remember(self, row: int, signature: Signature, keys: list[bytes]) -> None:
        place = len(self._rows)
        for buckets, key in zip(self._buckets, keys, strict=True):
            bucket = buckets.setdefault(key, [])
            bucket.append(place)
            if len(bucket) > PER_BUCKET:
                del bucket[0]
        if place == len(self._signatures):
            self._signatures = np.concatenate([self._signatures, np.zeros_like(self._signatures)])
        self._signatures[place] = signature
        self._rows.append(row)


def likeness(one: Signature, other: Signature) -> float:
    """The estimated share of runs that two texts have in common."""
    return float(np.mean(one == other))


def signature_of(plain: bytes) -> Signature:
    """The smallest hash of the text's runs, by each of the functions."""
    runs_R = np.unique(_runs(plain))
    multipliers_F, offsets_F = _functions()
    smallest_F = np.full(HASHES, np.uint64(2**64 - 1))
    for start in range(0, len(runs_R), PORTION):
        mixed_FR = runs_R[start : start + PORTION][None, :] * multipliers_F[:, None] + offsets_F[:, None]
        smallest_F = np.minimum(smallest_F, mixed_FR.min(axis=1))
    return (smallest_F >> np.uint64(32)).astype(np.uint32)


def _runs(plain: bytes) -> npt.NDArray[np.uint64]:
    """Every run of 8 bytes as a number, scattered; a shorter text is one run."""
    data = np.frombuffer(plain.ljust(RUN_BYTES, b"\0"), np.uint8).astype(np.uint64)
    count = len(data) - RUN_BYTES + 1
    found = np.zeros(count, np.uint64)
    for place in range(RUN_BYTES):
        found |= data[place : place + count] << np.uint64(8 * place)
    return _scattered(found)


def _scattered(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Numbers that are close become far apart, each its own: multiplied and shifted, modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _functions() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Odd multipliers and offsets, the same everywhere."""
    numbers = _scattered(np.arange(1, 2 * HASHES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return numbers[:HASHES] | np.uint64(1), numbers[HASHES:]
