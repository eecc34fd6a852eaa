"""What rounding explains passes, what it does not is seen, the sooner the more values there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vectors import normal

from shoal.toploc import Comparisons, PointBatch, ProofCheck, ProofTolerance, check_proofs, commit, compare, top_points

TOPK, ROWS = 128, 32


def judged(prover: npt.NDArray[np.float32], verifier: npt.NDArray[np.float32]) -> ProofCheck:
    proofs = commit(top_points(prover, [len(prover)], TOPK, ROWS))
    return check_proofs(compare(top_points(verifier, [len(verifier)], TOPK, ROWS), proofs))


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
    assert result.mantissa_mean < 0.02


@pytest.mark.parametrize("scale", [0.004, 0.01, 0.1])
@pytest.mark.parametrize("tokens", [256, 2048])
def test_lower_precision_is_seen(scale: float, tokens: int) -> None:
    """bfloat16 in place of float32 makes errors of 0.4 %, int8 weights of about 1 %, int4 of 10 %."""
    values = normal(1, tokens, 64)
    assert judged(noisy(values, scale), values).reason in ("drift", "mismatch")


def test_the_rounding_of_bfloat16_products_is_seen_under_float32_limits() -> None:
    weights = torch.from_numpy(normal(2, 64, 64)) / 8
    rows = torch.from_numpy(normal(3, 2048, 64))
    exact = (rows @ weights).numpy()
    rough = (rows.bfloat16() @ weights.bfloat16()).float().numpy()
    assert judged(rough, exact).reason in ("drift", "mismatch")


def synthetic(chunks: int, mant_err_sum: int, exp_mismatches: int = 0, median: float = 0.0) -> Comparisons:
    def column(value: float) -> npt.NDArray[np.int64]:
        return np.full(chunks, value, np.int64)

    return Comparisons(column(128), column(exp_mismatches), column(mant_err_sum), np.full(chunks, median), column(0),
                       column(1), column(256), np.zeros(chunks, bool), [None] * chunks)  # fmt: skip


def test_small_errors_everywhere_are_drift_once_there_are_enough_values() -> None:
    """Each chunk passes alone; 64 together do not."""
    for numbers in ({"mant_err_sum": 20}, {"mant_err_sum": 0, "exp_mismatches": 4}):
        assert check_proofs(synthetic(1, **numbers)).passed
        assert check_proofs(synthetic(64, **numbers)).reason == "drift"


def test_a_profile_that_allows_the_honest_mean_sees_a_larger_one() -> None:
    """The honest bfloat16 engine of shared measurements has a mean error of 1.25, int8 weights 2.1."""
    profile = ProofTolerance(exponents=0.15, mantissa_mean=6, mantissa_median=4, drift_exponents=0.05,
                             drift_mantissa=1.4, drift_spread=4.0)  # fmt: skip
    assert check_proofs(synthetic(64, 160, median=1.0), profile).passed
    assert check_proofs(synthetic(1, 269, median=1.0), profile).passed
    assert check_proofs(synthetic(64, 269, median=1.0), profile).reason == "drift"


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


def test_the_evidence() -> None:
    result = check_proofs(synthetic(2, 64, exp_mismatches=64, median=3.0))
    assert (result.reason, result.chunks, result.values, result.exponent_mismatches) == ("mismatch", 2, 256, 128)
    assert (result.mantissa_mean, result.mantissa_median, result.outside_hits) == (1.0, 3.0, 1)
    assert "64 of 128 exponents differ" in result.detail


def test_nothing_that_agrees_and_nothing_at_all() -> None:
    nothing_agrees = check_proofs(synthetic(2, 0, exp_mismatches=128, median=2.0**64))
    assert nothing_agrees.reason == "mismatch"
    assert nothing_agrees.mantissa_mean == 2.0**64
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
    tolerance = ProofTolerance(drift_exponents=0.02)
    assert check_proofs(compared, tolerance).passed


def test_a_tie_that_all_rollouts_of_a_group_share_is_no_drift() -> None:
    """They begin with the same state: what rounds the other way there does so in every chunk (once in 4,640 groups)."""
    shared = replace(synthetic(16, mant_err_sum=0, exp_mismatches=1), k=np.full(16, 28))
    assert check_proofs(shared).passed
    assert check_proofs(replace(shared, exp_mismatches=np.full(16, 2))).reason == "drift"


def test_small_errors_in_a_few_small_chunks_are_drift_but_one_large_error_is_not() -> None:
    """One point that matches by chance may have any mantissa; int8 weights have errors everywhere."""
    small = replace(synthetic(16, mant_err_sum=8), k=np.full(16, 28))
    assert check_proofs(small).reason == "drift"
    once = np.zeros(16, dtype=np.int64)
    once[3] = 127
    assert check_proofs(replace(small, mant_err_sum=once)).passed
