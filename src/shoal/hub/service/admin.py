"""What the run's owner orders: checked from the root key down, carried out and recorded in one transaction.

AdminRequest ─► signed by the root, or by an admin it certified ─► not revoked ─► new ─► fresh ─► apply_order ─► ledger
"""

from __future__ import annotations

from typing import Any

from shoal.errors import ProtocolError
from shoal.hub.changes import Topic
from shoal.hub.service.context import ORDERS, Context, orders_of
from shoal.hub.state import nodes, orders
from shoal.hub.state.commands import Command, Record, Refusal
from shoal.hub.state.rows import NodeRow
from shoal.hub.storage import Writer
from shoal.protocol import AdminAction, AdminReply, AdminRequest, AdminVerb, NodeState, node_id, open_admin

REPEATED = AdminReply(changed=False, message="this very order was carried out before")


class Administration:
    def __init__(self, context: Context) -> None:
        config = context.config
        self._context = context
        self._estate = orders.Estate(
            config.run_id, config.root_key, config.key.public_key, config.sources, config.last_resort,
            config.certificates,
        )  # fmt: skip

    def act(self, request: AdminRequest) -> AdminReply:
        """The same order again gets the same state, and an answer that says so."""
        context, config = self._context, self._context.config
        try:
            action = open_admin(request, config.run_id, config.root_key)
        except ProtocolError as error:
            raise Refusal(403, "admin.signature", f"the order does not hold: {error}") from error
        by_root = request.action.signed_by == config.root_key
        with context.storage.read() as reader:  # who repeats old orders makes nobody wait
            if self._is_repeated(orders_of(reader), request, action, context.clock.now_ms()):
                return REPEATED
        with context.decision(exclusive=True) as (transaction, moment):
            known = orders_of(transaction)
            if self._is_repeated(known, request, action, moment.now_ms):
                return REPEATED
            try:
                after, changed, message = orders.apply_order(known, action, self._estate, by_root, moment.now_ms)
            except ProtocolError as error:
                raise Refusal(422, "admin.certificate", f"a certificate in the order does not hold: {error}") from error
            commands = self._about_nodes(transaction, moment.now_ms, action, known)
            changed = changed and (bool(commands) or action.verb not in orders.SANCTIONS)
            if changed:
                commands.append(Record("admin", _body(action, request, by_root), moment.now_ms))
            transaction.apply(commands)
            transaction.put_setting(ORDERS, after.model_dump_json())
        context.changes.notify(*Topic)
        return AdminReply(changed=changed, message=message if changed else f"nothing to do: {message}")

    def _is_repeated(self, known: orders.Orders, request: AdminRequest, action: AdminAction, now_ms: int) -> bool:
        """Whether this very order was carried out before; raise if it may not be carried out (any more)."""
        if request.action.signed_by in known.revoked:
            raise Refusal(403, "admin.revoked", "the key that signed this order was revoked")
        if any(action.id == seen for seen, _ in known.seen):
            return True
        orders.require_fresh(action, now_ms)
        return False

    def _about_nodes(
        self, transaction: Writer, now_ms: int, action: AdminAction, known: orders.Orders
    ) -> list[Command]:
        """What an order does to a node: a sanction or its end; and whose key is revoked is shut out."""
        if action.verb is AdminVerb.REVOKE:
            node = transaction.node(node_id(action.target))
            return [] if node is None else _ban(transaction, node, orders.REVOKED, now_ms)
        if action.verb not in orders.SANCTIONS:
            return []
        node = transaction.node(action.target)
        if node is None:
            raise Refusal(404, "node.unknown", f"there is no node {action.target[:64]!r} in this run")
        reason = action.reason or "by order of the run's owner"
        if action.verb is AdminVerb.PARDON:
            orders.require_pardonable(known, node.public_key)
            return nodes.pardon(node, reason, now_ms)
        orders.require_worker(node.role, node.public_key)
        if action.verb is AdminVerb.BAN:
            return _ban(transaction, node, reason, now_ms)
        return nodes.suspend(node, reason, now_ms, round(action.for_s * 1000) or None)


def _ban(transaction: Writer, node: NodeRow, reason: str, now_ms: int) -> list[Command]:
    banned = node.state is NodeState.BANNED
    return [] if banned else nodes.ban(node, reason, transaction.holdings(node.node), now_ms)


def _body(action: AdminAction, request: AdminRequest, by_root: bool) -> dict[str, Any]:
    """What the ledger keeps: the order in words, and as it was signed, so that nobody can have made it up."""
    by = "root" if by_root else node_id(request.action.signed_by)
    body = {"verb": action.verb.value, "target": action.target, "reason": action.reason, "by": by}
    if action.verb in orders.SANCTIONS:
        body["node"] = action.target
    elif action.verb is AdminVerb.REVOKE:
        body["node"] = node_id(action.target)
    return {**body, "order": request.model_dump(mode="json")}
