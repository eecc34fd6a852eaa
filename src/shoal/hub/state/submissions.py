"""Submissions arriving: new (201), the same again (200), another body (409), late or void (410), not yours (403).

A submission after its deadline is still taken while its unit is free: work that is done is not thrown away for being
a second late. It is refused once the unit has gone to somebody else, is finished, or would be too stale to train on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.hub.state import pacing, windows
from shoal.hub.state.commands import Command, SaveLease, SaveNode, SaveSubmission, SaveUnit
from shoal.hub.state.machines import LeaseState, UnitState
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import Holding, LeaseRow, Moment, NodeRow, SubmissionRow
from shoal.hub.state.units import is_entrusted
from shoal.protocol import Depth

CREATED = 201
SAME_AGAIN = 200
LATE = "lease.late"


@dataclass(frozen=True)
class Arrival:
    """Bytes that a node wants to hand in for a lease. `size_bytes` is their length as sent, `depth` how they would be
    audited: drawn from what is committed here, written with it, and so never drawn again."""

    node: str
    lease: str
    submission: str
    size_bytes: int
    depth: Depth = "full"
    tokens: int = 0


@dataclass(frozen=True)
class Reception:
    status: int
    row: SubmissionRow
    commands: tuple[Command, ...] = ()


def check_owner(holding: Holding | None, node: str, lease: str) -> Holding:
    """The lease and its unit, if the lease exists and is this node's."""
    if holding is None:
        raise Refusal(404, "lease.unknown", f"there is no lease {lease[:64]} in this run")
    if holding.lease.node != node:
        raise Refusal(403, "lease.not_yours", f"lease {lease} belongs to another node")
    return holding


def receive(
    moment: Moment,
    node: NodeRow,
    holding: Holding,
    existing: SubmissionRow | None,
    arrival: Arrival,
    receipt: Callable[[SubmissionRow], str],
) -> Reception:
    """Take the submission of `node`, or say why not. `existing` is what was handed in for this lease before."""
    if existing is not None:
        if existing.submission != arrival.submission:
            raise Refusal(409, "submission.other_body", f"lease {arrival.lease} was already answered with another body")
        return Reception(SAME_AGAIN, existing)
    _require_takeable(moment, node, holding)
    lease, unit = holding.lease, holding.unit
    row = new_row(lease, arrival, moment.now_ms)
    row = replace(row, receipt=receipt(row))
    commands: list[Command] = [
        SaveNode(windows.delivered(node, lease, moment.now_ms), node.state),
        SaveSubmission(row, None),
        SaveLease(lease.to(LeaseState.SUBMITTED, moment.now_ms), lease.state),
    ]
    if unit.state is not UnitState.VOID:  # void: too old to train on by now, but it was asked for, so it is judged
        filled = {"incarnation": lease.incarnation, "version": lease.version, "submission": row.submission}
        commands.append(SaveUnit(unit.to(UnitState.SUBMITTED, **filled), unit.state))
    return Reception(CREATED, row, tuple(commands))


def new_row(lease: LeaseRow, arrival: Arrival, now_ms: int) -> SubmissionRow:
    """What arrived for a lease, before anybody has judged it."""
    return SubmissionRow(
        submission=arrival.submission,
        lease=lease.lease,
        unit=lease.unit,
        node=lease.node,
        incarnation=lease.incarnation,
        version=lease.version,
        digest=lease.digest,
        size_bytes=arrival.size_bytes,
        received_at_ms=now_ms,
        depth=arrival.depth,
        tokens=arrival.tokens,
    )


def _require_takeable(moment: Moment, node: NodeRow, holding: Holding) -> None:
    lease, unit = holding.lease, holding.unit
    if lease.state == LeaseState.ACTIVE:
        return
    if lease.state == LeaseState.VOID:
        raise Refusal(410, "lease.void", f"lease {lease.lease} is void: its node was banned or its policy withdrawn")
    if lease.state == LeaseState.RELEASED:
        raise Refusal(410, "lease.released", f"lease {lease.lease} was given back")
    if unit.state != UnitState.OPEN:
        raise Refusal(410, LATE, f"lease {lease.lease} ran out and unit {unit.unit} is {unit.state.value} meanwhile")
    if is_entrusted(unit) and not node.trusted:
        raise Refusal(410, LATE, f"lease {lease.lease} ran out, and a validator generates unit {unit.unit} now")
    if pacing.is_stale(moment.rules, moment.progress.next_step, lease.version):
        raise Refusal(
            410, LATE, f"lease {lease.lease} ran out, and policy {lease.policy.label} is too old to train on now"
        )
