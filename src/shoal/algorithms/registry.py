"""The words of the recipe: `advantage = "group_mean"`, `loss = "two_sided_clip"`."""

from __future__ import annotations

from shoal.algorithms import advantages, losses
from shoal.algorithms.advantages import Advantage
from shoal.algorithms.losses import Loss

_ADVANTAGES = (
    advantages.group_mean, advantages.group_mean_std, advantages.group_mean_sample_std, advantages.rloo,
    advantages.dr_grpo, advantages.max_rl,
)  # fmt: skip
_LOSSES = (
    losses.two_sided_clip, losses.ppo_clip, losses.dppo, losses.gspo, losses.cispo, losses.decoupled, losses.tis,
    losses.geometric_mask, losses.plain, losses.cross_entropy,
)  # fmt: skip
ADVANTAGES: dict[str, Advantage] = {each.__name__: each for each in _ADVANTAGES}
LOSSES: dict[str, Loss] = {each.__name__: each for each in _LOSSES}

# Losses that need the trainer's own log-probabilities of the step's beginning, whatever `ratio_base` says.
NEEDS_RECOMPUTED: frozenset[str] = frozenset({"decoupled"})
