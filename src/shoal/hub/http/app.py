"""The hub as an ASGI app: routes, error answers, and the upkeep that runs beside them.

request ─► door ─► route ─► auth (event loop) ─► service (thread) ─► storage
         (limits,                                  │ commit
          metrics)                   long polls ◄──┴── changes ◄── upkeep, once a second
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
from shoal.hub.http.auth import WrongClock
from shoal.hub.http.calls import Busy, UploadSlots
from shoal.hub.http.metrics import StateMetrics, run_metrics
from shoal.hub.http.middleware import HEADER_REQUEST, Door, Edge, visit_of
from shoal.hub.limits import TooMuch
from shoal.hub.service import Hub
from shoal.hub.service.reporting import Figures, read_figures
from shoal.hub.settings import CONCURRENT_UPLOADS, HubConfig
from shoal.hub.state.commands import Refusal
from shoal.protocol import Problem, SignedDocument
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
    edge.metrics.registry.register(StateMetrics(lambda: run_metrics(_figures(hub), edge.intake)))
    app.add_middleware(Door, edge=edge)
    app.add_exception_handler(Refusal, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_bad_parameter)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ShoalError, _on_failure)
    app.add_exception_handler(Exception, _on_defect)
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


def _problem(
    request: Request, status: int, code: str, message: str, clock: SignedDocument | None = None
) -> JSONResponse:
    visit_of(request.scope).code = code
    body = Problem(code=code, message=message, clock=clock).model_dump(exclude_none=True)
    return JSONResponse(body, status_code=status)


async def _on_refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    clock = error.clock if isinstance(error, WrongClock) else None
    answer = _problem(request, error.status, error.code, error.sentence, clock)
    if isinstance(error, TooMuch | Busy):
        answer.headers["retry-after"] = str(error.retry_after_s)
    return answer


async def _on_bad_parameter(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return _problem(request, 422, "request.parameter", f"{where}: {first['msg']}")


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}; the calls are listed at /openapi.json"
    answer = _problem(request, error.status_code, f"http.{error.status_code}", message)
    answer.headers.update(error.headers or {})
    return answer


async def _on_defect(request: Request, error: Exception) -> JSONResponse:
    """The caller gets a `Problem` like everybody else, outside of the door."""
    number = visit_of(request.scope).number
    log.error("request %s, %s %s failed", number, request.method, request.url.path, exc_info=error)
    message = f"the hub failed in a way it does not understand; its log says more about request {number}"
    body = Problem(code="hub.defect", message=message).model_dump(exclude_none=True)
    return JSONResponse(body, status_code=500, headers={HEADER_REQUEST: number})


async def _on_failure(request: Request, error: Exception) -> JSONResponse:
    """The hub itself failed (disk full, say). Nothing was promised; the caller may try again later.

    Why is for who runs the hub, and in its log: folders, hosts, users and buckets are nothing for strangers.
    """
    number = visit_of(request.scope).number
    _note_failure(request.app.state.hub, f"request {number}, {request.method} {request.url.path}", error)
    code = "hub.resource" if isinstance(error, ResourceError) else "hub.failed"
    message = f"the hub could not do this now, try again later; its log says more about request {number}"
    return _problem(request, 503, code, message)


def _figures(hub: Hub) -> Figures:
    return read_figures(hub.context, hub.work.late, hub.work.drawing.unusable)
