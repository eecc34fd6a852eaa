"""Routes for the run's owner."""

from __future__ import annotations

from fastapi import APIRouter, Request

from shoal.hub.bodies import parse_json, read_body
from shoal.hub.gate import HubDependency, serve
from shoal.hub.openapi import describes
from shoal.protocol import AdminReply, AdminRequest

router = APIRouter()

MAX_ORDER_BYTES = 64 * 1024


@router.post(
    "/admin",
    summary="Order something as the run's owner",
    **describes("owner", (400, 401, 403, 404, 409, 413, 422), AdminRequest),
)
async def admin(request: Request, hub: HubDependency) -> AdminReply:
    """An `AdminAction` signed by the run's root key, or by an admin key with its certificate. The request itself is
    not signed: the action is, is dated, and is carried out once. The ledger keeps it, with what it changed."""
    body = await read_body(request, MAX_ORDER_BYTES)
    return await serve(hub.administration.act, parse_json(body, AdminRequest))
