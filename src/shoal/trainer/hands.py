"""What a training run does with its learner: alone here, or at the head of a crew (`follower.leading_hands`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.trainer.checkpoint import StoredCheckpoint, restore
from shoal.trainer.copies import Copies
from shoal.trainer.learner import Learner
from shoal.trainer.step import look_back, train_step


@dataclass(frozen=True)
class Hands:
    """Train a step, look back at it, put a checkpoint in place, copy the state: what all processes of a crew do at the
    same time."""

    train: Callable[..., dict[str, float]] = train_step
    look_back: Callable[..., dict[str, float]] = look_back
    restore: Callable[[Learner, StoredCheckpoint], None] = restore
    copies: Copies = field(default_factory=Copies)
