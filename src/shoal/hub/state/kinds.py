"""When machines of one kind fail a statistical check together, it is the kind that differs, not its owners that cheat.

A kind is what generates (`engine/device/number format`). A driver, a library, or a policy that has moved away from what
was calibrated makes all of its machines fail the same check. Then what the check says of that kind is unsure, and an
alarm says so.

    rule    at least `MANY` independent nodes of the kind, this one among them, failed this very check within
            `WITHIN_MS`, and they are more than the independent nodes of the kind that pass their audits
    counts  a node with `PROBATION_AUDITS` accepted groups counts by itself; all others of one network (/24, /48) count
            once together

It protects no cheat: unsure work is neither trained on nor paid, gets its node one lease at a time, and after two
attempts a validator generates the unit. Failures that are certain ban as ever, and so do better rewards than the seeds'
branches (`gains`): no driver or library knows the reward, and that evidence is of groups that were paid. Whoever fakes
a failing kind from three networks buys that such keys are not banned, and that their records begin anew: what one group
does not show is paid until the record fails again, while they outnumber those of the kind that pass. The alarm says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.hub.state import gains, reputation
from shoal.hub.state.commands import RaiseAlarm
from shoal.hub.state.rows import PROBATION_AUDITS, Moment, NodeRow
from shoal.protocol import Outcome, Severity, Tally, Verdict

MANY = 3
WITHIN_MS = 3_600_000


def failing(moment: Moment, node: NodeRow, kin: Sequence[NodeRow], verdict: Verdict) -> RaiseAlarm | None:
    """The alarm if this statistical rejection is that of a whole kind; None if the verdict counts as it is.

    `kin` are the workers of the same kind that failed this check, or passed audits, within `WITHIN_MS`.
    """
    if verdict.outcome != Outcome.REJECTED or verdict.severity is not Severity.STATISTICAL or node.trusted:
        return None
    if verdict.reason == gains.STEERED:
        return None
    step, since_ms = moment.progress.next_step, moment.now_ms - WITHIN_MS
    others = [row for row in kin if row.node != node.node]
    fail = [row for row in others if row.failed_check == verdict.reason and row.failed_at_ms >= since_ms]
    failed_names = {row.node for row in fail}
    failed = independent([node, *fail])
    passing = independent(row for row in others if row.node not in failed_names and row.passed > 0)
    if failed < MANY or failed <= passing:
        return None
    message = (
        f"step {step}: most machines of kind {node.kind} fail {verdict.reason}, so their work is unsure: nobody is "
        "struck for it, and it is neither paid nor trained on. Their driver, library or hardware differs from what was "
        "calibrated: calibrate that kind again, on a machine like theirs if there is one, and pardon who was banned "
        "for it before (`shoal admin pardon`)"
    )
    return RaiseAlarm(step, f"kind.{verdict.reason}.{node.kind}", message, moment.now_ms)


def failed(node: NodeRow, verdict: Verdict, now_ms: int) -> NodeRow:
    """The node after such a failure: no strike, but its record begins anew and the failure is remembered. The record
    was counted by limits that are in doubt now: kept, it would fail the node under better ones, too."""
    after = reputation.unsure(node, verdict, own_fault=True)
    return replace(after, record=Tally(), failed_check=verdict.reason, failed_at_ms=now_ms)


def independent(nodes: Iterable[NodeRow]) -> int:
    """How many of the nodes count: see the module's rule."""
    rows = list(nodes)
    proven = sum(row.accepted >= PROBATION_AUDITS for row in rows)
    return proven + len({row.network for row in rows if row.accepted < PROBATION_AUDITS})
