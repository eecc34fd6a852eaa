"""What rounding explains passes, what it does not is seen, the sooner the more values there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from vectors import normal

from shoal.toploc import Comparisons, PointBatch, ProofCheck, check_proofs, commit, compare, top_points
from shoal.toploc.check import ProofSums, proof_sums
from shoal.validator.evidence import STRIKE, in_units, log_evidence
from shoal.validator.profiles import NoiseLimits

TOPK, ROWS = 128, 32


def judged(prover: npt.NDArray[np.float32], verifier: npt.NDArray[np.float32]) -> ProofCheck:
    proofs = commit(top_points(prover, [len(prover)], TOPK, ROWS))
    return check_proofs(compare(top_points(verifier, [len(verifier)], TOPK, ROWS), proofs))


def is_seen(prover: npt.NDArray[np.float32], verifier: npt.NDArray[np.float32]) -> bool:
    """By one chunk, or by the sums of all under the limits of float32."""
    compared = compare(
        top_points(verifier, [len(verifier)], TOPK, ROWS), commit(top_points(prover, [len(prover)], TOPK, ROWS))
    )
    return not check_proofs(compared).passed or drift(proof_sums(compared)) >= STRIKE


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
        result = judged(noisy(values, scale, seed), values)
        assert result.passed, result
        assert not is_seen(noisy(values, scale, seed), values)
    assert result.mantissa_mean < 0.02


@pytest.mark.parametrize("scale", [0.004, 0.01, 0.1])
@pytest.mark.parametrize("tokens", [256, 2048])
def test_lower_precision_is_seen(scale: float, tokens: int) -> None:
    """bfloat16 in place of float32 makes errors of 0.4 %, int8 weights of about 1 %, int4 of 10 %."""
    values = normal(1, tokens, 64)
    assert is_seen(noisy(values, scale), values)


def synthetic(chunks: int, mant_err_sum: int, exp_mismatches: int = 0, median: float = 0.0) -> Comparisons:
    def column(value: float) -> npt.NDArray[np.int64]:
        return np.full(chunks, value, np.int64)

    return Comparisons(column(128), column(exp_mismatches), column(mant_err_sum), np.full(chunks, median), column(0),
                       column(1), column(256), np.zeros(chunks, bool), [None] * chunks)  # fmt: skip


def test_small_errors_everywhere_show_once_there_are_enough_values() -> None:
    """Each chunk passes alone; 64 together do not. Nor do a few small chunks."""
    for numbers in ({"mant_err_sum": 20}, {"mant_err_sum": 0, "exp_mismatches": 4}):
        assert check_proofs(synthetic(64, **numbers)).passed
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


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
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
    ],
)
def test_the_limits_of_one_chunk(changes: dict[str, float], passes: bool) -> None:
    """Every limit, on both sides, on the third of many chunks that are perfect otherwise."""
    compared = synthetic(200, 0)
    for name, value in changes.items():
        column = getattr(compared, name).copy()
        column[3] = value
        compared = replace(compared, **{name: column})
    result = check_proofs(compared)
    assert result.passed == passes
    assert passes or result.chunk == 3


def test_the_evidence_also_where_nothing_agrees_and_of_nothing_at_all() -> None:
    result = check_proofs(synthetic(2, 64, exp_mismatches=64, median=3.0))
    assert (result.reason, result.chunks, result.values, result.exponent_mismatches) == ("mismatch", 2, 256, 128)
    assert (result.mantissa_mean, result.mantissa_median, result.outside_hits) == (1.0, 3.0, 1)
    assert "64 of 128 exponents differ" in result.detail
    nothing_agrees = check_proofs(synthetic(2, 0, exp_mismatches=128, median=2.0**64))
    assert (nothing_agrees.reason, nothing_agrees.mantissa_mean) == ("mismatch", 2.0**64)
    nothing = check_proofs(compare(PointBatch.concat([]), []))
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
    assert check_proofs(compared).passed
    assert proof_sums(compared).exponents < 0.01 * proof_sums(compared).values
