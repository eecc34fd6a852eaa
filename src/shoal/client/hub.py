"""`HubClient`: one typed method per row of the hub's HTTP table (docs/reference/http.md).

The first call that needs it fetches `GET /run` and verifies the chain from the root key; later signatures of the hub
are verified against the keys found there. If a run has several hubs, the first that answers is asked. Unknown fields in
answers are ignored. Threads may share a client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TypeVar
from urllib.parse import quote

import shoal.protocol as wire
from shoal import __version__
from shoal.client.transport import ClientOptions, HubCall, Hubs, SharedState, Transport, parsed
from shoal.client.trust import TrustedRun
from shoal.errors import CodecError, HubRefused, HubUnreachable, SignatureError
from shoal.protocol import SignedDocument, SigningKey, document_hash, open_document, pack, submission_digest, unpack
from shoal.runtime import Clock, StopToken, SystemClock
from shoal.runtime.exchange import HttpClient

M = TypeVar("M", bound=wire.Message)
D = TypeVar("D", wire.Lease, wire.EvaluationSlice, wire.LedgerHead, wire.Receipt, wire.Calibration)  # what a hub signs

log = logging.getLogger(__name__)

UNKNOWN_NODE = "auth.unknown_node"  # the hub's code for a key that has not registered
BULK = "application/msgpack+zstd"
SUBMISSION_BODIES_LIMITS = wire.BodyLimits(compressed_bytes=2**27, inflated_bytes=2**27)
TRAINING_BATCH_LIMITS = wire.BodyLimits(compressed_bytes=2**30, inflated_bytes=2**32)  # from the hub, which is trusted


class HubClient:
    def __init__(
        self, url: str | Sequence[str], key: SigningKey, stop: StopToken, root_fingerprint: str | None = None,
        http: HttpClient | None = None, clock: Clock = SystemClock(), options: ClientOptions = ClientOptions(),
    ) -> None:  # fmt: skip
        self.key = key
        self.on_receipt: Callable[[SignedDocument], None] | None = None  # gets every verified receipt as it was signed
        self._owns_http = http is None
        hubs, http = Hubs([url] if isinstance(url, str) else url), http or HttpClient()
        self._transport = Transport(http, hubs, key, stop, clock, options, SharedState(root_fingerprint))

    @classmethod
    def of_a_person(
        cls, url: str | Sequence[str], wait_s: float, root_fingerprint: str | None, stop: StopToken | None = None
    ) -> HubClient:
        options = ClientOptions.of_a_person(wait_s)
        return cls(url, SigningKey.generate(), stop or StopToken(), root_fingerprint, options=options)

    @property
    def url(self) -> str:
        return self._transport.hubs.present.url

    def close(self) -> None:
        if self._owns_http:
            self._transport.http.close()

    def patient(self, patience_s: float) -> HubClient:
        """The same client with another patience. It shares connections and trust, and need not be closed."""
        other, transport = copy(self), self._transport
        options = transport.options.with_patience(patience_s, len(transport.hubs.urls))
        other._transport, other._owns_http = replace(transport, options=options), False
        return other

    # The run, for anyone

    def trusted_run(self) -> TrustedRun:
        return self._transport.run()

    def refreshed_run(self) -> TrustedRun:
        return self._transport.run_again(self.trusted_run())

    def run_info(self) -> wire.RunInfo:
        return self.trusted_run().info

    def status(self) -> wire.RunStatus:
        return self._get("/status", wire.RunStatus)

    def ledger(self, after: int = -1, limit: int = 500) -> wire.LedgerPage:
        return self._get("/ledger", wire.LedgerPage, after=after, limit=limit)

    def ledger_head(self) -> wire.LedgerHead:
        return self._from_hub(self._get("/ledger/head", SignedDocument), wire.LedgerHead)

    def signed_ledger_head(self) -> SignedDocument:
        signed = self._get("/ledger/head", SignedDocument)
        self._from_hub(signed, wire.LedgerHead)
        return signed

    def evidence(self, after: int, limit: int) -> wire.EvidencePage:
        return self._get("/ledger/evidence", wire.EvidencePage, after=after, limit=limit)

    def unit(self, number: int) -> wire.UnitStory:
        return self._get(f"/units/{number}", wire.UnitStory)

    def node(self, node: str) -> wire.NodeStory:
        return self._get(f"/nodes/{quote(node, safe='')}", wire.NodeStory)

    def nodes(self, after: str = "", limit: int = 200) -> wire.NodePage:
        return self._get("/nodes", wire.NodePage, after=after, limit=limit)

    def evaluations(self, since: int = 0) -> wire.EvaluationPage:
        return self._get("/evaluations", wire.EvaluationPage, since=since)

    def admin(self, request: wire.AdminRequest) -> wire.AdminReply:
        """The order inside is signed, so the call is not."""
        body = request.model_dump_json().encode()
        return self._parsed("/admin", self._transport.send(HubCall("POST", "/admin", body)), wire.AdminReply)

    # Any node

    def register(
        self, name: str, role: wire.Role, certificate: SignedDocument | None, vouch: SignedDocument | None = None
    ) -> wire.NodeView:
        """`vouch` is an owner's signature that the machine is theirs."""
        return self._introduce(wire.Registration(
            public_key=self.key.public_key, name=name, role=role, certificate=certificate, vouch=vouch,
            software=f"shoal {__version__}",
        ))  # fmt: skip

    def _introduce(self, message: wire.Registration) -> wire.NodeView:
        body, known = message.model_dump_json().encode(), self._transport.known
        answer = self._transport.send(HubCall("POST", "/nodes", body, run=self.trusted_run().run))
        known.registration, known.registered = message, known.registered + 1
        return self._parsed("/nodes", answer, wire.NodeView)

    def heartbeat(self, heartbeat: wire.Heartbeat) -> wire.HeartbeatReply:
        return self._post("/heartbeat", heartbeat, wire.HeartbeatReply)

    # Workers

    def lease(self, request: wire.LeaseRequest) -> wire.LeaseReply:
        """Signed leases; `open_leases` verifies them. Use the same request id again after a crash."""
        return self._post("/leases", request, wire.LeaseReply, request.wait_s)

    def open_leases(self, reply: wire.LeaseReply) -> list[tuple[wire.Lease, SignedDocument]]:
        return [(self.open_own_lease(signed), signed) for signed in reply.leases]

    def release(self, release: wire.LeaseRelease) -> None:
        self._send("POST", "/leases/release", release)

    def show(self, lease_id: str, progress: wire.ShownProgress) -> wire.ProgressReply:
        path = f"/leases/{quote(lease_id, safe='')}/progress"
        call = HubCall("POST", path, pack(progress), content_type=BULK)
        return self._parsed(path, self._ask(call), wire.ProgressReply)

    def submit(self, lease_id: str, body: bytes) -> wire.Receipt:
        """Submit a packed submission. The receipt is verified: these bytes, this node, this lease."""
        path = f"/submissions/{quote(lease_id, safe='')}"
        signed = self._parsed(path, self._ask(HubCall("PUT", path, body, content_type=BULK)), SignedDocument)
        receipt = self._from_hub(signed, wire.Receipt)
        promised = (receipt.node, receipt.lease, receipt.submission)
        if promised != (self.key.node, lease_id, submission_digest(body)):
            raise SignatureError(f"the hub's receipt for lease {lease_id} is for something else: {promised}")
        if self.on_receipt is not None:
            self.on_receipt(signed)
        return receipt

    # Validators

    def audits(self, request: wire.AuditRequest) -> wire.AuditReply:
        return self._post("/audits", request, wire.AuditReply, request.wait_s)

    def open_lease(self, signed: SignedDocument) -> wire.Lease:
        """The lease inside an audit: signed by the hub for this run, for any node."""
        return self._from_hub(signed, wire.Lease)

    def submissions(self, digests: Sequence[str]) -> list[bytes]:
        limits, names = SUBMISSION_BODIES_LIMITS, tuple(("name", digest) for digest in digests)
        call = HubCall("GET", "/submissions", params=names, max_bytes=limits.compressed_bytes)
        bodies = unpack(self._ask(call), wire.SubmissionBodies, limits).bodies
        if [submission_digest(body) for body in bodies] != list(digests):
            raise CodecError("the hub's copies of submissions do not match their digests")
        return bodies

    def verdicts(self, signed: Sequence[SignedDocument], traces: Mapping[str, str] | None = None) -> wire.VerdictReply:
        report = wire.VerdictReport(verdicts=tuple(signed), traces=dict(traces or {}))
        return self._post("/verdicts", report, wire.VerdictReply)

    def publish_calibration(self, signed: SignedDocument) -> None:
        self._transport.send(HubCall("POST", "/calibrations", signed.model_dump_json().encode()))

    def calibration(self, digest: str) -> wire.Calibration:
        """A calibration, verified: signed by a validator of the run or by its owner."""
        signed = self._get(f"/calibrations/{digest}", SignedDocument)
        if document_hash(signed) != digest:
            raise SignatureError(f"the hub's calibration {digest[:16]}… is another one")
        return self._from_hub(signed, wire.Calibration, lambda run: {run.info.root_key, *run.validator_keys})

    def report_evaluation(self, signed: SignedDocument) -> None:
        self._send("POST", "/evaluations", signed)

    def open_slice(self, signed: SignedDocument) -> wire.EvaluationSlice:
        return self._from_hub(signed, wire.EvaluationSlice)

    # The trainer

    def announce(self, signed: SignedDocument) -> None:
        self._send("POST", "/policies", signed)

    def batch(self, step: int, wait_s: float) -> wire.BatchReply:
        return self._post(f"/batches/{step}", wire.BatchRequest(wait_s=wait_s), wire.BatchReply, wait_s)

    def rollouts(self, step: int) -> wire.TrainingBatch:
        cap = TRAINING_BATCH_LIMITS.compressed_bytes
        body = self._ask(HubCall("GET", f"/batches/{step}/rollouts", max_bytes=cap))
        return unpack(body, wire.TrainingBatch, TRAINING_BATCH_LIMITS)

    def report(self, report: wire.StepReport) -> None:
        self._send("POST", "/steps", report)

    # Plumbing

    def open_own_lease(self, signed: SignedDocument) -> wire.Lease:
        """A lease of this node, verified: signed by the hub for this run."""
        lease = self.open_lease(signed)
        if lease.node != self.key.node:
            raise SignatureError(f"lease {lease.lease} is for node {lease.node}, not for this one ({self.key.node})")
        return lease

    def _from_hub(
        self, signed: SignedDocument, kind: type[D], keys: Callable[[TrustedRun], set[str]] = lambda run: run.hub_keys
    ) -> D:
        """A document signed by one of these `keys` for this run. For an unknown key the run is fetched once more."""
        trusted = self.trusted_run()
        if signed.signed_by not in keys(trusted):
            trusted = self._transport.run_again(trusted)
        document = open_document(signed, kind, keys(trusted))
        if document.run != trusted.run:
            raise SignatureError(f"the hub's {kind.kind} is for run {document.run!r}, not for {trusted.run!r}")
        return document

    def _ask(self, call: HubCall) -> bytes:
        """A signed call. If the hub has forgotten this node (restored from a backup), it is registered again, once,
        also if several calls fail together."""
        known, patience_s = self._transport.known, self._transport.options.patience_s
        seen, call = known.registered, replace(call, run=self.trusted_run().run)
        try:
            return self._transport.send(call)
        except HubRefused as refusal:
            if refusal.code != UNKNOWN_NODE or known.registration is None:
                raise
        if not known.registering.acquire(timeout=patience_s):
            raise HubUnreachable(f"the hub has forgotten this node, and it is not registered in {patience_s:.0f} s")
        try:
            if known.registered == seen:
                log.warning("the hub does not know this node any more (restored from a backup?): registering again")
                self._introduce(known.registration)
        finally:
            known.registering.release()
        return self._transport.send(call)

    def _get(self, path: str, kind: type[M], **params: int | str) -> M:
        pairs = tuple((name, str(value)) for name, value in params.items())
        return self._parsed(path, self._transport.send(HubCall("GET", path, params=pairs)), kind)

    def _send(self, method: str, path: str, message: wire.Message, wait_s: float = 0.0) -> bytes:
        return self._ask(HubCall(method, path, message.model_dump_json().encode(), wait_s=wait_s))

    def _post(self, path: str, message: wire.Message, kind: type[M], wait_s: float = 0.0) -> M:
        return self._parsed(path, self._send("POST", path, message, wait_s), kind)

    def _parsed(self, path: str, answer: bytes, kind: type[M]) -> M:
        return parsed(kind, f"{self.url}{path}", answer)
