"""The functions of the published `toploc` package, with its names, so that its users can switch.

They differ where the package fails: float32 and float16 are rounded to bfloat16 instead of giving proofs that nobody
can verify, a chunk with fewer than `topk` values and a malformed proof are a ProofError instead of a null proof or a
crash, there must be exactly one proof for each chunk, and every form of input is judged by one rule (indices modulo m,
the upper median). What passes here has not been checked for forgery: that is `compare` and `check_proofs`.

`activations`: a sequence whose element 0 is the whole prefill (unless `skip_prefill`), each further one the row of one
token; or one tensor [tokens, hidden]. Each is a torch tensor, or a numpy array as in `top_points`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shoal.errors import ProofError
from shoal.toploc.check import compare
from shoal.toploc.points import Activations, PointBatch, chunk_rows, commit, points_of_chunks

Many: TypeAlias = "Activations | Sequence[Activations]"


@dataclass(frozen=True)
class VerificationResult:
    """How far one proof is from the verifier's activations; 2^64 twice where no exponent agrees."""

    exp_mismatches: int
    mant_err_mean: float
    mant_err_median: float


def build_proofs_bytes(
    activations: Many, decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[bytes]:
    """One proof of the prefill (unless skipped), then one for every `decode_batching_size` tokens, of 2 + 2 · topk
    bytes each."""
    return commit(points_of(activations, decode_batching_size, topk, skip_prefill))


def verify_proofs_bytes(
    activations: Many, proofs: Sequence[bytes], decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[VerificationResult]:
    """How far each proof is from the verifier's own activations. ProofError if one is malformed or missing."""
    compared = compare(points_of(activations, decode_batching_size, topk, skip_prefill), proofs, outside=0)
    for chunk, sentence in enumerate(compared.malformed):
        if sentence is not None:
            raise ProofError(f"proof {chunk} is malformed: {sentence}")
    columns = compared.exp_mismatches.tolist(), compared.mant_err_mean.tolist(), compared.mant_err_median.tolist()
    return [VerificationResult(*row) for row in zip(*columns, strict=True)]


def points_of(activations: Any, rows: int, topk: int, skip_prefill: bool) -> PointBatch:
    """The points of the package's chunks: `topk` of each, whatever its size."""
    if topk < 1 or rows < 1:
        raise ProofError(f"topk and decode_batching_size are 1 or more, not {topk} and {rows}")
    if hasattr(activations, "ndim"):
        if activations.ndim < 2:
            raise ProofError("activations are a sequence of tensors, or a tensor of at least two dimensions")
        flat, widths = activations.reshape(-1), [math.prod(activations.shape[1:])] * len(activations)
    else:
        elements = [element.reshape(-1) for element in activations]
        flat, widths = _joined(elements), list(map(len, elements))
    groups = [1] * (not skip_prefill and len(widths) > 0)
    groups += chunk_rows(len(widths) - len(groups), rows)
    ends = np.cumsum(groups, dtype=np.int64)
    totals = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
    sizes = totals[ends] - totals[ends - groups] if groups else ends
    return points_of_chunks(flat, sizes, np.full(len(groups), topk, dtype=np.int64))


def _joined(elements: Sequence[Any]) -> Any:
    if not elements or isinstance(elements[0], np.ndarray):
        return np.concatenate(elements) if elements else np.empty(0, np.uint16)
    import torch

    return torch.cat(list(elements))
