"""Splitting: deterministic, complete, within the budget; and the layout of padded rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.algorithms.packing import micro_batches, minibatches, pad


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 5), st.integers(0, 5))
def test_minibatches_hold_everything_once_in_even_parts(count: int, parts: int, seed: int, step: int) -> None:
    split = minibatches(count, parts, seed=seed, step=step)
    assert sorted(index for part in split for index in part) == list(range(count))
    assert len(split) == min(parts, count)
    assert not split or max(map(len, split)) - min(map(len, split)) <= 1


def test_minibatches_depend_on_seed_and_step_only() -> None:
    assert minibatches(8, 2, seed=0, step=3) == minibatches(8, 2, seed=0, step=3)
    assert minibatches(8, 2, seed=0, step=3) != minibatches(8, 2, seed=0, step=4)
    assert minibatches(8, 2, seed=0, step=3) != minibatches(8, 2, seed=1, step=3)


def test_the_order_is_pinned_because_a_resume_relies_on_it() -> None:
    assert minibatches(6, 2, seed=1, step=2) == [[2, 3, 5], [0, 4, 1]]


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200))
def test_micro_batches_hold_everything_once_within_the_budget(lengths: list[int], budget: int) -> None:
    split = micro_batches(lengths, budget)
    assert sorted(index for rows in split for index in rows) == list(range(len(lengths)))
    for rows in split:
        assert len(rows) == 1 or len(rows) * max(lengths[index] for index in rows) <= budget


def test_micro_batches_by_hand() -> None:
    assert micro_batches([3, 8, 4, 7], token_budget=16) == [[1, 3], [2, 0]]
    assert micro_batches([30, 2, 2], token_budget=16) == [[0], [1, 2]]


def test_padding_points_each_token_at_its_predictor() -> None:
    batch = pad([(np.array([5, 6]), np.array([7, 8, 9])), (np.array([4]), np.array([3]))])
    assert batch.input_ids_BL.tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    assert batch.targets_N.tolist() == [7, 8, 9, 3]
    assert batch.rows_N.tolist() == [0, 0, 0, 1]
    assert batch.columns_N.tolist() == [1, 2, 3, 0]
    own = batch.input_ids_BL[batch.rows_N, batch.columns_N + 1]
    assert own.tolist() == batch.targets_N.tolist()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        pad([(np.array([], dtype=np.int64), np.array([1]))])
