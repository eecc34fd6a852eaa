"""Leases: who gets which unit, and what happens when a lease ends without a submission.

worker asks ─► open units, lowest number first ─► then new ones, while pacing leaves room ─► leases
               (a newcomer: within newcomers' share, and new units only while established nodes are asking)
deadline passes, the worker gives up or is gone ─► the unit is open again, task and seeds unchanged
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

from shoal.hub.state import newcomers, pacing
from shoal.hub.state.commands import Command, SaveLease, SaveUnit
from shoal.hub.state.machines import LeaseState, UnitState
from shoal.hub.state.nodes import require_active
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import PROBATION_AUDITS, Holding, LeaseRow, Moment, NodeRow, UnitRow
from shoal.protocol import PolicyRef

NEWCOMER_PART = 4


@dataclass(frozen=True)
class Ask:
    """A worker's request: `held` leases are active already, `granted` are those that this very request got before."""

    node: NodeRow
    request: str
    max_units: int
    held: int
    granted: tuple[LeaseRow, ...] = ()
    crowd: newcomers.Crowd = field(default_factory=newcomers.Crowd)


@dataclass(frozen=True)
class Grant:
    """The leases, or none and the reason in words."""

    leases: tuple[LeaseRow, ...] = ()
    commands: tuple[Command, ...] = ()
    waiting: str = ""


@dataclass(frozen=True)
class Draws:
    """How a unit gets its task and a lease its signed form; both follow from their arguments."""

    task_of: Callable[[int], str]
    document: Callable[[LeaseRow, UnitRow], str]


def grant(moment: Moment, open_units: Sequence[UnitRow], ask: Ask, draws: Draws) -> Grant:
    """Leases for `ask`; the same request gets the same leases again."""
    if ask.granted:
        return Grant(leases=ask.granted)
    require_active(ask.node)
    rules, progress = moment.rules, moment.progress
    policy = progress.policy
    if policy is None or pacing.is_finished(rules, progress):
        return Grant(waiting="the run is finished" if policy else "no policy has been published yet")
    # Who has shown nothing yet gets little: fresh keys are free, and each could sit on its leases until they run out.
    most = rules.leases_per_node if ask.node.accepted else max(1, rules.leases_per_node // NEWCOMER_PART)
    count = min(ask.max_units, most - ask.held)
    if count <= 0:
        return Grant(
            waiting=f"this node holds {ask.held} leases, the most that it may hold now: submit or release some"
        )
    room = newcomers.room_for(moment, ask.node, ask.crowd)
    if room is not None and room < 1:
        return Grant(waiting=_crowded(moment, ask))
    again = open_units if newcomers.may_try_again(moment, ask.node, ask.crowd) else ()
    units = _pick_units(moment, again, draws, count if room is None else min(count, room))
    if not units:
        return Grant(waiting=why_no_unit(moment))
    return _lease_units(moment, units, ask, policy, draws)


def _crowded(moment: Moment, ask: Ask) -> str:
    most = newcomers.most_in_hand(moment)
    return (
        f"nodes on probation have {ask.crowd.in_hand} units in hand, and may have {most} together while established "
        f"ones are here: a place comes free with every group that is judged; probation ends after {PROBATION_AUDITS}"
    )


def why_no_unit(moment: Moment) -> str:
    """Why there is nothing to give out, in words."""
    rules, progress = moment.rules, moment.progress
    label = progress.policy.label if progress.policy else "?"
    most = pacing.cap(rules, progress)
    if most == 0:
        return f"all groups for policy {label} are generated: waiting for the trainer to publish the next one"
    return f"all {progress.alive} units of step {progress.next_step} (policy {label}) are given out or being checked"


def _pick_units(moment: Moment, open_units: Sequence[UnitRow], draws: Draws, count: int) -> list[tuple[UnitRow, bool]]:
    """Up to `count` units, each with whether it is new."""
    progress = moment.progress
    again = sorted(open_units, key=lambda unit: unit.unit)[:count]
    fresh = min(count - len(again), pacing.room(moment.rules, progress))
    numbers = range(progress.next_unit, progress.next_unit + fresh)
    return [(unit, False) for unit in again] + [(UnitRow(number, draws.task_of(number)), True) for number in numbers]


def _lease_units(moment: Moment, units: list[tuple[UnitRow, bool]], ask: Ask, policy: PolicyRef, draws: Draws) -> Grant:
    leases: list[LeaseRow] = []
    commands: list[Command] = []
    for unit, is_new in units:
        lease = LeaseRow(
            lease=f"u{unit.unit}a{unit.attempt}",  # unique, because every lease of a unit has its own attempt
            unit=unit.unit,
            node=ask.node.node,
            attempt=unit.attempt,
            request=ask.request,
            incarnation=policy.incarnation,
            version=policy.version,
            digest=policy.digest,
            issued_at_ms=moment.now_ms,
            deadline_ms=moment.now_ms + moment.rules.lease_ms,
        )
        lease = replace(lease, document=draws.document(lease, unit))
        leases.append(lease)
        after = unit.to(UnitState.LEASED, attempt=unit.attempt + 1)
        commands += [SaveUnit(after, None if is_new else unit.state), SaveLease(lease, None)]
    return Grant(leases=tuple(leases), commands=tuple(commands))


def expire(moment: Moment, holdings: Sequence[Holding]) -> list[Command]:
    """End the leases that are past their deadline; their units are open again.

    That is no failure of the unit: whoever hoards leases, or hands in rubbish, must not be able to void work.
    """
    return end([held for held in holdings if _is_overdue(held.lease, moment.now_ms)])


def abandon(holdings: Sequence[Holding], request: str, held: Container[str]) -> list[Command]:
    """End the leases that their node no longer knows, as if they had run out; those of this very `request` stand.

    Ended, not given back: should the work turn up after all, it is taken while its unit is free.
    """
    return end([each for each in holdings if each.lease.request != request and each.lease.lease not in held])


def end(holdings: Sequence[Holding]) -> list[Command]:
    """End active leases: their time is over, or their node has lost them or is gone. Their units are open again."""
    commands: list[Command] = [SaveLease(held.lease.to(LeaseState.EXPIRED), held.lease.state) for held in holdings]
    return commands + [SaveUnit(held.unit.reopened(), held.unit.state) for held in holdings]


def _is_overdue(lease: LeaseRow, now_ms: int) -> bool:
    return lease.state == LeaseState.ACTIVE and lease.deadline_ms <= now_ms


def release(node: str, holdings: Sequence[Holding]) -> list[Command]:
    """A worker gives leases back. Ended ones are ignored, so that asking twice is harmless.

    A release is no failure of the unit: no number of stopping workers can void it.
    """
    commands: list[Command] = []
    for held in holdings:
        if held.lease.node != node:
            raise Refusal(403, "lease.not_yours", f"lease {held.lease.lease} belongs to another node")
        if held.lease.state == LeaseState.ACTIVE:
            commands.append(SaveLease(held.lease.to(LeaseState.RELEASED), held.lease.state))
            commands.append(SaveUnit(held.unit.reopened(), held.unit.state))
    return commands
