"""Advantages: how much better a rollout did than the others of its group.

Legend: G rollouts of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import torch
from torch import Tensor

Advantage = Callable[[Tensor], Tensor]

STD_FLOOR = 1e-6


def carries_signal(rewards: Sequence[float]) -> bool:
    """Whether a group gives a gradient: all rewards are finite, and not all are equal."""
    return all(map(isfinite, rewards)) and any(reward != rewards[0] for reward in rewards)


def group_mean(rewards_G: Tensor) -> Tensor:
    """`r − mean(r)`: unbiased up to scale, without large values for groups that are nearly solved."""
    return rewards_G - rewards_G.mean()


def group_mean_std(rewards_G: Tensor) -> Tensor:
    """`(r − mean(r)) / (std(r) + 1e-6)`, with the population's standard deviation (defined for one rollout too)."""
    return group_mean(rewards_G) / (rewards_G.std(correction=0) + STD_FLOOR)


def group_mean_sample_std(rewards_G: Tensor) -> Tensor:
    """`group_mean_std` with the sample's standard deviation: divided by G − 1, not G. A group of one: 0."""
    return group_mean(rewards_G) / (rewards_G.std(correction=min(1, len(rewards_G) - 1)) + STD_FLOOR)


def rloo(rewards_G: Tensor) -> Tensor:
    """`r − mean of the others` = G / (G − 1) · (r − mean): its baseline does not know its reward. A group of one: 0."""
    size = len(rewards_G)
    return group_mean(rewards_G) * (size / max(1, size - 1))


def dr_grpo(rewards_G: Tensor) -> Tensor:
    """`r − mean(r)`, as `group_mean`: Dr. GRPO's first half. Its second half, no division by a completion's own length,
    is `normalisation = "constant"` in [trainer.objective], which comes with the word unless another is given."""
    return group_mean(rewards_G)


def max_rl(rewards_G: Tensor) -> Tensor:
    """`(r − mean(r)) / mean(r)`, or 0 for all if nothing succeeded: rare successes have more weight. For rewards of 0
    and 1 this estimates the gradient of log(pass rate): 1, 0, 0, 0 give 3, −1, −1, −1. A reward below 0 (a length
    penalty) counts as 0, since a mean near or below 0 would explode or change the sign. Values are in [−1, G − 1]."""
    success_G = rewards_G.clamp(min=0)
    mean = success_G.mean()
    return torch.where(mean > 0, (success_G - mean) / mean, torch.zeros_like(success_G))
