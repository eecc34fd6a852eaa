"""The functions of the published `toploc` package, under its names, so that its users can switch.

They differ where the package fails: float32 is rounded to bfloat16 instead of giving null proofs; a chunk with fewer
than `topk` values, or a malformed proof, is a ProofError instead of a null proof or a crash; there must be exactly one
proof for each chunk; all forms of input follow one rule (indices modulo m, the upper median). These functions do not
detect forgery: use `compare` and `check_proofs`.

`activations`: a sequence whose element 0 is the whole prefill (unless `skip_prefill`), each further one the row of one
token; or one tensor [tokens, hidden]. Each is a torch tensor, or a numpy array as in `top_points`.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shoal.errors import ProofError
from shoal.toploc.check import compare
from shoal.toploc.plain import PRIME, Ints, evaluate
from shoal.toploc.points import Activations, PointBatch, chunk_rows, commit, decode, points_of_chunks

if TYPE_CHECKING:
    import torch

Many: TypeAlias = "Activations | Sequence[Activations]"


@dataclass(frozen=True)
class VerificationResult:
    """How far one proof is from the verifier's activations; 2^64 twice where no exponent agrees."""

    exp_mismatches: int
    mant_err_mean: float
    mant_err_median: float


@dataclass(frozen=True)
class ProofPoly:
    """One proof as numbers: its coefficients, ascending powers, and the modulus of the indices.

    >>> proof = ProofPoly.from_points([1, 2, 3], [4, 5, 6])
    >>> proof.coeffs, proof(2), proof.to_base64()
    ([3, 1, 0], 5, '/9kAAwABAAA=')
    """

    coeffs: list[int]
    modulus: int

    def __call__(self, x: int) -> int:
        if not self.modulus:
            raise ProofError("a null proof has no values")
        return int(evaluate(np.array([self.coeffs], dtype=np.int64), np.array([[x % self.modulus]]))[0, 0])

    def __len__(self) -> int:
        return len(self.coeffs)

    @staticmethod
    def from_points(x: Sequence[int], y: Sequence[int]) -> ProofPoly:
        if len(x) != len(y) or not len(x):
            raise ProofError(f"{len(x)} indices and {len(y)} values: there must be as many, and at least one")
        bits = np.array([value % PRIME for value in y], dtype=np.uint16)
        sizes = np.array([max(x) + 1], dtype=np.int64)
        batch = PointBatch(np.array(x, dtype=np.int64), bits, np.array([len(x)], dtype=np.int64), sizes)
        return ProofPoly.from_bytes(commit(batch)[0])

    @staticmethod
    def from_points_tensor(x: torch.Tensor, y: torch.Tensor) -> ProofPoly:
        """As `from_points`, of tensors: bfloat16 and float16 count by their bits, whole numbers as they are."""
        import torch

        if x.ndim != 1 or y.ndim != 1 or x.is_floating_point():
            raise ProofError("indices and values are tensors of one dimension, the indices of whole numbers")
        if y.dtype in (torch.bfloat16, torch.float16):
            y = y.detach().contiguous().view(torch.uint16)
        if y.is_floating_point():
            raise ProofError(f"values are bfloat16, float16 or whole numbers, not {y.dtype}")
        return ProofPoly.from_points(x.tolist(), y.tolist())

    @staticmethod
    def null(length: int) -> ProofPoly:
        """Zeros, which the package writes where it fails. Reading or verifying one is a `ProofError` here."""
        return ProofPoly([0] * length, 0)

    @staticmethod
    def from_bytes(data: bytes) -> ProofPoly:
        if len(data) < 4 or len(data) % 2:
            raise ProofError(f"a proof has 2 bytes and 2 for each point, not {len(data)}")
        read = decode([data], np.array([len(data) // 2 - 1], dtype=np.int64))
        if read.malformed[0]:
            raise ProofError(read.malformed[0])
        return ProofPoly(read.coefficients.tolist(), int(read.moduli[0]))

    @staticmethod
    def from_base64(text: str) -> ProofPoly:
        return ProofPoly.from_bytes(from_base64(text))

    def to_bytes(self) -> bytes:
        return np.array([self.modulus, *self.coeffs], dtype=">u2").tobytes()

    def to_base64(self) -> str:
        return base64.b64encode(self.to_bytes()).decode()


def build_proofs(
    activations: Many, decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[ProofPoly]:
    """One proof of the prefill (unless skipped), then one for every `decode_batching_size` tokens."""
    proofs = build_proofs_bytes(activations, decode_batching_size, topk, skip_prefill)
    return [ProofPoly.from_bytes(proof) for proof in proofs]


def build_proofs_bytes(
    activations: Many, decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[bytes]:
    return commit(_points(activations, decode_batching_size, topk, skip_prefill, raw_float16=True))


def build_proofs_base64(
    activations: Many, decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[str]:
    proofs = build_proofs_bytes(activations, decode_batching_size, topk, skip_prefill)
    return [base64.b64encode(proof).decode() for proof in proofs]


def verify_proofs(
    activations: Many, proofs: Iterable[ProofPoly], decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[VerificationResult]:
    """How far each proof is from the verifier's own activations. ProofError if one is malformed or missing."""
    data = [proof.to_bytes() for proof in proofs]
    return verify_proofs_bytes(activations, data, decode_batching_size, topk, skip_prefill)


def verify_proofs_bytes(
    activations: Many, proofs: Sequence[bytes], decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[VerificationResult]:
    points = _points(activations, decode_batching_size, topk, skip_prefill, raw_float16=False)
    compared = compare(points, proofs, outside=0)
    for chunk, sentence in enumerate(compared.malformed):
        if sentence is not None:
            raise ProofError(f"proof {chunk} is malformed: {sentence}")
    columns = compared.exp_mismatches.tolist(), compared.mant_err_mean.tolist(), compared.mant_err_median.tolist()
    return [VerificationResult(*row) for row in zip(*columns, strict=True)]


def verify_proofs_base64(
    activations: Many, proofs: Sequence[str], decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[VerificationResult]:
    data = [from_base64(proof) for proof in proofs]
    return verify_proofs_bytes(activations, data, decode_batching_size, topk, skip_prefill)


def from_base64(text: str) -> bytes:
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except (ValueError, TypeError) as error:
        raise ProofError(f"a proof is not base64: {error}") from error
    if base64.b64encode(data) != (text.encode() if isinstance(text, str) else text):
        raise ProofError("a proof is not base64 in its one canonical form")
    return data


def _points(activations: Many, rows: int, topk: int, skip_prefill: bool, *, raw_float16: bool) -> PointBatch:
    if topk < 1 or rows < 1:
        raise ProofError(f"topk and decode_batching_size are 1 or more, not {topk} and {rows}")
    flat, widths = _flatten(activations)
    flat = _float16_as_bits(flat, allowed=raw_float16)
    groups = [1] * (not skip_prefill and len(widths) > 0)
    groups += chunk_rows(len(widths) - len(groups), rows)
    ends = np.cumsum(groups, dtype=np.int64)
    totals = np.concatenate([[0], np.cumsum(widths)])
    sizes = totals[ends] - totals[ends - groups] if groups else ends
    return points_of_chunks(flat, sizes, np.full(len(groups), topk, dtype=np.int64))


def _flatten(activations: Any) -> tuple[Any, Ints]:
    if hasattr(activations, "ndim"):
        if activations.ndim < 2:
            raise ProofError("activations are a sequence of tensors, or a tensor of at least two dimensions")
        return activations.reshape(-1), np.full(len(activations), math.prod(activations.shape[1:]), dtype=np.int64)
    elements = [element.reshape(-1) for element in activations]
    widths = np.array([len(element) for element in elements], dtype=np.int64)
    if not elements:
        return np.empty(0, np.uint16), widths
    if isinstance(elements[0], np.ndarray):
        return np.concatenate(elements), widths
    import torch

    return torch.cat(elements), widths


def _float16_as_bits(flat: Any, *, allowed: bool) -> Any:
    """The package builds proofs from the bits of float16, and cannot verify them; this function does the same."""
    if "float16" not in str(flat.dtype) or "bfloat16" in str(flat.dtype):
        return flat
    if not allowed:
        raise TypeError("proofs are verified against bfloat16 (or float32): cast float16 activations to bfloat16 first")
    if isinstance(flat, np.ndarray):
        return flat.view(np.uint16)
    import torch

    return flat.contiguous().view(torch.bfloat16)
