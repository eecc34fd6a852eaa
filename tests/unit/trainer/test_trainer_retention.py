"""Which checkpoints are kept: the newest, the best, and those that may turn out to be the best. Never more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.trainer.folder import AWAITED, Place, Retention, ranked

EVERY = 5


def is_measured(version: int) -> bool:
    return version % EVERY == 0


RULE = Retention(keep=2, keep_best=1, is_measured=is_measured)


def after(versions: int, scores: dict[int, float], rule: Retention = RULE, delay: int = 0) -> list[int]:
    """What is left when versions were saved one by one, and the score of each came `delay` versions later."""
    left: set[Place] = set()
    for version in range(versions):
        known = {number: score for number, score in scores.items() if number + delay <= version}
        left = rule.kept([*left, (version, 0)], known)
    return sorted(version for version, _ in left)


def test_the_newest_the_best_and_those_that_wait_for_their_score() -> None:
    scores = {0: 0.1, 5: 0.7, 10: 0.6, 15: 0.2}
    assert after(28, scores) == [5, 20, 25, 26, 27]


@pytest.mark.parametrize("delay", [0, 1, 4, 7])
def test_the_best_is_kept_however_late_its_score_comes(delay: int) -> None:
    scores = {0: 0.1, 5: 0.7, 10: 0.6, 15: 0.2, 20: 0.3}
    assert after(34, scores, delay=delay)[0] == 5


def test_of_equal_ones_the_newer_is_kept() -> None:
    assert after(24, {0: 1.0, 5: 1.0, 10: 0.5, 15: 1.0, 20: 0.9}) == [15, 22, 23]


def test_versions_that_nobody_ever_measures_do_not_pile_up() -> None:
    assert after(100, {}) == [90, 95, 98, 99]


def test_without_a_best_only_the_newest_are_kept() -> None:
    assert after(12, {5: 1.0}, Retention(keep=3, is_measured=is_measured)) == [9, 10, 11]


def test_a_version_of_two_incarnations_counts_once_and_as_the_newer_one() -> None:
    places = [(5, 0), (5, 1), (7, 1), (8, 1)]
    assert RULE.kept(places, {5: 0.9}) == {(5, 1), (7, 1), (8, 1)}
    assert ranked(places, {5: 0.9, 7: 0.1}) == [(5, 1), (7, 1)]


places_strategy = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), unique=True, max_size=30)
scores_strategy = st.dictionaries(st.integers(0, 40), st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=30)


@given(places_strategy, scores_strategy, st.integers(1, 4), st.integers(0, 3))
def test_bounded_stable_and_never_without_the_newest(
    places: list[Place], scores: dict[int, float], keep: int, keep_best: int
) -> None:
    rule = Retention(keep, keep_best, is_measured)
    kept = rule.kept(places, scores)
    assert kept <= set(places)
    assert len(kept) <= keep + keep_best + (AWAITED if keep_best else 0)
    assert set(sorted(places, reverse=True)[:keep]) <= kept
    assert rule.kept(sorted(kept), scores) == kept, "what is kept for a reason stays as long as nothing is learnt"
    if keep_best:
        assert set(ranked(places, scores)[:keep_best]) <= kept
