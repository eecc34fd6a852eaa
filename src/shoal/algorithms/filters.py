"""Which groups and which samples are trained on, and how old they may be. What is left out is counted, never silent."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite


def carries_signal(rewards: Sequence[float]) -> bool:
    """Whether a group can teach anything: all rewards are numbers, and not all are equal.

    >>> carries_signal([1.0, 0.0, 1.0]), carries_signal([1.0, 1.0]), carries_signal([1.0, float("nan")])
    (True, False, False)
    """
    return all(isfinite(reward) for reward in rewards) and any(reward != rewards[0] for reward in rewards)


def is_truncated(finish: str) -> bool:
    """Whether a completion ended by its length limit. Its reward still counts in the group's mean: it is a real
    outcome; but what its tokens would have led to is unknown, so masking it is an option."""
    return finish == "length"


def staleness(step: int, version: int) -> int:
    """Step `n` improves version `n`, so a group of version `v` is `n − v` steps old in it.

    >>> staleness(step=7, version=5)
    2
    """
    return step - version


def allowed(step: int, version: int, bound: int) -> bool:
    """Whether step `step` may train on a group of `version`: neither too old nor from the future."""
    return 0 <= staleness(step, version) <= bound
