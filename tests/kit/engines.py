"""The engines that contract suites run against, vLLM's only where it is installed (`make test-vllm`); and how what they
draw is compared."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from shoal.engines import ENGINES, Chunks, Completion, Prefill
from shoal.protocol import ProofParameters
from shoal.toploc import check_proofs, compare, split_proofs

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm")
ENGINE_NAMES: list[Any] = [
    pytest.param(name, marks=[pytest.mark.vllm, needs_vllm]) if name == "vllm" else name for name in sorted(ENGINES)
]


def exactly(groups: Sequence[Sequence[Completion]], proofs: bool = True) -> list[Any]:
    """All of the completions but their log-probabilities, which are rounded; without `proofs` only their lengths."""
    return [
        (each.token_ids.tolist(), each.finish, each.given, each.proofs if proofs else len(each.proofs))
        for group in groups
        for each in group
    ]


def assert_same(
    ones: Sequence[Sequence[Completion]], others: Sequence[Sequence[Completion]], proofs: bool = True,
    atol: float = 1e-4,
) -> None:  # fmt: skip
    assert exactly(ones, proofs) == exactly(others, proofs)
    for one, other in zip((each for group in ones for each in group), (c for g in others for c in g), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=atol)


def holds(completion: Completion, prefill: Prefill, hidden_size: int, proof: ProofParameters) -> bool:
    """Whether the proofs of a completion are of the states that a prefill found."""
    assert prefill.points is not None
    chunks = split_proofs(completion.proofs, len(completion.token_ids), hidden_size, proof.topk, proof.rows)
    return check_proofs(compare(prefill.points, chunks)).passed


def begins(shown: Chunks, completion: Completion) -> bool:
    """Whether finished chunks are the first of a completion, bit for bit."""
    is_first = shown.token_ids.tolist() == completion.token_ids[: len(shown.token_ids)].tolist()
    return is_first and completion.proofs.startswith(b"".join(shown.proofs))
