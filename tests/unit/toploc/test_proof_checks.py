"""Which proofs pass: those that differ by what rounding explains. None that was made without running the model, or of
something else, each for its reason.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from vectors import normal, packed, through, unpacked

from shoal.errors import ProofError
from shoal.toploc import PointBatch, ProofCheck, ProofTolerance, chunk_topk, commit, compare, plain, top_points
from shoal.toploc import check_proofs as check
from shoal.toploc.check import Comparisons, ProofSums, outside_limit, proof_sums
from shoal.toploc.plain import PRIME
from shoal.toploc.points import split_proofs
from shoal.validator.evidence import STRIKE, in_units, log_evidence
from shoal.validator.profiles import NoiseLimits

TOPK, ROWS = 128, 32
LENIENT = ProofTolerance(exponents=60 / 128, mantissa_mean=40, mantissa_median=40, signs=1.0)
HIDDEN = [64, 576, 4096]


def points_of(seed: int, chunks: int = 1, hidden: int = 4096) -> PointBatch:
    return top_points(normal(seed, chunks * ROWS, hidden), [chunks * ROWS], TOPK, ROWS)


def proof_of(coefficients: npt.ArrayLike, modulus: int = PRIME) -> bytes:
    padded = np.zeros(TOPK, np.int64)
    padded[: np.size(coefficients)] = coefficients
    return packed(padded, modulus)


def judged(points: PointBatch, *proofs: bytes, tolerance: ProofTolerance | None = None) -> ProofCheck:
    return check(compare(points, proofs), tolerance)


def modal_value(points: PointBatch) -> int:
    """The best single guess: the median of the values with the most frequent exponent, sign dropped."""
    magnitudes = (points.bits & np.uint16(0x7FFF)).astype(np.int64)
    exponent = np.bincount(magnitudes >> 7).argmax()
    return int(np.median(magnitudes[magnitudes >> 7 == exponent]))


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_constant_is_forged_even_under_lenient_limits(hidden: int) -> None:
    points = points_of(2, 1, hidden)
    naive = compare(points, [proof_of(modal_value(points))])
    assert naive.exp_mismatches[0] <= 60  # what the published check would let through
    assert naive.outside_hits[0] == naive.outside_count[0] == 256
    for tolerance in (None, LENIENT):
        assert check(naive, tolerance).reason == "forged"
    nearly = replace(naive, constant=np.array([False]))  # but for a few points: the count outside alone sees it
    assert check(nearly, LENIENT).reason == "forged"


@pytest.mark.parametrize("slope", [1, 2, PRIME - 1])
def test_a_slow_line_on_a_small_chunk_is_forged(slope: int) -> None:
    """On few indices a line of small slope stays within one exponent."""
    points = top_points(normal(3, 1, 64), [1], TOPK, ROWS)
    k = int(points.counts[0])
    start = (modal_value(points) & ~0x7F) + (0 if slope < 3 else 127)
    line = packed([start, slope, *[0] * (k - 2)])
    tolerance = replace(LENIENT, mantissa_mean=127, mantissa_median=127)
    assert judged(points, line, tolerance=tolerance).reason == "forged"
    assert not judged(points, line).passed


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 7, 12, 24])  # x^24 has 2729 values: 24 divides p - 1
@pytest.mark.parametrize("hidden", HIDDEN)
def test_polynomials_of_low_degree_fail(degree: int, hidden: int) -> None:
    points = points_of(4, 1, hidden)
    draw = np.random.default_rng(degree)
    for leading in (1, 2, 64, 128, int(draw.integers(PRIME))):
        coefficients = np.zeros(degree + 1, np.int64)
        coefficients[0], coefficients[degree] = modal_value(points), leading
        assert judged(points, proof_of(coefficients), tolerance=LENIENT).reason in ("mismatch", "forged")


@pytest.mark.parametrize("hidden", HIDDEN)
def test_proofs_of_other_chunks_fail(hidden: int) -> None:
    points = points_of(7, 3, hidden)
    proofs = commit(points)
    assert judged(points, proofs[0], proofs[2], proofs[1]).reason == "mismatch"
    assert judged(points, proofs[0], proofs[0], proofs[0], tolerance=LENIENT).reason == "mismatch"
    assert judged(points, *commit(points_of(8, 3, hidden))).reason == "mismatch"


def test_a_fit_to_guessed_indices_fails() -> None:
    points = points_of(9)
    size = int(points.sizes[0])
    guess = np.random.default_rng(9).choice(size, TOPK, replace=False)
    assert judged(points, through(guess, np.full(TOPK, modal_value(points) ^ 1), size)).reason == "forged"  # constant
    varied = modal_value(points) + np.arange(TOPK) % 8
    assert judged(points, through(guess, varied, size), tolerance=LENIENT).reason == "mismatch"


def test_channels_that_are_always_large_do_not_help() -> None:
    """Real models have such channels: who knows them knows all indices, and nearly all exponents, but no mantissa."""
    activations = normal(10, ROWS, 4096)
    outliers = [17, 300, 2048, 4000]
    activations[:, outliers] = 11.5 + activations[:, outliers]
    points = top_points(activations, [ROWS], TOPK, ROWS)
    guess = np.array([row * 4096 + channel for row in range(ROWS) for channel in outliers])
    assert np.array_equal(np.sort(guess), points.indices)
    usual = int(plain.bfloat16_bits(np.array([11.5], np.float32))[0])
    values = usual + np.arange(TOPK) % 2
    forgery = through(guess, values, ROWS * 4096)
    assert compare(points, [forgery]).exp_mismatches[0] < 6
    assert judged(points, forgery).reason == "mismatch"
    paper = replace(LENIENT, exponents=38 / 128, mantissa_mean=10, mantissa_median=8)
    assert judged(points, forgery, tolerance=paper).reason == "mismatch"


def test_wrong_mantissas_or_signs_at_the_right_indices_fail() -> None:
    points = points_of(11)
    mantissas = np.random.default_rng(11).integers(0, 128, TOPK).astype(np.uint16)
    forgery = through(points.indices, points.bits & np.uint16(0xFF80) | mantissas, int(points.sizes[0]))
    assert judged(points, forgery).reason == "mismatch"
    points = points_of(12)
    negated = PointBatch(points.indices, points.bits ^ np.uint16(0x8000), points.counts, points.sizes)
    compared = compare(points, commit(negated))
    assert compared.exp_mismatches[0] == compared.mant_err_sum[0] == 0
    assert compared.sign_mismatches[0] == TOPK
    assert check(compared).reason == "mismatch"


BROKEN = {
    "empty": b"", "one byte": b"\xff", "modulus only": b"\xff\xd9", "null": bytes(258), "odd": proof_of([1, 2]) + b"\0",
    "short": proof_of([1, 2])[:-2], "long": proof_of([1, 2]) + b"\0\0", "modulus 1": proof_of(range(1, 129), modulus=1),
    "modulus below half": proof_of(range(1, 129), modulus=2**15),
    "modulus too low for chance": proof_of(range(1, 129), modulus=65432),
    "modulus above the prime": proof_of(range(1, 129), modulus=65498),
    "coefficient above the prime": proof_of([1, 65497]), "all ones": b"\xff" * 258,
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_bytes_that_no_honest_prover_writes_are_malformed(name: str) -> None:
    points = points_of(13, 2)
    honest = commit(points)
    result = judged(points, honest[0], BROKEN[name], tolerance=LENIENT)
    assert (result.reason, result.chunk) == ("malformed", 1)
    assert "chunk 1" in result.detail


def test_the_bound_on_moduli_bends_to_points_that_need_it() -> None:
    """Two rows 16 apart with 104 large neighbours each collide under every modulus from 65497 down to 65433."""
    activations = np.zeros((ROWS, 4096), np.float32)
    activations[0, :104] = activations[16, :104] = 1 + np.arange(104) / 128
    points = top_points(activations, [ROWS], 208, ROWS)
    (proof,) = commit(points)
    assert unpacked(proof)[0] < 65433
    assert judged(points, proof).passed
    other = top_points(normal(14, ROWS, 4096), [ROWS], 208, ROWS)
    assert judged(other, proof).reason == "malformed"


def test_not_bytes_is_malformed_and_the_number_of_proofs_must_fit() -> None:
    points = points_of(15, 2)
    honest = commit(points)
    assert judged(points, honest[0], "text").reason == "malformed"  # type: ignore[arg-type]
    for proofs in ([], honest[:1], [*honest, honest[0]]):
        with pytest.raises(ProofError, match="for 2 chunks"):
            compare(points, proofs)


def test_activations_that_are_all_equal_honestly_give_a_constant() -> None:
    for value in (0.0, 1.0, np.nan):
        points = top_points(np.full((ROWS, 64), value, np.float32), [ROWS], TOPK, ROWS)
        (proof,) = commit(points)
        assert not any(proof[4:])
        assert judged(points, proof).passed
        assert judged(points_of(17, 1, 64), proof).reason == "forged"


def test_honest_proofs_rarely_hit_outside() -> None:
    points = points_of(18, 64)
    compared = compare(points, commit(points))
    assert compared.outside_count.tolist() == [256] * 64
    assert compared.outside_hits.mean() == pytest.approx(1.0, abs=0.5)
    assert compared.outside_hits.max() <= 7
    assert [outside_limit(count, 1e-9) for count in (0, 1, 3, 48, 256)] == [0, 1, 3, 6, 11]
    assert outside_limit(256, 1e-3) < outside_limit(256, 1e-12)


def test_proofs_are_split_by_their_known_sizes() -> None:
    lengths = [chunk_topk(r, 64, TOPK, ROWS) for r in (32, 32, 6)]
    points = top_points(normal(19, 70, 64), [70], TOPK, ROWS)
    proofs = commit(points)
    assert [len(proof) for proof in proofs] == [2 + 2 * k for k in lengths]
    data = b"".join(proofs)
    assert split_proofs(data, 70, 64, TOPK, ROWS) == proofs
    assert split_proofs(b"", 0, 64, TOPK, ROWS) == []
    for wrong, length in ((data[:-1], 70), (data + b"\0\0", 70), (data, 69), (data, 32), (b"", 70)):
        with pytest.raises(ProofError, match=f"{len(wrong)} bytes of proofs, but {length} tokens"):
            split_proofs(wrong, length, 64, TOPK, ROWS)


# Rounding: what it explains passes, what it does not is seen, the sooner the more values there are


def against(prover: npt.NDArray[np.float32], verifier: npt.NDArray[np.float32]) -> Comparisons:
    proofs = commit(top_points(prover, [len(prover)], TOPK, ROWS))
    return compare(top_points(verifier, [len(verifier)], TOPK, ROWS), proofs)


def is_seen(compared: Comparisons) -> bool:
    """By one chunk, or by the sums of all under the limits of float32."""
    return not check(compared).passed or drift(proof_sums(compared)) >= STRIKE


def drift(sums: ProofSums) -> float:
    """The log-evidence of sums under the limits of float32."""
    noise = NoiseLimits()
    exponents = in_units(sums.exponents, noise.exponents.rate * sums.values, noise.exponents)
    mantissa = in_units(sums.mantissa, noise.mantissa.rate * sums.matches, noise.mantissa)
    return max(log_evidence("exponents", exponents), log_evidence("mantissa", mantissa))


def noisy(values: npt.NDArray[np.float32], scale: float, seed: int = 0) -> npt.NDArray[np.float32]:
    """Errors as matrix products have them: relative to the typical size of a value, not to the value."""
    noise = np.random.default_rng(1000 + seed).standard_normal(values.shape, dtype=np.float32)
    return values + np.float32(scale) * noise


@pytest.mark.parametrize("hidden", [64, 576])
@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e-6, 1e-5])
def test_float32_rounding_passes(hidden: int, scale: float) -> None:
    """128 chunks of Gaussian activations, tails included; errors up to ten times what float32 products show."""
    for seed in range(4):
        values = normal(seed, 1000, hidden)
        compared = against(noisy(values, scale, seed), values)
        assert check(compared).passed, check(compared)
        assert not is_seen(compared)
    assert check(compared).mantissa_mean < 0.02


@pytest.mark.parametrize("scale", [0.004, 0.01, 0.1])
@pytest.mark.parametrize("tokens", [256, 2048])
def test_lower_precision_is_seen(scale: float, tokens: int) -> None:
    """bfloat16 in place of float32 makes errors of 0.4 %, int8 weights of about 1 %, int4 of 10 %."""
    values = normal(1, tokens, 64)
    assert is_seen(against(noisy(values, scale), values))


def synthetic(chunks: int, mant_err_sum: int, exp_mismatches: int = 0, median: float = 0.0) -> Comparisons:
    def column(value: float) -> npt.NDArray[np.int64]:
        return np.full(chunks, value, np.int64)

    return Comparisons(column(128), column(exp_mismatches), column(mant_err_sum), np.full(chunks, median), column(0),
                       column(1), column(256), np.zeros(chunks, bool), [None] * chunks)  # fmt: skip


def test_small_errors_everywhere_show_once_there_are_enough_values() -> None:
    """Each chunk passes alone; 64 together do not. Nor do a few small chunks."""
    for numbers in ({"mant_err_sum": 20}, {"mant_err_sum": 0, "exp_mismatches": 4}):
        assert check(synthetic(64, **numbers)).passed
        assert drift(proof_sums(synthetic(1, **numbers))) < STRIKE <= drift(proof_sums(synthetic(64, **numbers)))
    small = replace(synthetic(16, mant_err_sum=8), k=np.full(16, 28))
    assert drift(proof_sums(small)) >= STRIKE


def test_the_sums_leave_out_what_chance_and_ties_put_into_them() -> None:
    """Of 64 chunks one other exponent each, and the worst mantissa error; of few chunks one error."""
    some = proof_sums(synthetic(64, mant_err_sum=20, exp_mismatches=4))
    noise = 2 * 256 / 65497 * 127 * 64 * 4
    assert (some.values, some.exponents, some.matches) == (64 * 128, 64 * 3, 63 * 124)
    assert some.mantissa == pytest.approx(63 * 20 - noise)
    assert proof_sums(synthetic(64, 0, exp_mismatches=1)).exponents == 0
    assert proof_sums(synthetic(1, 130)) == ProofSums(128, 0, 128, 3.0)
    assert proof_sums(synthetic(1, 20)).mantissa == 0.0
    shared = replace(synthetic(16, mant_err_sum=0, exp_mismatches=3), k=np.full(16, 28))
    assert drift(proof_sums(shared)) >= STRIKE
    once = np.zeros(16, dtype=np.int64)
    once[3] = 127
    assert proof_sums(replace(synthetic(16, 0), mant_err_sum=once)).mantissa == 0.0


@pytest.mark.parametrize(("changes", "passes"), [
    ({"exp_mismatches": 6}, True),
    ({"exp_mismatches": 7}, False),
    ({"mant_err_sum": 127}, True),  # one value tied at the boundary that has the right exponent by chance
    ({"mant_err_sum": 192}, False),
    ({"mant_err_median": 1.0}, False),
    ({"sign_mismatches": 2}, True),
    ({"sign_mismatches": 3}, False),
    ({"outside_hits": 11}, True),
    ({"outside_hits": 12}, False),
    ({"outside_hits": 14, "exp_mismatches": 3}, True),  # points that only the prover chose lie outside
])  # fmt: skip
def test_the_limits_of_one_chunk(changes: dict[str, float], passes: bool) -> None:
    """Every limit, on both sides, on the third of many chunks that are perfect otherwise."""
    compared = synthetic(200, 0)
    for name, value in changes.items():
        column = getattr(compared, name).copy()
        column[3] = value
        compared = replace(compared, **{name: column})
    result = check(compared)
    assert result.passed == passes
    assert passes or result.chunk == 3


def test_evidence_without_agreement_and_without_chunks() -> None:
    result = check(synthetic(2, 64, exp_mismatches=64, median=3.0))
    assert (result.reason, result.chunks, result.values, result.exponent_mismatches) == ("mismatch", 2, 256, 128)
    assert (result.mantissa_mean, result.mantissa_median, result.outside_hits) == (1.0, 3.0, 1)
    assert "64 of 128 exponents differ" in result.detail
    nothing_agrees = check(synthetic(2, 0, exp_mismatches=128, median=2.0**64))
    assert (nothing_agrees.reason, nothing_agrees.mantissa_mean) == ("mismatch", 2.0**64)
    nothing = check(compare(PointBatch.concat([]), []))
    assert (nothing.passed, nothing.chunks, nothing.chunk) == (True, 0, None)


def with_other_ties(values: npt.NDArray[np.float32]) -> PointBatch:
    """Of equal magnitudes the highest index: another implementation's rule."""
    batches = []
    for begin in range(0, len(values), ROWS):
        chunk = values[begin : begin + ROWS].reshape(-1)
        backwards = top_points(chunk[::-1].reshape(ROWS, -1), [ROWS], TOPK, ROWS)
        batches.append(
            PointBatch(chunk.size - 1 - backwards.indices, backwards.bits, backwards.counts, backwards.sizes)
        )
    return PointBatch.concat(batches)


def test_another_rule_for_ties_is_tolerated_by_its_profile() -> None:
    """At most 4 of 128 points differ in a chunk of 4096 channels, about one on average: no fraud."""
    values = normal(4, 16 * ROWS, 4096)
    compared = compare(top_points(values, [len(values)], TOPK, ROWS), commit(with_other_ties(values)))
    assert 0.2 < compared.exp_mismatches.mean() < 3
    assert compared.exp_mismatches.max() <= 6
    assert check(compared).passed
    assert proof_sums(compared).exponents < 0.01 * proof_sums(compared).values
