"""Nodes: registration, whether they are here, how many leases they may hold, and sanctions.

    window      at first a quarter of `leases_per_node`, at least one; one more for each accepted group; half when
                leases lapse or are given back; one while too many groups are unsure (`reputation`)
    sanction    active ─ a statistical strike, 8 lapses or 4 soft rejections in a row ─► suspended ─ time over ─► active
                   ▲                                                                         │
                   └────────────────── pardon by the owner ◄── banned ◄── one certain, or two statistical failures
                            a trusted worker: not pardoned ◄── banned ◄── one failure of either kind: it is revoked

Leases that lapse at the same time halve the window once. Giving leases back halves it too, or a node could keep units
from others at no cost; it counts as a lapse only if the window is one already. A suspended node may submit what it
holds; a banned node's leases are void, and what it submitted before is still judged.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.hub.state import Command, Record, Refusal, Save, reputation
from shoal.hub.state.rows import Holding, LeaseRow, LeaseState, NodeRow, Rules, UnitState
from shoal.protocol import Liveness, NodeState, Registration, Severity, SignedDocument, Tally, Verdict, node_id
from shoal.protocol.node import titled

CERTAIN_TO_BAN, STATISTICAL_TO_BAN = 1, 2
SOFT_TO_SUSPEND, LAPSES_TO_SUSPEND = 4, 8
HERE_MS = 20_000  # four heartbeats with ordinary settings. A worker that is not here any more loses its leases.
SILENT_MS = 300_000  # after this long a node is gone, not merely out of sight
FIRST_PART = 4
PACE_WEIGHT = 4  # the newest measurement counts a quarter in a node's pace
FIRST_MS, LONGEST_MS = 60_000, 24 * 60 * 60 * 1000
OVER, EXPIRED = "the suspension is over", "certificate.expired"


def register(known: NodeRow | None, registration: Registration, now_ms: int) -> tuple[NodeRow, list[Command]]:
    """A key cannot change its role, nor its owner (the key that signed the vouch). A banned node keeps its name. A
    worker gets into the ledger with its first accepted work (`joined`), trusted roles at once."""
    vouch = registration.vouch
    owner, document = ("", "") if vouch is None else (vouch.signed_by, vouch.model_dump_json())
    name, software, signed = registration.name, registration.software, registration.certificate
    expires_at_ms = None if signed is None else signed.document.get("expires_at_ms")
    if known is None:
        row = NodeRow(
            node_id(registration.public_key), registration.public_key, registration.role, name, now_ms, software,
            owner=owner, vouch=document, expires_at_ms=expires_at_ms,
        )  # fmt: skip
        return row, [Save(row, None), *(joined(row, now_ms, signed) if row.on_chain else [])]
    if known.role != registration.role:
        other = titled(registration.role)
        sentence = f"this key is registered as {titled(known.role)}; use another key to take part as {other}"
        raise Refusal(409, "node.role", sentence)
    if known.owner and owner not in ("", known.owner):
        sentence = f"node {known.node} has an owner already ({known.owner[:16]}…): use a new key (another --folder)"
        raise Refusal(409, "vouch.owner", sentence)
    if known.state is NodeState.BANNED:
        return known, []
    row = replace(
        known, name=name, software=software, owner=known.owner or owner, vouch=known.vouch or document,
        expires_at_ms=expires_at_ms,
    )  # fmt: skip
    vouched = _vouched(row, now_ms) if row.on_chain and not known.owner else []
    return row, [] if row == known else [Save(row, known.state), *vouched]


def joined(row: NodeRow, now_ms: int, certificate: SignedDocument | None = None) -> list[Command]:
    body: dict[str, Any] = {"node": row.node, "public_key": row.public_key, "role": row.role, "name": row.name}
    if certificate is not None:
        body["certificate"] = certificate.model_dump(mode="json")
    sanction = [] if row.state is NodeState.ACTIVE else _recorded(row, now_ms, until_ms=row.until_ms)
    return [Record("node", body, now_ms), *_vouched(row, now_ms), *sanction]


def _vouched(row: NodeRow, now_ms: int) -> list[Command]:
    body = {"node": row.node, "owner": row.owner, "vouch": json.loads(row.vouch or "null")}
    return [Record("vouch", body, now_ms)] if row.owner else []


def require_welcome(node: NodeRow, now_ms: int) -> None:
    """A suspended node is welcome: it may submit what it has done."""
    if node.state is NodeState.BANNED:
        raise Refusal(403, "node.banned", f"this node is banned: {node.reason}")
    require_valid(node.expires_at_ms, now_ms)


def require_valid(expires_at_ms: int | None, now_ms: int) -> None:
    if expires_at_ms is not None and expires_at_ms <= now_ms:
        ended = f"its certificate ended {(now_ms - expires_at_ms) // 1000} s ago"
        raise Refusal(403, EXPIRED, f"{ended}: ask the run's owner for another (shoal admin add-worker)")


def liveness(last_seen_ms: int, now_ms: int) -> Liveness:
    unheard_ms = now_ms - last_seen_ms
    return "here" if unheard_ms <= HERE_MS else "silent" if unheard_ms <= SILENT_MS else "gone"


def window(rules: Rules, node: NodeRow) -> int:
    if node.doubt >= reputation.DOUBTED:
        return 1
    return min(node.window or max(1, rules.leases_per_node // FIRST_PART), rules.leases_per_node)


def widened(rules: Rules, node: NodeRow) -> NodeRow:
    return replace(node, window=min(window(rules, node) + 1, rules.leases_per_node))


def lapse(rules: Rules, node: NodeRow, count: int, now_ms: int) -> list[Command]:
    halved = max(1, window(rules, node) // 2)
    after = replace(node, window=halved, lapsed=node.lapsed + count, lapses=node.lapses + count)
    if node.state is NodeState.ACTIVE and after.window == 1 and after.lapses >= LAPSES_TO_SUSPEND:
        return suspend(after, f"leases.lapsed: {after.lapses} leases in a row came to nothing", now_ms)
    return [Save(after, node.state)]


def give_back(rules: Rules, node: NodeRow, count: int, now_ms: int) -> list[Command]:
    if window(rules, node) == 1:
        return lapse(rules, node, count, now_ms)
    return [Save(replace(node, window=window(rules, node) // 2), node.state)]


def delivered(node: NodeRow, lease: LeaseRow, now_ms: int) -> NodeRow:
    """Leases of one request are generated together: the pace per group is the time divided by their number."""
    took_ms = max(1, (now_ms - lease.issued_at_ms) // max(1, lease.granted))
    pace_ms = took_ms if node.pace_ms == 0 else (node.pace_ms * (PACE_WEIGHT - 1) + took_ms) // PACE_WEIGHT
    return replace(node, lapses=0, pace_ms=max(1, pace_ms))


def is_over(node: NodeRow) -> bool:
    most = 1 if node.certified else STATISTICAL_TO_BAN  # one failed sample stands for all groups that were not sampled
    return node.certain >= CERTAIN_TO_BAN or node.statistical >= most


def reject(
    node: NodeRow, verdict: Verdict, severity: Severity | None, holdings: Sequence[Holding], now_ms: int
) -> list[Command]:
    struck = reputation.failed(node, severity, verdict.reason, now_ms)
    reason = f"{verdict.reason}: {verdict.message}" if verdict.message else verdict.reason
    reason = f"its certificate is revoked, {reason}" if node.certified and severity is not None else reason
    if node.state is NodeState.BANNED:
        return [Save(struck, node.state)]
    if severity is not None:
        return ban(struck, reason, holdings, now_ms) if is_over(struck) else suspend(struck, reason, now_ms)
    if node.state is NodeState.ACTIVE and struck.soft >= SOFT_TO_SUSPEND:
        return suspend(struck, f"{struck.soft} groups in a row were rejected, the last for {reason}", now_ms)
    return [Save(struck, node.state)]


def suspend(node: NodeRow, reason: str, now_ms: int, for_ms: int | None = None) -> list[Command]:
    """Without `for_ms` each suspension lasts twice as long as the one before. It never ends a present one earlier."""
    if node.state is NodeState.BANNED:
        raise Refusal(409, "node.banned", f"node {node.node} is banned: a suspension would be no more than that")
    if for_ms is None:
        for_ms = min(LONGEST_MS, FIRST_MS << min(node.suspensions, 20))
    until_ms = max(now_ms + for_ms, node.until_ms or 0)
    moved = node if node.state is NodeState.SUSPENDED else node.to(NodeState.SUSPENDED)
    row = replace(moved, reason=reason, until_ms=until_ms, suspensions=node.suspensions + 1)
    return [Save(row, node.state), *_recorded(row, now_ms, until_ms=until_ms)]


def ban(node: NodeRow, reason: str, holdings: Sequence[Holding], now_ms: int) -> list[Command]:
    """The node's active leases are void, and their units open again: no failures of theirs."""
    banned = node.to(NodeState.BANNED, reason=reason, until_ms=None)
    commands: list[Command] = [Save(banned, node.state), *_recorded(banned, now_ms)]
    for held in holdings:
        commands.append(Save(held.lease.to(LeaseState.VOID, ended_at_ms=now_ms), held.lease.state))
        if held.unit.state is UnitState.LEASED:  # not too old meanwhile
            commands.append(Save(held.unit.reopened(), held.unit.state))
    return commands


def pardon(node: NodeRow, reason: str, now_ms: int) -> list[Command]:
    if node.state is NodeState.ACTIVE:
        return []
    row = node.to(
        NodeState.ACTIVE, reason="", until_ms=None, certain=0, statistical=0, streak=0, passed=0, soft=0, lapses=0,
        suspensions=0, record=Tally(), doubt=0.0, failed_check="",
    )  # fmt: skip
    return [Save(row, node.state), *_recorded(row, now_ms, reason=reason)]


def lift(node: NodeRow, now_ms: int) -> tuple[NodeRow, list[Command]]:
    if node.state is not NodeState.SUSPENDED or node.until_ms is None or node.until_ms > now_ms:
        return node, []
    row = node.to(NodeState.ACTIVE, reason="", until_ms=None)
    return row, [Save(row, node.state), *_recorded(row, now_ms, reason=OVER)]


def _recorded(row: NodeRow, now_ms: int, **more: Any) -> list[Command]:
    body = {"node": row.node, "state": row.state.value, "reason": row.reason, **more}
    return [Record("sanction", body, now_ms)] if row.on_chain else []
