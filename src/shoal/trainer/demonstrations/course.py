"""Which sequences each step is trained on, and at which rate: functions of the settings alone, so that a resume has
nothing to restore but the number of the step. Imports no torch.

    corpus ─► validation, by question ─┐
           └► the others: epoch 0, an order by (seed, 0), cut into batches; epoch 1, …
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.trainer.settings import LossName, TrainerSettings

Numbers = npt.NDArray[np.int64]
DECAYS = ("none", "linear", "cosine")
VALIDATION_SHARE, MOST_VALIDATION = 20, 256
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
HARMLESS = frozenset({"tracking", "checkpoint_every", "keep_checkpoints", "evaluate_every"})
"""Settings that may be others when a warm start continues."""
USED = HARMLESS | {
    "learning_rate", "betas", "weight_decay", "warmup_steps", "grad_clip", "memory", "lora", "guards",
    "micro_batch_tokens", "device", "threads", "publish_dtype",
}  # fmt: skip
"""Settings of [trainer] that mean something here. The others are about rollouts, rewards and hubs."""


def refuse_unused(override: str) -> None:
    """An override that would change nothing is a mistake."""
    table, key, *_ = [*override.partition("=")[0].strip().split("."), ""]
    if table != "trainer":
        raise ConfigError(f"--set {override}: only settings of [trainer] and [environment] matter here")
    if key in TrainerSettings.model_fields and key not in USED:
        raise ConfigError(
            f"--set {override}: trainer.{key} means nothing to a warm start, which is one process without rollouts; "
            f"what does: {', '.join(sorted(USED))}"
        )


@dataclass(frozen=True)
class Course:
    """How long, in batches of how many sequences, in which order. `steps` ends it whatever the epochs; None: all of
    them. At least `validation` sequences are kept for validation; None: a twentieth, 256 at most."""

    epochs: int = 1
    steps: int | None = None
    batch: int = 32
    seed: int = 0
    decay: str = "cosine"
    validation: int | None = None

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ConfigError(f"--decay {self.decay}: there are {', '.join(DECAYS)}")

    def timetable(self, questions: Numbers) -> tuple[tuple[Numbers, ...], Numbers]:
        """The sequences of every step, and those that are kept for validation; `questions` are those of all."""
        aside = self._aside(questions)
        others = np.setdiff1d(np.arange(len(questions)), aside)
        if not len(others):
            raise ConfigError(
                f"all {len(questions)} sequences are kept for validation, so that none is left to train on: "
                "lower --validation, or give more demonstrations"
            )
        epochs = range(self.epochs) if self.steps is None else count()
        # As even as can be: a last batch of one sequence would weigh as much as one of many.
        batches = math.ceil(len(others) / self.batch)
        every = (batch for epoch in epochs for batch in np.array_split(self._order(others, epoch), batches))
        return tuple(islice(every, self.steps)), aside

    def _aside(self, questions: Numbers) -> Numbers:
        """Those of the lowest questions, each with all its answers, until they are enough; questions with more answers
        than are wanted come last, the fewest first."""
        total = len(questions)
        wanted = min(total // VALIDATION_SHARE, MOST_VALIDATION) if self.validation is None else self.validation
        asked, answers = np.unique(questions, return_counts=True)
        order = np.lexsort((asked, np.where(answers > wanted, answers, 0)))
        enough = int(np.searchsorted(np.cumsum(answers[order]), wanted)) + 1 if wanted else 0
        return np.flatnonzero(np.isin(questions, asked[order[:enough]])).astype(np.int64)

    def _order(self, others: Numbers, epoch: int) -> Numbers:
        # The raw bits of a counter-based generator: the same on every machine and in every version.
        shuffle = np.random.Philox(key=[self.seed, epoch]).random_raw(len(others))
        return others[np.argsort(shuffle, kind="stable")]

    def rate_factor(self, step: int, steps: int, warmup: int) -> float:
        """What the rate of a step is multiplied by: 1 while it warms up, then less, to almost 0.

        >>> [round(Course(decay="linear").rate_factor(step, 6, 2), 2) for step in range(6)]
        [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if self.decay == "none" or step < warmup:
            return 1.0
        done = (step - warmup) / max(1, steps - warmup)
        return 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
