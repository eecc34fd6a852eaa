"""Where every request comes in: it gets a number, is counted, and is held back if its address asks too fast.

    request ─► Visit (number, address) ─► bucket of the address ─┬─► the app ─► answer + number ─► counted, logged
                                                                 └─► held for a second, then 429

Refusals by address are held: who asks again at once, on however many connections, is slowed to one request a second on
each, and others do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.hub.http.connections import GUARD, Guard
from shoal.hub.http.metrics import HubMetrics
from shoal.hub.limits import Addresses, Buckets, Intake, Receiving, Turns
from shoal.hub.settings import CONCURRENT_UPLOADS, HubConfig
from shoal.runtime.clock import Clock, SystemClock

KEPT_S = 1.0

T = TypeVar("T")


class Answers:
    """Answers that are the same for everybody, and cost more than anything else that anyone may ask for: computed once
    for all who ask, one at a time. Strangers get one that is a second old at most, whoever is on this machine one that
    began after it asked. By name, the last one and the one that is being computed; on one event loop only."""

    def __init__(self, clock: Clock = SystemClock()) -> None:
        self._clock = clock
        self._kept: dict[str, tuple[asyncio.Task[Any], float]] = {}  # and when it began

    async def get(self, name: str, max_age_s: float, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """An answer whose computation began `max_age_s` before this call at the earliest."""
        since_s, loop = self._clock.monotonic_s() - max_age_s, asyncio.get_running_loop()
        while True:
            task, began_s = self._kept.get(name, (None, 0.0))
            # Not of a loop that has ended, and no failure: that is for those who waited for it, not for the next.
            usable = task is not None and task.get_loop() is loop
            if task is not None and usable and task.done():
                usable = began_s >= since_s and not task.cancelled() and task.exception() is None
            if task is None or not usable:
                task, began_s = self._kept[name] = asyncio.create_task(compute()), self._clock.monotonic_s()
            if began_s >= since_s:
                answer: T = await asyncio.shield(task)  # who hangs up does not take it from the others
                return answer
            await asyncio.wait([task])


HEADER_REQUEST: Final = "shoal-request"
VISIT: Final = "shoal.visit"
HOLD_S = 1.0
SHOWN_PER_S = 5.0
"""Refusals in the log, at most, over a while: an attacker does not decide how much is written to the disk."""
SHOWN_PATH_BYTES = 120
REGISTRATIONS = 1 / 200  # new keys of an address, by its requests: one a second where 200 requests are allowed
LEAST_INTAKE_BYTES = 64 * 1024 * 1024
READ_AT_ONCE = 4
"""Pages that anyone may read (the status, the ledger) cost the hub more than anything a stranger may send. Nobody who
reads on many connections gets more of the hub than this."""

SIGNED_GETS = ("/submissions", "/batches/")
"""What only trusted roles may read: whoever has not proven who it is gets nothing of it, and costs nothing."""

log = logging.getLogger("shoal.hub.requests")


@dataclass
class Visit:
    """One request on its way through: what is known about it outside of its route."""

    number: str
    client: str = ""  # the address as limits count it; empty: nobody's
    node: str = ""  # only once it is proven
    code: str = ""  # of the refusal, if it is one
    waited_s: float = 0.0  # in a long poll, for something to happen
    body: Receiving | None = None


def visit_of(scope: Scope) -> Visit:
    """The visit that the middleware has begun; a new one where there is none."""
    if VISIT not in scope:
        scope[VISIT] = Visit(secrets.token_hex(8))
    visit: Visit = scope[VISIT]
    return visit


def max_age_s(scope: Scope) -> float:
    """How old an answer may be that all share: strangers get what is kept, this machine's own read their writes."""
    return KEPT_S if visit_of(scope).client else 0.0


class Edge:
    """What is counted of callers, shared by all requests of one hub. `addresses` is the server's: without one (in one
    process, in tests) nobody has an address to be counted by.

    Rates are real time, whatever clock the hub goes by.
    """

    def __init__(self, config: HubConfig, clock: Clock = SystemClock()) -> None:
        settings = config.settings
        self.clock = clock
        self.metrics = HubMetrics()
        self.addresses: Addresses | None = None
        self.requests = Buckets(settings.requests_per_address_s)
        self.reading = Turns(READ_AT_ONCE)
        self.answers = Answers(clock)
        self._warned = False
        self.keys = Buckets(settings.requests_per_key_s)
        self.newcomers = Buckets(settings.requests_per_address_s * REGISTRATIONS, burst_s=60.0)
        body_bytes = config.submission_limits.compressed_bytes
        self.intake = Intake(max(LEAST_INTAKE_BYTES, CONCURRENT_UPLOADS * body_bytes))

    def client_of(self, scope: Scope) -> str:
        """The address that a request is counted under; empty: none."""
        peer = scope.get("client")
        if self.addresses is None or not peer:
            return ""
        client = self.addresses.client(peer[0])
        # This machine counts under no address; whoever comes through a proxy on it that nobody named, neither.
        forwarded = any(name == b"x-forwarded-for" for name, _ in scope["headers"])
        if not client and not self._warned and forwarded and not self.addresses.is_proxy(peer[0]):
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
        self._app = app
        self._edge = edge
        self._clock = edge.clock
        self._shown = Buckets(SHOWN_PER_S)
        self._hidden = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = visit_of(scope)
        visit.client = self._edge.client_of(scope)
        began_s = self._clock.monotonic_s()
        status = 500  # an exception that nobody turned into an answer is a defect

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((HEADER_REQUEST.encode(), visit.number.encode()))
            with contextlib.suppress(h11.LocalProtocolError):  # the connection broke meanwhile: nobody hears it
                await send(message)

        guard: Guard | None = scope.get("state", {}).get(GUARD)
        if guard is not None:
            guard.began(scope)
        try:
            await self._let_in(visit, scope, receive, answer)
        finally:
            if visit.body is not None:
                visit.body.close()
            if guard is not None:
                guard.ended()
            took_s = self._clock.monotonic_s() - began_s
            route = getattr(scope.get("route"), "path", "other")
            self._edge.metrics.note(route, scope["method"], status, visit.code, max(0.0, took_s - visit.waited_s))
            self._log(visit, scope, status, took_s)

    async def _let_in(self, visit: Visit, scope: Scope, receive: Receive, answer: Send) -> None:
        wait_s = self._edge.requests.take(visit.client, self._clock.monotonic_s()) if visit.client else 0.0
        if wait_s == 0.0:
            if visit.client and scope["method"] == "GET" and not scope["path"].startswith(SIGNED_GETS):
                async with self._edge.reading.of(visit.client):
                    await self._app(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
            return
        visit.code = "rate.address"
        await asyncio.sleep(HOLD_S)
        sentence = "your address asks too often: ask again in a second, and less often"
        refusal = JSONResponse({"code": visit.code, "message": sentence}, 429, {"retry-after": "1"})
        await refusal(scope, receive, answer)

    def _log(self, visit: Visit, scope: Scope, status: int, took_s: float) -> None:
        """Every request for who debugs; refusals for everybody, but only so many."""
        level = logging.DEBUG
        if status >= 400:
            if self._shown.take("", self._clock.monotonic_s()) == 0.0:
                level = logging.WARNING if status >= 500 else logging.INFO
            else:
                self._hidden += 1
        if not log.isEnabledFor(level):
            return
        # The path as it was sent, percent signs and all: no control character of a stranger's reaches a terminal.
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        path = raw[:SHOWN_PATH_BYTES].decode("ascii", errors="backslashreplace")
        fields: dict[str, Any] = {
            "request": visit.number, "code": visit.code, "node": visit.node, "address": visit.client,
            "took_ms": round(took_s * 1000),
        }  # fmt: skip
        if level > logging.DEBUG and self._hidden:
            fields["not_shown"], self._hidden = self._hidden, 0
        said = " ".join(f"{name}={value}" for name, value in fields.items() if value not in ("", 0))
        log.log(level, "%s %s %s: %s", scope["method"], path, status, said)
