"""Routes for anyone: the run, its status, the ledger, health, and a page to start from."""

from __future__ import annotations

from html import escape
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from shoal.hub.docs_page import docs_page
from shoal.hub.door import Edge, max_age_s
from shoal.hub.gate import HubDependency, serve
from shoal.hub.metrics import CONTENT_TYPE as METRICS_TYPE
from shoal.hub.openapi import describes
from shoal.hub.service.readiness import Readiness
from shoal.protocol import EvaluationPage, LedgerPage, RunStatus, SignedDocument, fingerprint

router = APIRouter()

_READY = describes("run")
_READY["responses"][200] = {"model": Readiness, "description": "ready"}
_READY["responses"][503] = {"model": Readiness, "description": "not ready; `problems` says why"}

_METRICS = describes("run")
_METRICS["responses"][200] = {
    "description": "metrics as text",
    "content": {METRICS_TYPE: {"schema": {"type": "string"}}},
}


@router.get("/run", summary="What a node needs to take part", **describes("run"))
async def run_info(hub: HubDependency) -> SignedDocument:
    """A signed `RunInfo`. Check its root key against the fingerprint in the join URL before believing any of it."""
    return await serve(hub.reporting.run_info)


@router.get("/status", summary="The run as a person sees it", **describes("run"))
async def status(request: Request, hub: HubDependency) -> RunStatus:
    """Progress, nodes, who waits for whom, the last verdicts, step reports and alarms; as of a second ago at most."""
    edge: Edge = request.app.state.edge
    return await edge.answers.get("status", max_age_s(request.scope), lambda: serve(hub.reporting.status))


@router.get("/health", summary="Whether the hub answers", **describes("run"))
async def health() -> dict[str, bool]:
    return {"ok": True}


@router.get("/ready", summary="Whether the run can go on by itself", **_READY)
async def ready(request: Request, hub: HubDependency) -> JSONResponse:
    """For load balancers and watchdogs: 200 while trainer and validators are here, audits catch the known-bad
    submissions that are mixed in, and the disk takes what comes; else 503 with what is wrong, a sentence each."""
    edge: Edge = request.app.state.edge
    found = await edge.answers.get("ready", max_age_s(request.scope), lambda: serve(hub.readiness.check))
    return JSONResponse(found.model_dump(mode="json"), status_code=200 if found.ready else 503)


@router.get("/metrics", summary="Numbers for a monitoring system", response_class=Response, **_METRICS)
async def metrics(request: Request) -> Response:
    """Text for Prometheus: requests, latencies and refusals; units, submissions and nodes by state; the process."""
    edge: Edge = request.app.state.edge
    text = await edge.answers.get("metrics", max_age_s(request.scope), lambda: serve(edge.metrics.text))
    return Response(text, media_type=METRICS_TYPE)


@router.get("/evaluations", summary="How versions did on held-out tasks", **describes("run", (422,)))
async def evaluations(
    hub: HubDependency,
    since: Annotated[int, Query(ge=0, le=2**31 - 1, description="the first version to tell of")] = 0,
) -> EvaluationPage:
    """What validators measured while training went on, and what they are at; of each version its newest incarnation."""
    return await serve(hub.evaluating.page, since)


@router.get("/calibrations/{digest}", summary="Measured limits, signed", **describes("run", (404, 422)))
async def calibration(
    digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="as a lease or a verdict names it")],
    hub: HubDependency,
) -> SignedDocument:
    """A `Calibration` as a validator or the run's owner signed it: what work under leases that name it is judged by."""
    return await serve(hub.calibrating.document, digest)


@router.get("/ledger", summary="A page of the ledger", **describes("run", (422,)))
async def ledger(
    hub: HubDependency,
    after: Annotated[int, Query(ge=-1, le=2**62, description="index of the last entry you have; -1 for none")] = -1,
    limit: Annotated[int, Query(ge=1, le=1000, description="entries at most")] = 500,
) -> LedgerPage:
    """Entries in order. `shoal.ledger.verify` checks the chain, `shoal.ledger.fold` recomputes every account."""
    return await serve(hub.reporting.ledger_page, after, limit)


@router.get("/ledger/head", summary="The newest entry of the ledger, signed", **describes("run"))
async def ledger_head(hub: HubDependency) -> SignedDocument:
    """A signed `LedgerHead`. Keep it: a ledger that later does not contain it was rolled back."""
    return await serve(hub.reporting.ledger_head)


@router.get("/", include_in_schema=False)
async def home(request: Request, hub: HubDependency) -> HTMLResponse:
    """A page without scripts or outside files: what this is, how to join, where to look."""
    config = hub.context.config
    join = f"shoal join {request.base_url}#{fingerprint(config.root_key)}"
    page = _HOME.format(name=escape(config.run.name), run=escape(config.run_id), join=escape(join))
    return HTMLResponse(page)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(docs_page(request.app.openapi()))


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
<li><a href="docs">docs</a>: every call (<a href="openapi.json">openapi.json</a>)</li>
</ul>
</body></html>
"""
