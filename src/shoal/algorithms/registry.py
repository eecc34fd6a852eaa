"""The words of the recipe: `advantage = "group_mean"`, `loss = "two_sided_clip"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from shoal.algorithms.advantages import Advantage, group_mean, group_mean_std
from shoal.algorithms.losses import Loss, ppo_clip, two_sided_clip
from shoal.errors import ConfigError

T = TypeVar("T")

ADVANTAGES: dict[str, Advantage] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
}

LOSSES: dict[str, Loss] = {
    "two_sided_clip": two_sided_clip,
    "ppo_clip": ppo_clip,
}


def advantage_named(name: str) -> Advantage:
    return _named(ADVANTAGES, "advantage", name)


def loss_named(name: str) -> Loss:
    return _named(LOSSES, "loss", name)


def _named(registry: Mapping[str, T], what: str, name: str) -> T:
    if name not in registry:
        raise ConfigError(f"there is no {what} called {name!r}; choose one of: {', '.join(sorted(registry))}")
    return registry[name]
