"""The evidence that tolerance buys reward: hand-computed wealth, honest nodes, steered ones, sleepers."""

import math

import numpy as np
import pytest

from shoal.protocol.verdict import BETS, ENOUGH, FORGOTTEN, LEAST_LOG, MARGIN, GainEvidence


def test_nothing_seen_is_a_wealth_of_one() -> None:
    assert GainEvidence().value == 1.0
    assert not GainEvidence().suffices
    assert GainEvidence().after([0.0, 0.0]) == GainEvidence(), "equal rewards change nothing"


def test_one_and_two_differences_by_hand() -> None:
    """Half is staked at the first: 0.5 × (1 + bet × 0.96); a sixth more at the second, which is lost by bet × 0.52."""
    one = GainEvidence().after([1.0])
    assert one.value == pytest.approx(0.5 + 0.5 * (1 + 0.42 * 0.96))
    two = one.after([-0.5])
    stakes = [(0.5 * (1 + bet * 0.96) + 1 / 6) * (1 - bet * 0.52) for bet in BETS]
    assert two.value == pytest.approx(1 / 3 + sum(stakes) / 5)
    assert (two.differing, two.gained) == (2, 0.5)


def test_order_of_audits_is_kept_and_differences_beyond_the_range_count_as_the_range() -> None:
    assert GainEvidence().after([1.0, -1.0, 1.0]) == GainEvidence().after([1.0]).after([-1.0, 1.0])
    assert GainEvidence().after([7.0, -9.0]) == GainEvidence().after([1.0, -1.0])


def test_28_gains_in_a_row_suffice_27_do_not_and_evidence_is_bounded_whatever_is_seen() -> None:
    assert not GainEvidence().after([1.0] * 27).suffices
    assert GainEvidence().after([1.0] * 28).suffices
    assert math.isfinite(GainEvidence().after([1.0] * 5_000).value)
    falling = GainEvidence().after([-1.0] * 5_000)
    assert min(falling.stakes) >= LEAST_LOG
    assert 0 < falling.value < 1


def wealth(share: float, nodes: int, differences: int, honest_first: int = 0, seed: int = 0) -> np.ndarray:
    """The largest wealth of each of many nodes; the same sums as `GainEvidence`, of all nodes at once."""
    rng, stakes = np.random.default_rng(seed), np.zeros((nodes, len(BETS)))
    most = np.ones(nodes)
    for n in range(1, differences + 1):
        chance = 0.5 if n <= honest_first else share
        outcome = np.where(rng.random(nodes) < chance, 1.0, -1.0) - MARGIN
        stakes = (stakes + 1 / (n * (n + 1))) * (1 + np.outer(outcome, BETS))
        if n > honest_first:
            most = np.maximum(most, stakes.mean(axis=1) + 1 / (n + 1))
    return most


def test_the_sums_of_many_nodes_are_those_of_one() -> None:
    evidence, most = GainEvidence(), 1.0
    outcomes = np.where(np.random.default_rng(5).random((40, 1)) < 0.8, 1.0, -1.0)[:, 0]
    for outcome in outcomes:
        evidence = evidence.after([float(outcome)])
        most = max(most, evidence.value)
    assert wealth(0.8, 1, 40, seed=5)[0] == pytest.approx(most)


@pytest.mark.parametrize("share", [0.5, 0.5 + MARGIN / 2])
def test_no_honest_node_of_ten_thousand_is_struck(share: float) -> None:
    """1,000 unequal pairs each, which are 1,000 groups or so; also if rounding prefers one side a little."""
    most = wealth(share, 10_000, 1_000)
    assert most.max() < ENOUGH
    assert (most >= 1_000).mean() <= 1 / 1_000  # Ville's inequality, at a level where it can be seen


def test_best_of_several_branches_is_found_after_70_unequal_pairs() -> None:
    assert (wealth(0.9, 2_000, 70) >= ENOUGH).mean() >= 0.94


def test_a_sleeper_is_found_although_it_was_honest_for_long() -> None:
    assert (wealth(0.9, 1_000, 1_000 + 140, honest_first=1_000) >= ENOUGH).mean() >= 0.95


def test_struck_gain_is_removed_from_the_evidence_of_others() -> None:
    both = GainEvidence().after([1.0] * 30)
    assert both.value > ENOUGH
    assert both.without(ENOUGH).value == pytest.approx(1 / 31 + (both.value - 1 / 31) / ENOUGH)
    assert both.without(ENOUGH).value < FORGOTTEN
