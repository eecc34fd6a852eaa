"""The seed check: honest sequences pass, each way of cheating is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol import Tally
from shoal.sampling import SeedTolerance, check_seeded
from shoal.sampling.check import distance_tail, distances, measured_tolerance, noise_p_value, poisson_tail
from shoal.sampling.inverse import intervals, sample
from shoal.sampling.stream import uniforms

COARSE = SeedTolerance(distance=0.05, floor=1e-9, outside_rate=0.01, outside_distance=0.001)


def drawn(seed: int, tokens: int = 64, vocabulary: int = 50):
    """Logits of some model, the uniforms of a seed, and the tokens that follow from both."""
    logits = np.random.default_rng(seed).normal(0, 2, (tokens, vocabulary)).astype(np.float32)
    u = uniforms(seed, 0, tokens)
    return logits, u, sample(logits, u, 1.0)[0]


def checked(logits, u, tokens, tolerance=None):
    return check_seeded(u, *intervals(logits, tokens, 1.0), tolerance)


@given(st.integers(0, 10_000))
@settings(deadline=None)
def test_an_honest_sequence_passes_without_any_tolerance_used(seed):
    result = checked(*drawn(seed))
    assert result.passed
    assert (result.n_tokens, result.n_outside, result.max_distance, result.position) == (64, 0, 0.0, None)


@given(st.integers(0, 10_000))
@settings(deadline=None)
def test_rounding_noise_on_the_validators_side_passes(seed):
    logits, u, tokens = drawn(seed)
    noise = np.random.default_rng(seed + 1).normal(0, 1e-6, logits.shape).astype(np.float32)
    assert checked(logits + noise, u, tokens).passed


@given(st.integers(0, 10_000))
@settings(deadline=None)
def test_another_seed_is_beyond(seed):
    logits, _, tokens = drawn(seed)
    result = checked(logits, uniforms(seed + 1, 0, 64), tokens)
    assert result.reason == "beyond"
    assert result.n_outside > 10


@given(st.integers(0, 10_000))
@settings(deadline=None)
def test_another_seed_is_caught_within_32_tokens_under_a_coarse_tolerance(seed):
    logits, _, tokens = drawn(seed, tokens=32)
    coarse = SeedTolerance(distance=0.15, floor=1e-13, outside_rate=0.1, outside_distance=0.0068)  # bfloat16
    assert checked(logits, uniforms(seed + 1, 0, 32), tokens, coarse).reason in ("beyond", "steered")


def test_one_edited_token_is_found_where_it_is():
    logits, u, tokens = drawn(5)
    tokens[17] = (tokens[17] + 25) % 50
    result = checked(logits, u, tokens)
    assert (result.reason, result.position, result.n_outside) == ("beyond", 17, 1)


def test_an_improbable_token_next_to_u_is_implausible():
    # u is 5e-5 past the end of a token of probability 1e-10: near, but no rounding error puts a token there.
    u, low, high = np.array([0.5]), np.array([0.49995 - 1e-10]), np.array([0.49995])
    result = check_seeded(u, low, high, np.log(np.array([1e-10])), COARSE)
    assert result.reason == "implausible"
    assert result.min_probability_outside == pytest.approx(1e-10)
    assert check_seeded(u, np.array([0.3]), high, np.log(np.array([0.2])), COARSE).passed


def test_too_many_tokens_that_use_the_tolerance_are_steering():
    u, low, high, logprob = np.full(64, 0.5), np.full(64, 0.2), np.full(64, 0.9), np.full(64, math.log(0.3))
    high[:9] = 0.5
    result = check_seeded(u, low, high, logprob, COARSE)
    assert (result.reason, result.n_outside, result.sum_distance) == ("steered", 9, 0.0)
    assert result.p_value == pytest.approx(2 * poisson_tail(9, 64 * COARSE.outside_rate))
    high[3:9] = 0.9
    assert check_seeded(u, low, high, logprob, COARSE).passed


def test_distances_that_sum_to_too_much_are_steering():
    u, low, high, logprob = np.full(64, 0.5), np.full(64, 0.2), np.full(64, 0.9), np.full(64, math.log(0.3))
    high[:2] = 0.5 - 0.015  # two outside are nothing, but not by as much
    result = check_seeded(u, low, high, logprob, COARSE)
    assert (result.reason, result.n_outside) == ("steered", 2)
    assert result.p_value == pytest.approx(2 * distance_tail(0.03 / COARSE.outside_distance, 64 * COARSE.outside_rate))
    high[:2] = 0.5 - 0.002
    assert check_seeded(u, low, high, logprob, COARSE).passed


def noise(tokens: int, outside: int, distance: float):
    """u, low, high, log-probability of a sequence with so many tokens outside by that much."""
    u, low, high = np.full(tokens, 0.5), np.full(tokens, 0.2), np.full(tokens, 0.9)
    high[:outside] = 0.5 - distance
    return u, low, high, np.full(tokens, math.log(0.3))


def test_one_steered_rollout_is_found_among_many_that_are_not():
    honest, steered = noise(256, 2, 0.0005), noise(256, 9, 0.006)
    parts = [honest] * 20 + [steered] + [honest] * 43
    together = [np.concatenate(column) for column in zip(*parts, strict=True)]
    assert check_seeded(*together, COARSE).passed
    result = check_seeded(*together, COARSE, lengths=[256] * 64)
    assert result.reason == "steered"
    assert check_seeded(*[np.concatenate([column] * 64) for column in honest], COARSE, lengths=[256] * 64).passed


def test_the_record_shows_what_one_submission_hides():
    submission = noise(512, 10, 0.0012)  # twice the rate: p is about 0.03, nothing
    alone = check_seeded(*submission, COARSE)
    assert alone.passed
    assert alone.tally == Tally(tokens=512, entropy=512.0, outside=10, distance=alone.sum_distance)
    assert alone.sum_distance == pytest.approx(0.012)
    record, seen, result = Tally(), 0, alone
    while result.passed and seen < 50:
        record, seen = record.plus(result.tally), seen + 1
        result = check_seeded(*submission, COARSE, record=record)
    assert result.reason == "drift"
    assert result.record_p_value < COARSE.significance <= result.p_value
    assert 5 < seen < 20
    assert result.record_p_value == noise_p_value(record.plus(alone.tally), COARSE)
    clean = Tally(tokens=10_000_000, entropy=1e7, outside=100_000, distance=100.0)  # what the profile expects
    assert check_seeded(*noise(512, 5, 0.001), COARSE, record=clean).passed


def test_lengths_that_do_not_fit_are_refused():
    for lengths in ([3, 4], [8, 0], [9, -1]):
        with pytest.raises(ValueError, match="lengths"):
            check_seeded(*noise(8, 0, 0.0), lengths=lengths)


def test_honest_noise_of_the_profiles_size_fails_less_often_than_promised():
    """A million sequences whose noise is as large as the profile allows: counts Poisson, distances exponential."""
    limits, tokens, promised = COARSE, 256, 1e-5
    rng = np.random.default_rng(0)
    counts = rng.poisson(limits.outside_rate * tokens, 1_000_000)
    sums = np.where(counts > 0, rng.gamma(np.maximum(counts, 1)) * limits.outside_distance, 0.0)

    def failing(counted, distance):
        return (
            noise_p_value(Tally(tokens=tokens, entropy=tokens, outside=counted, distance=distance), limits) < promised
        )

    count_limit = next(k for k in range(tokens) if failing(k, 0.0))
    sum_limit = next(s for s in np.arange(0, 1, limits.outside_distance / 10) if failing(0, s))
    failed = ((counts >= count_limit) | (sums >= sum_limit)).mean()
    assert 0 < failed <= promised


def test_a_tolerance_measured_on_honest_tokens_holds_for_more_of_them():
    rng = np.random.default_rng(0)

    def honest(tokens):
        outside = rng.random(tokens) < 0.02
        return np.where(outside, rng.exponential(0.004, tokens), 0.0), outside

    base = SeedTolerance()
    measured = measured_tolerance(*honest(20_000), np.full(20_000, 2.0), base)
    assert 0.0125 < measured.outside_rate < 0.015  # per nat
    assert 0.0045 < measured.outside_distance < 0.006
    assert 0.06 < measured.distance < 0.12
    assert (measured.floor, measured.significance) == (base.floor, base.significance)
    for _ in range(200):
        distance, outside = honest(4096)
        assert distance.max() < measured.distance
        tally = Tally(tokens=4096, entropy=8192, outside=int(outside.sum()), distance=float(distance.sum()))
        assert noise_p_value(tally, measured) > measured.significance
    assert measured_tolerance(np.zeros(100), np.zeros(100, dtype=bool), np.ones(100), base) == base


def test_the_upper_end_of_an_interval_is_outside_it():
    result = check_seeded(np.array([0.5]), np.array([0.2]), np.array([0.5]), np.array([-1.0]))
    assert (result.n_outside, result.max_distance) == (1, 0.0)


def test_a_tolerance_of_its_own():
    arguments = np.array([0.5]), np.array([0.51]), np.array([0.9]), np.array([-1.0])
    assert check_seeded(*arguments).reason == "beyond"
    assert check_seeded(*arguments, SeedTolerance(distance=0.02, outside_distance=0.01)).passed


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_no_number_never_passes(broken):
    result = check_seeded(np.array([0.5]), np.array([broken]), np.array([broken]), np.array([-1.0]))
    assert result.reason == "beyond"
    nan_probability = check_seeded(np.array([0.5]), np.array([0.2]), np.array([0.5]), np.array([np.nan]))
    assert nan_probability.reason == "implausible"


def test_vectors_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one length"):
        check_seeded(np.zeros(2), np.zeros(2), np.ones(3), np.zeros(2))


def test_an_empty_sequence_has_nothing_against_it():
    empty = np.zeros(0)
    assert check_seeded(empty, empty, empty, empty).passed


def test_distances_by_hand():
    u, low, high = np.array([0.1, 0.5, 0.95]), np.array([0.2, 0.2, 0.2]), np.array([0.9, 0.9, 0.9])
    np.testing.assert_allclose(distances(u, low, high), [0.1, 0.0, 0.05], atol=1e-15)


def test_poisson_tail_by_hand():
    assert poisson_tail(1, 0.5) == pytest.approx(1 - math.exp(-0.5))
    assert poisson_tail(0, 0.5) == 1.0
    assert poisson_tail(30, 10.0) == pytest.approx(
        1 - sum(math.exp(-10) * 10**k / math.factorial(k) for k in range(30))
    )
    assert poisson_tail(3, 10.0) == 1.0  # no more than expected
    assert poisson_tail(1, 0.0) == 0.0
    assert 0 < poisson_tail(20_600, 20_000.0) < 1e-4  # a long record: no overflow, and quick


def test_distance_tail_by_hand():
    assert distance_tail(9.0, 1.0) == pytest.approx(math.exp(-((3 - 1) ** 2)))
    assert distance_tail(1.0, 1.0) == 1.0
    assert distance_tail(0.0, 0.0) == 1.0


def test_the_same_noise_is_expected_of_high_entropy_and_suspicious_of_low():
    submission = noise(512, 25, 0.001)
    assert check_seeded(*submission, COARSE, entropy_T=np.full(512, 4.0)).passed
    result = check_seeded(*submission, COARSE, entropy_T=np.full(512, 0.2))
    assert (result.reason, result.sum_entropy) == ("steered", pytest.approx(102.4))
    assert result.tally.entropy == result.sum_entropy
    nothing_known = check_seeded(*noise(512, 0, 0.0), COARSE, entropy_T=np.full(512, np.nan))
    assert nothing_known.tally.entropy == 0.0
    with pytest.raises(ValueError, match="one length"):
        check_seeded(*submission, COARSE, entropy_T=np.ones(3))
