"""Inverse-CDF sampling: the numpy statement and the torch sampler mean the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.sampling import inverse, sampler
from shoal.sampling.stream import uniforms

LOGITS = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.floats(-30, 30, width=32, allow_nan=False)
)
TEMPERATURES = st.floats(0.2, 3.0)
UNIFORMS = st.integers(0, 2**53 - 1).map(lambda bits: bits / 2**53)


def torch_sample(logits, u, temperature):
    draw = sampler.sample(torch.from_numpy(logits), torch.from_numpy(u), temperature)
    return draw.tokens.numpy(), draw.logprobs.numpy()


def torch_intervals(logits, tokens, temperature):
    found = sampler.token_statistics(torch.from_numpy(logits), torch.from_numpy(tokens), temperature)
    return found.low.numpy(), found.high.numpy(), found.logprobs.numpy()


@given(LOGITS, UNIFORMS, TEMPERATURES)
@settings(max_examples=150, deadline=None)
def test_the_interval_of_the_sampled_token_contains_u(logits, u, temperature):
    us = np.full(len(logits), u)
    for draw, find in ((inverse.sample, inverse.intervals), (torch_sample, torch_intervals)):
        tokens, logprobs = draw(logits, us, temperature)
        low, high, again = find(logits, tokens, temperature)
        assert np.all(low <= us)
        assert np.all(us < high)
        np.testing.assert_array_equal(logprobs, again)


@given(LOGITS, TEMPERATURES)
@settings(max_examples=100, deadline=None)
def test_torch_and_numpy_agree_on_intervals(logits, temperature):
    rows, vocabulary = logits.shape
    every = np.repeat(logits, vocabulary, axis=0)
    tokens = np.tile(np.arange(vocabulary), rows)
    ours, theirs = torch_intervals(every, tokens, temperature), inverse.intervals(every, tokens, temperature)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-14)


@given(LOGITS, TEMPERATURES)
@settings(max_examples=50, deadline=None)
def test_intervals_tile_the_unit_interval(logits, temperature):
    ends = [inverse.intervals(logits, np.full(len(logits), token), temperature)[:2] for token in range(logits.shape[1])]
    assert np.all(ends[0][0] == 0.0)
    assert np.all(ends[-1][1] == 1.0)
    for (_, high), (low, _) in pairwise(ends):
        np.testing.assert_array_equal(high, low)


def test_hand_computed():
    logits = np.log(np.array([[0.5, 0.25, 0.25]], dtype=np.float32))
    for draw in (inverse.sample, torch_sample):
        assert [int(draw(logits, np.array([u]), 1.0)[0][0]) for u in (0.0, 0.49, 0.51, 0.74, 0.76)] == [0, 0, 1, 1, 2]
        np.testing.assert_allclose(draw(logits, np.array([0.6]), 1.0)[1], [np.log(0.25)], rtol=1e-6)
        # at T = 1/2 the weights are squared: 4/6, 1/6, 1/6
        assert [int(draw(logits, np.array([u]), 0.5)[0][0]) for u in (0.66, 0.67, 0.84)] == [0, 1, 2]


def test_a_token_of_probability_zero_is_never_drawn():
    logits = np.full((1, 5), -np.inf, dtype=np.float32)
    logits[0, 2] = 3.0
    for u in (0.0, 0.5, 1 - 2**-53):
        for draw in (inverse.sample, torch_sample):
            tokens, logprobs = draw(logits, np.array([u]), 1.0)
            assert tokens[0] == 2
            assert logprobs[0] == 0.0


def test_frequencies_follow_the_softmax():
    logits = np.array([[1.0, 0.0, -1.0, 2.0]], dtype=np.float32)
    u = uniforms(3, 0, 20_000)
    tokens, _ = torch_sample(np.repeat(logits, len(u), axis=0), u, 1.0)
    expected = np.exp(logits[0]) / np.exp(logits[0]).sum()
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / len(u), expected, atol=0.012)


def test_temperature_may_differ_by_row():
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    found = sampler.token_statistics(logits, torch.tensor([0, 0]), torch.tensor([[1.0], [0.5]]))
    one, half = 1 / (1 + np.e), 1 / (1 + np.e**2)
    np.testing.assert_allclose(found.high.numpy(), [one, half], rtol=1e-6)
