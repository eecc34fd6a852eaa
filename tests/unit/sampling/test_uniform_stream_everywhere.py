"""The dice are the same everywhere: numpy, torch, the statement in the documentation, and the vectors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.sampling import inverse, uniforms, uniforms_matrix
from shoal.sampling.stream_torch import uniforms_block

ROOT = Path(__file__).parents[3]
VECTORS = json.loads((ROOT / "tests/data/uniform_stream.json").read_text())["vectors"]
SEEDS = st.integers(min_value=0, max_value=2**64 - 1)


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
    assert uniforms_block([seed], position, 1)[0, 0].item() == expected
    assert statement["uniform"](seed, position) == expected


@given(st.lists(SEEDS, min_size=1, max_size=4), st.integers(0, 2**45), st.integers(0, 6))
@settings(deadline=None)
def test_torch_gives_the_same_bits_as_numpy(seeds, start, count):
    found = uniforms_block(seeds, start, count)
    assert found.dtype == torch.float64
    np.testing.assert_array_equal(found.numpy(), uniforms_matrix(seeds, start, count))


@given(SEEDS, st.integers(0, 2**45))
@settings(deadline=None)
def test_the_documented_statement_gives_the_same_bits(statement, seed, position):
    assert statement["uniform"](seed, position) == uniforms(seed, position, 1)[0]


@given(SEEDS, st.sampled_from([0.5, 0.7, 1.0, 1.3]))
@settings(deadline=None)
def test_the_documented_statement_draws_the_same_tokens(statement, seed, temperature):
    logits = np.random.default_rng(seed % 1000).normal(0, 2, (1, 30)).astype(np.float32)
    u = uniforms(seed, 0, 1)
    assert statement["token"](logits[0].tolist(), temperature, u[0]) == inverse.sample(logits, u, temperature)[0][0]


@pytest.mark.parametrize(("seed", "start", "count"), [(-1, 0, 1), (2**64, 0, 1), (0, -1, 1), (0, 0, -1)])
def test_what_is_no_seed_or_position_is_refused(seed, start, count):
    with pytest.raises(ValueError, match=r"seed|position"):
        uniforms_block([seed], start, count)
