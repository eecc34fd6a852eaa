"""The published format, byte for byte: the conformance vectors, through every form of input. Arbitrary bytes: nothing
crashes, nothing passes. And what was committed to is found again, whatever it was.
"""

import base64
import math
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from vectors import activations, by_name, normal, packed, vectors

from shoal import toploc
from shoal.errors import ProofError
from shoal.toploc.package import _points
from shoal.toploc.plain import PRIME

NAMES = {section: [vector.get("name") for vector in vectors()[section]] for section in vectors() if section != "meta"}
pytestmark = pytest.mark.usefixtures("arithmetic")
NULL = ["fewer_than_topk", "fp32_build"]  # vectors that record a failure of the published package
ABSENT = ["modulus_not_65497"]  # its activations are not in the file


def as_torch(value: Any) -> Any:
    if isinstance(value, list):
        return [as_torch(each) for each in value]
    tensor = torch.from_numpy(value.copy())
    return tensor.view(torch.bfloat16) if value.dtype == np.uint16 else tensor


def arguments(vector: dict[str, Any]) -> tuple[int, int, bool]:
    return vector["decode_batching_size"], vector["topk"], vector["skip_prefill"]


@pytest.mark.parametrize("name", NAMES["points"])
def test_points_and_tensors_of_points_become_the_published_bytes(name: str) -> None:
    vector = by_name("points", name)
    proof = toploc.ProofPoly.from_points(vector["x"], vector["y"])
    assert (proof.modulus, proof.to_base64()) == (vector["modulus"], vector["proof_b64"])
    assert len(proof.to_bytes()) == vector["bytes"]
    backwards = toploc.ProofPoly.from_points(vector["x"][::-1], vector["y"][::-1])
    assert backwards == proof
    halves = torch.tensor(vector["y"], dtype=torch.int32).to(torch.uint16)
    for values in (torch.tensor(vector["y"]), halves.view(torch.bfloat16), halves.view(torch.float16)):
        assert toploc.ProofPoly.from_points_tensor(torch.tensor(vector["x"]), values).to_base64() == vector["proof_b64"]


@pytest.mark.parametrize("y", [torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]]), torch.tensor([1])])
def test_tensors_that_are_no_points_are_refused(y: torch.Tensor) -> None:
    with pytest.raises(ProofError):
        toploc.ProofPoly.from_points_tensor(torch.tensor([1, 2]), y)
    with pytest.raises(ProofError):
        toploc.ProofPoly.from_points_tensor(torch.tensor([1.0, 2.0]), torch.tensor([1, 2]))


def test_a_null_proof_is_zeros_and_is_rejected() -> None:
    null = toploc.ProofPoly.null(5)
    assert (null.coeffs, null.modulus, len(null), null.to_bytes()) == ([0] * 5, 0, 5, bytes(12))
    rows = torch.arange(96, dtype=torch.bfloat16).reshape(6, 16)
    (honest,) = toploc.build_proofs(rows, 6, 5, skip_prefill=True)
    for verify in (
        lambda: toploc.verify_proofs(rows, [null], 6, 5, skip_prefill=True),
        lambda: toploc.verify_proofs_bytes(rows, [null.to_bytes()], 6, 5, skip_prefill=True),
        lambda: toploc.verify_proofs_base64(rows, [null.to_base64()], 6, 5, skip_prefill=True),
    ):
        with pytest.raises(ProofError, match="the modulus 0 is not between"):
            verify()
    with pytest.raises(ProofError, match="the modulus 0"):
        toploc.ProofPoly.from_bytes(null.to_bytes())
    with pytest.raises(ProofError, match="null proof"):
        null(1)
    assert toploc.verify_proofs(rows, [honest], 6, 5, skip_prefill=True) == [toploc.VerificationResult(0, 0.0, 0.0)]


@pytest.mark.parametrize("number", range(len(vectors()["evaluations"])))
def test_a_proof_evaluates_as_published(number: int) -> None:
    vector = vectors()["evaluations"][number]
    proof = toploc.ProofPoly.from_base64(vector["proof_b64"])
    assert [proof(x) for x in vector["x"]] == vector["y_mod_modulus"]
    assert len(proof) == len(proof.coeffs)


@pytest.mark.parametrize("form", ["numpy", "torch"])
@pytest.mark.parametrize("name", [name for name in NAMES["activations"] if name not in NULL])
def test_activations_become_the_published_proofs(name: str, form: str) -> None:
    """Byte for byte, or, where values tie at the k-th place, the same magnitudes with the lowest indices chosen."""
    vector = by_name("activations", name)
    given = activations(vector) if form == "numpy" else as_torch(activations(vector))
    proofs = toploc.build_proofs_base64(given, *arguments(vector))
    points = _points(given, *arguments(vector), raw_float16=True)
    assert len(proofs) == len(vector["proofs_b64"]) == len(points)
    for chunk, tie in enumerate(vector["boundary_tie"]):
        if not tie:
            assert proofs[chunk] == vector["proofs_b64"][chunk]
            assert points[chunk : chunk + 1].indices.tolist() == vector["topk_sorted"][chunk]
        elif vector["topk_sorted"]:
            assert_same_magnitudes(points[chunk : chunk + 1], vector, chunk)


def assert_same_magnitudes(points: toploc.PointBatch, vector: dict[str, Any], chunk: int) -> None:
    """The published choice among ties is another one, but it has the same magnitudes; ours has the lowest indices."""
    published = toploc.ProofPoly.from_base64(vector["proofs_b64"][chunk])
    theirs = sorted(published(x) & 0x7FFF for x in vector["topk_sorted"][chunk])
    ours = (points.bits & np.uint16(0x7FFF)).tolist()
    assert sorted(ours) == theirs
    boundary = min(ours)
    above = {x for x, y in zip(points.indices.tolist(), ours, strict=True) if y > boundary}
    assert above == {x for x in vector["topk_sorted"][chunk] if published(x) & 0x7FFF > boundary}
    at_boundary = sorted(set(points.indices.tolist()) - above)
    assert at_boundary <= sorted(set(vector["topk_sorted"][chunk]) - above)


def test_float32_is_rounded_where_the_package_gives_null_proofs() -> None:
    vector = by_name("activations", "fp32_build")
    given = activations(vector)
    proofs = toploc.build_proofs_bytes(given, *arguments(vector))
    assert len(proofs) == 2
    assert proofs == toploc.build_proofs_bytes(torch.from_numpy(given.copy()).bfloat16(), *arguments(vector))
    assert toploc.verify_proofs_bytes(given, proofs, *arguments(vector)) == [toploc.VerificationResult(0, 0.0, 0.0)] * 2


@pytest.mark.parametrize("name", [name for name in NAMES["verifications"] if name not in ABSENT])
def test_verifications_give_the_published_numbers(name: str) -> None:
    vector = by_name("verifications", name)
    given = activations(vector)
    found = toploc.verify_proofs_base64(given, vector["proofs_b64"], *arguments(vector))
    numbers = [(result.exp_mismatches, result.mant_err_mean, result.mant_err_median) for result in found]
    if "tensor" in vector and not (vector["boundary_tie"] and any(vector["boundary_tie"])):
        assert numbers == [tuple(result) for result in vector["tensor"]]
    else:  # the package's median of a list is the middle of two; a tie at the k-th place moves single points
        for ours, theirs in zip(numbers, vector.get("tensor", vector["list"]), strict=True):
            slack = 4 if any(vector["boundary_tie"]) else 0
            assert abs(ours[0] - theirs[0]) <= slack
            assert ours[1] == pytest.approx(theirs[1], abs=slack / 4)
            assert ours[2] == pytest.approx(math.ceil(theirs[2]), abs=slack / 4)
    objects = [toploc.ProofPoly.from_base64(proof) for proof in vector["proofs_b64"]]
    assert toploc.verify_proofs(as_torch(given), objects, *arguments(vector)) == found


def test_a_modulus_below_the_prime_is_used() -> None:
    """What the vector with the absent activations is about: indices are reduced by the proof's own modulus."""
    bits = np.zeros((32, 4096), np.uint16)
    chosen = [10, 65507, 20, 65516, 30, 65525]  # the published collision chain: modulus 65494
    bits.reshape(-1)[chosen] = np.arange(16256, 16262)
    (proof,) = toploc.build_proofs(bits, 32, 6, skip_prefill=True)
    assert proof.modulus == 65494
    assert toploc.verify_proofs(bits, [proof], 32, 6, skip_prefill=True) == [toploc.VerificationResult(0, 0.0, 0.0)]


@pytest.mark.parametrize("name", [vector["name"] for vector in vectors()["errors"] if "proof_b64" in vector])
def test_malformed_proofs_are_rejected(name: str) -> None:
    vector = by_name("errors", name)
    text = vector["proof_b64"]
    size = 128 if name == "null_proof_tensor_path" else 16
    given = activations(by_name("activations", "planted_5120"))[:32]
    with pytest.raises(ProofError):
        toploc.verify_proofs_base64(given, [text], 32, size, skip_prefill=True)
    if name != "bad_base64":
        with pytest.raises(ProofError):
            toploc.verify_proofs_bytes(given, [base64.b64decode(text)], 32, size, skip_prefill=True)


def test_wrong_number_of_proofs_too_few_values_and_repeated_points_are_refused() -> None:
    assert {"more_proofs_than_chunks", "fewer_proofs_than_chunks"} <= set(NAMES["errors"])
    given = activations(by_name("activations", "planted_5120"))
    proofs = toploc.build_proofs_bytes(given, 32, 128, skip_prefill=True)
    for wrong in ([*proofs, proofs[0]], proofs[:1], []):
        with pytest.raises(ProofError, match=f"{len(wrong)} proofs for 2 chunks"):
            toploc.verify_proofs_bytes(given, wrong, 32, 128, skip_prefill=True)
    assert "topk_larger_than_chunk_verify" in NAMES["errors"]
    vector = by_name("activations", "fewer_than_topk")
    with pytest.raises(ProofError, match="chunk 0 has 20 values, too few for 128 points"):
        toploc.build_proofs_bytes(activations(vector), *arguments(vector))
    with pytest.raises(ProofError, match="too few"):
        toploc.verify_proofs_bytes(activations(vector), [bytes(258)], *arguments(vector))
    twice = toploc.PointBatch(np.array([5, 5]), np.array([1, 2], np.uint16), np.array([2]), np.array([64]))
    with pytest.raises(ProofError, match="chunk 0"):
        toploc.commit(twice)


def test_float16_builds_as_published_and_is_not_verified() -> None:
    assert by_name("errors", "fp16_verify_tensor")["want"] == "TypeError"
    vector = by_name("activations", "fp16_build")
    for values in (activations(vector), as_torch(activations(vector))):
        proofs = toploc.build_proofs_bytes(values, *arguments(vector))
        with pytest.raises(TypeError, match="bfloat16"):
            toploc.verify_proofs_bytes(values, proofs, *arguments(vector))


def test_tensors_that_are_not_contiguous_work() -> None:
    assert by_name("errors", "non_contiguous_verify_tensor")["want"] == "works"
    tensor = as_torch(activations(by_name("activations", "planted_5120")))
    strided = torch.stack([tensor, tensor], dim=2)[:, :, 0]
    assert not strided.is_contiguous()
    proofs = toploc.build_proofs_bytes(strided, 32, 128, skip_prefill=True)
    assert proofs == toploc.build_proofs_bytes(tensor, 32, 128, skip_prefill=True)
    assert (
        toploc.verify_proofs_bytes(strided, proofs, 32, 128, skip_prefill=True)
        == [toploc.VerificationResult(0, 0.0, 0.0)] * 2
    )


POINTS = toploc.top_points(normal(0, 70, 64), [70], 128, 32)
HONEST = toploc.commit(POINTS)


def damaged(proof: bytes) -> st.SearchStrategy[bytes]:
    """Bytes near a real proof: some replaced, cut off or appended."""
    replaced = st.tuples(st.integers(0, len(proof) - 1), st.binary(min_size=1, max_size=6)).map(
        lambda change: proof[: change[0]] + change[1] + proof[change[0] + len(change[1]) :]
    )
    cut = st.integers(0, len(proof)).map(lambda size: proof[:size])
    longer = st.binary(max_size=8).map(lambda tail: proof + tail)
    return st.one_of(replaced, cut, longer)


def wellformed(k: int) -> st.SearchStrategy[bytes]:
    """Canonical proofs with any coefficients."""
    coefficients = st.lists(st.integers(0, PRIME - 1), min_size=k, max_size=k)
    return st.builds(packed, coefficients, st.integers(65433, PRIME))


@hypothesis.settings(max_examples=100)
@hypothesis.given(data=st.data(), chunk=st.integers(0, 2))
def test_no_bytes_pass_but_the_proof(data: st.DataObject, chunk: int) -> None:
    honest = HONEST[chunk]
    k = int(POINTS.counts[chunk])
    same_length = st.binary(min_size=len(honest), max_size=len(honest))
    strategy = st.one_of(st.binary(max_size=300), same_length, damaged(honest), wellformed(k))
    proof = data.draw(strategy)
    proofs = [*HONEST[:chunk], proof, *HONEST[chunk + 1 :]]
    result = toploc.check_proofs(toploc.compare(POINTS, proofs))
    assert result.passed == (proof == honest)
    assert result.reason in (None, "malformed", "forged", "mismatch")
    if proof != honest:
        assert result.chunk == chunk


@st.composite
def point_batches(draw: st.DrawFn) -> toploc.PointBatch:
    """A few chunks of any points: any indices, any bits that the field can hold."""
    counts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    size = draw(st.sampled_from([64, 3000, 65497, 131072, 2**20]))
    seed = draw(st.integers(0, 2**32))
    random = np.random.default_rng(seed)
    indices = np.concatenate([random.choice(size, count, replace=False) for count in counts])
    bits = random.integers(0, PRIME, len(indices)).astype(np.uint16)
    return toploc.PointBatch(indices, bits, np.array(counts), np.full(len(counts), size))


@hypothesis.given(points=point_batches(), seed=st.integers(0, 2**32))
def test_committed_points_are_found_in_any_order(points: toploc.PointBatch, seed: int) -> None:
    proofs = toploc.commit(points)
    compared = toploc.compare(points, proofs)
    assert compared.malformed == [None] * len(points)
    for errors in (compared.exp_mismatches, compared.mant_err_sum, compared.mant_err_median, compared.sign_mismatches):
        assert not errors.any()
    order = np.concatenate([
        begin + np.random.default_rng(seed).permutation(count)
        for begin, count in zip(np.cumsum(points.counts) - points.counts, points.counts, strict=True)
    ])  # fmt: skip
    assert (
        toploc.commit(toploc.PointBatch(points.indices[order], points.bits[order], points.counts, points.sizes))
        == proofs
    )
    each = [toploc.commit(points[c : c + 1])[0] for c in range(len(points))]
    assert each == proofs


@pytest.mark.parametrize(
    "text", ["/9kAAwABAAB=", "/9kAAwABAAA", "/9kAAwABAAA=\n", " /9kAAwABAAA=", "_9kAAwABAAA=", "é"]
)
def test_base64_has_one_form(text: str) -> None:
    assert toploc.ProofPoly.from_base64("/9kAAwABAAA=").coeffs == [3, 1, 0]
    with pytest.raises(ProofError, match="base64"):
        toploc.ProofPoly.from_base64(text)
