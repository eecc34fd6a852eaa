"""Whether two demonstrations are the same, or nearly.

The same: equal texts but for how much white space there is, case and width. Who says a text counts, and so does where
it ends: each begins with a mark that cannot be part of one.
Nearly: MinHash. A text is the set of its runs of 8 bytes (after the same normalisation); two texts are as alike as the
share of runs that they have in common (Jaccard). 128 hash functions estimate it with a standard error of 0.044 at most.
Texts are compared that agree in all hashes of a band, of which there are as few as find texts that are just as alike as
the threshold in 999 of 1,000 cases. Of rows that agree in a band, the newest 32 that were kept are remembered, so that
a row costs the same however many came before: rows that share a form agree in some bands by the thousand.
Everything follows from the texts and the order of the rows; there is no generator.
"""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Iterable
from hashlib import sha256

import numpy as np
import numpy.typing as npt

RUN_BYTES, HASHES = 8, 128
MISSED = 1e-3  # of pairs that are just as alike as the threshold
PER_BUCKET = 32  # rows that are remembered of those that agree in a band
PORTION = 4096  # runs hashed at a time: memory stays small for a long text
Numbers = npt.NDArray[np.uint64]
Signature = npt.NDArray[np.uint32]
MARKS = {"system": "\x1c", "user": "\x1d", "assistant": "\x1e", "": "\x1f"}
"""Before a text, by who says it. They are white space to Python, so that no text has one when space is made even."""


def plain_text(said: Iterable[tuple[str, str]]) -> bytes:
    """Texts (speaker, text) as one, each behind its mark, without what does not tell them apart.

    >>> plain_text([("user", "What is  2 + 2?"), ("", "Four")])
    b'\\x1dwhat is 2 + 2?\\x1ffour'
    """
    even = ((who, " ".join(unicodedata.normalize("NFKC", text).casefold().split())) for who, text in said)
    return "".join(MARKS[who] + text for who, text in even).encode(errors="surrogatepass")


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
    """Remembers texts by row, and says which earlier one a text resembles. `compared` counts pairs."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._bands, self._size = bands_for(threshold)
        self._kept: list[tuple[int, Signature]] = []
        self._buckets: dict[tuple[int, bytes], deque[int]] = {}
        self.compared = 0

    def earlier(self, row: int, plain: bytes, about: bytes = b"") -> int | None:
        """The first remembered row that is at least as alike as the threshold; if there is none, this one is kept.

        Texts that are `about` different things are never alike.
        """
        signature = signature_of(plain)
        pieces = signature[: self._bands * self._size].reshape(self._bands, self._size)
        buckets = [(number, about + piece.tobytes()) for number, piece in enumerate(pieces)]
        places = sorted({place for key in buckets for place in self._buckets.get(key, ())})
        self.compared += len(places)
        known = np.array([self._kept[place][1] for place in places], np.uint32).reshape(-1, HASHES)
        alike = np.count_nonzero(known == signature, axis=1) / HASHES >= self._threshold
        if alike.any():
            return self._kept[places[int(np.argmax(alike))]][0]
        for key in buckets:
            self._buckets.setdefault(key, deque(maxlen=PER_BUCKET)).append(len(self._kept))
        self._kept.append((row, signature))
        return None


def signature_of(plain: bytes) -> Signature:
    """The smallest hash of the text's runs, by each of the functions; a text shorter than a run is one."""
    data = np.frombuffer(plain.ljust(RUN_BYTES, b"\0"), np.uint8).astype(np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(data, RUN_BYTES)
    runs_R = np.unique(_scattered(windows @ (np.uint64(1) << np.arange(0, 64, 8, dtype=np.uint64))))
    smallest_F = np.full(HASHES, np.uint64(2**64 - 1))
    for start in range(0, len(runs_R), PORTION):
        mixed_FR = runs_R[start : start + PORTION][None, :] * MULTIPLIERS_F[:, None] + OFFSETS_F[:, None]
        smallest_F = np.minimum(smallest_F, mixed_FR.min(axis=1))
    return (smallest_F >> np.uint64(32)).astype(np.uint32)


def _scattered(values: Numbers) -> Numbers:
    """Numbers that are close become far apart, each its own: multiplied and shifted, modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


MULTIPLIERS_F, OFFSETS_F = _scattered(
    np.arange(1, 2 * HASHES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
).reshape(2, HASHES)
MULTIPLIERS_F |= np.uint64(1)
