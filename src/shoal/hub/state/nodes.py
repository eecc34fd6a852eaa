"""Nodes: registration, strikes and what they cost.

A hard sanction needs one `certain` failure or two `statistical` ones; a rejection without a severity costs credit only.
A statistical strike is forgiven after many full audits passed in a row (`reputation`). A banned node gets no leases;
those it holds are void and their units open again. What it had handed in before is still judged, each submission by its
own verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.hub.state import reputation
from shoal.hub.state.commands import Command, Record, SaveLease, SaveNode, SaveUnit
from shoal.hub.state.machines import LeaseState
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import Holding, NodeRow
from shoal.protocol import NodeState, Registration, Verdict, node_id

CERTAIN_TO_BAN = 1
STATISTICAL_TO_BAN = 2


def register(known: NodeRow | None, registration: Registration, now_ms: int) -> tuple[NodeRow, list[Command]]:
    """The node's row. The same registration again changes nothing; a key cannot change its role."""
    if known is None:
        row = NodeRow(
            node=node_id(registration.public_key),
            public_key=registration.public_key,
            role=registration.role,
            name=registration.name,
            registered_at_ms=now_ms,
            software=registration.software,
        )
        body = {"node": row.node, "public_key": row.public_key, "role": row.role, "name": row.name}
        return row, [SaveNode(row, None), Record("node", body, now_ms)]
    if known.role != registration.role:
        raise Refusal(
            409,
            "node.role",
            f"this key is registered as {known.role}; use another key to take part as {registration.role}",
        )
    row = replace(known, name=registration.name, software=registration.software)
    return row, [] if row == known else [SaveNode(row, known.state)]


def require_active(node: NodeRow) -> None:
    """Raise unless the node may get work."""
    if node.state == NodeState.BANNED:
        raise Refusal(403, "node.banned", f"this node is banned: {node.reason}")
    if node.state == NodeState.SUSPENDED:
        raise Refusal(403, "node.suspended", f"this node is suspended: {node.reason}")


def is_over(node: NodeRow) -> bool:
    """Whether the node has too many strikes to stay."""
    return node.certain >= CERTAIN_TO_BAN or node.statistical >= STATISTICAL_TO_BAN


def reject(node: NodeRow, verdict: Verdict, holdings: Sequence[Holding], now_ms: int) -> list[Command]:
    """Count a rejected submission; ban the node if that was one too many."""
    struck = reputation.failed(node, verdict.severity)
    if not is_over(struck) or node.state == NodeState.BANNED:
        return [SaveNode(struck, node.state)]
    reason = f"{verdict.reason}: {verdict.message}" if verdict.message else verdict.reason
    return ban(struck, reason, holdings, now_ms)


def ban(node: NodeRow, reason: str, holdings: Sequence[Holding], now_ms: int) -> list[Command]:
    """Ban a node; its active leases are void and their units open again, without counting as failures of the unit."""
    banned = node.to(NodeState.BANNED, reason=reason)
    body = {"node": node.node, "state": banned.state.value, "reason": reason}
    commands: list[Command] = [SaveNode(banned, node.state), Record("sanction", body, now_ms)]
    for held in holdings:
        if held.lease.node == node.node and held.lease.state == LeaseState.ACTIVE:
            commands.append(SaveLease(held.lease.to(LeaseState.VOID), held.lease.state))
            commands.append(SaveUnit(held.unit.reopened(), held.unit.state))
    return commands
