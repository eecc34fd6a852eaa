"""Advantages: how much better a rollout did than the others of its group.

Legend: G rollouts of one group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Advantage = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RolloutGroup:
    """What an advantage of the owner's sees: `rewards` (float64) and `lengths` (drawn tokens) are tensors [G], the
    others have one entry for each rollout. `drawn` says which tokens the model drew, `finishes` how each ended.
    `columns` are those of the task's row. Example: `group.rewards / group.lengths`."""

    rewards: Tensor
    lengths: Tensor
    tokens: Sequence[npt.NDArray[np.int64]]
    logprobs: Sequence[npt.NDArray[np.float32]]
    drawn: Sequence[npt.NDArray[np.bool_]]
    finishes: Sequence[str]
    prompt: npt.NDArray[np.int64]
    task: str
    unit: int = 0
    version: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnAdvantage:
    """An advantage from a file of the owner's, or from a package."""

    function: Callable[[RolloutGroup], Tensor | Sequence[float]]

    def of(self, group: RolloutGroup) -> list[float]:
        """One finite number for each rollout, or `ValueError`."""
        values = torch.as_tensor(self.function(group), dtype=torch.float64)
        if values.shape != group.rewards.shape or not values.isfinite().all():
            shown = str(values.tolist())[:80]
            raise ValueError(f"it gives {shown}, not one finite number for each of {len(group.rewards)} rollouts")
        found: list[float] = values.tolist()
        return found


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
