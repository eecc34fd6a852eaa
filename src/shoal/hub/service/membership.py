"""Nodes: registration with role certificates, heartbeats, which also renew the leases that a node is at work on."""

from __future__ import annotations

from shoal.errors import ProtocolError
from shoal.hub.service.context import Context, node_view, require_trusted
from shoal.hub.service.readiness import validator_alarms
from shoal.hub.state import leases, nodes, pacing
from shoal.hub.state.commands import Refusal
from shoal.hub.state.rows import Moment, NodeRow
from shoal.hub.storage import Presence
from shoal.protocol.identity import node_id
from shoal.protocol.node import Heartbeat, HeartbeatReply, NodeView, Registration, RoleCertificate, Vouch, check_spoken
from shoal.protocol.signing import open_document
from shoal.runtime.crash import point

MAX_VOUCH_BYTES = 2048
"""Kept with every key, in the end in the ledger: what else its signer put into the document would be, too."""


class Membership:
    def __init__(self, context: Context) -> None:
        self._context = context

    def register(self, registration: Registration) -> NodeView:
        """The request's signature was checked against the key in the registration."""
        try:
            check_spoken("node", registration.protocol_version)
        except ProtocolError as error:
            raise Refusal(409, "protocol.version", str(error)) from error
        self._check_role(registration)
        check_vouch(registration)
        with self._context.decision() as (transaction, moment):
            require_trusted(transaction, registration.public_key)
            known = transaction.node(node_id(registration.public_key))
            row, commands = nodes.register(known, registration, moment.now_ms)
            transaction.apply(commands)
            view = node_view(row, transaction.presence(row.node), moment.rules, moment.now_ms)
            point("hub.node.before_commit")
        point("hub.node.after_commit")
        return view

    def heartbeat(self, node: NodeRow, heartbeat: Heartbeat) -> HeartbeatReply:
        """On probation progress has to be shown (`showing`), not said: fresh keys cost nothing, and may say
        anything."""
        now_ms, said, deadlines = self._context.clock.now_ms(), heartbeat.progress, dict[str, int]()
        presence = Presence(
            node=node.node, last_seen_ms=now_ms, doing=heartbeat.doing, waiting_for=heartbeat.waiting_for,
            waiting_since_ms=now_ms - round(heartbeat.waiting_s * 1000), counters=heartbeat.counters,
        )  # fmt: skip
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
        return HeartbeatReply(
            node=node_view(fresh, presence, moment.rules, now_ms), policy=moment.progress.policy,
            finished=pacing.is_finished(moment.rules, moment.progress), deadlines=deadlines,
        )  # fmt: skip

    def _check_role(self, registration: Registration) -> None:
        """Trusted roles need a certificate of the root key for this run, this role and this very key."""
        if registration.role == "worker":
            return
        if registration.role in ("hub", "admin"):
            raise Refusal(403, "auth.role", f"a {registration.role} does not register with a hub")
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


def check_vouch(registration: Registration) -> None:
    """Refuse a vouch that does not hold. The node itself brings it: nobody is claimed unasked."""
    signed = registration.vouch
    if signed is None:
        return
    if registration.role != "worker":
        raise Refusal(403, "vouch.role", f"only a worker earns, and can have an owner; this is a {registration.role}")
    if len(signed.model_dump_json()) > MAX_VOUCH_BYTES:
        raise Refusal(422, "vouch.size", f"a vouch has at most {MAX_VOUCH_BYTES} bytes")
    try:
        vouch = open_document(signed, Vouch, signed.signed_by)
    except ProtocolError as error:
        raise Refusal(403, "vouch.signature", f"the vouch does not hold: {error}") from error
    if vouch.owner != signed.signed_by or vouch.node != node_id(registration.public_key):
        raise Refusal(403, "vouch.other", "the vouch is for another node, or signed by another key than its owner's")
