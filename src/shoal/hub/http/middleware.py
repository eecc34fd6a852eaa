"""Where every request comes in: it gets a number, is counted, and is held back if its address asks too fast.

    request ─► Visit (number, address) ─► bucket of the address ─┬─► the app ─► answer + number ─► counted, logged
                                                                 └─► held for a second, then 429

What a monitoring system reads at `GET /metrics`: requests, refusals, latencies and bytes as they are counted here;
units, submissions, nodes and ledger from the storage; and the process. No label names a node or an address: there is no
bound on those. Times leave out what a long poll waits.

Refusals by address are held: whoever asks again at once is slowed to one request a second on each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import h11
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as Total
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.hub.limits import Addresses, Buckets, Intake
from shoal.hub.service.reporting import Figure
from shoal.hub.settings import CONCURRENT_UPLOADS, HubConfig
from shoal.runtime.clock import Clock, SystemClock

T = TypeVar("T")

HEADER_REQUEST: Final = "shoal-request"
CONNECTION: Final = "shoal.connection"  # in the state of a scope: the `server.HubConnection` that it came by
KEPT_S = 1.0
HOLD_S = 1.0
SHOWN_PER_S = 5.0  # refusals in the log: an attacker does not decide how much is written to the disk
SHOWN_PATH_BYTES = 120
REGISTRATIONS = 1 / 200  # new keys of an address, by its requests: one a second where 200 requests are allowed
LEAST_INTAKE_BYTES = 64 * 1024 * 1024
READ_AT_ONCE = 4  # of the pages that anyone may read (status, ledger), which cost more than what a stranger may send
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
METHODS = ("GET", "HEAD", "POST", "PUT")

log = logging.getLogger("shoal.hub.requests")


@dataclass
class Visit:
    """What is known about one request outside of its route."""

    number: str
    client: str = ""  # the address as limits count it; empty: nobody's
    node: str = ""  # only once it is proven
    code: str = ""  # of the refusal, if it is one
    waited_s: float = 0.0  # in a long poll, for something to happen
    sender: str = ""  # who `body_bytes` in memory are counted under
    body_bytes: int = 0


def visit_of(scope: Scope) -> Visit:
    """The visit that the middleware has begun; a new one outside of it."""
    visit: Visit = scope.setdefault("shoal.visit", Visit(secrets.token_hex(8)))
    return visit


class HubMetrics:
    """Counters of one hub, in a registry of their own: two hubs in one process do not mix."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        ProcessCollector(registry=own)
        labels, refused = ("route", "method", "status"), "Refusals, by code; rate.* are limits."
        took = "Time to answer, without what a long poll waited."
        self._requests = Total("shoal_hub_requests", "Answers, by route, method and status.", labels, registry=own)
        self._seconds = Histogram("shoal_hub_request_seconds", took, labels[:2], buckets=SECONDS, registry=own)
        self._refusals = Total("shoal_hub_refusals", refused, ("code",), registry=own)

    def note(self, route: str, method: str, status: int, code: str, took_s: float) -> None:
        """One request was answered. Whatever a stranger sends as a method is one label value, not a new one each."""
        method = method if method in METHODS else "other"
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route, method).observe(took_s)
        if code:
            self.refused(code)

    def refused(self, code: str) -> None:
        self._refusals.labels(code).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class StateMetrics(Collector):
    """How the run stands, read when it is asked for."""

    def __init__(self, read: Callable[[], Iterable[Figure]], intake: Intake) -> None:
        self._read, self._intake = read, intake

    def collect(self) -> Iterable[Metric]:
        held = Figure("bodies_held_bytes", "Bytes of request bodies in memory.", self._intake.held_bytes)
        for figure in (*self._read(), held):
            family = GaugeMetricFamily(f"shoal_hub_{figure.name}", figure.what, labels=figure.labels)
            for labels, value in sorted(figure.values.items()):
                family.add_metric(labels, value)
            yield family
        received = float(self._intake.received_bytes)
        yield CounterMetricFamily("shoal_hub_bodies_bytes", "Bytes of request bodies received.", value=received)


class Edge:
    """What is counted of callers, shared by all requests of one hub. `addresses` is the server's: without one (in one
    process, in tests) nobody has an address to be counted by. Rates are real time, whatever clock the hub goes by."""

    def __init__(self, config: HubConfig, clock: Clock = SystemClock()) -> None:
        settings = config.settings
        self.clock = clock
        self.metrics = HubMetrics()
        self.addresses: Addresses | None = None
        self.connections: Counter[str] = Counter()  # open ones, by client
        self.requests = Buckets(settings.requests_per_address_s)
        self.keys = Buckets(settings.requests_per_key_s)
        self.newcomers = Buckets(settings.requests_per_address_s * REGISTRATIONS, burst_s=60.0)
        self.intake = Intake(max(LEAST_INTAKE_BYTES, CONCURRENT_UPLOADS * config.submission_limits.compressed_bytes))
        self.uploads = asyncio.Semaphore(CONCURRENT_UPLOADS)  # submissions are in memory while they are checked
        self.reading: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._computing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._kept: dict[str, tuple[Any, float]] = {}  # answers, and when their computation began
        self._warned = False

    async def shared(self, name: str, visit: Visit, compute: Callable[[], Awaitable[T]]) -> T:
        """An answer that is the same for everybody and costs more than others: computed one at a time. Strangers get
        one that is a second old at most, this machine's own processes one that began after they asked."""
        since_s = self.clock.monotonic_s() - (KEPT_S if visit.client else 0.0)
        async with self._computing[name]:
            answer, began_s = self._kept.get(name, (None, -1.0))
            if began_s < since_s or answer is None:
                began_s = self.clock.monotonic_s()
                answer = await compute()
                self._kept[name] = answer, began_s
            return answer  # type: ignore[no-any-return]

    def reading_of(self, client: str) -> asyncio.Semaphore:
        """So many at a time of one address; nothing is kept of an address once nobody holds its semaphore."""
        return self.reading.setdefault(client, asyncio.Semaphore(READ_AT_ONCE))

    def client_of(self, scope: Scope) -> str:
        """The address that a request is counted under; empty: none."""
        peer = scope.get("client")
        if self.addresses is None or not peer:
            return ""
        client = self.addresses.client(peer[0])
        forwarded = any(name == b"x-forwarded-for" for name, _ in scope["headers"])
        if not client and forwarded and not self._warned and not self.addresses.is_proxy(peer[0]):
            self._warned = True
            log.warning(
                "requests come through a proxy at %s that the hub was not told of: no limit by address holds for them; "
                "name it in hub.trusted_proxies",
                peer[0],
            )
        return client


class EdgeMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, edge: Edge) -> None:
        self._app, self._edge = app, edge
        self._shown = Buckets(SHOWN_PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        edge, visit, connection = self._edge, visit_of(scope), scope.get("state", {}).get(CONNECTION)
        visit.client, began_s = edge.client_of(scope), edge.clock.monotonic_s()
        status = 500  # an exception that nobody turned into an answer is a defect

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((HEADER_REQUEST.encode(), visit.number.encode()))
            with contextlib.suppress(h11.LocalProtocolError):  # the connection broke meanwhile: nobody hears it
                await send(message)

        if connection is not None:
            connection.began()
        try:
            if visit.client and edge.requests.take(visit.client, began_s) > 0:
                visit.code = "rate.address"
                await asyncio.sleep(HOLD_S)
                sentence = "your address asks too often: ask again in a second, and less often"
                refusal = JSONResponse({"code": visit.code, "message": sentence}, 429, {"retry-after": "1"})
                await refusal(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        finally:
            edge.intake.release(visit.sender, visit.body_bytes)
            if connection is not None:
                connection.ended()
            took_s = edge.clock.monotonic_s() - began_s
            path = getattr(getattr(scope.get("endpoint"), "__self__", None), "path", "other")  # of a `routes.Call`
            edge.metrics.note(path, scope["method"], status, visit.code, max(0.0, took_s - visit.waited_s))
            self._log(visit, scope, status, took_s)

    def _log(self, visit: Visit, scope: Scope, status: int, took_s: float) -> None:
        """Every request for whoever debugs; refusals for everybody, but only so many."""
        level = logging.DEBUG
        if status >= 400 and self._shown.take("", self._edge.clock.monotonic_s()) == 0.0:
            level = logging.WARNING if status >= 500 else logging.INFO
        if not log.isEnabledFor(level):
            return
        # The path as it was sent, percent signs and all: no control character of a stranger's reaches a terminal.
        path = scope.get("raw_path") or scope["path"].encode()
        shown = path[:SHOWN_PATH_BYTES].decode("ascii", errors="backslashreplace")
        fields = {"request": visit.number, "code": visit.code, "node": visit.node, "address": visit.client}
        said = " ".join(f"{name}={value}" for name, value in fields.items() if value)
        log.log(level, "%s %s %s: %s took_ms=%.0f", scope["method"], shown, status, said, took_s * 1000)
