"""Points at which a process can be told to die as by `kill -9`: how tests show that nothing is lost there.

    SHOAL_CRASH_AT=hub.submit.after_blob        die when this point is reached
    SHOAL_CRASH_AT=hub.submit.after_blob:3      … for the third time in this process
    SHOAL_CRASH_AT=worker.outbox.written,…      several: a process dies at the first of them that it reaches
    SHOAL_CRASH_FOLDER=/somewhere               a point leaves a file of its name there as it strikes, and strikes only
                                                once for all processes: what a supervisor starts again lives on

    code ─► point("hub.submit.after_blob") ─┬─ not asked for: nothing
                                            └─ asked for: SIGKILL to itself. No handler, no `finally`, no answer.
    (`cli.main` calls `arm`, which reads the environment; a process that never does dies nowhere.)

Every point has a name here that says what has just happened and what has not. A point that is not placed anywhere, or
placed and not named, fails a test, and so does one that no test can make a process reach.
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

POINTS: Mapping[str, str] = {
    "hub.start.after_secret": "the run's secret is on disk; its database may not exist",
    "hub.start.before_commit": "the run is written into its database, uncommitted",
    "hub.node.before_commit": "a node is registered, uncommitted",
    "hub.node.after_commit": "a node is registered and does not know it",
    "hub.lease.before_commit": "units are leased, uncommitted",
    "hub.lease.after_commit": "units are leased and their worker does not know it",
    "hub.submit.before_blob": "a submission would be taken; nothing of it is on disk",
    "hub.submit.after_blob": "the bytes of a submission are on disk; no row names them",
    "hub.submit.before_commit": "a submission's row and receipt are written, uncommitted",
    "hub.submit.after_commit": "a submission is promised and its worker does not know it",
    "hub.audit.before_commit": "submissions are claimed for a validator, uncommitted",
    "hub.audit.after_commit": "submissions are claimed and the validator does not know it",
    "hub.verdict.before_commit": "verdicts, what they cost and what they earned are written, uncommitted",
    "hub.verdict.after_commit": "verdicts are in force and the validator does not know it",
    "hub.credit.before_commit": "pending credit has become final, uncommitted",
    "hub.credit.after_commit": "pending credit has become final",
    "hub.ledger.before_commit": "rows were moved from the outbox into the ledger, uncommitted",
    "hub.ledger.after_commit": "rows were moved from the outbox into the ledger",
    "hub.batch.before_commit": "a batch is written down, uncommitted",
    "hub.batch.after_commit": "a batch is written down and the trainer does not know it",
    "hub.policy.before_commit": "a policy is announced, uncommitted",
    "hub.policy.after_commit": "a policy is announced and the trainer does not know it",
    "trainer.step.recorded": "a step's row is in the metrics and at the hub; its checkpoint is not begun",
    "trainer.checkpoint.before_rename": "all files of a checkpoint are written, under a hidden name",
    "trainer.checkpoint.after_rename": "a checkpoint is in place; older ones are not removed",
    "trainer.publish.before_manifest": "the chunks of a version are at the origin; its manifest is not",
    "trainer.publish.before_head": "a version's manifest is at the origin; the head names the one before",
    "trainer.publish.before_announce": "a version is published at the origin; the hub has not heard of it",
    "trainer.publish.after_announce": "a version is announced; the trainer has not noted it",
    "worker.lease.received": "leases are in hand; nothing is generated",
    "worker.outbox.written": "a finished group is in the outbox; the uploader does not know it",
    "worker.outbox.before_send": "a parcel was taken from the outbox; nothing is sent",
    "worker.outbox.after_receipt": "the hub has promised a parcel; its file is still there",
    "validator.verdict.before_report": "verdicts are made; nobody has heard of them",
    "validator.verdict.after_report": "verdicts are reported; the validator has not noted it",
    "backup.before_rename": "a backup is whole, under a hidden name",
    "restore.after_blobs": "all submissions are in the store; no row and no recipe names it",
    "restore.after_rows": "all rows are in the database, marked; the folder that names it is hidden",
    "restore.before_rename": "a run is restored, under a hidden name",
}


_plan: _CrashPlan | None = None


def arm(environment: Mapping[str, str] = os.environ) -> None:
    """From now on die where the environment says. At the start, so that a name that is none is refused there."""
    global _plan
    asked, folder = environment.get(CRASH_AT, ""), environment.get(CRASH_FOLDER, "")
    last = dict(_parse(part.strip()) for part in asked.split(",") if part.strip())
    _plan = _CrashPlan(last, Path(folder) if folder else None) if last else None


def point(name: str) -> None:
    """Die here, if this process was told to. `name` is one of `POINTS`."""
    if _plan is not None and _plan.is_due(name):
        log.critical("this process kills itself at %s, as %s says", name, CRASH_AT)
        die()


def die() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class _CrashPlan:
    """Point → the how manieth time is its last, and how often each was reached; `folder` is what processes share."""

    def __init__(self, last: Mapping[str, int], folder: Path | None) -> None:
        self._last = last
        self._folder = folder
        self._reached: Counter[str] = Counter()
        self._lock = threading.Lock()

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
