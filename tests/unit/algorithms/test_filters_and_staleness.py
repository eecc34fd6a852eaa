"""Which groups may be trained on."""

from __future__ import annotations

import math

import pytest

from shoal.algorithms.filters import allowed, carries_signal, is_truncated, staleness


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], True),
        ([0.5, 0.5, 0.5000001], True),
        ([1.0, 1.0, 1.0], False),
        ([0.0], False),
        ([], False),
        ([0.0, math.nan], False),
        ([0.0, math.inf], False),
    ],
)
def test_groups_that_teach(rewards: list[float], expected: bool) -> None:
    assert carries_signal(rewards) is expected


def test_truncation_is_the_length_limit() -> None:
    assert is_truncated("length")
    assert not is_truncated("eos")


@pytest.mark.parametrize(
    ("step", "version", "bound", "expected"),
    [(0, 0, 0, True), (1, 0, 0, False), (1, 0, 1, True), (5, 3, 2, True), (5, 2, 2, False), (5, 6, 2, False)],
)
def test_the_staleness_bound(step: int, version: int, bound: int, expected: bool) -> None:
    assert allowed(step, version, bound) is expected
    assert staleness(step, version) == step - version
