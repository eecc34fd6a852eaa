"""The hub as an ASGI app: the table of calls, error answers, and the upkeep that runs beside them.

request ─► middleware ─► routes ─► auth (event loop) ─► service (thread) ─► storage
           (limits,                                        │ commit
            metrics)                         long polls ◄──┴── changes ◄── upkeep, once a second
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from shoal.errors import DiskError, ResourceError, ShoalError
from shoal.hub.http.middleware import HEADER_REQUEST, Edge, EdgeMiddleware, StateMetrics, visit_of
from shoal.hub.http.routes import TABLE
from shoal.hub.service import Hub
from shoal.hub.service.reporting import read_figures
from shoal.hub.settings import HubConfig
from shoal.hub.state.commands import Refusal
from shoal.protocol import Problem
from shoal.runtime.clock import Clock, SystemClock

TICK_S = 1.0

log = logging.getLogger("shoal.hub")


def create_app(config: HubConfig, clock: Clock = SystemClock()) -> Starlette:
    """The hub over `config.folder`: opened here, closed when the app's lifespan ends, or by `app.state.hub.close()`."""
    hub, edge = Hub(config, clock), Edge(config)
    routes = [Route(call.path, call.answer, methods=[call.method]) for rows in TABLE.values() for call in rows]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(EdgeMiddleware, edge=edge)],
        exception_handlers=dict.fromkeys((HTTPException, ShoalError, Exception), _on_error),
        lifespan=_lifespan,
    )
    app.state.hub, app.state.edge = hub, edge
    figures = StateMetrics(lambda: read_figures(hub.context, hub.work.late, hub.work.drawing.unusable), edge.intake)
    edge.metrics.registry.register(figures)
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    hub: Hub = app.state.hub
    upkeep = asyncio.create_task(_keep_up(hub))
    try:
        yield
    finally:
        hub.context.changes.close()
        upkeep.cancel()
        await asyncio.gather(upkeep, return_exceptions=True)
        hub.close()


async def _keep_up(hub: Hub) -> None:
    """Tick until cancelled. A failed tick is logged and tried again, unless the disk is at an end."""
    while True:
        try:
            await run_in_threadpool(hub.upkeep.tick)
        except ShoalError as error:
            _note_failure(hub, "upkeep", error)
        except Exception:  # a defect must be seen, and must not end the upkeep of a running run
            log.exception("upkeep failed")
        await asyncio.sleep(TICK_S)


def _note_failure(hub: Hub, what: str, error: Exception) -> None:
    log.error("%s failed: %s", what, error)
    if isinstance(error, DiskError):
        hub.context.fail(error)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    """Whatever went wrong, as a `Problem`. Where the hub itself failed (disk full, say) nothing was promised; why it
    failed is for the log, not for strangers. A defect is answered outside of the middleware."""
    visit, headers, clock, status = visit_of(request.scope), dict[str, str](), None, 500
    what = f"request {visit.number}, {request.method} {request.url.path}"
    if isinstance(error, Refusal):
        status, visit.code, message, clock = error.status, error.code, error.sentence, error.clock
        headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    elif isinstance(error, HTTPException):
        status, visit.code, headers = error.status_code, f"http.{error.status_code}", dict(error.headers or {})
        message = f"{error.detail}: {request.method} {request.url.path}; docs/reference/http.md lists the calls"
    elif isinstance(error, ShoalError):
        _note_failure(request.app.state.hub, what, error)
        status, visit.code = 503, "hub.resource" if isinstance(error, ResourceError) else "hub.failed"
        message = f"the hub could not do this now, try again later; its log says more about request {visit.number}"
    else:
        log.error("%s failed", what, exc_info=error)
        visit.code, headers = "hub.defect", {HEADER_REQUEST: visit.number}
        message = f"the hub failed in a way it does not understand; its log says more about request {visit.number}"
    body = Problem(code=visit.code, message=message, clock=clock).model_dump(exclude_none=True)
    return JSONResponse(body, status, headers)
