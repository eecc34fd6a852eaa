"""Splitting: deterministic, complete, within the budget, level; and the layout of packs and padded rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.algorithms.packing import Cost, flatten, micro_batches, minibatches, packs, pad, shares


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 5), st.integers(0, 5))
def test_minibatches_hold_everything_once_in_even_parts(count: int, parts: int, seed: int, step: int) -> None:
    split = minibatches(count, parts, seed=seed, step=step)
    assert sorted(index for part in split for index in part) == list(range(count))
    assert len(split) == min(parts, count)
    assert not split or max(map(len, split)) - min(map(len, split)) <= 1


def test_minibatches_micro_batches_packs_and_shares_by_hand() -> None:
    assert minibatches(6, 2, seed=1, step=2) == [[2, 3, 5], [0, 4, 1]]
    assert minibatches(8, 2, seed=1, step=3) != minibatches(8, 2, seed=0, step=3) != minibatches(8, 2, seed=0, step=4)
    assert micro_batches([3, 8, 4, 7], token_budget=16) == [[1, 3], [2, 0]]
    assert micro_batches([30, 2, 2], token_budget=16) == [[0], [1, 2]]
    assert micro_batches([4, 4, 4, 4], token_budget=16, ranks=2) == [[0, 1], [2, 3]]
    even = Cost(1, 0)
    assert packs([3, 8, 4, 7], 16, even) == [[1, 0], [3, 2]]
    assert packs([30, 2, 2], 16, even) == [[0], [1, 2]]  # longer than the budget: alone, not dropped
    assert packs([5, 5, 5, 5], 20, even, ranks=2) == [[0, 2], [1, 3]]  # one bin would do, two ranks share
    assert packs([9, 6, 6, 5, 5, 5], 18, even) == [[0, 5], [1, 3], [2, 4]]  # 14, 11, 11 tokens, not 15, 17, 5
    # 8 + 4 and 6 + 6 hold as many tokens, but attention makes the former dearer: what is left goes to the latter.
    assert packs([8, 6, 6, 4, 1], 13, Cost(0, 1)) == [[0, 3], [1, 2, 4]]
    # 6 + 4 and 5 + 3 + 2 fill two bins of 10; levelling puts 4 to 5, and 2 fits nowhere: the tight fit is kept
    assert packs([6, 5, 4, 3, 2], 10, even) == [[0, 2], [1, 3, 4]]
    assert shares([[0], [1], [2]], costs=[5, 9, 7], ranks=2) == [[[1], []], [[2], [0]]]
    assert shares([[0], [1]], costs=[1, 1], ranks=1) == [[[0], [1]]]
    assert shares([], costs=[], ranks=3) == [[], [], []]


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200))
def test_micro_batches_hold_everything_once_within_the_budget(lengths: list[int], budget: int) -> None:
    split = micro_batches(lengths, budget)
    assert sorted(index for rows in split for index in rows) == list(range(len(lengths)))
    for rows in split:
        assert len(rows) == 1 or len(rows) * max(lengths[index] for index in rows) <= budget


def test_padded_and_packed_each_token_is_pointed_at_its_predictor() -> None:
    pairs = [(np.array([5, 6]), np.array([7, 8, 9])), (np.array([4]), np.array([3]))]
    rows, flat = pad(pairs), flatten(pairs)
    assert rows.ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    assert rows.targets_N.tolist() == flat.targets_N.tolist() == [7, 8, 9, 3]
    assert rows.places_N.tolist() == [1, 2, 3, 5]
    assert rows.ids.flatten()[rows.places_N + 1].tolist() == rows.targets_N.tolist()
    assert flat.ids.tolist() == [5, 6, 7, 8, 4]  # the last token of each predicts nothing
    assert flat.positions_T is not None
    assert flat.positions_T.tolist() == [0, 1, 2, 3, 0]
    assert (flat.bounds, flat.places_N.tolist()) == ((0, 4, 5), [1, 2, 3, 4])
    for layout in (pad, flatten):
        with pytest.raises(ValueError, match="empty prompt"):
            layout([(np.array([], dtype=np.int64), np.array([1]))])


LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(1, 200), st.integers(0, 5), st.integers(1, 5))
def test_packs_hold_everything_once_within_the_budget(lengths, budget: int, quadratic: int, ranks: int) -> None:
    bins = packs(lengths, budget, Cost(10, quadratic), ranks)
    assert sorted(index for rows in bins for index in rows) == list(range(len(lengths)))
    for rows in bins:
        assert len(rows) == 1 or 1 <= sum(lengths[index] for index in rows) <= budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(0, 5), st.integers(1, 8))
def test_packs_differ_in_cost_by_one_sequence_at_most_where_room_does_not_decide(lengths, quadratic, ranks) -> None:
    cost = Cost(10, quadratic)
    bins = packs(lengths, 10_000, cost, ranks)
    assert len(bins) == min(ranks, len(lengths))  # one each: every rank has something to do, and none has two
    costs = [sum(cost.of(lengths[index]) for index in rows) for rows in bins]
    assert max(costs) - min(costs) <= cost.of(max(lengths))


@given(LENGTHS, st.integers(1, 6))
def test_shares_are_as_many_for_every_rank_and_hold_every_bin_once(lengths, ranks: int) -> None:
    bins = [[index] for index in range(len(lengths))]
    shared = shares(bins, lengths, ranks)
    assert len(shared) == ranks
    assert {len(own) for own in shared} == {-(-len(bins) // ranks)}
    assert sorted(rows[0] for own in shared for rows in own if rows) == list(range(len(bins)))
    for row in zip(*shared, strict=True):  # what is computed at the same time is neighbours in cost
        costs = [lengths[rows[0]] for rows in row if rows]
        assert sum(min(costs) < other < max(costs) for other in lengths) <= ranks
