"""The closing look of a warm start: whether its last version still knows what it was trained on.

    the last batch, seen by version 0 ────────┐
                    seen by the last but one ─┴► the lower loss ─► seen by the last: how much higher?

Each time the same tokens, so that what differs is the model. Nothing was recorded when demonstrations were written, so
`trainer.guards.divergence` judges this rise, in nats per token, where RL has the distance from what was recorded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.trainer.guard_rules import LOWER_RATE, Row
from shoal.trainer.guard_settings import GuardSettings
from shoal.trainer.guards import Alarm, Judged

log = logging.getLogger(__name__)

LAST_BATCH = "last_batch_loss"
NAME = "divergence"


@dataclass(frozen=True)
class LastBatch:
    """The loss of the last batch. `begun` and `before` are nan where no row tells them."""

    begun: float
    before: float
    after: float

    @classmethod
    def of(cls, rows: Sequence[Row], step: int, after: float) -> LastBatch:
        """From the rows: version 0 has seen it in row 0, and the loss of the last step is of what it began with."""
        by_step = {int(row["step"]): row for row in rows}
        begun, before = by_step.get(0, {}).get(LAST_BATCH, math.nan), by_step.get(step, {}).get("loss", math.nan)
        return cls(begun, before, after)

    @property
    def rise(self) -> float:
        """
        >>> LastBatch(begun=2.0, before=0.5, after=4.5).rise
        4.0
        """
        return max((self.after - loss for loss in (self.begun, self.before) if math.isfinite(loss)), default=0.0)

    @property
    def rise_by_step(self) -> float:
        return self.after - self.before


def judge_last(settings: GuardSettings, step: int, seen: LastBatch, folder: Path, kept: Sequence[int]) -> Judged:
    """What the guard says of the version that the last step made. `kept`: versions of the checkpoints in `folder`."""
    guard = settings.divergence
    if guard.react == "off" or not seen.rise > guard.limit:
        return Judged((), {})
    by_step = seen.rise_by_step > guard.limit
    value = seen.rise_by_step if by_step else seen.rise
    than, who = ("before it", "The step has") if by_step else ("at the beginning", "Earlier steps have")
    said = f"after step {step}, the last: the loss of its batch is {value:.3g} nats per token higher than {than}, "
    said += f"above trainer.guards.{NAME}.limit = {guard.limit:g}"
    advice = f"{who} destroyed what the model knew. What to do: {LOWER_RATE} or trainer.grad_clip"
    way_back = _way_back(step, folder, kept) if by_step else ""
    alarm = Alarm(NAME, step, value, guard.react, True, said, advice, way_back)
    if guard.react != "stop":  # what stops is said by the error
        log.warning("%s", alarm.message)
    return Judged((alarm,), {f"alarm_{NAME}": value})


def _way_back(step: int, folder: Path, kept: Sequence[int]) -> str:
    """Every version but the last is from before the step that did it."""
    good = max((version for version in kept if version <= step), default=None)
    left = f"there is no checkpoint in {folder}" if good is None else f"version {good} from before it is in {folder}"
    return f"Nothing was exported; {left}"
