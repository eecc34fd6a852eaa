"""The uniform stream against published vectors and against a plain restatement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.sampling import philox4x32, uniforms, uniforms_matrix
from shoal.sampling.stream import uniforms_at

SEEDS = st.integers(min_value=0, max_value=2**64 - 1)
ALL_ONES = 0xFFFFFFFF


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


def plain_uniform(seed: int, position: int) -> float:
    """The stream in twelve lines of Python integers: what another implementation has to match."""
    c = [position & ALL_ONES, position >> 32, 0, 0]
    k = [seed & ALL_ONES, seed >> 32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return ((c[0] >> 5) * 2**26 + (c[1] >> 6)) / 2**53


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


@given(SEEDS, st.integers(min_value=0, max_value=2**40))
@settings(deadline=None)
def test_a_uniform_is_what_plain_integers_give(seed, position):
    assert uniforms(seed, position, 1)[0] == plain_uniform(seed, position)


def test_vectors_for_other_implementations():
    assert uniforms(0, 0, 2).tolist() == [0.39904647231489565, plain_uniform(0, 1)]
    assert uniforms(2**64 - 1, 2**32 - 1, 2).tolist() == [
        plain_uniform(2**64 - 1, 2**32 - 1),
        plain_uniform(2**64 - 1, 2**32),
    ]


@given(SEEDS, st.integers(0, 1000), st.integers(0, 50))
@settings(deadline=None)
def test_a_position_does_not_depend_on_where_reading_starts(seed, start, count):
    np.testing.assert_array_equal(uniforms(seed, start, count), uniforms(seed, 0, start + count)[start:])


@given(st.lists(SEEDS, min_size=1, max_size=5), st.integers(0, 100))
@settings(deadline=None)
def test_a_row_of_the_matrix_is_the_stream_of_its_seed(seeds, start):
    matrix = uniforms_matrix(seeds, start, 7)
    for row, seed in zip(matrix, seeds, strict=True):
        np.testing.assert_array_equal(row, uniforms(seed, start, 7))


def test_the_stream_looks_uniform_and_fills_53_bits():
    values = uniforms(7, 0, 200_000)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom; deterministic, so this never flickers
    lowest_bits = (values * 2**53).astype(np.uint64) & np.uint64(1)
    assert 0.49 < lowest_bits.mean() < 0.51
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


def test_neighbouring_seeds_are_unrelated():
    matrix = uniforms_matrix(range(1000), 0, 100)
    assert abs(np.corrcoef(matrix[:-1].ravel(), matrix[1:].ravel())[0, 1]) < 0.01


@pytest.mark.parametrize(("seed", "start", "count"), [(-1, 0, 1), (2**64, 0, 1), (0, -1, 1), (0, 0, -1)])
def test_what_is_no_seed_or_position_is_refused(seed, start, count):
    with pytest.raises(ValueError, match=r"seed|position"):
        uniforms(seed, start, count)


def test_single_positions_are_those_of_the_matrix():
    seeds, positions = np.array([3, 3, 2**64 - 1], dtype=np.uint64), np.array([0, 5, 2**33], dtype=np.uint64)
    expected = [uniforms(int(seed), int(at), 1)[0] for seed, at in zip(seeds, positions, strict=True)]
    assert uniforms_at(seeds, positions).tolist() == expected
