"""Who measures versions on held-out tasks, and how the scores reach the metrics.

    trainer      due ─► training pauses ─► score ─► the row of that version
    validators   due ─► the hub offers it ─► slices between audits ─► complete ─┬─► before its row: into it
                                                   (training goes on)           └─► later: into the row that is there
                 the last version: waited for, `LAST_WAIT_S` at most; then the trainer measures it itself

A score that comes twice, or again after a resume, changes nothing. One of a part of the tasks (`Evaluation.partial`)
is none: beside those of other versions it would be read as a rise or a fall.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shoal.protocol import Evaluation, EvaluationPage
from shoal.runtime.clock import Clock
from shoal.runtime.stop import StopToken
from shoal.trainer.evaluate import Evaluator
from shoal.trainer.step import Stopped

log = logging.getLogger(__name__)

LAST_WAIT_S = 120.0
LOOK_S = 0.5


class HeldOut(Protocol):
    """What a training run asks: each answer is the score of a version, if it is known by then."""

    def before(self, version: int) -> float | None:
        """Training from this version is about to begin."""
        ...

    def known(self, version: int) -> dict[int, float]:
        """The row of this version is about to be written: its score, and those of earlier ones that came since."""
        ...

    def last(self, version: int) -> float | None:
        """The run is over: the score of its last version."""
        ...


@dataclass(frozen=True)
class ByTrainer:
    """Implements `HeldOut`: every so many versions the trainer stops and looks."""

    evaluate: Evaluator
    every: int

    def before(self, version: int) -> float | None:
        return self.evaluate() if self.every and version % self.every == 0 else None

    def known(self, version: int) -> dict[int, float]:  # noqa: ARG002  nobody else measures
        return {}

    def last(self, version: int) -> float | None:  # noqa: ARG002  the model is at its last version
        return self.evaluate() if self.every else None


@dataclass
class ByValidators:
    """Implements `HeldOut`: the hub has validators measure; `evaluate` is for the last version, should none do it."""

    page: Callable[[int], EvaluationPage]
    evaluate: Evaluator
    every: int
    clock: Clock
    stop: StopToken
    _told: dict[int, float] = field(default_factory=dict)
    _since: int = 0

    def before(self, version: int) -> float | None:  # noqa: ARG002  training waits for nobody
        return None

    def known(self, version: int) -> dict[int, float]:
        if not self.every:
            return {}
        listed = self.page(self._since).evaluations
        found = {each.policy.version: None if each.partial else each.mean for each in listed if each.complete}
        # What a replay has not come to yet is known already; it is told with its own row.
        later = [number for number in found if number > version]
        awaited = [each.policy.version for each in listed if not each.complete]
        self._since = min([*awaited, *later], default=max(found, default=self._since - 1) + 1)
        news = {
            number: mean
            for number, mean in found.items()
            if mean is not None and number <= version and self._told.get(number) != mean
        }
        self._told.update(news)
        return news

    def last(self, version: int) -> float | None:
        if not self.every:
            return None
        until_s = self.clock.monotonic_s() + LAST_WAIT_S
        while self.clock.monotonic_s() < until_s:
            found = self._of(version)
            if found is None or found.partial:
                break
            if found.complete:
                return found.mean
            if self.stop.wait(LOOK_S):
                raise Stopped
        log.info("validators have not measured all of version %d: the trainer does it itself", version)
        return self.evaluate()

    def _of(self, version: int) -> Evaluation | None:
        return next((each for each in self.page(version).evaluations if each.policy.version == version), None)
