"""Staleness: how many training steps old the policy was that generated a group."""

from __future__ import annotations


def staleness(step: int, version: int) -> int:
    """Step `n` improves version `n`, so a group of version `v` is `n − v` steps old in it.

    >>> staleness(step=7, version=5)
    2
    """
    return step - version


def allowed(step: int, version: int, bound: int) -> bool:
    """Whether step `step` may train on a group of `version`: neither too old nor from the future."""
    return 0 <= staleness(step, version) <= bound
