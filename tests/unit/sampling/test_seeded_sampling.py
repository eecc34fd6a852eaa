"""The uniforms of a seed are the same everywhere: numpy, torch, the documented statement, published vectors. So is what
inverse-CDF sampling makes of them; and the check of a seed names each way of cheating.
"""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.sampling import SeedTolerance, check_seeded, inverse, kernels, philox4x32, sampler, uniforms, uniforms_at
from shoal.sampling.check import distances

ROOT = Path(__file__).parents[3]
VECTORS = json.loads((ROOT / "tests/data/uniform_stream.json").read_text())["vectors"]
SEEDS = st.integers(min_value=0, max_value=2**64 - 1)
ALL_ONES = 0xFFFFFFFF


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


def in_torch(seeds, start, count):
    low, high = (torch.tensor([[seed >> shift & ALL_ONES] for seed in seeds]) for shift in (0, 32))
    return sampler.uniforms_of(torch.arange(start, start + count)[None, :], low, high)


@pytest.fixture(scope="module")
def statement():
    """The functions that docs/concepts/sampling.md prints, run as they stand there."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/concepts/sampling.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(blocks[0], names)
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 20
    return names


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['seed']}-{vector['position']}")
def test_vectors(vector, statement):
    seed, position, expected = int(vector["seed"], 16), vector["position"], vector["bits"] / 2**53
    assert uniforms(seed, position, 1)[0] == expected
    assert in_torch([seed], position, 1)[0, 0].item() == expected
    assert statement["uniform"](seed, position) == expected


@pytest.mark.parametrize(("counter", "key", "expected"), [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])  # fmt: skip
def test_philox_gives_the_published_answers(counter, key, expected):
    assert tuple(int(word[0]) for word in philox4x32(words(*counter), words(*key))) == expected


@given(st.lists(SEEDS, min_size=1, max_size=4), st.integers(0, 2**45), st.integers(0, 6))
def test_torch_gives_the_same_bits_as_numpy(seeds, start, count):
    found = in_torch(seeds, start, count)
    assert found.dtype == torch.float64
    np.testing.assert_array_equal(found.numpy(), [uniforms(seed, start, count) for seed in seeds])


@given(SEEDS, st.integers(0, 2**45), st.sampled_from([0.5, 0.7, 1.0, 1.3]))
def test_the_documented_statement_gives_the_same_bits_and_tokens(statement, seed, position, temperature):
    logits = np.random.default_rng(seed % 1000).normal(0, 2, (1, 30)).astype(np.float32)
    u = uniforms(seed, position, 1)
    assert statement["uniform"](seed, position) == u[0]
    assert statement["token"](logits[0].tolist(), temperature, u[0]) == inverse.sample(logits, u, temperature)[0][0]


@given(SEEDS, st.integers(0, 1000), st.integers(0, 50))
def test_a_position_does_not_depend_on_where_reading_starts(seed, start, count):
    np.testing.assert_array_equal(uniforms(seed, start, count), uniforms(seed, 0, start + count)[start:])


@pytest.mark.parametrize(("seed", "start", "count"), [(-1, 0, 1), (2**64, 0, 1), (0, -1, 1), (0, 0, -1)])
def test_invalid_seeds_and_positions_are_refused(seed, start, count):
    with pytest.raises(ValueError, match=r"seed|position"):
        uniforms(seed, start, count)


def test_single_positions_are_those_of_the_matrix():
    seeds, positions = np.array([3, 3, 2**64 - 1], dtype=np.uint64), np.array([0, 5, 2**33], dtype=np.uint64)
    expected = [uniforms(int(seed), int(at), 1)[0] for seed, at in zip(seeds, positions, strict=True)]
    assert uniforms_at(seeds, positions).tolist() == expected


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
@settings(max_examples=150)
def test_the_interval_of_the_sampled_token_contains_u(logits, u, temperature):
    us = np.full(len(logits), u)
    for draw, find in ((inverse.sample, inverse.intervals), (torch_sample, torch_intervals)):
        tokens, logprobs = draw(logits, us, temperature)
        low, high, again = find(logits, tokens, temperature)
        assert np.all(low <= us)
        assert np.all(us < high)
        np.testing.assert_array_equal(logprobs, again)


@given(LOGITS, TEMPERATURES)
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


SOME_TEMPERATURES = (0.5, 0.7, 1.0, 1.3)


def stated(logits, tokens, temperature):
    """The five values in plain numpy, float64."""
    probabilities, _ = inverse.cumulative(logits, temperature)
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = np.where(probabilities > 0, -np.log(probabilities), 0.0)
    entropy = (probabilities * surprise).sum(1)
    varentropy = (probabilities * (surprise - entropy[:, None]) ** 2).sum(1)
    return (*inverse.intervals(logits, tokens, temperature), entropy, varentropy)


def compared(logits, tokens, temperature):
    found = sampler.token_statistics(torch.from_numpy(logits), torch.from_numpy(tokens), temperature)
    for name, ours, theirs in zip(found._fields, found, stated(logits, tokens, temperature), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=2e-6, atol=1e-6 if "entropy" in name else 1e-13)
    return found


@given(st.integers(0, 10_000), st.sampled_from(SOME_TEMPERATURES), st.floats(0.1, 12))
def test_agrees_with_numpy(seed, temperature, spread):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (5, 96)).astype(np.float32)
    compared(logits, rng.integers(0, 96, 5), temperature)


def test_agrees_with_numpy_on_a_large_vocabulary_in_several_tiles():
    rng = np.random.default_rng(0)
    rows = 2 * sampler.CPU_TILE_ELEMENTS // 49_152 + 3
    logits = rng.normal(0, 3, (rows, 49_152)).astype(np.float32)
    compared(logits, rng.integers(0, 49_152, rows), 1.0)


def test_a_uniform_a_certain_and_an_uneven_distribution_by_hand():
    found = sampler.token_statistics(torch.zeros(1, 8), torch.tensor([2]), 1.0)
    assert [float(value) for value in found] == pytest.approx([0.25, 0.375, -np.log(8), np.log(8), 0.0], abs=1e-6)
    certain = torch.full((1, 8), -torch.inf)
    certain[0, 5] = 3.0
    found = sampler.token_statistics(certain, torch.tensor([5]), 1.0)
    assert [float(value) for value in found] == [0.0, 1.0, 0.0, 0.0, 0.0]
    # p = 1/4, 3/4: -log p has mean H and variance (3/16) (log 3)²
    found = sampler.token_statistics(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([1]), 1.0)
    assert float(found.entropy) == pytest.approx(-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)), rel=1e-6)
    assert float(found.varentropy) == pytest.approx(3 / 16 * np.log(3) ** 2, rel=1e-6)


def test_temperature_by_row_in_either_shape():
    logits, tokens = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    each = [sampler.token_statistics(logits[i : i + 1], tokens[i : i + 1], t) for i, t in enumerate(SOME_TEMPERATURES)]
    for shape in ((4,), (4, 1)):
        found = sampler.token_statistics(
            logits, tokens, torch.tensor(SOME_TEMPERATURES, dtype=torch.float64).reshape(shape)
        )
        for column, parts in zip(found, zip(*each, strict=True), strict=True):
            torch.testing.assert_close(column, torch.cat(parts), rtol=1e-12, atol=0)


def test_nan_logits_give_no_interval_and_no_crash():
    logits = torch.zeros(2, 8)
    logits[0, 3] = torch.nan
    found = sampler.token_statistics(logits, torch.tensor([1, 1]), 1.0)
    assert bool(found.low[0].isnan())
    assert float(found.low[1]) == 0.125
    assert int(sampler.sample(logits, torch.tensor([0.99, 0.99]), 1.0).tokens[0]) < 8


def test_kernels_that_do_not_build_are_left_out_with_a_word(monkeypatch, caplog):
    def no_compiler(*_):
        raise RuntimeError("failed to find a C compiler")

    kernels.compiles.cache_clear()
    monkeypatch.setattr(kernels, "find_spec", lambda _: object())
    monkeypatch.setattr(kernels, "token_statistics", no_compiler)
    assert not kernels.compiles(torch.device("cpu"))
    assert "C compiler" in caplog.text
    kernels.compiles.cache_clear()


COARSE = SeedTolerance(distance=0.05, floor=1e-9)


def drawn(seed: int, tokens: int = 64, vocabulary: int = 50):
    """Logits of some model, the uniforms of a seed, and the tokens that follow from both."""
    logits = np.random.default_rng(seed).normal(0, 2, (tokens, vocabulary)).astype(np.float32)
    u = uniforms(seed, 0, tokens)
    return logits, u, inverse.sample(logits, u, 1.0)[0]


def checked(logits, u, tokens, tolerance=None):
    return check_seeded(u, *inverse.intervals(logits, tokens, 1.0), tolerance)


@given(st.integers(0, 10_000))
def test_an_honest_sequence_passes_without_any_tolerance_used(seed):
    result = checked(*drawn(seed))
    assert result.passed
    assert (result.n_tokens, result.n_outside, result.max_distance, result.position) == (64, 0, 0.0, None)


@given(st.integers(0, 10_000))
def test_rounding_noise_passes_and_another_seed_is_beyond(seed):
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
    assert check_seeded(u, np.array([0.3]), high, np.log(np.array([0.2])), COARSE).passed


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_nan_never_passes(broken):
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
