"""What a failed audit does to the rest of its node's work: what nobody looked at closely is not believed any more.

    accepted by a light audit, in no batch yet ─► pulled; the unit is open again, task and seeds unchanged
    accepted by a full audit, in no batch yet ──► stays, unless the node is banned for it (audits by reputation only)
    waiting for a light audit, or in one ───────► waits for a full one
    credit pending ─────────────────────────────► void
    credit final (its window has passed) ───────► stays; its unit is void: not trained on, and not paid twice

A pulled unit was alive and stays alive, so pacing counts it as before. It is undecided again, so a synchronous batch
that needs it waits for it; whoever generates it next does so under the same seeds. A batch that is written down stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.hub.state.commands import Command, Record, SaveSubmission, SaveUnit
from shoal.hub.state.machines import SubmissionState, UnitState
from shoal.hub.state.rows import Filled, SubmissionRow
from shoal.protocol import Verdict

PULLED = "node.failed"


@dataclass(frozen=True)
class Stake:
    """What a node has at stake when an audit of it fails, beside the submission that failed."""

    untrained: tuple[Filled, ...] = ()
    light: tuple[SubmissionRow, ...] = ()
    pending: tuple[SubmissionRow, ...] = ()


def pull(stake: Stake, verdict: Verdict, banned: bool, now_ms: int) -> list[Command]:
    """Take back the accepted groups that are in no batch: those audited lightly, and all if the node is `banned`. Where
    their credit was pending, their units are open again; where it is final, they are void."""
    failing = [filled for filled in stake.untrained if banned or filled.submission.depth == "light"]
    taken = [filled for filled in failing if filled.submission.matures_at_ms is not None]
    commands: list[Command] = [
        SaveUnit(filled.unit.to(UnitState.VOID, reason=PULLED), filled.unit.state)
        for filled in failing
        if filled.submission.matures_at_ms is None
    ]
    if not taken:
        return commands
    message = f"its node failed the audit of unit {verdict.unit} ({verdict.reason or 'no reason given'})"
    for filled in taken:
        commands.append(SaveSubmission(_pulled(filled.submission, message, now_ms), filled.submission.state))
        commands.append(SaveUnit(filled.unit.reopened(), filled.unit.state))
    body = {
        "node": verdict.node,
        "units": [filled.unit.unit for filled in taken],
        "submission": verdict.submission,
        "reason": verdict.reason,
    }
    return [*commands, Record("pulled", body, now_ms)]


def _pulled(row: SubmissionRow, message: str, now_ms: int) -> SubmissionRow:
    # All pending credit of the node is void by now: this row's, too.
    return row.to(SubmissionState.PULLED, reason=PULLED, message=message, decided_at_ms=now_ms, matures_at_ms=None)


def deepen(waiting: Sequence[SubmissionRow], but: str) -> list[Command]:
    """Have all of `waiting` audited fully, except the submission `but`. Light audits under way are given up."""
    commands: list[Command] = []
    for row in waiting:
        if row.submission == but:
            continue
        after = replace(row, depth="full")
        if row.state == SubmissionState.AUDITING:
            after = after.to(SubmissionState.RECEIVED, validator=None, claimed_until_ms=None)
        commands.append(SaveSubmission(after, row.state))
    return commands
