"""Nodes: registration, what rejected work costs them, and whether they are here.

    rejected, certain ──────► banned                                      (`sanctions`)
    rejected, statistical ──► suspended and on probation, its record empty; banned for a second one that rests on work
                              leased after the first
    rejected, no severity ──► costs the credit of this submission only; 4 in a row suspend

A statistical strike is forgiven after many full audits passed in a row (`reputation`). A banned node gets no leases;
those it holds are void and their units open again. What it had handed in before is still judged, each submission by its
own verdict.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.hub.state import reputation, sanctions
from shoal.hub.state.commands import Command, Record, SaveNode
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import Holding, NodeRow
from shoal.protocol import NodeState, Registration, Severity, SignedDocument, Verdict, node_id
from shoal.protocol.node import Liveness

CERTAIN_TO_BAN = 1
STATISTICAL_TO_BAN = 2
SOFT_TO_SUSPEND = 4

HERE_MS = 20_000
"""Four heartbeats with ordinary settings. A worker that is not here any more loses its leases."""
SILENT_MS = 300_000
"""After this long a node is gone, not merely out of sight."""


def register(known: NodeRow | None, registration: Registration, now_ms: int) -> tuple[NodeRow, list[Command]]:
    """The node's row. The same registration again changes nothing; a key cannot change its role, nor its owner.
    A banned node keeps the name that it was banned under: it is found by it, and reappears under no other.

    The owner is the key that signed the vouch which the node brought along; the first one stays, whatever comes later
    without any. A worker is written into the ledger with its first accepted work (`joined`), trusted roles at once.
    """
    vouch = registration.vouch
    owner, document = ("", "") if vouch is None else (vouch.signed_by, vouch.model_dump_json())
    if known is None:
        row = NodeRow(
            node=node_id(registration.public_key),
            public_key=registration.public_key,
            role=registration.role,
            name=registration.name,
            registered_at_ms=now_ms,
            software=registration.software,
            owner=owner,
            vouch=document,
        )
        return row, [SaveNode(row, None), *(joined(row, now_ms, registration.certificate) if row.on_chain else [])]
    if known.role != registration.role:
        raise Refusal(
            409,
            "node.role",
            f"this key is registered as {known.role}; use another key to take part as {registration.role}",
        )
    if known.owner and owner not in ("", known.owner):
        raise Refusal(
            409,
            "vouch.owner",
            f"node {known.node} has an owner already ({known.owner[:16]}…), and what it earns stays with that one; "
            "give this machine a new key to work for another owner (another --folder)",
        )
    if known.state is NodeState.BANNED:
        return known, []
    row = replace(
        known,
        name=registration.name,
        software=registration.software,
        owner=known.owner or owner,
        vouch=known.vouch or document,
    )
    vouched = _vouched(row, now_ms) if row.on_chain and not known.owner else []
    return row, [] if row == known else [SaveNode(row, known.state), *vouched]


def joined(row: NodeRow, now_ms: int, certificate: SignedDocument | None = None) -> list[Command]:
    """A node's first rows in the ledger: its key, for trusted roles what the root key signed for it; its owner; and
    the sanction that it is under, if its first work is accepted only then."""
    body: dict[str, Any] = {"node": row.node, "public_key": row.public_key, "role": row.role, "name": row.name}
    if certificate is not None:
        body["certificate"] = certificate.model_dump(mode="json")
    sanction = [] if row.state is NodeState.ACTIVE else sanctions.recorded(row, now_ms, until_ms=row.until_ms)
    return [Record("node", body, now_ms), *_vouched(row, now_ms), *sanction]


def _vouched(row: NodeRow, now_ms: int) -> list[Command]:
    """The ledger's row of an owner, with the document that the owner signed."""
    if not row.owner:
        return []
    body = {"node": row.node, "owner": row.owner, "vouch": json.loads(row.vouch)}
    return [Record("vouch", body, now_ms)]


def require_welcome(node: NodeRow) -> None:
    """Raise if the node is banned. A suspended one gets nothing to do, but may hand in what it has done."""
    if node.state is NodeState.BANNED:
        raise Refusal(403, "node.banned", f"this node is banned: {node.reason}")


def liveness(last_seen_ms: int, now_ms: int) -> Liveness:
    """Whether a node is here, by when it was last heard of.

    >>> [liveness(0, now_ms) for now_ms in (20_000, 20_001, 300_001)]
    ['here', 'silent', 'gone']
    """
    unheard_ms = now_ms - last_seen_ms
    if unheard_ms <= HERE_MS:
        return "here"
    return "silent" if unheard_ms <= SILENT_MS else "gone"


def is_over(node: NodeRow) -> bool:
    """Whether the node has too many strikes to stay."""
    return node.certain >= CERTAIN_TO_BAN or node.statistical >= STATISTICAL_TO_BAN


def reject(
    node: NodeRow, verdict: Verdict, severity: Severity | None, holdings: Sequence[Holding], now_ms: int
) -> list[Command]:
    """Count a rejected submission, as `severity` says; suspend or ban the node if that was one too many."""
    struck = reputation.failed(node, severity, verdict.reason, now_ms)
    if node.state is NodeState.BANNED:
        return [SaveNode(struck, node.state)]
    reason = f"{verdict.reason}: {verdict.message}" if verdict.message else verdict.reason
    if severity is not None and is_over(struck):
        return sanctions.ban(struck, reason, holdings, now_ms)
    if severity is not None:
        return sanctions.suspend(struck, reason, now_ms)
    if node.state is NodeState.ACTIVE and struck.soft >= SOFT_TO_SUSPEND:
        return sanctions.suspend(struck, f"{struck.soft} groups in a row were rejected, the last for {reason}", now_ms)
    return [SaveNode(struck, node.state)]
