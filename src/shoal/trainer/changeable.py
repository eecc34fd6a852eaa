"""Which settings of [trainer] may be others when a run goes on. Imports no torch, since the CLI asks.

    harmless     nothing of what is learnt depends on it
    rounding     the same is computed in another order or place: learnt alike, not bit for bit
    guards       "skip" and "slow" decide what is learnt from then on: the owner's decision, and it is said

Everything else is what the run is. `trainer.publish_dtype` is, too, though nothing is learnt from it: workers generate
with what was published. `trainer.evaluate_tasks` is, since scores of other tasks could not be compared.
"""

from __future__ import annotations

ROUNDING = ("device", "threads", "processes", "micro_batch_tokens", "memory.compile", "memory.recompute")
HARMLESS = (
    "tracking", "batch_deadline_s", "checkpoint_every", "keep_checkpoints", "keep_best", "anchor_every", "evaluate_by",
    "evaluate_every",
)  # fmt: skip
GUARDS = "guards"


def is_changeable(key: str) -> bool:
    """Whether a run may go on with another value of `trainer.KEY`.

    >>> [is_changeable(key) for key in ("keep_best", "guards.clip_fraction.react", "objective.kl")]
    [True, True, False]
    """
    return key in HARMLESS or key in ROUNDING or key.split(".")[0] == GUARDS
