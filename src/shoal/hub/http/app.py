"""What is done with a request.

    request ─► its address's bucket ─► call (`service/calls`) ─► `auth` ─► service, in a thread ─► reply, or `Problem`
                                                                             └ again on every change: long polls

Refusals by address are delayed: a caller that asks again at once gets one answer a second on each connection.
"""

import asyncio
import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qs

from pydantic import ValidationError

from shoal.errors import ResourceError, ShoalError
from shoal.hub.buckets import Buckets
from shoal.hub.http.auth import caller
from shoal.hub.http.limits import Edge
from shoal.hub.http.polling import Polls
from shoal.hub.service import Hub, retry
from shoal.hub.service.calls import TABLE, Ask, Call, Names, Parameters
from shoal.hub.service.reporting import HubMetrics, read_figures
from shoal.hub.service.turns import network_of
from shoal.hub.service.upkeep import keep_up, note_failure
from shoal.hub.settings import HubConfig
from shoal.hub.state.commands import Refusal
from shoal.protocol import Problem, first_problem
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.http import HttpRequest, Reply

HOLD_S = 1.0
SHOWN_PER_S = 5.0  # refusals in the log: an attacker does not decide how much is written to the disk
SHOWN_PATH_BYTES = 120
EVENTS, FOLLOWED_S, FOLLOW_EACH_S = "/view/events", 20.0, 2.0
VIEWERS, VIEWERS_OF_ONE, PAGES_AT_ONCE = 64, 4, 2  # pages leave threads and memory to everybody's calls
LOOK_AGAIN_S = 0.5  # what another hub changes in a shared database comes without notice: long polls look so often
HEADER_REQUEST = "shoal-request"

log = logging.getLogger("shoal.hub")
requests_log = logging.getLogger("shoal.hub.requests")

_BY_PATH: dict[str, dict[str, Call]] = defaultdict(dict)
for _call in sorted((call for rows in TABLE.values() for call in rows), key=lambda call: call.method, reverse=True):
    _BY_PATH[re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", _call.path)][_call.method] = _call
CALLS = [(re.compile(path), calls) for path, calls in _BY_PATH.items()]


class Pages(Protocol):
    """What a hub serves beside its calls: pages for people (`shoal.dashboard`)."""

    def takes(self, path: str) -> bool: ...
    def answer(self, request: HttpRequest) -> Reply: ...
    def level(self, request: HttpRequest) -> str: ...
    def state(self, request: HttpRequest) -> tuple[str, bytes]: ...


class App:
    """The hub over `config.folder`: opened here, closed when its `lifespan` ends, or by `hub.close()`."""

    def __init__(
        self, config: HubConfig, clock: Clock = SystemClock(), pages: Callable[[Hub], Pages] | None = None
    ) -> None:
        hub = self.hub = Hub(config, clock)
        self._pages, self._viewers = None if pages is None else pages(hub), Counter[str]()
        self._showing = asyncio.Semaphore(PAGES_AT_ONCE)
        self.edge = Edge(config)
        intake = self.edge.intake
        figures = lambda: read_figures(hub.context, hub.work.late, hub.work.drawing.unusable)  # noqa: E731
        self.metrics = HubMetrics(figures, lambda: (intake.held_bytes, intake.received_bytes))
        self._shown = Buckets(SHOWN_PER_S)

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        self.polls = Polls(self.hub.context.changes)
        upkeep = asyncio.create_task(keep_up(self.hub.upkeep, self.edge.in_thread))
        try:
            yield
        finally:
            self.hub.context.changes.close()
            upkeep.cancel()
            await asyncio.gather(upkeep, return_exceptions=True)
            self.edge.threads.shutdown(cancel_futures=True)
            self.hub.close()

    async def answer(self, request: HttpRequest) -> Reply:
        edge, reply = self.edge, Reply(500)
        request.client, began_s = edge.client_of(request), edge.clock.monotonic_s()
        try:
            if request.client and edge.requests.take(request.client, began_s) > 0:
                await asyncio.sleep(HOLD_S)
                sentence = "your address asks too often: ask again in a second, and less often"
                raise Refusal(429, "rate.address", sentence, retry_after_s=1)
            reply = await self._reply(request)
        except Exception as error:  # noqa: BLE001  answered as a `Problem`, and logged if it is a defect
            reply = self._problem(request, error)
        finally:
            edge.intake.release(request.sender, request.body_bytes)
            took_s = edge.clock.monotonic_s() - began_s
            named = request.route, request.method, reply.status, request.code
            self.metrics.note(*named, max(0.0, took_s - request.waited_s))
            self._log(request, reply.status, took_s)
        reply.headers = {**reply.headers, HEADER_REQUEST: request.number}
        return reply

    async def _reply(self, request: HttpRequest) -> Reply:
        if self._pages is not None and self._pages.takes(request.path):
            if request.path == EVENTS:
                return await self._events(request, self._pages)
            async with self.edge.reading_of(request.client) if request.client else nullcontext():
                return await self.edge.in_turn(self._showing, partial(self.edge.in_thread, self._pages.answer, request))
        call, named = _find(request)
        at = Parameters()
        if call.at is not Parameters:
            query = parse_qs(request.query, keep_blank_values=True)
            many = {"name": query.get("name", [])} if call.at is Names else {}
            try:
                at = call.at.model_validate({**{name: each[-1] for name, each in query.items()}, **named, **many})
            except ValidationError as error:
                raise Refusal(422, "request.parameter", first_problem(error)) from error
        node, said = await caller(self.hub.context, self.edge, request, call)
        ask = Ask(at, said, node, request.client, network_of(request.client), self.metrics.text)
        answer = None if call.at_once is None else call.at_once(self.hub, ask)
        if answer is None:
            answer = await self._served(request, call, ask)
        status, answer = answer if isinstance(answer, tuple) else (204 if call.reply is None else 200, answer)
        body = answer if isinstance(answer, bytes) else b"" if answer is None else answer.model_dump_json().encode()
        return Reply(status, body, call.reply if isinstance(call.reply, str) else "application/json")

    async def _events(self, request: HttpRequest, pages: Pages) -> Reply:
        """The next state that differs from the one that the viewer has; after a while the same again. A browser asks
        again by itself, and says which it had last. All viewers share one computation."""
        request.route, began_s, level = EVENTS, time.monotonic(), pages.level(request)
        if self._viewers["*"] >= VIEWERS or (request.client and self._viewers[request.client] >= VIEWERS_OF_ONE):
            raise Refusal(429, "rate.viewers", "too many follow this run already: look at its pages without", 60)
        viewed = Counter({"*", request.client})
        self._viewers += viewed
        try:
            while True:
                compute = partial(self.edge.in_thread, pages.state, request)
                name, event = await self.edge.shared(f"{EVENTS} {level}", "viewer", compute)
                waited_s, is_ending = time.monotonic() - began_s, self.hub.context.changes.is_closed
                if name != request.headers.get("last-event-id") or waited_s > FOLLOWED_S or is_ending:
                    request.waited_s = waited_s
                    return Reply(200, event, "text/event-stream", {"cache-control": "no-store"})
                await asyncio.sleep(FOLLOW_EACH_S)
        finally:
            self._viewers -= viewed

    async def _served(self, request: HttpRequest, call: Call, ask: Ask) -> Any:
        compute: Callable[[], Awaitable[Any]] = partial(self.edge.in_thread, retry, partial(call.serve, self.hub, ask))
        if call.is_serial and self.hub.context.storage.is_shared:
            compute = partial(self.edge.in_turn, self.edge.deciding, compute)
        is_open = call.roles is None and call.method == "GET" and request.client
        async with self.edge.reading_of(request.client) if is_open else nullcontext():
            if call.poll is not None:
                return await self._poll(request, call, ask, compute)
            if call.is_upload:
                return await self.edge.in_turn(self.edge.uploads, compute)
            return await (self.edge.shared(call.path, request.client, compute) if call.is_shared else compute())

    async def _poll(self, request: HttpRequest, call: Call, ask: Ask, compute: Callable[[], Awaitable[Any]]) -> Any:
        assert call.poll is not None
        poll, began_s, worked_s = call.poll, time.monotonic(), 0.0

        async def attempt() -> tuple[Any, bool]:
            nonlocal worked_s
            asked_s = time.monotonic()
            reply = await compute()
            worked_s += time.monotonic() - asked_s
            return reply, poll.is_ready(reply, ask.said)

        try:
            return await self.polls.poll(
                poll.topic, ask.said.wait_s, attempt, request.node, is_gone=lambda: request.is_gone,
                look_s=LOOK_AGAIN_S if self.hub.context.storage.is_shared else None, is_held_back=poll.is_held_back,
            )  # fmt: skip
        finally:  # what was waited for is no time that the hub took
            request.waited_s = time.monotonic() - began_s - worked_s

    def _problem(self, request: HttpRequest, error: Exception) -> Reply:
        """Any error as a `Problem`. Why the hub itself failed is for the log, not for strangers."""
        headers, clock, status = dict[str, str](), None, 500
        what = f"request {request.number}, {request.method} {request.path}"
        more = f"its log says more about request {request.number}"
        if isinstance(error, Refusal):
            status, request.code, message, clock = error.status, error.code, error.sentence, error.clock
            headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
        elif isinstance(error, ShoalError):
            note_failure(self.hub.context, what, error)
            status, request.code = 503, "hub.resource" if isinstance(error, ResourceError) else "hub.failed"
            message = f"the hub could not do this now, try again later; {more}"
        else:
            log.error("%s failed", what, exc_info=error)
            request.code = "hub.defect"
            message = f"the hub failed in a way it does not understand; {more}"
        body = Problem(code=request.code, message=message, clock=clock).model_dump_json(exclude_none=True)
        return Reply(status, body.encode(), headers=headers)

    def _log(self, request: HttpRequest, status: int, took_s: float) -> None:
        level = logging.DEBUG
        if status >= 400 and self._shown.take("", self.edge.clock.monotonic_s()) == 0.0:
            level = logging.WARNING if status >= 500 else logging.INFO
        if not requests_log.isEnabledFor(level):
            return
        # The path as it was sent, percent signs and all: no control character of a stranger's reaches a terminal.
        path = request.target.partition("?")[0].encode("latin-1")[:SHOWN_PATH_BYTES].decode("ascii", "backslashreplace")
        fields = {"request": request.number, "code": request.code, "node": request.node, "address": request.client}
        said = " ".join(f"{name}={value}" for name, value in fields.items() if value)
        requests_log.log(level, "%s %s %s: %s took_ms=%.0f", request.method, path, status, said, took_s * 1000)


def _find(request: HttpRequest) -> tuple[Call, dict[str, str]]:
    found = ((named, calls) for pattern, calls in CALLS if (named := pattern.fullmatch(request.path)))
    named, calls = next(found, (None, {}))
    call = calls.get("GET" if request.method == "HEAD" else request.method)
    if call is None or named is None:
        status = HTTPStatus.METHOD_NOT_ALLOWED if calls else HTTPStatus.NOT_FOUND
        request.route = next((each.path for each in calls.values()), request.route)
        sentence = f"{status.phrase}: {request.method} {request.path}; docs/reference/http.md lists the calls"
        raise Refusal(status, f"http.{status}", sentence)
    request.route = call.path
    return call, named.groupdict()
