"""The seed check: honest sequences pass, each way of cheating is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.sampling import SeedTolerance, check_seeded
from shoal.sampling.check import distances
from shoal.sampling.inverse import intervals, sample
from shoal.sampling.stream import uniforms

COARSE = SeedTolerance(distance=0.05, floor=1e-9)


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
def test_rounding_noise_on_the_validators_side_passes_and_another_seed_is_beyond(seed):
    logits, u, tokens = drawn(seed)
    noise = np.random.default_rng(seed + 1).normal(0, 1e-6, logits.shape).astype(np.float32)
    assert checked(logits + noise, u, tokens).passed
    result = checked(logits, uniforms(seed + 1, 0, 64), tokens)
    assert result.reason == "beyond"
    assert result.n_outside > 10
    coarse = SeedTolerance(distance=0.15, floor=1e-13)  # bfloat16: caught within 32 tokens
    assert checked(logits[:32], uniforms(seed + 1, 0, 32), tokens[:32], coarse).reason == "beyond"


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


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_no_number_never_passes(broken):
    result = check_seeded(np.array([0.5]), np.array([broken]), np.array([broken]), np.array([-1.0]))
    assert result.reason == "beyond"
    nan_probability = check_seeded(np.array([0.5]), np.array([0.2]), np.array([0.5]), np.array([np.nan]))
    assert nan_probability.reason == "implausible"


def test_vectors_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one length"):
        check_seeded(np.zeros(2), np.zeros(2), np.ones(3), np.zeros(2))


def test_distances_by_hand_and_the_upper_end_of_an_interval_is_outside_it():
    result = check_seeded(np.array([0.5]), np.array([0.2]), np.array([0.5]), np.array([-1.0]))
    assert (result.n_outside, result.max_distance) == (1, 0.0)
    u, low, high = np.array([0.1, 0.5, 0.95]), np.array([0.2, 0.2, 0.2]), np.array([0.9, 0.9, 0.9])
    np.testing.assert_allclose(distances(u, low, high), [0.1, 0.0, 0.05], atol=1e-15)
