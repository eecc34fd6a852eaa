"""Routes that need no signature: the run, its status, the ledger, why things happened, a page to start from; and the
owner's orders, which are signed documents themselves."""

from __future__ import annotations

from html import escape
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from shoal.hub.http.auth import parse_json, read_body
from shoal.hub.http.calls import HubDependency, serve
from shoal.hub.http.metrics import CONTENT_TYPE as METRICS_TYPE
from shoal.hub.http.middleware import Edge, max_age_s
from shoal.hub.http.openapi import describes
from shoal.hub.service.readiness import Readiness
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
    fingerprint,
)
from shoal.protocol.status import MAX_EVIDENCE_PER_PAGE, MAX_NODES_PER_PAGE

router = APIRouter()

_READY: dict[int, dict[str, Any]] = {
    200: {"model": Readiness, "description": "ready"},
    503: {"model": Readiness, "description": "not ready; `problems` says why"},
}
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


@router.get("/ready", **describes("run", answers=_READY))
async def ready(request: Request, hub: HubDependency) -> JSONResponse:
    """For load balancers and watchdogs: 200 while trainer and validators are here, audits catch the known-bad
    submissions that are mixed in, and the disk takes what comes; else 503 with what is wrong, a sentence each."""
    edge: Edge = request.app.state.edge
    found = await edge.answers.get("ready", max_age_s(request.scope), lambda: serve(hub.readiness.check))
    return JSONResponse(found.model_dump(mode="json"), status_code=200 if found.ready else 503)


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


@router.get("/", include_in_schema=False)
async def home(request: Request, hub: HubDependency) -> HTMLResponse:
    """A page without scripts or outside files: what this is, how to join, where to look."""
    config = hub.context.config
    join = f"shoal join {request.base_url}#{fingerprint(config.root_key)}"
    page = _HOME.format(name=escape(config.run.name), run=escape(config.run_id), join=escape(join))
    return HTMLResponse(page)


_HOME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>shoal: {name}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 42rem; margin: 3rem auto; padding: 0 1rem }}
pre {{ background: #eee; color: #111; padding: 1rem; overflow-x: auto }}
</style></head><body>
<h1>{name}</h1>
<p>The hub of the shoal run <code>{run}</code>. To take part with this machine:</p>
<pre>{join}</pre>
<ul>
<li><a href="status">status</a>: progress, nodes, who waits for whom</li>
<li><a href="ledger">ledger</a> and its signed <a href="ledger/head">head</a></li>
<li><a href="ready">ready</a>: whether the run can go on by itself; <a href="metrics">metrics</a> for Prometheus</li>
<li><a href="run">run</a>: what a node needs to take part</li>
<li><a href="openapi.json">openapi.json</a>: every call</li>
</ul>
</body></html>
"""
