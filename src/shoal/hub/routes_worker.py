"""Routes for nodes: registration, heartbeats, leases, submissions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from shoal.hub.auth import authenticate, authenticate_newcomer
from shoal.hub.bodies import parse_json
from shoal.hub.changes import Topic
from shoal.hub.door import visit_of
from shoal.hub.gate import HubDependency, poll, serve
from shoal.hub.limits import network_of
from shoal.hub.openapi import bulk_body, describes
from shoal.protocol import (
    Heartbeat,
    HeartbeatReply,
    LeaseRelease,
    LeaseReply,
    LeaseRequest,
    NodeView,
    Registration,
    SignedDocument,
)
from shoal.protocol.submission import SHOWN_BYTES, ProgressReply

router = APIRouter()

_REGISTRATION = {"public_key": "5f" * 32, "name": "my-laptop", "role": "worker"}


@router.post(
    "/nodes",
    summary="Introduce a node",
    **describes("nodes", (401, 403, 409, 413, 422), Registration, _REGISTRATION),
)
async def register(request: Request, hub: HubDependency) -> NodeView:
    """Signed with the key in the body; the node id is the hash of that key. Workers need nothing else; a trainer or
    validator brings the certificate that the root key signed for it. The same again is harmless."""
    registration = await authenticate_newcomer(hub.context, request)
    return await serve(hub.membership.register, registration)


@router.post(
    "/heartbeat",
    summary="Say that a node is alive",
    **describes("nodes", (401, 413, 422), Heartbeat, {"doing": "generating", "counters": {"tokens": 4096}}),
)
async def heartbeat(request: Request, hub: HubDependency) -> HeartbeatReply:
    """Answers with the node as the hub sees it, the newest policy, and whether the run is finished."""
    caller = await authenticate(hub.context, request)
    return await serve(hub.membership.heartbeat, caller.node, parse_json(caller.body, Heartbeat))


@router.post(
    "/leases",
    summary="Ask for work",
    **describes("worker", (401, 403, 413, 422), LeaseRequest, {"request": "0f9c2d7e1a", "max_units": 4, "wait_s": 20}),
)
async def lease(request: Request, hub: HubDependency) -> LeaseReply:
    """Up to `max_units` signed leases. Waits up to `wait_s` (at most 30) for one; none comes with a reason in words.
    The same `request` id gets the same leases again, so a lost answer costs nothing. Who asks with an older `policy`
    than the newest is told so at once."""
    caller = await authenticate(hub.context, request, roles=("worker",))
    ask = parse_json(caller.body, LeaseRequest)
    client = visit_of(request.scope).client
    return await poll(
        hub,
        request,
        Topic.LEASES,
        ask.wait_s,
        lambda: hub.work.lease(caller.node, ask, network_of(client), client),
        lambda reply: bool(reply.leases) or reply.finished or ask.policy not in (None, reply.policy),
        lambda reply: reply.held_back,
    )


@router.post(
    "/leases/release",
    summary="Give leases back",
    status_code=204,
    **describes("worker", (401, 403, 413, 422), LeaseRelease, {"leases": ["u17a0"], "reason": "stopping"}),
)
async def release(request: Request, hub: HubDependency) -> None:
    """Their units go to somebody else at once. Leases that have ended are ignored."""
    caller = await authenticate(hub.context, request, roles=("worker",))
    await serve(hub.work.release, caller.node, parse_json(caller.body, LeaseRelease))


_SHOW = describes("worker", (401, 403, 404, 410, 413, 422))
_SHOW["openapi_extra"]["requestBody"] = bulk_body("a `ShownProgress`: msgpack in a zstd frame")


@router.post("/leases/{lease}/progress", summary="Show finished chunks of a lease at work", **_SHOW)
async def show(lease: str, request: Request, hub: HubDependency) -> ProgressReply:
    """For workers on probation: more time for a lease, against token ids and proofs. Chunks that do not begin where the
    hub's copy ends are left out; the answer says where that is. 410 if the lease has ended."""
    caller = await authenticate(hub.context, request, roles=("worker",), max_bytes=SHOWN_BYTES)
    return await serve(hub.showing.show, caller.node, lease, caller.body)


_SUBMIT = describes("worker", (401, 403, 404, 409, 410, 413, 422))
_SUBMIT["openapi_extra"]["requestBody"] = bulk_body("a `Submission`: msgpack in a zstd frame")
_SUBMIT["responses"][200] = {"model": SignedDocument, "description": "the same body again: the same receipt"}


@router.put("/submissions/{lease}", summary="Hand in the group of a lease", status_code=201, **_SUBMIT)
async def submit(lease: str, request: Request, response: Response, hub: HubDependency) -> SignedDocument:
    """Answers with a signed `Receipt`: from then on the submission is on the hub's disk and will be judged. 201 if it
    is new, 200 for the same body again, 409 for another body; 410 if the lease has ended and its unit is taken."""
    max_bytes = hub.context.config.submission_limits.compressed_bytes
    caller = await authenticate(hub.context, request, roles=("worker", "validator"), max_bytes=max_bytes)
    async with request.app.state.uploads:  # around the work, never around a wait for somebody's bytes
        response.status_code, receipt = await serve(hub.work.submit, caller.node, lease, caller.body)
    return receipt
