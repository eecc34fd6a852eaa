"""Policies announced by the trainer: versions go up by steps, incarnations void what the old one left behind.

Within one incarnation a version is announced once, with one digest. A new incarnation means that the trainer could
not reproduce a published digest: open leases and groups of the old one that are in no batch are void (a batch that is
written down stays, and is trained on as it is).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.hub.state.commands import AddPolicy, Command, Record, SaveLease, SaveUnit
from shoal.hub.state.machines import LeaseState, UnitState
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import LeaseRow, Moment, Progress, UnitRow
from shoal.hub.state.units import VOID_INCARNATION
from shoal.protocol import PolicyRef


@dataclass(frozen=True)
class Standing:
    """What an announcement may touch: alive units, active leases, units in batches that are not marked trained yet."""

    alive: Sequence[UnitRow] = ()
    leases: Sequence[LeaseRow] = ()
    batched: Sequence[UnitRow] = ()


def announce(moment: Moment, known: PolicyRef | None, standing: Standing, policy: PolicyRef) -> list[Command]:
    """Make `policy` the newest one. `known` is what was announced before under its (incarnation, version)."""
    progress, now_ms = moment.progress, moment.now_ms
    if known is not None:
        if known.digest != policy.digest:
            raise Refusal(
                409, "policy.digest", f"policy {policy.label} was announced with digest {known.digest[:16]}…: "
                "weights that differ need a new incarnation"
            )  # fmt: skip
        return []
    _require_order(progress, policy)
    body = {"incarnation": policy.incarnation, "version": policy.version, "digest": policy.digest}
    commands: list[Command] = [AddPolicy(policy, now_ms), Record("policy", body, now_ms)]
    if progress.policy is not None and policy.incarnation > progress.policy.incarnation:
        commands += _void_incarnation(standing, now_ms)
    trained = [unit for unit in standing.batched if unit.step is not None and unit.step < policy.version]
    return commands + [SaveUnit(unit.to(UnitState.TRAINED), unit.state) for unit in trained]


def _require_order(progress: Progress, policy: PolicyRef) -> None:
    newest = progress.policy
    if newest is not None and policy.incarnation < newest.incarnation:
        raise Refusal(
            409, "policy.incarnation", f"incarnation {policy.incarnation} is over: the newest policy is {newest.label}"
        )
    if newest is not None and policy.incarnation == newest.incarnation and policy.version < newest.version:
        raise Refusal(409, "policy.order", f"policy {policy.label} is older than the newest, {newest.label}")
    if policy.version > progress.next_step:
        raise Refusal(
            409, "policy.order", f"version {policy.version} cannot exist yet: step {progress.next_step} has no batch"
        )


def _void_incarnation(standing: Standing, now_ms: int) -> list[Command]:
    leases = [lease for lease in standing.leases if lease.state == LeaseState.ACTIVE]
    commands: list[Command] = [SaveLease(lease.to(LeaseState.VOID, now_ms), lease.state) for lease in leases]
    return commands + [
        SaveUnit(unit.to(UnitState.VOID, reason=VOID_INCARNATION), unit.state) for unit in standing.alive if unit.alive
    ]
