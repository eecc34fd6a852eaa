"""The uniforms of a seed are the same everywhere: numpy, torch, the documented statement, published vectors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.sampling import inverse, philox4x32, uniforms
from shoal.sampling.sampler import uniforms_of
from shoal.sampling.stream import uniforms_at

ROOT = Path(__file__).parents[3]
VECTORS = json.loads((ROOT / "tests/data/uniform_stream.json").read_text())["vectors"]
SEEDS = st.integers(min_value=0, max_value=2**64 - 1)
ALL_ONES = 0xFFFFFFFF


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


def in_torch(seeds, start, count):
    low, high = (torch.tensor([[seed >> shift & ALL_ONES] for seed in seeds]) for shift in (0, 32))
    return uniforms_of(torch.arange(start, start + count)[None, :], low, high)


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


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
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
def test_what_is_no_seed_or_position_is_refused(seed, start, count):
    with pytest.raises(ValueError, match=r"seed|position"):
        uniforms(seed, start, count)


def test_single_positions_are_those_of_the_matrix():
    seeds, positions = np.array([3, 3, 2**64 - 1], dtype=np.uint64), np.array([0, 5, 2**33], dtype=np.uint64)
    expected = [uniforms(int(seed), int(at), 1)[0] for seed, at in zip(seeds, positions, strict=True)]
    assert uniforms_at(seeds, positions).tolist() == expected
