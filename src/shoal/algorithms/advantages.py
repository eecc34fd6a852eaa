"""Advantages: how much better a rollout did than the others of its group.

Legend: G rollouts of one group.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Advantage = Callable[[Tensor], Tensor]

STD_FLOOR = 1e-6


def group_mean(rewards_G: Tensor) -> Tensor:
    """`r − mean(r)`: unbiased up to scale, and a group that is nearly solved is not blown up.

    >>> group_mean(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """
    return rewards_G - rewards_G.mean()


def group_mean_std(rewards_G: Tensor) -> Tensor:
    """`(r − mean(r)) / (std(r) + 1e-6)`, with the population's standard deviation (defined for one rollout too).

    >>> group_mean_std(torch.tensor([1.0, 0.0]))
    tensor([ 1.0000, -1.0000])
    """
    return group_mean(rewards_G) / (rewards_G.std(correction=0) + STD_FLOOR)
