"""Registrations, heartbeats, and the orders of the run's owner, carried out and recorded in one transaction.

AdminRequest ─► signed by the root, or by an admin it certified ─► not revoked ─► new ─► fresh ─► apply_order ─► ledger
"""

from typing import Any

from shoal.errors import ProtocolError
from shoal.hub.changes import Topic
from shoal.hub.service.context import ORDERS, Context, node_view, orders_of, require_trusted
from shoal.hub.service.reporting import validator_alarms
from shoal.hub.state import Command, Moment, NodeRow, Record, Refusal, audits, leases, nodes, orders
from shoal.hub.storage import Presence, Writer
from shoal.protocol import AdminAction, AdminReply, AdminRequest, AdminVerb, NodeState, PolicyRef, node_id, open_admin
from shoal.protocol.node import Heartbeat, HeartbeatReply, NodeView, Registration, RoleCertificate, Vouch, check_spoken
from shoal.protocol.signing import open_document
from shoal.runtime.crash import point

MAX_VOUCH_BYTES = 2048  # a vouch is kept with every key and goes into the ledger, with all that its signer put in


class Membership:
    def __init__(self, context: Context) -> None:
        self._context = context

    def register(self, registration: Registration) -> NodeView:
        try:
            check_spoken("node", registration.protocol_version)
        except ProtocolError as error:
            raise Refusal(409, "protocol.version", str(error)) from error
        self._check_role(registration)
        _check_vouch(registration)
        with self._context.decision() as (transaction, moment):
            require_trusted(transaction, registration.public_key)
            known = transaction.node(node_id(registration.public_key))
            row, commands = nodes.register(known, registration, moment.now_ms)
            transaction.apply(commands)
            view = node_view(row, transaction.presence(row.node), moment.rules, moment.now_ms)
            point("hub.node.before_commit")
        point("hub.node.after_commit")
        return view

    def heartbeat_at_once(self, node: NodeRow, heartbeat: Heartbeat) -> HeartbeatReply | None:
        """From memory; None if it says what the database must hear: progress, or a validator's counts."""
        if heartbeat.progress or node.role == "validator":
            return None
        presence = _presence(node, heartbeat, self._context.clock.now_ms())
        self._context.storage.arrivals.said(presence)
        return self._reply(node, presence, self._context.policy)

    def heartbeat(self, node: NodeRow, heartbeat: Heartbeat) -> HeartbeatReply:
        """On probation progress has to be shown (`showing`), not said: fresh keys cost nothing."""
        if (reply := self.heartbeat_at_once(node, heartbeat)) is not None:
            return reply
        now_ms, said, deadlines = self._context.clock.now_ms(), heartbeat.progress, dict[str, int]()
        presence = _presence(node, heartbeat, now_ms)
        with self._context.storage.write(durable=False) as transaction:
            fresh = transaction.node(node.node) or node
            moment = Moment(self._context.rules, transaction.progress(counted=False), now_ms)
            if fresh.role == "validator":
                before = transaction.presence(node.node)
                transaction.apply(validator_alarms(fresh, before, presence, moment.progress.next_step))
            transaction.put_presence(presence)
            if said:
                held = [lease for lease in transaction.leases_held(node.node) if lease.lease in said]
                renewed = [] if fresh.on_probation else leases.renew(moment, held, said)
                transaction.apply(renewed)
                deadlines = {lease.lease: lease.deadline_ms for lease in held}
                deadlines |= {each.row.lease: each.row.deadline_ms for each in renewed}
        return self._reply(fresh, presence, moment.progress.policy, deadlines=deadlines)

    def _reply(self, node: NodeRow, presence: Presence, policy: PolicyRef | None, **more: Any) -> HeartbeatReply:
        rules = self._context.rules
        finished = policy is not None and policy.version >= rules.steps
        view = node_view(node, presence, rules, presence.last_seen_ms)
        return HeartbeatReply(node=view, policy=policy, finished=finished, **more)

    def _check_role(self, registration: Registration) -> None:
        if registration.role == "worker":
            return
        if registration.role in ("hub", "admin"):
            raise Refusal(403, "auth.role", f"a {registration.role} does not register with a hub")
        if registration.certificate is None:
            raise Refusal(403, "auth.certificate", f"the role {registration.role} needs the root key's certificate")
        config = self._context.config
        try:
            certificate = open_document(registration.certificate, RoleCertificate, config.root_key)
        except ProtocolError as error:
            raise Refusal(403, "auth.certificate", f"the certificate does not hold: {error}") from error
        expected = (config.run_id, registration.role, registration.public_key)
        if (certificate.run, certificate.role, certificate.public_key) != expected:
            raise Refusal(403, "auth.certificate", "the certificate is for another run, role or key")
        if registration.role == "trusted" and certificate.expires_at_ms is None:
            raise Refusal(403, "auth.certificate", "the certificate of a trusted worker must say when it ends")
        nodes.require_valid(certificate.expires_at_ms, self._context.clock.now_ms())


def _presence(node: NodeRow, heartbeat: Heartbeat, now_ms: int) -> Presence:
    since_ms = now_ms - round(heartbeat.waiting_s * 1000)
    return Presence(node.node, now_ms, heartbeat.doing, heartbeat.waiting_for, since_ms, heartbeat.counters)


def _check_vouch(registration: Registration) -> None:
    """The node itself brings its vouch: no owner claims a node that did not ask."""
    signed = registration.vouch
    if signed is None:
        return
    if registration.role in ("trainer", "validator"):
        raise Refusal(403, "vouch.role", f"only a worker earns, and can have an owner; this is a {registration.role}")
    if len(signed.model_dump_json()) > MAX_VOUCH_BYTES:
        raise Refusal(422, "vouch.size", f"a vouch has at most {MAX_VOUCH_BYTES} bytes")
    try:
        vouch = open_document(signed, Vouch, signed.signed_by)
    except ProtocolError as error:
        raise Refusal(403, "vouch.signature", f"the vouch does not hold: {error}") from error
    if vouch.owner != signed.signed_by or vouch.node != node_id(registration.public_key):
        raise Refusal(403, "vouch.other", "the vouch is for another node, or signed by another key than its owner's")


REPEATED = AdminReply(changed=False, message="this very order was carried out before")


class Administration:
    def __init__(self, context: Context) -> None:
        self._context, config = context, context.config
        own, sources = (config.run_id, config.root_key, config.key.public_key), (config.sources, config.last_resort)
        self._estate = orders.Estate(*own, *sources, config.certificates)

    def act(self, request: AdminRequest) -> AdminReply:
        context, config = self._context, self._context.config
        try:
            action = open_admin(request, config.run_id, config.root_key)
        except ProtocolError as error:
            raise Refusal(403, "admin.signature", f"the order does not hold: {error}") from error
        by_root = request.action.signed_by == config.root_key
        with context.storage.read() as reader:  # an old order that is repeated makes nobody wait
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
        if request.action.signed_by in known.revoked:
            raise Refusal(403, "admin.revoked", "the key that signed this order was revoked")
        if any(action.id == seen for seen, _ in known.seen):
            return True
        orders.require_fresh(action, now_ms)
        return False

    def _about_nodes(
        self, transaction: Writer, now_ms: int, action: AdminAction, known: orders.Orders
    ) -> list[Command]:
        if action.verb is AdminVerb.REVOKE:
            node = transaction.node(node_id(action.target))
            return [] if node is None else _ban(transaction, node, orders.REVOKED, now_ms)
        if action.verb not in orders.SANCTIONS:
            return []
        node = transaction.node(action.target)
        if node is None:
            raise Refusal(404, "node.unknown", f"there is no node {action.target[:64]!r} in this run")
        reason = action.reason or "by order of the run's owner"
        orders.require_allowed(known, action.verb, node.role, node.public_key)
        if action.verb is AdminVerb.PARDON:
            return nodes.pardon(node, reason, now_ms)
        if action.verb is AdminVerb.BAN:
            return _ban(transaction, node, reason, now_ms)
        return nodes.suspend(node, reason, now_ms, round(action.for_s * 1000) or None)


def _ban(transaction: Writer, node: NodeRow, reason: str, now_ms: int) -> list[Command]:
    if node.state is NodeState.BANNED:
        return []
    commands = nodes.ban(node, reason, transaction.holdings(node.node), now_ms)
    if node.certified:
        commands += audits.pull(node, transaction.untrained(node.node), None, True, now_ms)
        commands += audits.audit_fully(transaction.light_audits(node.node))
    return commands


def _body(action: AdminAction, request: AdminRequest, by_root: bool) -> dict[str, Any]:
    """For the ledger: the order in words, and as it was signed, so that nobody can have made it up."""
    by = "root" if by_root else node_id(request.action.signed_by)
    body = {"verb": action.verb.value, "target": action.target, "reason": action.reason, "by": by}
    if action.verb in orders.SANCTIONS:
        body["node"] = action.target
    elif action.verb is AdminVerb.REVOKE:
        body["node"] = node_id(action.target)
    return {**body, "order": request.model_dump(mode="json")}
