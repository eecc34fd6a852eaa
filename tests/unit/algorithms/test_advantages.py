"""Advantages, against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

from shoal.algorithms.advantages import group_mean, group_mean_std
from shoal.algorithms.registry import ADVANTAGES, LOSSES, advantage_named, loss_named
from shoal.errors import ConfigError


def test_group_mean_by_hand() -> None:
    # mean of 1, 0, 0.5, 0.5 is 0.5
    assert group_mean(torch.tensor([1.0, 0.0, 0.5, 0.5])).tolist() == [0.5, -0.5, 0.0, 0.0]


def test_group_mean_std_by_hand() -> None:
    # rewards 2, 0, 1, 1: mean 1, population variance (1 + 1 + 0 + 0) / 4 = 0.5, std 0.70710678; 1 / 0.70710778
    expected = torch.tensor([1.4142116, -1.4142116, 0.0, 0.0])
    torch.testing.assert_close(group_mean_std(torch.tensor([2.0, 0.0, 1.0, 1.0])), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_equal_rewards_carry_no_advantage(name: str) -> None:
    assert advantage_named(name)(torch.tensor([0.25, 0.25, 0.25])).tolist() == [0.0, 0.0, 0.0]
    assert advantage_named(name)(torch.tensor([7.0])).tolist() == [0.0]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_sum_to_zero_and_keep_the_order(name: str) -> None:
    rewards = torch.tensor([0.1, 0.9, 0.3, 0.3, 1.0])
    advantages = advantage_named(name)(rewards)
    assert abs(float(advantages.sum())) < 1e-5
    assert torch.equal(advantages.argsort(stable=True), rewards.argsort(stable=True))


def test_an_unknown_word_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="group_mean, group_mean_std"):
        advantage_named("grpo")
    with pytest.raises(ConfigError, match="ppo_clip, two_sided_clip"):
        loss_named("clip")
    assert loss_named("ppo_clip") is LOSSES["ppo_clip"]
