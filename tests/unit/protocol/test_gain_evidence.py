"""The evidence that tolerance buys reward: hand-computed wealth, honest nodes, steered ones, sleepers."""

import math

import numpy as np
import pytest

from shoal.protocol.verdict import BETS, ENOUGH, FORGOTTEN, LEAST_LOG, MARGIN, RECENT_BET, GainEvidence, look_share


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


def test_recent_gains_show_at_once_after_any_honest_past_and_are_forgotten_when_they_end() -> None:
    """0.96 × 0.4 is won, 1.04 × 0.4 is lost; six gains in a row are enough to look at everything."""
    quiet = GainEvidence().after([-1.0] * 100)
    assert quiet.recent == 1.0
    assert quiet.after([1.0] * 2).recent == pytest.approx(1.384**2)
    assert quiet.after([1.0, -1.0]).recent == 1.0
    noticed = quiet.after([1.0] * 6)
    assert noticed.value < 1
    assert (look_share(1_000, noticed.recent), look_share(1_000, quiet.recent)) == (1.0, 0.011)
    assert noticed.after([-1.0] * 4).recent == 1.0
    assert GainEvidence().after([1.0] * 1_000).recent == ENOUGH


def followed(nodes: int, honest: int, steered: int, favour: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The shares of their tokens that are decoded [groups, nodes], and the steered groups until each node is struck.
    Groups of 16 rollouts, of which 37 % have branches of another reward, as SmolLM2-135M has in bfloat16."""
    rng, stakes, shares = np.random.default_rng(seed), np.zeros((nodes, len(BETS))), list[np.ndarray]()
    count, recent, value, struck = np.zeros(nodes), np.ones(nodes), np.ones(nodes), np.full(nodes, np.inf)
    for group in range(honest + steered):
        shares.append(np.array([look_share(group, each) for each in np.maximum(recent, value)]))
        pairs = rng.binomial(16, 0.37 * shares[-1])
        for nth in range(int(pairs.max())):
            is_seen = nth < pairs
            outcome = np.where(rng.random(nodes) < (0.5 if group < honest else favour), 1.0, -1.0) - MARGIN
            count = count + is_seen
            grown = (stakes + 1 / np.maximum(1, count * (count + 1))[:, None]) * (1 + np.outer(outcome, BETS))
            stakes = np.where(is_seen[:, None], grown, stakes)
            recent = np.where(is_seen, np.clip(recent * (1 + RECENT_BET * outcome), 1.0, ENOUGH), recent)
        value = stakes.mean(axis=1) + 1 / (count + 1)
        struck = np.where((value >= ENOUGH) & np.isinf(struck) & (group >= honest), group - honest + 1, struck)
    return np.array(shares), struck


def test_honest_lives_cost_3_percent_and_sleepers_are_found_as_soon_as_nodes_without_a_past() -> None:
    """Best of two branches: a new node within 100 groups, one that was honest for 1,000 groups within 100 in four of
    five cases. (By the evidence alone it was one in thirty.)"""
    shares, struck = followed(300, honest=1_000, steered=100, favour=0.79)
    assert shares[:1_000].mean() < 0.031
    assert 0.72 < (struck <= 100).mean() < 0.95
    _, fresh = followed(300, honest=0, steered=100, favour=0.79, seed=1)
    assert (fresh <= 100).mean() >= 0.95
