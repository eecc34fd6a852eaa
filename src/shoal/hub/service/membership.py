"""Nodes: registration with role certificates, heartbeats."""

from __future__ import annotations

from shoal.errors import ProtocolError
from shoal.hub.service.context import Context, node_view
from shoal.hub.service.readiness import MISSED, canary_problem
from shoal.hub.state import nodes, pacing
from shoal.hub.state.commands import RaiseAlarm
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import NodeRow
from shoal.hub.storage import Presence
from shoal.protocol import (
    PROTOCOL_VERSION,
    Heartbeat,
    HeartbeatReply,
    NodeView,
    Registration,
    RoleCertificate,
    node_id,
    open_document,
)


class Membership:
    def __init__(self, context: Context) -> None:
        self._context = context

    def register(self, registration: Registration) -> NodeView:
        """Take a node in. The request's signature was checked against the key in the registration."""
        self._check_version(registration)
        self._check_role(registration)
        with self._context.decision() as (transaction, moment):
            known = transaction.node(node_id(registration.public_key))
            row, commands = nodes.register(known, registration, moment.now_ms)
            transaction.apply(commands)
            return node_view(row, transaction.presence(row.node))

    def heartbeat(self, node: NodeRow, heartbeat: Heartbeat) -> HeartbeatReply:
        now_ms = self._context.clock.now_ms()
        with self._context.storage.write(durable=False) as transaction:
            presence = Presence(
                node=node.node,
                last_seen_ms=now_ms,
                doing=heartbeat.doing,
                waiting_for=heartbeat.waiting_for,
                waiting_since_ms=now_ms - round(heartbeat.waiting_s * 1000),
                counters=heartbeat.counters,
            )
            said = transaction.presence(node.node)
            transaction.put_presence(presence)
            progress = transaction.progress()
            fresh = transaction.node(node.node) or node
            transaction.apply(canary_alarm(fresh, said, presence, progress.next_step))
        return HeartbeatReply(
            node=node_view(fresh, presence),
            policy=progress.policy,
            finished=pacing.is_finished(self._context.rules, progress),
        )

    def _check_version(self, registration: Registration) -> None:
        if registration.protocol_version != PROTOCOL_VERSION:
            raise Refusal(
                409,
                "protocol.version",
                f"this hub speaks protocol {PROTOCOL_VERSION}, the node speaks {registration.protocol_version}: "
                "install the version of shoal that the run uses",
            )

    def _check_role(self, registration: Registration) -> None:
        """Trusted roles need a certificate of the root key for this run, this role and this very key."""
        if registration.role == "worker":
            return
        if registration.role == "hub":
            raise Refusal(403, "auth.role", "a hub does not register with a hub")
        if registration.certificate is None:
            raise Refusal(403, "auth.certificate", f"a {registration.role} needs a certificate signed by the root key")
        config = self._context.config
        try:
            certificate = open_document(registration.certificate, RoleCertificate, config.root_key)
        except ProtocolError as error:
            raise Refusal(403, "auth.certificate", f"the certificate does not hold: {error}") from error
        expected = (config.run_id, registration.role, registration.public_key)
        if (certificate.run, certificate.role, certificate.public_key) != expected:
            raise Refusal(403, "auth.certificate", "the certificate is for another run, role or key")


def canary_alarm(node: NodeRow, before: Presence | None, now: Presence, step: int) -> list[RaiseAlarm]:
    """An alarm for each known-bad submission that a validator says it let pass; its further heartbeats add none."""
    known = before.counters.get(MISSED, 0) if before is not None else 0
    if node.role != "validator" or now.counters.get(MISSED, 0) <= known:
        return []
    return [RaiseAlarm(step, f"canary.missed.{node.node[:8]}", canary_problem(node, now), now.last_seen_ms)]
