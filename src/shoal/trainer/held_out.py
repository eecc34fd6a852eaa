"""The greedy score on held-out tasks: validators measure it, and it reaches the metrics whenever it comes.

    due ─► the hub offers it ─► slices between audits ─► complete ─┬─► before its row: into it
                                      (training continues)         └─► later: into the row that is there
    the last version: waited for, `LAST_WAIT_S` at most; then it stays unscored

A score that comes twice, or again after a resume, changes nothing. One of a part of the tasks (`Evaluation.partial`)
is none: beside those of other versions it would be read as a rise or a fall.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.protocol import EvaluationPage
from shoal.runtime.clock import Clock
from shoal.runtime.stop import StopToken
from shoal.trainer.step import Stopped

log = logging.getLogger(__name__)

LAST_WAIT_S = 120.0
LOOK_S = 0.5


@dataclass
class HeldOut:
    """`page` asks the hub for the evaluations of the versions from a number on."""

    every: int
    page: Callable[[int], EvaluationPage]
    clock: Clock
    stop: StopToken
    _told: dict[int, float] = field(default_factory=dict)
    _since: int = 0

    def known(self, version: int) -> dict[int, float]:
        """The row of this version is about to be written: its score, and those of earlier ones that came since."""
        if not self.every:
            return {}
        listed = self.page(self._since).evaluations
        found = {each.policy.version: None if each.partial else each.mean for each in listed if each.complete}
        # What a replay has not come to yet is known already; it is told with its own row.
        open_ones = [each.policy.version for each in listed if not each.complete or each.policy.version > version]
        self._since = min(open_ones, default=max(found, default=self._since - 1) + 1)
        told = {number: mean for number, mean in found.items() if mean is not None and number <= version}
        news = dict(told.items() - self._told.items())
        self._told |= news
        return news

    def last(self, version: int) -> float | None:
        """The run is over: the score of its last version, if validators measure all of it."""
        until_s = self.clock.monotonic_s() + LAST_WAIT_S
        while self.every and self.clock.monotonic_s() < until_s:
            listed = self.page(version).evaluations
            found = next((each for each in listed if each.policy.version == version), None)
            if found is None or found.partial:
                break
            if found.complete:
                return found.mean
            if self.stop.wait(LOOK_S):
                raise Stopped
        log.info("validators have not measured all of version %d: it stays unscored", version)
        return None
