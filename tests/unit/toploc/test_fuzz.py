"""Arbitrary bytes: nothing crashes, nothing passes. And what was committed to is found again, whatever it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import normal, packed

from shoal.errors import ProofError
from shoal.toploc import PointBatch, ProofPoly, check_proofs, commit, compare, top_points
from shoal.toploc.plain import PRIME

pytestmark = pytest.mark.usefixtures("arithmetic")
POINTS = top_points(normal(0, 70, 64), [70], 128, 32)
HONEST = commit(POINTS)


def damaged(proof: bytes) -> st.SearchStrategy[bytes]:
    """Bytes near a real proof: some replaced, cut off or appended."""
    replaced = st.tuples(st.integers(0, len(proof) - 1), st.binary(min_size=1, max_size=6)).map(
        lambda change: proof[: change[0]] + change[1] + proof[change[0] + len(change[1]) :]
    )
    cut = st.integers(0, len(proof)).map(lambda size: proof[:size])
    longer = st.binary(max_size=8).map(lambda tail: proof + tail)
    return st.one_of(replaced, cut, longer)


def of_length(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


def wellformed(k: int) -> st.SearchStrategy[bytes]:
    """Canonical proofs with any coefficients."""
    coefficients = st.lists(st.integers(0, PRIME - 1), min_size=k, max_size=k)
    return st.builds(packed, coefficients, st.integers(65433, PRIME))


@settings(max_examples=100)
@given(data=st.data(), chunk=st.integers(0, 2))
def test_no_bytes_pass_but_the_proof(data: st.DataObject, chunk: int) -> None:
    honest = HONEST[chunk]
    k = int(POINTS.counts[chunk])
    strategy = st.one_of(st.binary(max_size=300), of_length(len(honest)), damaged(honest), wellformed(k))
    proof = data.draw(strategy)
    proofs = [*HONEST[:chunk], proof, *HONEST[chunk + 1 :]]
    result = check_proofs(compare(POINTS, proofs))
    assert result.passed == (proof == honest)
    assert result.reason in (None, "malformed", "forged", "mismatch")
    if proof != honest:
        assert result.chunk == chunk


@st.composite
def point_batches(draw: st.DrawFn) -> PointBatch:
    """A few chunks of any points: any indices, any bits that the field can hold."""
    counts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    size = draw(st.sampled_from([64, 3000, 65497, 131072, 2**20]))
    seed = draw(st.integers(0, 2**32))
    random = np.random.default_rng(seed)
    indices = np.concatenate([random.choice(size, count, replace=False) for count in counts])
    bits = random.integers(0, PRIME, len(indices)).astype(np.uint16)
    return PointBatch(indices, bits, np.array(counts), np.full(len(counts), size))


@given(points=point_batches(), seed=st.integers(0, 2**32))
def test_what_was_committed_to_is_found_again_in_any_order(points: PointBatch, seed: int) -> None:
    proofs = commit(points)
    compared = compare(points, proofs)
    assert compared.malformed == [None] * len(points)
    for errors in (compared.exp_mismatches, compared.mant_err_sum, compared.mant_err_median, compared.sign_mismatches):
        assert not errors.any()
    order = np.concatenate([
        begin + np.random.default_rng(seed).permutation(count)
        for begin, count in zip(np.cumsum(points.counts) - points.counts, points.counts, strict=True)
    ])  # fmt: skip
    assert commit(PointBatch(points.indices[order], points.bits[order], points.counts, points.sizes)) == proofs
    each = [commit(points[c : c + 1])[0] for c in range(len(points))]
    assert each == proofs


@pytest.mark.parametrize(
    "text", ["/9kAAwABAAB=", "/9kAAwABAAA", "/9kAAwABAAA=\n", " /9kAAwABAAA=", "_9kAAwABAAA=", "é"]
)
def test_base64_has_one_form(text: str) -> None:
    assert ProofPoly.from_base64("/9kAAwABAAA=").coeffs == [3, 1, 0]
    with pytest.raises(ProofError, match="base64"):
        ProofPoly.from_base64(text)


def test_repeated_points_cannot_be_committed_to() -> None:
    twice = PointBatch(np.array([5, 5]), np.array([1, 2], np.uint16), np.array([2]), np.array([64]))
    with pytest.raises(ProofError, match="chunk 0"):
        commit(twice)
