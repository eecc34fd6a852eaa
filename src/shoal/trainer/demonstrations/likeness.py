"""Whether two demonstrations are the same, or nearly.

The same: equal texts but for white space, case and width (SHA-256 of what is left).
Nearly: MinHash. A text is the set of its runs of 8 bytes (after the same normalisation); two texts are as alike as the
share of runs that they have in common (Jaccard). 128 hash functions estimate it with a standard error of 0.044 at most.
Candidates are those that agree in all 4 hashes of one of 32 bands: of texts that are alike by 0.8, one in twenty
million is missed; of those alike by 0.6, one in 85. Everything follows from the texts alone: no generator, no order
but that of the rows, of which the first stays.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from hashlib import sha256

import numpy as np
import numpy.typing as npt

RUN_BYTES = 8
HASHES = 128
BANDS = 32
PER_BAND = HASHES // BANDS
PORTION = 4096  # runs hashed at a time: memory stays small for a long text
Signature = npt.NDArray[np.uint32]


def plain_text(texts: Iterable[str]) -> bytes:
    """Texts as one, without what does not tell them apart.

    >>> plain_text(["What is  2 + 2?", "Four"])
    b'whatis2+2?four'
    """
    found = "".join("".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in texts)
    return found.encode(errors="surrogatepass")


def digest_of(plain: bytes) -> bytes:
    return sha256(plain).digest()[:16]


class Lookalikes:
    """Remembers texts by row, and says which earlier one a text resembles."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._signatures: list[Signature] = []
        self._rows: list[int] = []
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(BANDS)]

    def earlier(self, row: int, plain: bytes) -> int | None:
        """The first remembered row that is at least as alike as the threshold; if there is none, this one is kept."""
        signature = signature_of(plain)
        keys = [signature[band * PER_BAND : (band + 1) * PER_BAND].tobytes() for band in range(BANDS)]
        candidates = {place for band, key in zip(self._bands, keys, strict=True) for place in band.get(key, ())}
        for place in sorted(candidates):
            if likeness(signature, self._signatures[place]) >= self._threshold:
                return self._rows[place]
        for band, key in zip(self._bands, keys, strict=True):
            band.setdefault(key, []).append(len(self._rows))
        self._signatures.append(signature)
        self._rows.append(row)
        return None


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
