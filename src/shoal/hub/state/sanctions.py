"""Sanctions: a suspension ends by itself, a ban does not; only the run's owner can pardon.

    active ─ a statistical strike, lapses or soft rejections in a row ─► suspended ─ its time is over ─► active
       ▲                                                                    │
       └──────────────────────── pardon ◄─────────── banned ◄── too many strikes

The first suspension lasts a minute, each further one twice as long, up to a day. Its end is decided when the node asks
for work: until then nothing depends on it. A suspended node gets no leases; what it holds it may hand in, for that is
judged by its own verdict like everything else. Every sanction, and its end, of a node that ever had work accepted is a
row of the ledger; of others only the node's own row tells: whoever makes keys for nothing does not fill the ledger.

Trust is another axis (`reputation`): a suspension for a strike leaves the node on probation because of the strike, one
for lapses takes nothing but time. Whether the node is here is the third (`nodes.liveness`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.hub.state.commands import Command, Record, SaveLease, SaveNode, SaveUnit
from shoal.hub.state.machines import LeaseState, UnitState
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import Holding, NodeRow
from shoal.protocol import NodeState, Tally

FIRST_MS = 60_000
LONGEST_MS = 24 * 60 * 60 * 1000
OVER = "the suspension is over"


def suspension_ms(suspensions: int) -> int:
    """How long a node is suspended that was suspended so many times before.

    >>> [suspension_ms(count) // 60_000 for count in (0, 1, 2, 50)]
    [1, 2, 4, 1440]
    """
    return min(LONGEST_MS, FIRST_MS << min(suspensions, 20))


def suspend(node: NodeRow, reason: str, now_ms: int, for_ms: int | None = None) -> list[Command]:
    """Give the node nothing to do for a while; one that is suspended already stays so at least as long as it was."""
    if node.state is NodeState.BANNED:
        raise Refusal(409, "node.banned", f"node {node.node} is banned: a suspension would be no more than that")
    until_ms = now_ms + (suspension_ms(node.suspensions) if for_ms is None else for_ms)
    moved = node if node.state is NodeState.SUSPENDED else node.to(NodeState.SUSPENDED)
    row = replace(moved, reason=reason, until_ms=max(until_ms, node.until_ms or 0), suspensions=node.suspensions + 1)
    return [SaveNode(row, node.state), *recorded(row, now_ms, until_ms=row.until_ms)]


def ban(node: NodeRow, reason: str, holdings: Sequence[Holding], now_ms: int) -> list[Command]:
    """Ban a node; its active leases are void and their units open again, without counting as failures of the unit."""
    banned = node.to(NodeState.BANNED, reason=reason, until_ms=None)
    commands: list[Command] = [SaveNode(banned, node.state), *recorded(banned, now_ms)]
    for held in holdings:
        if held.lease.node == node.node and held.lease.state == LeaseState.ACTIVE:
            commands.append(SaveLease(held.lease.to(LeaseState.VOID, now_ms), held.lease.state))
            if held.unit.state is UnitState.LEASED:  # not too old meanwhile
                commands.append(SaveUnit(held.unit.reopened(), held.unit.state))
    return commands


def pardon(node: NodeRow, reason: str, now_ms: int) -> list[Command]:
    """The owner takes a sanction back: active again, without strikes or record, and on probation like anybody new."""
    if node.state is NodeState.ACTIVE:
        return []
    row = replace(
        node.to(NodeState.ACTIVE, reason="", until_ms=None),
        certain=0,
        statistical=0,
        streak=0,
        passed=0,
        soft=0,
        lapses=0,
        suspensions=0,
        record=Tally(),
        doubt=0.0,
        failed_check="",
    )
    return [SaveNode(row, node.state), *recorded(row, now_ms, reason=reason)]


def lift(node: NodeRow, now_ms: int) -> tuple[NodeRow, list[Command]]:
    """The node as it is now: active again if its suspension is over. The next one follows from how many there were."""
    if node.state is not NodeState.SUSPENDED or node.until_ms is None or node.until_ms > now_ms:
        return node, []
    row = node.to(NodeState.ACTIVE, reason="", until_ms=None)
    return row, [SaveNode(row, node.state), *recorded(row, now_ms, reason=OVER)]


def waiting(node: NodeRow, now_ms: int) -> str:
    """What a suspended node that asks for work is told."""
    if node.until_ms is None:
        return f"this node is suspended until the run's owner pardons it: {node.reason}"
    return f"this node is suspended for {-(-(node.until_ms - now_ms) // 1000)} s more: {node.reason}"


def recorded(row: NodeRow, now_ms: int, **more: Any) -> list[Command]:
    """The ledger's row of a sanction, if the node is in the ledger at all."""
    body = {"node": row.node, "state": row.state.value, "reason": row.reason, **more}
    return [Record("sanction", body, now_ms)] if row.on_chain else []
