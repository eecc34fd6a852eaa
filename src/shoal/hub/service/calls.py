"""The table of the hub's calls: who may make each, what it takes and gives, and which service answers. The HTTP edge
(`hub/http`) reads it; so do the reference and the tests that send every call what it does not expect."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, Field, create_model

from shoal import protocol as wire
from shoal.hub.changes import Topic
from shoal.hub.service import Hub
from shoal.hub.settings import MIB
from shoal.protocol import MAX_BODIES_PER_REQUEST, SHOWN_BYTES, ProgressReply, Role, SignedDocument
from shoal.protocol.node import WORKERS
from shoal.protocol.status import MAX_EVIDENCE_PER_PAGE, MAX_NODES_PER_PAGE

BULK, TEXT = "application/msgpack+zstd", "text/plain; version=0.0.4; charset=utf-8"
SMALL_BODY_BYTES = 64 * 1024


class Parameters(BaseModel):
    """Of the path and the query; unknown ones are ignored."""


Since = create_model("Since", __base__=Parameters, since=(int, Field(0, ge=0, le=2**31 - 1)))
Digest = create_model("Digest", __base__=Parameters, digest=(str, Field(pattern="^[0-9a-f]{64}$")))
Unit = create_model("Unit", __base__=Parameters, unit=(int, Field(ge=0, le=2**62)))
Node = create_model("Node", __base__=Parameters, node=(str, Field(pattern="^[0-9a-f]{32}$")))
Lease = create_model("Lease", __base__=Parameters, lease=(str, Field()))
Step = create_model("Step", __base__=Parameters, step=(int, Field(ge=0, le=2**31)))
SeveralNames = Field(min_length=1, max_length=MAX_BODIES_PER_REQUEST)
Names = create_model("Names", __base__=Parameters, name=(list[str], SeveralNames))


class LedgerRows(Parameters):
    after: int = Field(-1, ge=-1, le=2**62, description="index of the last entry you have; -1 for none")
    limit: int = Field(500, ge=1, le=1000, description="entries at most")


class EvidenceRows(LedgerRows):
    limit: int = Field(100, ge=1, le=MAX_EVIDENCE_PER_PAGE, description="ledger rows to look at")


class Nodes(Parameters):
    after: str = Field("", pattern="^[0-9a-f]{0,64}$", description="the last node you have; empty for none")
    limit: int = Field(200, ge=1, le=MAX_NODES_PER_PAGE, description="nodes at most")


@dataclass(frozen=True)
class Ask:
    """What a service answers: `at` are the call's parameters, `said` its body, `node` who signed it. The caller's
    `address` and `network` are empty on the hub's own machine."""

    at: Any
    said: Any
    node: Any
    address: str
    network: str
    metrics: Callable[[], bytes]


@dataclass(frozen=True)
class Poll:
    topic: Topic
    is_ready: Callable[[Any, Any], bool]
    is_held_back: Callable[[Any], bool] = lambda _reply: False


@dataclass(frozen=True)
class Call:
    """A row of the table. Unsigned if `roles` is None; else these may call it (none: any). A body is JSON (`takes`) or
    bulk; a `reply` of None is an empty answer, a text its media type. `at_once` answers from memory, or with None if
    `serve` must. `is_harmless`: repeating the very request changes nothing, so its nonce is kept in memory only.
    `is_serial`: over a shared database a few at a time, so that others find a thread and a connection."""

    method: str
    path: str
    serve: Callable[[Hub, Ask], Any]
    reply: type[BaseModel] | str | None
    what: str
    takes: type[BaseModel] | None = None
    at: type[Parameters] = Parameters
    roles: tuple[Role, ...] | None = ()
    max_bytes: int = SMALL_BODY_BYTES
    poll: Poll | None = None
    at_once: Callable[[Hub, Ask], Any] | None = None
    is_harmless: bool = False
    is_serial: bool = False
    is_shared: bool = False
    is_upload: bool = False


FOR_LEASES = Poll(
    Topic.LEASES, lambda reply, said: reply.leases or reply.finished or said.policy not in (None, reply.policy),
    is_held_back=lambda reply: bool(reply.held_back),
)  # fmt: skip
FOR_AUDITS = Poll(Topic.AUDITS, lambda reply, _: reply.audits or reply.generate or reply.evaluation or reply.finished)
FOR_BATCH = Poll(Topic.BATCHES, lambda reply, _: reply.batch is not None)

OPEN, WORKER = partial(Call, roles=None), partial(Call, roles=WORKERS)
VALIDATOR, TRAINER = partial(Call, roles=("validator",)), partial(Call, roles=("trainer",))

# fmt: off
TABLE: dict[str, tuple[Call, ...]] = {
    "run": (
        OPEN("GET", "/run", lambda hub, _: hub.reporting.run_info(), SignedDocument,
             "A signed `RunInfo`. Check its root key against the fingerprint in the join URL before believing it."),
        OPEN("GET", "/status", lambda hub, _: hub.reporting.status(), wire.RunStatus,
             "Progress, nodes, who waits for whom, the last verdicts, step reports and alarms; at most a second old.",
             is_shared=True),
        OPEN("GET", "/health", lambda _hub, _ask: b'{"ok":true}', "application/json", "Whether the hub answers."),
        OPEN("GET", "/metrics", lambda _, ask: ask.metrics(), TEXT,
             "Text for Prometheus: requests, latencies, refusals; units, submissions, nodes; the process.",
             is_shared=True),
        OPEN("GET", "/evaluations", lambda hub, ask: hub.evaluating.page(ask.at.since), wire.EvaluationPage,
             "What validators measured during training; of each version its newest incarnation.", at=Since),
        OPEN("GET", "/calibrations/{digest}", lambda hub, ask: hub.calibrating.document(ask.at.digest), SignedDocument,
             "A signed `Calibration`: what work under leases that name it is judged by.", at=Digest),
        OPEN("GET", "/ledger", lambda hub, ask: hub.reporting.ledger_page(ask.at.after, ask.at.limit), wire.LedgerPage,
             "Entries in order. `shoal.ledger.verify` checks the chain, `shoal.ledger.fold` recomputes every account.",
             at=LedgerRows),
        OPEN("GET", "/ledger/head", lambda hub, _: hub.reporting.ledger_head(), SignedDocument,
             "A signed `LedgerHead`. Keep it: a ledger that later does not contain it was rolled back."),
        OPEN("GET", "/ledger/evidence", lambda hub, ask: hub.stories.evidence(ask.at.after, ask.at.limit),
             wire.EvidencePage, "The signed receipts and verdicts whose hashes the rows of credit hold.",
             at=EvidenceRows),
        OPEN("GET", "/units/{unit}", lambda hub, ask: hub.stories.unit(ask.at.unit), wire.UnitStory,
             "Its leases, its submissions with their signed verdicts, the rule that decided, and its ledger entries. "
             "Its seeds and leases are told once it is decided.", at=Unit),
        OPEN("GET", "/nodes/{node}", lambda hub, ask: hub.stories.node(ask.at.node), wire.NodeStory,
             "Its standing, its last work, what was refused with the signed verdicts, and its sanctions: what an "
             "appeal needs.", at=Node),
        OPEN("GET", "/nodes", lambda hub, ask: hub.stories.nodes(ask.at.after, ask.at.limit), wire.NodePage,
             "All nodes, in order of their ids. `/status` shows those that matter most.", at=Nodes),
    ),
    "nodes": (
        Call("POST", "/nodes", lambda hub, ask: hub.membership.register(ask.said), wire.NodeView,
             "Register. Signed with the key in the body; the node id is the hash of that key. A trainer, validator "
             "or trusted worker brings the certificate that the root key signed for it. The same again is harmless.",
             takes=wire.Registration),
        Call("POST", "/heartbeat", lambda hub, ask: hub.membership.heartbeat(ask.node, ask.said), wire.HeartbeatReply,
             "Answers with the node as the hub sees it, the newest policy, and whether the run is finished.",
             takes=wire.Heartbeat, at_once=lambda hub, ask: hub.membership.heartbeat_at_once(ask.node, ask.said),
             is_harmless=True),
    ),
    "worker": (
        WORKER("POST", "/leases",
               lambda hub, ask: hub.work.lease(ask.node, ask.said, ask.network, ask.address), wire.LeaseReply,
               "Up to `max_units` signed leases, waiting up to `wait_s` (at most 30) for one; or none, and why. The "
               "same `request` id gets the same leases again, so a lost answer costs nothing. A worker whose "
               "`policy` is not the newest gets an answer at once.",
               takes=wire.LeaseRequest, poll=FOR_LEASES, is_serial=True),
        WORKER("POST", "/leases/release", lambda hub, ask: hub.work.release(ask.node, ask.said), None,
               "Their units go to somebody else at once. Leases that have ended are ignored.", takes=wire.LeaseRelease),
        WORKER("POST", "/leases/{lease}/progress", lambda hub, ask: hub.showing.show(ask.node, ask.at.lease, ask.said),
               ProgressReply, "Takes a `ShownProgress`. For workers on probation: more time for a lease, against token "
               "ids and proofs. Chunks that do not begin where the hub's copy ends are left out; the answer says where "
               "that is.", at=Lease, max_bytes=SHOWN_BYTES),
        Call("PUT", "/submissions/{lease}", lambda hub, ask: hub.work.submit(ask.node, ask.at.lease, ask.said),
             SignedDocument, "Takes a `Submission`, answers with a signed `Receipt`: from then on it is on the hub's "
             "disk and will be judged. 201 if it is new, 200 for the same body again, 409 for another body; 410 if the "
             "lease has ended and its unit is taken.", at=Lease, roles=(*WORKERS, "validator"), is_upload=True),
    ),
    "validator": (
        VALIDATOR("POST", "/audits", lambda hub, ask: hub.checking.audits(ask.node, ask.said), wire.AuditReply,
                  "Submissions to check, this validator's until their deadline; waits up to `wait_s` for one. With "
                  "`generates` it may be given leases of units that nobody could judge, with `evaluate` a slice of an "
                  "evaluation as well.", takes=wire.AuditRequest, poll=FOR_AUDITS),
        Call("GET", "/submissions", lambda hub, ask: hub.checking.bodies(ask.at.name), BULK,
             "`SubmissionBodies`: for each name (the SHA-256 of the bytes) the very bytes that were put.",
             at=Names, roles=("validator", "trainer")),
        VALIDATOR("POST", "/verdicts", lambda hub, ask: hub.checking.verdicts(ask.node, ask.said), wire.VerdictReply,
                  "`Verdict`s signed by the calling validator. The first on a submission stands; the same again "
                  "is harmless. The answer names those that were not taken.",
                  takes=wire.VerdictReport, max_bytes=16 * MIB),
        VALIDATOR("POST", "/evaluations", lambda hub, ask: hub.evaluating.report(ask.node, ask.said), None,
                  "An `EvaluationReport` signed by the calling validator, on a slice that `/audits` gave out. The "
                  "first stands; 422 `evaluation.environment` if it was scored with other tasks than the run's.",
                  takes=SignedDocument),
    ),
    "trainer": (
        TRAINER("POST", "/policies", lambda hub, ask: hub.training.announce(ask.node, ask.said), None,
                "A `PolicyAnnouncement` signed by the trainer. The same again is harmless; 409 `policy.digest` for "
                "another digest of that version. A new incarnation voids open leases.", takes=SignedDocument),
        TRAINER("POST", "/batches/{step}", lambda hub, ask: hub.training.batch(ask.node, ask.at.step), wire.BatchReply,
                "A batch is written down before it is answered and never changes. While it is not complete, `waiting` "
                "says what it waits for.", at=Step, takes=wire.BatchRequest, poll=FOR_BATCH),
        TRAINER("GET", "/batches/{step}/rollouts", lambda hub, ask: hub.training.rollouts(ask.at.step), BULK,
                "A `TrainingBatch`: the groups of a written batch with the rewards, in order of unit.", at=Step),
        TRAINER("POST", "/steps", lambda hub, ask: hub.training.report(ask.said), None,
                "Shown by `/status`, its alarms among the hub's own. It replaces an earlier report of the same step.",
                takes=wire.StepReport),
    ),
    "owner": (
        OPEN("POST", "/admin", lambda hub, ask: hub.administration.act(ask.said), wire.AdminReply,
             "An `AdminAction` signed by the run's root key, or by an admin key with its certificate. The request "
             "itself is not signed: the action is, is dated, and is carried out once. The ledger keeps it.",
             takes=wire.AdminRequest),
        OPEN("POST", "/calibrations", lambda hub, ask: hub.calibrating.publish(ask.said), None,
             "A `Calibration` signed by a validator, or by the run's root key. A validator's names the one that it "
             "replaces: 409 `calibration.outdated` if that is not in force.", takes=SignedDocument, max_bytes=MIB),
    ),
}
# fmt: on
