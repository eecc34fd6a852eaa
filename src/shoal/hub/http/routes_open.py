"""Routes that need no signature: the run, its status, the ledger, why things happened; and the owner's
orders, which are signed documents themselves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from shoal.hub.http.auth import parse_json, read_body
from shoal.hub.http.calls import HubDependency, serve
from shoal.hub.http.metrics import CONTENT_TYPE as METRICS_TYPE
from shoal.hub.http.middleware import Edge, max_age_s
from shoal.hub.http.openapi import describes
from shoal.protocol import (
    AdminReply,
    AdminRequest,
    EvaluationPage,
    EvidencePage,
    LedgerPage,
    NodePage,
    NodeStory,
    RunStatus,
    SignedDocument,
    UnitStory,
)
from shoal.protocol.status import MAX_EVIDENCE_PER_PAGE, MAX_NODES_PER_PAGE

router = APIRouter()

_TEXT = {200: {"description": "metrics as text", "content": {METRICS_TYPE: {"schema": {"type": "string"}}}}}
NODE = "^[0-9a-f]{0,64}$"
MAX_ORDER_BYTES = 64 * 1024


@router.get("/run", **describes("run"))
async def run_info(hub: HubDependency) -> SignedDocument:
    """A signed `RunInfo`. Check its root key against the fingerprint in the join URL before believing any of it."""
    return await serve(hub.reporting.run_info)


@router.get("/status", **describes("run"))
async def status(request: Request, hub: HubDependency) -> RunStatus:
    """Progress, nodes, who waits for whom, the last verdicts, step reports and alarms; as of a second ago at most."""
    edge: Edge = request.app.state.edge
    return await edge.answers.get("status", max_age_s(request.scope), lambda: serve(hub.reporting.status))


@router.get("/health", **describes("run"))
async def health() -> dict[str, bool]:
    return {"ok": True}


@router.get("/metrics", response_class=Response, **describes("run", answers=_TEXT))
async def metrics(request: Request) -> Response:
    """Text for Prometheus: requests, latencies and refusals; units, submissions and nodes by state; the process."""
    edge: Edge = request.app.state.edge
    text = await edge.answers.get("metrics", max_age_s(request.scope), lambda: serve(edge.metrics.text))
    return Response(text, media_type=METRICS_TYPE)


@router.get("/evaluations", **describes("run", refusals=(422,)))
async def evaluations(
    hub: HubDependency, since: Annotated[int, Query(ge=0, le=2**31 - 1, description="the first version to tell of")] = 0
) -> EvaluationPage:
    """What validators measured while training went on, and what they are at; of each version its newest incarnation."""
    return await serve(hub.evaluating.page, since)


@router.get("/calibrations/{digest}", **describes("run", refusals=(404, 422)))
async def calibration(
    digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="as a lease or a verdict names it")],
    hub: HubDependency,
) -> SignedDocument:
    """A `Calibration` as a validator or the run's owner signed it: what work under leases that name it is judged by."""
    return await serve(hub.calibrating.document, digest)


@router.get("/ledger", **describes("run", refusals=(422,)))
async def ledger(
    hub: HubDependency,
    after: Annotated[int, Query(ge=-1, le=2**62, description="index of the last entry you have; -1 for none")] = -1,
    limit: Annotated[int, Query(ge=1, le=1000, description="entries at most")] = 500,
) -> LedgerPage:
    """Entries in order. `shoal.ledger.verify` checks the chain, `shoal.ledger.fold` recomputes every account."""
    return await serve(hub.reporting.ledger_page, after, limit)


@router.get("/ledger/head", **describes("run"))
async def ledger_head(hub: HubDependency) -> SignedDocument:
    """A signed `LedgerHead`. Keep it: a ledger that later does not contain it was rolled back."""
    return await serve(hub.reporting.ledger_head)


@router.get("/units/{unit}", **describes("run", refusals=(404, 422)))
async def unit_story(
    unit: Annotated[int, Path(ge=0, le=2**62, description="the unit's number")], hub: HubDependency
) -> UnitStory:
    """Every lease and how it ended, every submission with its signed verdict, the rule that decided, and the ledger
    entries about it. Its seeds, and the leases, which hold them, are told once it is decided."""
    return await serve(hub.stories.unit, unit)


@router.get("/ledger/evidence", **describes("run", refusals=(422,)))
async def ledger_evidence(
    hub: HubDependency,
    after: Annotated[int, Query(ge=-1, le=2**62, description="index of the last row you have; -1 for none")] = -1,
    limit: Annotated[int, Query(ge=1, le=MAX_EVIDENCE_PER_PAGE, description="ledger rows to look at")] = 100,
) -> EvidencePage:
    """For each row among them that gives or refuses credit: the receipt that the hub signed and the verdict that the
    validator signed, whose hashes the row holds."""
    return await serve(hub.stories.evidence, after, limit)


@router.get("/nodes/{node}", **describes("run", refusals=(404, 422)))
async def node_story(
    node: Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="the node's id")], hub: HubDependency
) -> NodeStory:
    """Its standing, its last leases and submissions, what was refused with the signed verdicts, and its sanctions:
    what one needs to appeal."""
    return await serve(hub.stories.node, node)


@router.get("/nodes", **describes("run", refusals=(422,)))
async def nodes(
    hub: HubDependency,
    after: Annotated[str, Query(pattern=NODE, description="the last node you have; empty for none")] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_NODES_PER_PAGE, description="nodes at most")] = 200,
) -> NodePage:
    """In order of their ids. `/status` shows those that matter most."""
    return await serve(hub.stories.nodes, after, limit)


@router.post("/admin", **describes("owner", AdminRequest, refusals=(400, 401, 403, 404, 409, 413, 422)))
async def admin(request: Request, hub: HubDependency) -> AdminReply:
    """An `AdminAction` signed by the run's root key, or by an admin key with its certificate. The request itself is
    not signed: the action is, is dated, and is carried out once. The ledger keeps it, with what it changed."""
    body = await read_body(request, MAX_ORDER_BYTES)
    return await serve(hub.administration.act, parse_json(body, AdminRequest))
