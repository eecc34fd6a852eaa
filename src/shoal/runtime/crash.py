"""Points at which a process can be told to die as by `kill -9`: how tests show that nothing is lost there.

    SHOAL_CRASH_AT=hub.submit.after_blob        die when this point is reached
    SHOAL_CRASH_AT=hub.submit.after_blob:3      … for the third time in this process
    SHOAL_CRASH_AT=worker.outbox.written,…      several: a process dies at the first of them that it reaches
    SHOAL_CRASH_FOLDER=/somewhere               each point kills only one process: it writes a file of its name there

    code ─► point("hub.submit.after_blob") ─┬─ not requested, or `arm` was never called: nothing
                                            └─ requested: SIGKILL to itself. No handler, no `finally`, no answer.

A test fails for a point that is placed nowhere, not named here, or reached by no test.
"""

from __future__ import annotations

import difflib
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import ConfigError

log = logging.getLogger(__name__)

CRASH_AT = "SHOAL_CRASH_AT"
CRASH_FOLDER = "SHOAL_CRASH_FOLDER"

# Each is named after the last thing done. A crash before a commit loses all of it; after it, no client knows yet.
POINTS = (
    "hub.start.after_secret", "hub.start.before_commit", "hub.node.before_commit", "hub.node.after_commit",
    "hub.lease.before_commit", "hub.lease.after_commit", "hub.submit.before_blob", "hub.submit.after_blob",
    "hub.submit.before_commit", "hub.submit.after_commit", "hub.audit.before_commit", "hub.audit.after_commit",
    "hub.verdict.before_commit", "hub.verdict.after_commit", "hub.credit.before_commit", "hub.credit.after_commit",
    "hub.ledger.before_commit", "hub.ledger.after_commit", "hub.batch.before_commit", "hub.batch.after_commit",
    "hub.policy.before_commit", "hub.policy.after_commit", "hub.records.before_write", "hub.records.after_write",
    "trainer.step.recorded", "trainer.checkpoint.before_rename",
    "trainer.checkpoint.after_rename", "trainer.publish.before_manifest", "trainer.publish.before_head",
    "trainer.publish.before_announce", "trainer.publish.after_announce", "worker.lease.received",
    "worker.outbox.written", "worker.outbox.before_send", "worker.outbox.after_receipt",
    "validator.verdict.before_report", "validator.verdict.after_report", "backup.before_rename", "restore.after_blobs",
    "restore.after_rows", "restore.before_rename",
)  # fmt: skip

_plan: _CrashPlan | None = None


def arm(environment: Mapping[str, str] = os.environ) -> None:
    """Read the crash points from the environment. Called at the start, where an unknown name is refused."""
    global _plan
    asked, folder = environment.get(CRASH_AT, ""), environment.get(CRASH_FOLDER, "")
    last = dict(_parse(part.strip()) for part in asked.split(",") if part.strip())
    _plan = _CrashPlan(last, Path(folder) if folder else None) if last else None


def point(name: str) -> None:
    if _plan is not None and _plan.is_due(name):
        log.critical("this process kills itself at %s, as %s says", name, CRASH_AT)
        die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _CrashPlan:
    def __init__(self, last: Mapping[str, int], folder: Path | None) -> None:
        self._last, self._folder, self._lock = last, folder, threading.Lock()
        self._reached: Counter[str] = Counter()

    def is_due(self, name: str) -> bool:
        if name not in self._last:
            return False
        with self._lock:
            self._reached[name] += 1
            if self._reached[name] != self._last[name] or self._folder is None:
                return self._reached[name] == self._last[name]
        try:  # whether no process has died at this point before
            (self._folder / name).open("x").close()
        except FileExistsError:
            return False
        return True


def _parse(part: str) -> tuple[str, int]:
    name, colon, count = part.partition(":")
    if name not in POINTS:
        near = difflib.get_close_matches(name, POINTS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(POINTS)}"
        raise ConfigError(f"{CRASH_AT} names {name!r}, which is no crash point; {hint}")
    if colon and not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ConfigError(f"{CRASH_AT}={part}: after the colon comes a number from 1, not {count!r}")
    return name, int(count) if colon else 1
