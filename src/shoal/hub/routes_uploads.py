"""Routes for submissions that go to an object store: leave to upload, and the receipt once the bytes are there."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from shoal.hub.auth import authenticate
from shoal.hub.bodies import parse_json
from shoal.hub.gate import HubDependency, serve
from shoal.hub.openapi import describes
from shoal.hub.slots import UploadSlots
from shoal.protocol import SignedDocument
from shoal.protocol.submission import UploadCommit, UploadRequest

router = APIRouter()

_SUBMISSION = "9f" * 32
_REFUSALS = (401, 403, 404, 409, 410, 413, 422)


@router.post(
    "/submissions/{lease}/upload",
    summary="Ask for leave to upload the group of a lease",
    **describes("worker", _REFUSALS, UploadRequest, {"submission": _SUBMISSION, "size_bytes": 48_213}),
)
async def upload(lease: str, request: Request, hub: HubDependency) -> SignedDocument:
    """Answers with a signed `UploadTicket`: one URL for one object of this size and hash, in the run's store. Refused
    as the submission would be; 409 `upload.by_hub` if the run has no such store."""
    caller = await authenticate(hub.context, request, roles=("worker", "validator"))
    ask = parse_json(caller.body, UploadRequest)
    return await serve(hub.uploads.ticket, caller.node, lease, ask)


_COMMIT = describes("worker", _REFUSALS, UploadCommit, {"submission": _SUBMISSION})
_COMMIT["responses"][200] = {"model": SignedDocument, "description": "the same again: the same receipt"}


@router.post("/submissions/{lease}/commit", summary="Hand in what was uploaded", status_code=201, **_COMMIT)
async def commit(lease: str, request: Request, response: Response, hub: HubDependency) -> SignedDocument:
    """The hub reads what was uploaded, checks it, and answers with a signed `Receipt`, exactly as for a submission that
    was put to the hub itself. 409 `upload.missing` if there is nothing (any more): upload it again."""
    caller = await authenticate(hub.context, request, roles=("worker", "validator"))
    named = parse_json(caller.body, UploadCommit)
    slots: UploadSlots = request.app.state.uploads
    with slots.committing(caller.node.node):
        async with slots:
            response.status_code, receipt = await serve(hub.uploads.commit, caller.node, lease, named)
    return receipt
