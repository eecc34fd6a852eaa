"""Routes for validators and the trainer: audits, verdicts, evaluations, policies, batches, reports."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from shoal.hub.auth import authenticate
from shoal.hub.bodies import parse_json, read_body
from shoal.hub.changes import Topic
from shoal.hub.gate import HubDependency, poll, serve
from shoal.hub.openapi import BULK, bulk_answer, describes
from shoal.protocol import (
    AuditReply,
    AuditRequest,
    BatchReply,
    BatchRequest,
    SignedDocument,
    StepReport,
    VerdictReply,
    VerdictReport,
)
from shoal.protocol.verdict import MAX_BODIES_PER_REQUEST

router = APIRouter()

MAX_REPORT_BYTES = 16 * 1024 * 1024
"""A verdict carries a reward with its parts for each of up to 1024 rollouts."""
MAX_CALIBRATION_BYTES = 1024 * 1024

Names = Annotated[list[str], Query(min_length=1, max_length=MAX_BODIES_PER_REQUEST, description="names of submissions")]

Step = Annotated[int, Path(ge=0, le=2**31, description="the step; step n produces version n + 1")]


@router.post(
    "/audits",
    summary="Ask for submissions to check",
    **describes("validator", (401, 403, 413, 422), AuditRequest, {"max_audits": 8, "wait_s": 20}),
)
async def audits(request: Request, hub: HubDependency) -> AuditReply:
    """Each audit is this validator's until its deadline; then it is given out again. Waits up to `wait_s` for one.
    With `generates` it may be given leases of its own, of units that nobody could judge: it generates them and hands
    them in like a worker. With `evaluate` it may be given a slice of an evaluation as well: `now`, or when there is
    nothing to check."""
    caller = await authenticate(hub.context, request, roles=("validator",))
    ask = parse_json(caller.body, AuditRequest)
    return await poll(
        hub,
        request,
        Topic.AUDITS,
        ask.wait_s,
        lambda: hub.checking.audits(caller.node, ask),
        lambda reply: bool(reply.audits or reply.generate or reply.evaluation) or reply.finished,
    )


_BODIES = describes("validator", (401, 403, 404, 413, 422))
_BODIES["responses"][200] = bulk_answer("`SubmissionBodies`: for each name the very bytes that were put")


@router.get("/submissions", summary="The bytes of submissions", response_class=Response, **_BODIES)
async def bodies(name: Names, request: Request, hub: HubDependency) -> Response:
    """For validators and the trainer. A name is the SHA-256 of the bytes."""
    await authenticate(hub.context, request, roles=("validator", "trainer"))
    return Response(await serve(hub.checking.bodies, name), media_type=BULK)


@router.post(
    "/verdicts",
    summary="Say what audits found",
    **describes("validator", (401, 403, 413, 422), VerdictReport),
)
async def verdicts(request: Request, hub: HubDependency) -> VerdictReply:
    """`Verdict`s signed by the calling validator. The first on a submission stands; the same outcome again is
    harmless. Those that were not taken are named in the answer."""
    caller = await authenticate(hub.context, request, roles=("validator",), max_bytes=MAX_REPORT_BYTES)
    return await serve(hub.checking.verdicts, caller.node, parse_json(caller.body, VerdictReport))


@router.post(
    "/calibrations",
    summary="Put measured limits in force",
    status_code=204,
    **describes("owner", (400, 401, 403, 409, 413, 422), SignedDocument),
)
async def calibrated(request: Request, hub: HubDependency) -> None:
    """A `Calibration` signed by a validator, or by the run's root key. The request itself is not signed. A validator's
    names the one that it replaces: 409 `calibration.outdated` if that is not in force, or if the owner has signed a
    later one. Later leases name it."""
    body = await read_body(request, MAX_CALIBRATION_BYTES)
    await serve(hub.calibrating.publish, parse_json(body, SignedDocument))


@router.post(
    "/evaluations",
    summary="Say how a policy did on held-out tasks",
    status_code=204,
    **describes("validator", (401, 403, 404, 413, 422), SignedDocument),
)
async def evaluated(request: Request, hub: HubDependency) -> None:
    """An `EvaluationReport` signed by the calling validator, on a slice that `/audits` gave out. The first report on a
    slice stands; 422 `evaluation.environment` if it was scored with other tasks than the run's."""
    caller = await authenticate(hub.context, request, roles=("validator",))
    await serve(hub.evaluating.report, caller.node, parse_json(caller.body, SignedDocument))


@router.post(
    "/policies",
    summary="Announce a published policy",
    status_code=204,
    **describes("trainer", (401, 403, 409, 413, 422), SignedDocument),
)
async def announce(request: Request, hub: HubDependency) -> None:
    """A `PolicyAnnouncement` signed by the trainer. The same again is harmless; 409 `policy.digest` if that
    (incarnation, version) was announced with another digest. A new incarnation voids open leases."""
    caller = await authenticate(hub.context, request, roles=("trainer",))
    await serve(hub.training.announce, caller.node, parse_json(caller.body, SignedDocument))


@router.post(
    "/batches/{step}",
    summary="Ask for the groups of a step",
    **describes("trainer", (401, 403, 409, 413, 422), BatchRequest, {"wait_s": 20}),
)
async def batch(step: Step, request: Request, hub: HubDependency) -> BatchReply:
    """The batch is written down before it is answered and never changes; asking again gets it again. While it is not
    complete, `waiting` says what it waits for."""
    caller = await authenticate(hub.context, request, roles=("trainer",))
    ask = parse_json(caller.body, BatchRequest)
    return await poll(
        hub,
        request,
        Topic.BATCHES,
        ask.wait_s,
        lambda: hub.training.batch(caller.node, step),
        lambda reply: reply.batch is not None,
    )


_ROLLOUTS = describes("trainer", (401, 403, 404))
_ROLLOUTS["responses"][200] = bulk_answer("a `TrainingBatch`")


@router.get("/batches/{step}/rollouts", summary="The rollouts of a batch", response_class=Response, **_ROLLOUTS)
async def rollouts(step: Step, request: Request, hub: HubDependency) -> Response:
    """The groups of a written batch with the validators' rewards, in order of unit."""
    await authenticate(hub.context, request, roles=("trainer",))
    body = await serve(hub.training.rollouts, step)
    return Response(body, media_type=BULK)


@router.post(
    "/steps",
    summary="Report what a step measured",
    status_code=204,
    **describes("trainer", (401, 403, 413, 422), StepReport, {"step": 3, "metrics": {"reward_mean": 0.42}}),
)
async def report(request: Request, hub: HubDependency) -> None:
    """Shown by `/status`, its alarms among the hub's own. A report for the same step replaces the earlier one."""
    caller = await authenticate(hub.context, request, roles=("trainer",))
    await serve(hub.training.report, parse_json(caller.body, StepReport))
