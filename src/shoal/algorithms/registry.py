"""The words of the recipe: `advantage = "group_mean"`, `loss = "two_sided_clip"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from shoal.algorithms.advantages import (
    Advantage,
    dr_grpo,
    group_mean,
    group_mean_sample_std,
    group_mean_std,
    max_rl,
    rloo,
)
from shoal.algorithms.losses import (
    Loss,
    cispo,
    cross_entropy,
    decoupled,
    dppo,
    geometric_mask,
    gspo,
    plain,
    ppo_clip,
    tis,
    two_sided_clip,
)
from shoal.errors import ConfigError

T = TypeVar("T")

ADVANTAGES: dict[str, Advantage] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "group_mean_sample_std": group_mean_sample_std,
    "rloo": rloo,
    "dr_grpo": dr_grpo,
    "max_rl": max_rl,
}

LOSSES: dict[str, Loss] = {
    "two_sided_clip": two_sided_clip,
    "ppo_clip": ppo_clip,
    "dppo": dppo,
    "gspo": gspo,
    "cispo": cispo,
    "decoupled": decoupled,
    "tis": tis,
    "geometric_mask": geometric_mask,
    "plain": plain,
    "cross_entropy": cross_entropy,
}

# Losses that need the trainer's own log-probabilities of the step's beginning, whatever `ratio_base` says.
NEEDS_RECOMPUTED: frozenset[str] = frozenset({"decoupled"})


def advantage_named(name: str) -> Advantage:
    return _named(ADVANTAGES, "advantage", name)


def loss_named(name: str) -> Loss:
    return _named(LOSSES, "loss", name)


def _named(registry: Mapping[str, T], what: str, name: str) -> T:
    if name not in registry:
        raise ConfigError(f"there is no {what} called {name!r}; choose one of: {', '.join(sorted(registry))}")
    return registry[name]
