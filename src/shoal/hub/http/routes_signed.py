"""Signed routes: of every node (registration, heartbeats, leases, submissions), and of validators and the trainer."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from shoal.hub.changes import Topic
from shoal.hub.http.auth import authenticate, authenticate_newcomer, parse_json, read_body, signed
from shoal.hub.http.calls import HubDependency, poll, serve
from shoal.hub.http.middleware import visit_of
from shoal.hub.http.openapi import BULK, bulk_answer, describes
from shoal.hub.limits import network_of
from shoal.protocol.batch import BatchReply, BatchRequest, StepReport
from shoal.protocol.lease import LeaseRelease, LeaseReply, LeaseRequest
from shoal.protocol.node import Heartbeat, HeartbeatReply, NodeView, Registration
from shoal.protocol.signing import SignedDocument
from shoal.protocol.submission import SHOWN_BYTES, ProgressReply
from shoal.protocol.verdict import MAX_BODIES_PER_REQUEST, AuditReply, AuditRequest, VerdictReply, VerdictReport

router = APIRouter()


@router.post("/nodes", **describes("nodes", Registration, refusals=(409,)))
async def register(request: Request, hub: HubDependency) -> NodeView:
    """Signed with the key in the body; the node id is the hash of that key. Workers need nothing else; a trainer or
    validator brings the certificate that the root key signed for it. The same again is harmless."""
    registration = await authenticate_newcomer(hub.context, request)
    return await serve(hub.membership.register, registration)


@router.post("/heartbeat", **describes("nodes", Heartbeat))
async def heartbeat(request: Request, hub: HubDependency) -> HeartbeatReply:
    """Answers with the node as the hub sees it, the newest policy, and whether the run is finished."""
    node, said = await signed(hub.context, request, Heartbeat)
    return await serve(hub.membership.heartbeat, node, said)


@router.post("/leases", **describes("worker", LeaseRequest))
async def lease(request: Request, hub: HubDependency) -> LeaseReply:
    """Up to `max_units` signed leases. Waits up to `wait_s` (at most 30) for one; none comes with a reason in words.
    The same `request` id gets the same leases again, so a lost answer costs nothing. Who asks with an older `policy`
    than the newest is told so at once."""
    node, ask = await signed(hub.context, request, LeaseRequest, "worker")
    client = visit_of(request.scope).client
    return await poll(
        hub, request, Topic.LEASES, ask.wait_s, lambda: hub.work.lease(node, ask, network_of(client), client),
        lambda reply: bool(reply.leases) or reply.finished or ask.policy not in (None, reply.policy),
        lambda reply: reply.held_back,
    )  # fmt: skip


@router.post("/leases/release", status_code=204, **describes("worker", LeaseRelease))
async def release(request: Request, hub: HubDependency) -> None:
    """Their units go to somebody else at once. Leases that have ended are ignored."""
    node, said = await signed(hub.context, request, LeaseRelease, "worker")
    await serve(hub.work.release, node, said)


@router.post(
    "/leases/{lease}/progress", **describes("worker", "a `ShownProgress`: msgpack in a zstd frame", refusals=(404, 410))
)
async def show(lease: str, request: Request, hub: HubDependency) -> ProgressReply:
    """For workers on probation: more time for a lease, against token ids and proofs. Chunks that do not begin where the
    hub's copy ends are left out; the answer says where that is. 410 if the lease has ended."""
    caller = await authenticate(hub.context, request, roles=("worker",), max_bytes=SHOWN_BYTES)
    return await serve(hub.showing.show, caller.node, lease, caller.body)


_SAME: dict[int, dict[str, Any]] = {200: {"model": SignedDocument, "description": "the same again: the same receipt"}}


@router.put(
    "/submissions/{lease}",
    status_code=201,
    **describes("worker", "a `Submission`: msgpack in a zstd frame", answers=_SAME, refusals=(404, 409, 410)),
)
async def submit(lease: str, request: Request, response: Response, hub: HubDependency) -> SignedDocument:
    """Answers with a signed `Receipt`: from then on the submission is on the hub's disk and will be judged. 201 if it
    is new, 200 for the same body again, 409 for another body; 410 if the lease has ended and its unit is taken."""
    max_bytes = hub.context.config.submission_limits.compressed_bytes
    caller = await authenticate(hub.context, request, roles=("worker", "validator"), max_bytes=max_bytes)
    async with request.app.state.uploads:  # around the work, never around a wait for somebody's bytes
        response.status_code, receipt = await serve(hub.work.submit, caller.node, lease, caller.body)
    return receipt


MAX_REPORT_BYTES = 16 * 1024 * 1024
"""A verdict carries a reward with its parts for each of up to 1024 rollouts."""
MAX_CALIBRATION_BYTES = 1024 * 1024

Names = Annotated[list[str], Query(min_length=1, max_length=MAX_BODIES_PER_REQUEST, description="names of submissions")]

Step = Annotated[int, Path(ge=0, le=2**31, description="the step; step n produces version n + 1")]


@router.post("/audits", **describes("validator", AuditRequest))
async def audits(request: Request, hub: HubDependency) -> AuditReply:
    """Each audit is this validator's until its deadline; then it is given out again. Waits up to `wait_s` for one.
    With `generates` it may be given leases of its own, of units that nobody could judge: it generates them and hands
    them in like a worker. With `evaluate` it may be given a slice of an evaluation as well: `now`, or when there is
    nothing to check."""
    node, ask = await signed(hub.context, request, AuditRequest, "validator")
    return await poll(
        hub, request, Topic.AUDITS, ask.wait_s, lambda: hub.checking.audits(node, ask),
        lambda reply: bool(reply.audits or reply.generate or reply.evaluation) or reply.finished,
    )  # fmt: skip


_BYTES = bulk_answer("`SubmissionBodies`: for each name the very bytes that were put")


@router.get("/submissions", response_class=Response, **describes("validator", answers=_BYTES, refusals=(404,)))
async def bodies(name: Names, request: Request, hub: HubDependency) -> Response:
    """For validators and the trainer. A name is the SHA-256 of the bytes."""
    await authenticate(hub.context, request, roles=("validator", "trainer"))
    return Response(await serve(hub.checking.bodies, name), media_type=BULK)


@router.post("/verdicts", **describes("validator", VerdictReport))
async def verdicts(request: Request, hub: HubDependency) -> VerdictReply:
    """`Verdict`s signed by the calling validator. The first on a submission stands; the same outcome again is
    harmless. Those that were not taken are named in the answer."""
    node, said = await signed(hub.context, request, VerdictReport, "validator", max_bytes=MAX_REPORT_BYTES)
    return await serve(hub.checking.verdicts, node, said)


@router.post(
    "/calibrations", status_code=204, **describes("owner", SignedDocument, refusals=(400, 401, 403, 409, 413, 422))
)
async def calibrated(request: Request, hub: HubDependency) -> None:
    """A `Calibration` signed by a validator, or by the run's root key. The request itself is not signed. A validator's
    names the one that it replaces: 409 `calibration.outdated` if that is not in force, or if the owner has signed a
    later one. Later leases name it."""
    body = await read_body(request, MAX_CALIBRATION_BYTES)
    await serve(hub.calibrating.publish, parse_json(body, SignedDocument))


@router.post("/evaluations", status_code=204, **describes("validator", SignedDocument, refusals=(404,)))
async def evaluated(request: Request, hub: HubDependency) -> None:
    """An `EvaluationReport` signed by the calling validator, on a slice that `/audits` gave out. The first report on a
    slice stands; 422 `evaluation.environment` if it was scored with other tasks than the run's."""
    node, said = await signed(hub.context, request, SignedDocument, "validator")
    await serve(hub.evaluating.report, node, said)


@router.post("/policies", status_code=204, **describes("trainer", SignedDocument, refusals=(409,)))
async def announce(request: Request, hub: HubDependency) -> None:
    """A `PolicyAnnouncement` signed by the trainer. The same again is harmless; 409 `policy.digest` if that
    (incarnation, version) was announced with another digest. A new incarnation voids open leases."""
    node, said = await signed(hub.context, request, SignedDocument, "trainer")
    await serve(hub.training.announce, node, said)


@router.post("/batches/{step}", **describes("trainer", BatchRequest, refusals=(409,)))
async def batch(step: Step, request: Request, hub: HubDependency) -> BatchReply:
    """The batch is written down before it is answered and never changes; asking again gets it again. While it is not
    complete, `waiting` says what it waits for."""
    node, ask = await signed(hub.context, request, BatchRequest, "trainer")
    return await poll(
        hub, request, Topic.BATCHES, ask.wait_s, lambda: hub.training.batch(node, step),
        lambda reply: reply.batch is not None,
    )  # fmt: skip


@router.get(
    "/batches/{step}/rollouts",
    response_class=Response,
    **describes("trainer", answers=bulk_answer("a `TrainingBatch`"), refusals=(404,)),
)
async def rollouts(step: Step, request: Request, hub: HubDependency) -> Response:
    """The groups of a written batch with the validators' rewards, in order of unit."""
    await authenticate(hub.context, request, roles=("trainer",))
    body = await serve(hub.training.rollouts, step)
    return Response(body, media_type=BULK)


@router.post("/steps", status_code=204, **describes("trainer", StepReport))
async def report(request: Request, hub: HubDependency) -> None:
    """Shown by `/status`, its alarms among the hub's own. A report for the same step replaces the earlier one."""
    _, said = await signed(hub.context, request, StepReport, "trainer")
    await serve(hub.training.report, said)
