"""Chunks of activations, their largest values, and the proofs that commit to them.

    activations [N, H], sequences end to end
        │ lengths, rows         chunks never cross sequences; the last chunk of one may have fewer rows
        ▼
    chunks, flattened           index = row in chunk · H + channel
        │ chunk_topk            the k largest magnitudes; of equal ones the lowest indices, on every device
        ▼
    PointBatch                  (index, bfloat16 bits) of every chunk, by ascending index

On CUDA the selection runs there, and only points leave the device. A proof of k points is 2 + 2k bytes, all numbers
big-endian uint16: the modulus m, then the k coefficients, ascending powers, of the polynomial over GF(65497) that is y
at (x mod m) for every point (x, y). It depends on the set of points, not on their order. Another length, or a number
>= 65497, is malformed.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.errors import ProofError
from shoal.toploc import backend
from shoal.toploc.plain import LEAST_MODULUS, PRIME, Bits, Ints

if TYPE_CHECKING:
    import torch

Activations: TypeAlias = "npt.NDArray[Any] | torch.Tensor"

MIN_POINTS = 8  # in one chunk


@dataclass(frozen=True, eq=False)
class PointBatch:
    """The largest values of many chunks: `counts[c]` points for chunk c, which has `sizes[c]` values, end to end.

    >>> points = PointBatch(np.array([3, 9, 1]), np.array([7, 8, 9], np.uint16), np.array([2, 1]), np.array([64, 64]))
    >>> len(points), points[1:2].indices.tolist()
    (2, [1])
    """

    indices: Ints
    bits: Bits
    counts: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, chunks: slice) -> PointBatch:
        begin, end, step = chunks.indices(len(self))
        if step != 1:
            raise ValueError("chunks are sliced without a step")
        first, last = (int(self.counts[:chunk].sum()) for chunk in (begin, max(begin, end)))
        return PointBatch(
            self.indices[first:last], self.bits[first:last], self.counts[begin:end], self.sizes[begin:end]
        )

    @staticmethod
    def concat(batches: Sequence[PointBatch]) -> PointBatch:
        if not batches:
            return PointBatch(np.empty(0, np.int64), np.empty(0, np.uint16), *(np.empty(0, np.int64) for _ in range(2)))
        names = ("indices", "bits", "counts", "sizes")
        return PointBatch(*(np.concatenate([getattr(batch, name) for batch in batches]) for name in names))


def chunk_rows(length: int, rows: int) -> list[int]:
    """How many rows each chunk of a sequence has.

    >>> chunk_rows(70, 32)
    [32, 32, 6]
    """
    if length < 0 or rows < 1:
        raise ValueError(f"a sequence has 0 or more rows, a chunk 1 or more, not {length} and {rows}")
    full, rest = divmod(length, rows)
    return [rows] * full + [rest] * (rest > 0)


def chunk_topk(r: int, hidden: int, topk: int, rows: int) -> int:
    """The number of points of a chunk with `r` rows: in proportion to its rows, at least 8, at most a quarter of its
    values (so that there is an outside), at least 1. A full chunk has exactly `topk`, unless that is over the quarter.

    >>> [chunk_topk(r, 4096, 128, 32) for r in (32, 16, 3, 1)]
    [128, 64, 12, 8]
    """
    share = max(MIN_POINTS, math.ceil(topk * r / rows))
    return max(1, min(topk, share, r * hidden // 4))


def top_points(activations: Activations, lengths: Sequence[int], topk: int, rows: int) -> PointBatch:
    """The points of sequences that lie end to end in `activations` [sum(lengths), H]: numpy (float32, float16, bfloat16
    bits as uint16) or torch (float32, float16, bfloat16). Other types are rounded to bfloat16, to nearest even."""
    if activations.ndim != 2:
        raise ValueError(f"activations are [rows, channels], not of {activations.ndim} dimensions")
    total, hidden = activations.shape
    if sum(lengths) != total:
        raise ValueError(f"the sequences have {sum(lengths)} rows together, the activations {total}")
    heights = [r for length in lengths for r in chunk_rows(length, rows)]
    counts = np.array([chunk_topk(r, hidden, topk, rows) for r in heights], dtype=np.int64)
    sizes = np.array(heights, dtype=np.int64) * hidden
    return points_of_chunks(activations.reshape(-1), sizes, counts)


def points_of_chunks(flat: Activations, sizes: Ints, counts: Ints) -> PointBatch:
    short = np.flatnonzero(counts > sizes)
    if len(short):
        c = int(short[0])
        too_few = f"chunk {c} has {sizes[c]} values, too few for {counts[c]} points"
        raise ProofError(f"{too_few}: choose a smaller topk or larger chunks")
    if _is_torch(flat) and flat.device.type != "cpu":  # type: ignore[union-attr]
        from shoal.toploc import device

        indices, bits = device.select(flat, sizes, counts)  # type: ignore[arg-type]
    else:
        indices, bits = backend.select(host_array(flat), np.cumsum(sizes) - sizes, sizes, counts)
    return PointBatch(indices, bits, counts, sizes)


def host_array(flat: Activations) -> npt.NDArray[Any]:
    """float32, or bfloat16 bits as uint16, in C order; shares memory with a contiguous torch tensor on the CPU."""
    if _is_torch(flat):
        import torch

        tensor: torch.Tensor = flat.detach().contiguous()  # type: ignore[union-attr]
        flat = tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    array: npt.NDArray[Any] = np.require(flat, requirements=["C", "A"])
    if array.dtype == np.float16:
        return array.astype(np.float32)
    if array.dtype not in (np.float32, np.uint16):
        raise TypeError(f"activations are bfloat16, float16 or float32 (or bfloat16 bits as uint16), not {array.dtype}")
    return array


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@dataclass(frozen=True, eq=False)
class Polynomials:
    """Decoded proofs, their coefficients end to end. A malformed one has a sentence in `malformed` and zeros."""

    moduli: Ints
    coefficients: Bits
    malformed: list[str | None]


def proof_size(k: int) -> int:
    return 2 + 2 * k


def compile_kernels() -> None:
    from shoal.toploc.check import compare

    with contextlib.suppress(ImportError):  # without numba, numpy is used
        import shoal.toploc.kernels  # noqa: F401  from now on it is used for small work, too

    points = top_points(np.arange(1.0, 4097.0, dtype=np.float32).reshape(64, 64), [64], 8, 32)
    compare(points, commit(points))


def commit(points: PointBatch) -> list[bytes]:
    moduli, coefficients = backend.interpolate(points.indices, points.bits, points.counts)
    if not moduli.all():
        raise ProofError(f"the indices of chunk {int(np.argmin(moduli))} agree under every modulus: repeated points?")
    ends = np.cumsum(points.counts) + np.arange(1, len(points) + 1)
    starts = ends - points.counts - 1
    words = np.empty(len(coefficients) + len(points), dtype=">u2")
    is_coefficient = np.ones(len(words), dtype=bool)
    is_coefficient[starts] = False
    words[starts] = moduli
    words[is_coefficient] = coefficients
    data = words.tobytes()
    return [data[2 * start : 2 * end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def split_proofs(data: bytes, length: int, hidden: int, topk: int, rows: int) -> list[bytes]:
    sizes = [proof_size(chunk_topk(r, hidden, topk, rows)) for r in chunk_rows(length, rows)]
    if len(data) != sum(sizes):
        raise ProofError(
            f"{len(data)} bytes of proofs, but {length} tokens in chunks of {rows} with {topk} points each"
            f" make {len(sizes)} proofs of {sum(sizes)} bytes together"
        )
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def decode(proofs: Sequence[bytes], counts: Ints) -> Polynomials:
    """Read proofs of `counts[c]` points each. Anything but the canonical form is malformed."""
    if len(proofs) != len(counts):
        raise ProofError(f"{len(proofs)} proofs for {len(counts)} chunks: there must be one for each")
    sizes = [proof_size(count) for count in counts.tolist()]
    malformed: list[str | None] = [None] * len(proofs)
    for c, size in enumerate(sizes):
        proof: object = proofs[c]
        if not isinstance(proof, bytes):
            malformed[c] = f"a proof is bytes, not {type(proof).__name__}"
        elif len(proof) != size:
            malformed[c] = f"{len(proof)} bytes, not {size}"
    whole = [bytes(size) if wrong else proof for proof, size, wrong in zip(proofs, sizes, malformed, strict=True)]
    words = np.frombuffer(b"".join(whole), dtype=">u2").astype(np.uint16)
    starts = np.cumsum(counts) - counts + np.arange(len(counts))
    is_coefficient = np.ones(len(words), dtype=bool)
    is_coefficient[starts] = False
    moduli, coefficients = words[starts].astype(np.int64), words[is_coefficient]
    for c in np.flatnonzero((moduli < LEAST_MODULUS) | (moduli > PRIME)).tolist():
        malformed[c] = malformed[c] or f"the modulus {moduli[c]} is not between {LEAST_MODULUS} and {PRIME}"
    chunk_of = np.repeat(np.arange(len(counts)), counts)
    for c in np.unique(chunk_of[coefficients >= PRIME]).tolist():
        malformed[c] = malformed[c] or f"a coefficient is not below {PRIME}"
    bad = np.array([sentence is not None for sentence in malformed], dtype=bool)
    if bad.any():
        moduli[bad] = PRIME
        coefficients[bad[chunk_of]] = 0
    return Polynomials(moduli, coefficients, malformed)
