"""What may be said about a warm start, apart from what it does: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shoal.errors import ConfigError
from shoal.trainer.settings import LossName, TrainerSettings

Decay = Literal["none", "linear", "cosine"]


class Interrupted(Exception):
    """The process was told to stop while it was choosing. Nothing is kept of it."""


@dataclass(frozen=True)
class Course:
    """How long, in batches of how much, in which order. `steps` ends it whatever the epochs; None: all of them.

    A batch has `batch` sequences, or, if `batch_tokens` is given, as many as have that many tokens.
    `validation` sequences at least are kept for validation; None: a twentieth, 256 at most.
    """

    epochs: int = 1
    steps: int | None = None
    batch: int = 32
    batch_tokens: int | None = None
    seed: int = 0
    decay: Decay = "cosine"
    validation: int | None = None


def named_decay(name: str) -> Decay:
    for known in get_args(Decay):
        if name == known:
            decay: Decay = known
            return decay
    raise ConfigError(f"--decay {name}: there are {', '.join(get_args(Decay))}")


LOSS: LossName = "cross_entropy"

DEFAULTS = """
learning_rate = 2e-5
betas = [0.9, 0.999]
warmup_steps = 10
grad_clip = 1.0
minibatches = 1
checkpoint_every = 50
evaluate_every = 50
"""
"""Of the [trainer] table, where imitation wants others than RL."""

USED = frozenset(
    {"learning_rate", "betas", "weight_decay", "warmup_steps", "grad_clip", "memory", "lora", "guards", "tracking",
     "micro_batch_tokens", "device", "threads", "publish_dtype", "checkpoint_every", "keep_checkpoints",
     "evaluate_every"}
)  # fmt: skip
"""Settings of [trainer] that mean something here. The others are about rollouts, rewards and hubs."""

KEPT_APART = frozenset({"tracking", "checkpoint_every", "keep_checkpoints", "evaluate_every"})
"""Those that do not change what is learnt, and may be others when a warm start goes on."""


def refuse_unused(override: str) -> None:
    """An override that would change nothing is a mistake."""
    key = override.partition("=")[0].strip().split(".")
    if key[0] == "trainer" and len(key) > 1 and key[1] in TrainerSettings.model_fields and key[1] not in USED:
        why = ", which is one process" if key[1] == "processes" else ""
        raise ConfigError(
            f"--set {override}: trainer.{key[1]} means nothing to a warm start{why}; what does: "
            f"{', '.join(sorted(USED))}"
        )


def identity(settings: TrainerSettings) -> dict[str, object]:
    """The settings that decide what is learnt."""
    return settings.model_dump(mode="json", include=set(USED - KEPT_APART))
