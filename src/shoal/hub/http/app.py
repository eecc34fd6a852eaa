"""The hub as an ASGI app: routes, error answers, and the upkeep that runs beside them.

request ─► middleware ─► route ─► auth (event loop) ─► service (thread) ─► storage
           (limits,                                      │ commit
            metrics)                       long polls ◄──┴── changes ◄── upkeep, once a second
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from shoal import __version__
from shoal.errors import DiskError, ResourceError, ShoalError
from shoal.hub.http import openapi, routes_open, routes_signed
from shoal.hub.http.calls import UploadSlots
from shoal.hub.http.metrics import StateMetrics
from shoal.hub.http.middleware import HEADER_REQUEST, Edge, EdgeMiddleware, visit_of
from shoal.hub.service import Hub
from shoal.hub.service.reporting import read_figures
from shoal.hub.settings import CONCURRENT_UPLOADS, HubConfig
from shoal.hub.state.commands import Refusal
from shoal.protocol import Problem
from shoal.runtime.clock import Clock, SystemClock

TICK_S = 1.0

log = logging.getLogger("shoal.hub")


def create_app(config: HubConfig, clock: Clock = SystemClock()) -> FastAPI:
    """The hub over `config.folder`: opened here, closed when the app's lifespan ends, or by `app.state.hub.close()`."""
    # Without the framework's own pages: they load scripts from elsewhere.
    title = f"shoal hub: {config.run.name}"
    app = FastAPI(title=title, version=__version__, lifespan=_lifespan, docs_url=None, redoc_url=None)
    app.state.hub = Hub(config, clock)
    # Bodies of submissions are held in memory while they are checked: this bounds how many at a time.
    app.state.uploads = UploadSlots(CONCURRENT_UPLOADS)
    for routes in (routes_open, routes_signed):
        app.router.routes.extend(routes.router.routes)  # as they are: `include_router` would build each anew
    edge = app.state.edge = Edge(config)
    hub: Hub = app.state.hub
    edge.metrics.registry.register(
        StateMetrics(lambda: read_figures(hub.context, hub.work.late, hub.work.drawing.unusable), edge.intake)
    )
    app.add_middleware(EdgeMiddleware, edge=edge)
    for kind in (RequestValidationError, HTTPException, ShoalError, Exception):
        app.add_exception_handler(kind, _on_error)
    openapi.install(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
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
    """Whatever went wrong, as a `Problem`. Where the hub itself failed (disk full, say) nothing was promised, and the
    caller may try again later; why is for who runs the hub, in its log: folders, hosts, users and buckets are nothing
    for strangers. A defect is answered outside of the middleware."""
    visit, headers, clock = visit_of(request.scope), dict[str, str](), None
    what = f"request {visit.number}, {request.method} {request.url.path}"
    if isinstance(error, Refusal):
        status, code, message, clock = error.status, error.code, error.sentence, error.clock
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status, code, message = 422, "request.parameter", f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    elif isinstance(error, HTTPException):
        status, code, headers = error.status_code, f"http.{error.status_code}", dict(error.headers or {})
        message = f"{error.detail}: {request.method} {request.url.path}; the calls are listed at /openapi.json"
    elif isinstance(error, ShoalError):
        _note_failure(request.app.state.hub, what, error)
        status, code = 503, "hub.resource" if isinstance(error, ResourceError) else "hub.failed"
        message = f"the hub could not do this now, try again later; its log says more about request {visit.number}"
    else:
        log.error("%s failed", what, exc_info=error)
        status, code, headers = 500, "hub.defect", {HEADER_REQUEST: visit.number}
        message = f"the hub failed in a way it does not understand; its log says more about request {visit.number}"
    visit.code = code
    body = Problem(code=code, message=message, clock=clock).model_dump(exclude_none=True)
    return JSONResponse(body, status, headers)
