"""Advantages by hand, and which groups are trained on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.algorithms.advantages import carries_signal
from shoal.algorithms.registry import ADVANTAGES
from shoal.protocol.verdict import MAX_REWARD

NAMES = sorted(ADVANTAGES)
GROUPS = st.lists(st.floats(-MAX_REWARD, MAX_REWARD, width=32), min_size=1, max_size=12)


def of(name: str, rewards: list[float]) -> list[float]:
    values: list[float] = ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64)).tolist()
    return values


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("group_mean", [1.0, 0.0, 0.5, 0.5], [0.5, -0.5, 0.0, 0.0]),
        # mean 1, population variance (1 + 1 + 0 + 0) / 4 = 0.5, std 0.70710678; 1 / 0.70710778
        ("group_mean_std", [2.0, 0.0, 1.0, 1.0], [1.4142116, -1.4142116, 0.0, 0.0]),
        # mean 1, sample variance (1 + 1 + 0 + 0) / 3, std 0.81649658; 1 / 0.81649758
        ("group_mean_sample_std", [2.0, 0.0, 1.0, 1.0], [1.2247434, -1.2247434, 0.0, 0.0]),
        ("group_mean_sample_std", [3.0], [0.0]),  # a group of one has no deviation
        # the others of the first have the mean 1/3, those of the second and third 4/3, of the last 1
        ("rloo", [3.0, 0.0, 0.0, 1.0], [8 / 3, -4 / 3, -4 / 3, 0.0]),
        ("dr_grpo", [1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5]),
        ("max_rl", [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),  # one success of four weighs 1 / (1/4) − 1
        ("max_rl", [1.0, 1.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3, -1.0]),
        ("max_rl", [0.0, 0.0], [0.0, 0.0]),  # no success, nothing to learn
        ("max_rl", [-0.5, -1.0], [0.0, 0.0]),  # what is below 0 is no success, and no two failures differ
        ("max_rl", [0.9, -0.1], [1.0, -1.0]),
        ("max_rl", [0.5, 0.25, 0.0, 0.25], [1.0, 0.0, -1.0, 0.0]),  # parts of a success: mean 1/4
    ],
)
def test_advantages_by_hand(name: str, rewards: list[float], expected: list[float]) -> None:
    assert of(name, rewards) == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_carry_no_advantage_and_others_keep_their_order(name: str) -> None:
    assert [of(name, rewards) for rewards in ([0.25] * 3, [7.0], [-7.0])] == [[0.0] * 3, [0.0], [0.0]]
    rewards = torch.tensor([0.1, 0.9, 0.3, 0.3, 1.0])
    assert torch.equal(ADVANTAGES[name](rewards).argsort(stable=True), rewards.argsort(stable=True))


@given(rewards=GROUPS)
def test_they_are_numbers_for_any_rewards_that_are_and_sum_to_nothing(rewards: list[float]) -> None:
    for name in NAMES:
        values = of(name, rewards)
        assert all(math.isfinite(value) for value in values)
        assert abs(math.fsum(values)) <= 1e-5 * len(values) * max(1.0, *(abs(value) for value in [*values, *rewards]))
    values, size = of("max_rl", rewards), len(rewards)
    assert -1 - 1e-5 <= min(values) <= max(values) <= (size - 1) * (1 + 1e-5), "bounded by the size of the group"


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], True), ([0.5, 0.5, 0.5000001], True), ([1.0, 1.0, 1.0], False), ([0.0], False), ([], False),
        ([0.0, math.nan], False), ([0.0, math.inf], False),
    ],
)  # fmt: skip
def test_groups_that_teach(rewards: list[float], expected: bool) -> None:
    assert carries_signal(rewards) is expected
