"""The real services over a storage in memory, driven without HTTP: what the state-machine tests play on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit import hub as kit
from kit.storage import Stored, apply, changed
from shoal import protocol
from shoal.hub.service import Hub, retry
from shoal.hub.state import Command, Holding, NodeRow, Refusal
from shoal.hub.storage import SqliteStorage
from shoal.runtime.clock import ManualClock
from shoal.simulator.world import MemoryBlobs


class Play:
    """A run on stage: every call of every role, with refusals as values."""

    def __init__(self, folder: Path, run: dict[str, Any], settings: dict[str, Any], **changes: Any) -> None:
        self.clock = ManualClock()
        self.storage = SqliteStorage(None)
        self.stored = Stored(self.storage)
        self.config = replace(kit.make_config(folder, run, settings), **changes)
        self.blobs = MemoryBlobs()
        self.restart()
        self.rules = self.hub.context.rules
        self.trainer = self._trusted(kit.TRAINER, "trainer")
        self.validator = self._trusted(kit.VALIDATOR, "validator")
        self.workers: list[NodeRow] = []
        self.leases: list[protocol.Lease] = []
        self.entrusted: list[protocol.Lease] = []
        self.audits: list[protocol.Audit] = []

    def restart(self) -> None:
        """Another hub over the same storage."""
        self.hub = Hub(self.config, self.clock, self.storage)
        self.hub.context.blobs = self.blobs  # type: ignore[assignment]

    def _trusted(self, key: protocol.SigningKey, role: Any) -> NodeRow:
        body = protocol.Registration(public_key=key.public_key, role=role, certificate=kit.certificate(key, role))
        return self._node(self.hub.membership.register(body).node)

    def _node(self, node: str) -> NodeRow:
        row: NodeRow = self.stored.node(node)
        return row

    def join(self, streak: int = 0, passed: int = 1) -> NodeRow:
        """A new worker that has passed one full audit; with a `streak`, so many before the play begins."""
        key = kit.worker_key(len(self.workers) + 1)
        row = self._node(self.hub.membership.register(protocol.Registration(public_key=key.public_key)).node)
        apply(self.storage, changed(row, streak=streak, passed=max(streak, passed)))
        self.workers.append(self._node(row.node))
        return self.workers[-1]

    def join_trusted(self, for_s: float = 10**6) -> NodeRow:
        """A new trusted worker, whose certificate ends."""
        key, ends_ms = kit.worker_key(len(self.workers) + 1), self.hub.context.clock.now_ms() + round(for_s * 1000)
        signed = kit.certificate(key, "trusted", expires_at_ms=ends_ms)
        body = protocol.Registration(public_key=key.public_key, role="trusted", certificate=signed)
        self.workers.append(self._node(self.hub.membership.register(body).node))
        return self.workers[-1]

    def revoke(self, worker: NodeRow) -> None:
        order = kit.action("revoke", target=worker.public_key, issued_at_ms=self.hub.context.clock.now_ms())
        self.hub.administration.act(protocol.AdminRequest(action=protocol.sign_document(order, kit.ROOT)))

    def lease(
        self, worker: NodeRow, count: int, request: str | None = None, profile: str = "torch/cpu/float32"
    ) -> list[protocol.Lease]:
        self.stored.touch_presence(worker.node, self.hub.context.clock.now_ms())  # as `auth` does
        asked = protocol.LeaseRequest(request=request or kit.fresh_request(), max_units=count, profile=profile)
        reply = attempt(lambda: retry(lambda: self.hub.work.lease(worker, asked)))
        if isinstance(reply, Refusal):
            if reply.code not in ("node.banned", "certificate.expired"):
                raise reply
            return []
        found = [protocol.Lease.model_validate(signed.document) for signed in reply.leases]
        self.leases += [lease for lease in found if lease not in self.leases]
        return found

    def submit(self, lease: protocol.Lease, engine: str = "") -> protocol.SignedDocument | Refusal:
        worker = next(row for row in [*self.workers, self.validator] if row.node == lease.node)
        body = kit.submission_body(lease, engine=engine)
        result = attempt(lambda: self.hub.work.submit(worker, lease.lease, body))
        return result if isinstance(result, Refusal) else result[1]

    def work(
        self, worker: NodeRow, count: int = 1, rewards: tuple[float, ...] = (0.0, 1.0),
        outcome: protocol.Outcome = protocol.Outcome.ACCEPTED,
    ) -> None:  # fmt: skip
        """Lease, submit, and have judged all that waits; a validator's own group is accepted."""
        for lease in self.lease(worker, count):
            self.submit(lease)
        for audit in self.claim(64):
            self.judge(audit, protocol.Outcome.ACCEPTED if audit.trusted else outcome, rewards)

    def release(self, lease: protocol.Lease) -> None:
        worker = next(row for row in self.workers if row.node == lease.node)
        self.hub.work.release(worker, protocol.LeaseRelease(leases=(lease.lease,)))

    def beat(self, worker: NodeRow, progress: dict[str, int]) -> protocol.HeartbeatReply:
        return self.hub.membership.heartbeat(worker, protocol.Heartbeat(progress=progress))

    def sanction(self, worker: NodeRow, how: Callable[[NodeRow, list[Holding], int], list[Command]]) -> Refusal | None:
        """What the run's owner does to a node."""

        def act() -> None:
            with self.hub.context.decision() as (transaction, moment):
                row = transaction.node(worker.node)
                assert row is not None
                transaction.apply(how(row, transaction.holdings(worker.node), moment.now_ms))

        result = attempt(act)
        return result if isinstance(result, Refusal) else None

    def claim(self, count: int = 4) -> list[protocol.Audit]:
        found = list(self.hub.checking.audits(self.validator, protocol.AuditRequest(max_audits=count)).audits)
        again = {audit.submission for audit in found}
        self.audits = [audit for audit in self.audits if audit.submission not in again] + found
        return found

    def entrust(self, left: tuple[str, ...] = ()) -> list[protocol.Lease]:
        """What the validator is to generate itself."""
        self.stored.touch_presence(self.validator.node, self.hub.context.clock.now_ms())
        known = tuple(audit.submission for audit in self.audits)
        request = protocol.AuditRequest(max_audits=1, generates="torch/cpu/float32", left=(*known, *left))
        reply = self.hub.checking.audits(self.validator, request)
        self.audits += [audit for audit in reply.audits if audit.submission not in known]
        found = [protocol.Lease.model_validate(signed.document) for signed in reply.generate]
        self.entrusted += [lease for lease in found if lease not in self.entrusted]
        return found

    def judge(
        self, audit: protocol.Audit, outcome: protocol.Outcome, rewards: tuple[float, ...],
        severity: protocol.Severity | None = None,
    ) -> Refusal | None:  # fmt: skip
        lease = protocol.Lease.model_validate(audit.lease.document)
        judged = {"outcome": outcome, "severity": severity, "reason": "test", "depth": audit.depth}
        at = {"generated_tokens": lease.unit % 5 + 1, "decided_at_ms": self.clock.now_ms()}
        signed = protocol.sign_document(kit.verdict_on(lease, audit.submission, rewards, **judged, **at), kit.VALIDATOR)
        reply = self.hub.checking.verdicts(self.validator, protocol.VerdictReport(verdicts=(signed,)))
        for refused in reply.refused:
            return Refusal(refused.status, refused.code, refused.message)
        return None

    def announce(self, version: int, incarnation: int = 0) -> Refusal | None:
        document = protocol.PolicyAnnouncement(run=kit.RUN_ID, policy=kit.policy(version, incarnation), created_at_ms=0)
        signed = protocol.sign_document(document, kit.TRAINER)
        result = attempt(lambda: self.hub.training.announce(self.trainer, signed))
        return result if isinstance(result, Refusal) else None

    def batch(self, step: int) -> protocol.Batch | Refusal | None:
        reply = attempt(lambda: self.hub.training.batch(self.trainer, step))
        return reply if isinstance(reply, Refusal) else reply.batch


def attempt(call: Callable[[], Any]) -> Any:
    """What the call returns, or its refusal. Anything else that it raises is a defect."""
    try:
        return call()
    except Refusal as refusal:
        return refusal
