"""The rows of a run: written to metrics.jsonl at once, told to the trackers, reported to the hub a version later.

    record(step) ─► row in the file, trackers                amend(step) ─► the same row, when more is known of it
         └──────────────────── unreported ◄─────────────────────┘
                                    │ take()
                                    ▼
                                report(rows) ─► the hub, which keeps the newest report of a step, with its alarms

The file is what a resume relies on. Reports go out in the publisher's thread, before the version that came of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from shoal.protocol import StepReport
from shoal.runtime.clock import Clock
from shoal.runtime.metrics import MetricsLog
from shoal.trainer.export import latest_metrics, scores_of
from shoal.trainer.guards import Judged
from shoal.trainer.tracking import Trackers

log = logging.getLogger(__name__)

Row = Mapping[str, float]

SHOWN = ("sampled_reward", "reward_mean", "held_out", "loss", "validation_loss", "grad_norm", "idle_fraction")


class Reports(Protocol):
    """Who is told of every step (`client.HubClient`)."""

    def report(self, report: StepReport) -> None: ...


class RunRecord:
    """What is known of every step. `scores` are the held-out ones, by version. A warm start reports to no hub."""

    def __init__(self, path: Path, hub: Reports | None, trackers: Trackers, clock: Clock) -> None:
        self._metrics = MetricsLog(path)
        self._hub = hub
        self._trackers = trackers
        self._clock = clock
        self._unreported: list[Row] = []
        self._alarms: dict[int, dict[str, str]] = {}  # by step, what the hub has not been told yet
        self.scores: dict[int, float] = {}

    def resume(self, version: int) -> list[Row]:
        """The rows of the steps before a version; those that are trained again are dropped."""
        self._metrics.rewind(version, keep=("held_out",))
        self.scores = scores_of(self._metrics)
        before = [row for row in self._metrics.rows() if row["step"] < version]
        if version > len(before):
            log.warning(
                "%s has %d of the %d steps that were done: guards, best score and a slowed rate go by these",
                self._metrics.path, len(before), version,
            )  # fmt: skip
        self._trackers.begin(version, before)
        return list(before)

    def add(self, step: int, metrics: Row, measured: Mapping[int, float]) -> None:
        """The row of a step. Of the held-out scores `measured` meanwhile, its own goes into it, others into theirs."""
        own = named(measured.get(step))
        for earlier, score in measured.items():
            if earlier != step:
                self.amend(earlier, named(score))
        row = self._metrics.append(step, {**own, **metrics, "at_ms": float(self._clock.now_ms())})
        self._unreported.append(row)
        self._trackers.write(row)
        self.scores |= dict(measured) | ({step: row["held_out"]} if "held_out" in row else {})
        log.info("step %d: %s", step, ", ".join(f"{name} {row[name]:.4g}" for name in SHOWN if name in row))

    def amend(self, step: int, numbers: Row) -> None:
        """Into the row of a step, once it is there; the hub is told with the next report."""
        if numbers and (amended := self._metrics.amend(step, numbers)) is not None:
            self._unreported.append(amended)
            self._trackers.amend(step, numbers)

    def warn(self, judged: Judged) -> None:
        """What the guards have said goes to the hub with the report of its step."""
        if news := judged.news():
            self._alarms.setdefault(judged.alarms[0].step, {}).update(news)

    def take(self) -> list[Row]:
        """The rows that the hub does not know yet; whoever takes them reports them."""
        rows, self._unreported = self._unreported, []
        return rows

    def report(self, rows: Iterable[Row]) -> None:
        for row in rows:
            assert self._hub is not None, "somebody takes rows to report them"
            step, measured = int(row["step"]), {name: value for name, value in row.items() if name != "step"}
            self._hub.report(StepReport(step=step, metrics=measured, alarms=self._alarms.pop(step, {})))

    def latest(self, version: int) -> dict[str, float]:
        return latest_metrics(self._metrics, version)


def named(score: float | None) -> dict[str, float]:
    return {} if score is None else {"held_out": score}


def finite(step: int, metrics: Row) -> dict[str, float]:
    """The numbers of a row. One that overflows (rewards of 1e200 have no variance) says nothing, and ends nothing."""
    left_out = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if left_out:
        log.warning("step %d: no finite number, so not in its row: %s", step, ", ".join(left_out))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
