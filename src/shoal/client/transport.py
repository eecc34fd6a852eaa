"""One HTTP call to a hub of the run: signed, retried until a deadline, its failure reported in one sentence.

    call ─► sign (fresh time and nonce) ─► send ─┬─ 2xx ─────────────────────► answer
              ▲                                  ├─ 4xx, a `Problem` ────────► HubRefused, at once
              │                                  ├─ 401, signed hub's time ──┐   later requests use the hub's clock
              │                                  ├─ no answer, 5xx, a page ──┤   another hub at once, if there is one
              │                                  └─ 429 ─────────────────────┤
              └──── back-off, or the hub's Retry-After ◄─────────────────────┘   after the patience: HubUnreachable

A page is an HTML answer of a proxy or of a network's login. Every call is idempotent on the hub's side.

    GET /run ─► open_run_info (pinned root, else that of the first answer) ─► TrustedRun ─► further hubs

A hub must prove that it belongs to the run before it gets a signed request, and before any request if the root key is
known. The clock is corrected only by a certified hub's answer to this very request (`HubClock`); otherwise an attacker
in between could collect requests that are dated in the future.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urlencode

from pydantic import ValidationError

from shoal import __version__, errors
from shoal.client.trust import TrustedRun, open_run_info
from shoal.errors import DeadlineExceeded, HubRefused, HubUnreachable, ProtocolError, ShutOut, SignatureError
from shoal.protocol import HubClock, Problem, Registration, SignedDocument, SigningKey, open_document, sign_request
from shoal.protocol.node import HEADER_PROTOCOL, PROTOCOL_VERSION
from shoal.protocol.signing import HEADER_NONCE, HEADER_TIME, Message, first_problem
from shoal.runtime import Backoff, Clock, StopToken
from shoal.runtime.exchange import LEAST_BYTES_PER_S, ClientRequest, ClientResponse, HttpClient, Limit
from shoal.runtime.targets import Nearness, Reach, TargetRefused, check_url, nearness_of_hub

M = TypeVar("M", bound=Message)

log = logging.getLogger(__name__)

HEADERS = {HEADER_PROTOCOL: str(PROTOCOL_VERSION), "user-agent": f"shoal/{__version__}", "accept-encoding": "identity"}
MIB = 1024 * 1024
MAX_RETRY_AFTER_S = 60.0
CLOCKS_AGREE_MS = 1_000
HOUR_MS = 3_600_000
MAX_CORRECTION_MS = 15 * HOUR_MS  # covers a clock that shows local time as UTC
LEAST_ATTEMPT_S = 2.0  # a busy hub may need this long
REFRESH_S = 10.0  # limits how often unknown signatures cause a request for /run


@dataclass(frozen=True)
class ClientOptions:
    """How long a call is retried, how long one attempt may take, and the pauses between attempts. A hub that does not
    answer for `warn_after_s` is mentioned in the log. `retries_pages`: whether an HTML page is retried."""

    patience_s: float = 60.0
    connect_timeout_s: float = 10.0
    answer_timeout_s: float = 20.0
    warn_after_s: float = 3.0
    retries_pages: bool = True
    backoff: Backoff = field(default_factory=Backoff)

    @classmethod
    def of_a_person(cls, wait_s: float) -> ClientOptions:
        """For a person at the terminal: errors are reported once, at the end."""
        connect_s, answer_s = max(1.0, min(10.0, wait_s)), max(5.0, min(10.0, wait_s))
        return cls(wait_s, connect_s, answer_s, warn_after_s=math.inf, retries_pages=False)

    def with_patience(self, patience_s: float, hubs: int) -> ClientOptions:
        """Another patience; with several hubs, one that hangs does not use it up."""
        attempt_s = max(LEAST_ATTEMPT_S, patience_s / min(hubs, 2))
        connect_s, answer_s = min(self.connect_timeout_s, attempt_s), min(self.answer_timeout_s, attempt_s)
        return replace(self, patience_s=patience_s, connect_timeout_s=connect_s, answer_timeout_s=answer_s)


@dataclass(frozen=True)
class HubCall:
    method: str
    path: str
    body: bytes = b""
    params: tuple[tuple[str, str], ...] = ()
    content_type: str = "application/json"
    wait_s: float = 0.0
    run: str | None = None  # signed for this run; None: a public call, unsigned
    max_bytes: int = 64 * MIB  # of the answer


RUN = HubCall("GET", "/run", max_bytes=2 * MIB)


@dataclass(eq=False)
class HubAddress:
    url: str
    named: bool = False  # by another hub, not by the user
    verified: bool = False  # it was seen to belong to the run


class Hubs:
    """The addresses of the run's hubs. The present one is asked until it fails, then the next. Thread-safe."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise errors.ConfigError("no hub was given: give the run's join URL")
        self._lock = threading.RLock()
        self._known = [HubAddress(url) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        self.present = self._known[0]

    @property
    def urls(self) -> list[str]:
        with self._lock:
            return [hub.url for hub in self._known]

    def named(self, urls: Iterable[str]) -> None:
        """Replace the addresses that hubs have named, except the present one; those that the user gave stay first."""
        with self._lock:
            known = {hub.url: hub for hub in self._known}
            self._known = [hub for hub in self._known if not hub.named or hub is self.present]
            for url in dict.fromkeys(url.rstrip("/") for url in urls):
                with suppress(TargetRefused):
                    check_url(url)
                    hub = known.get(url) or HubAddress(url, named=True)
                    self._known += [] if hub in self._known else [hub]

    def failed(self, hub: HubAddress) -> None:
        with self._lock:
            if self.present is hub:
                self.present = self._known[(self._known.index(hub) + 1) % len(self._known)]

    def drop(self, hub: HubAddress) -> bool:
        """Never ask this hub again: it belongs to another run. False if it is the only one."""
        with self._lock:
            if self._known == [hub]:
                return False
            self.failed(hub)
            self._known = [each for each in self._known if each is not hub]
            return True


class _Retry(Exception):
    """Another attempt may succeed; `elsewhere`: at another hub. `is_page`: an HTML page answered."""

    def __init__(self, why: str, after_s: float | None = None, elsewhere: bool = False, is_page: bool = False) -> None:
        super().__init__(why)
        self.after_s, self.elsewhere, self.is_page = after_s, elsewhere, is_page


@dataclass
class SharedState:
    """Shared by all copies of a client: the run, the registration of this node, the time of the hub."""

    pinned: str | None  # root fingerprint
    trusted: TrustedRun | None = None
    refreshed_s: float = -math.inf
    ahead_ms: int = 0  # how far the hub's clock is ahead of this machine's
    registration: Registration | None = None
    registered: int = 0  # times
    fetching: threading.Lock = field(default_factory=threading.Lock)
    changing: threading.Lock = field(default_factory=threading.Lock)
    registering: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Transport:
    http: HttpClient
    hubs: Hubs
    key: SigningKey
    stop: StopToken
    clock: Clock
    options: ClientOptions
    known: SharedState

    def send(self, call: HubCall) -> bytes:
        """The body of a hub's answer; or `HubRefused`, `HubUnreachable`, `DeadlineExceeded` (told to stop)."""
        began, attempt, failures, warned = self.clock.monotonic_s(), 0, 0, False
        must_meet = call.run is not None or self.known.pinned is not None
        while True:
            hub = self.hubs.present
            try:
                if call is not RUN and must_meet and not hub.verified:
                    self._meet(hub)
                content = self._meet(hub) if call is RUN else self._exchange(call, hub)[0]
                if warned:
                    log.info("the hub at %s answers again, after %.0f s", hub.url, self.clock.monotonic_s() - began)
                return content
            except _Retry as failure:
                urls = self.hubs.urls
                if failure.is_page and not self.options.retries_pages and len(urls) == 1:
                    advice = "check the address, and whether a proxy or a network's login page answers"
                    raise HubUnreachable(f"{hub.url} {failure}; {advice}") from failure
                tried_s = self.clock.monotonic_s() - began
                pause = self.options.backoff.wait_s(attempt) if failure.after_s is None else failure.after_s
                if failure.elsewhere:
                    self.hubs.failed(hub)
                    failures += 1
                    if failures % len(urls):  # not all of them have failed
                        other = self.hubs.present.url
                        log.warning("the hub at %s does not answer (%s): asking %s", hub.url, failure, other)
                        pause = 0.0
                if tried_s + pause > self.options.patience_s:
                    who = f"the hub{'s' if len(urls) > 1 else ''} at {', '.join(urls)} ({call.method} {call.path})"
                    advice = "check the address, that the hub is running, and this machine's network"
                    raise HubUnreachable(
                        f"no usable answer from {who} for {tried_s:.0f} s: {failure}; {advice}"
                    ) from failure
                if not warned and tried_s >= self.options.warn_after_s:
                    log.warning("the hub at %s does not answer %s (%s); trying again", hub.url, call.path, failure)
                    warned = True
                if self.stop.wait(pause):
                    raise DeadlineExceeded(f"stopped ({self.stop.reason}) while calling the hub: {failure}") from None
                attempt += pause > 0

    def run(self) -> TrustedRun:
        if self.known.trusted is None:
            with self.known.fetching:
                if self.known.trusted is None:
                    self.send(RUN)
        assert self.known.trusted is not None, "a description that is not believed raises"
        return self.known.trusted

    def run_again(self, seen: TrustedRun) -> TrustedRun:
        """The run as its hub describes it now, unless it has changed since `seen`. Asks at most every few seconds."""
        with self.known.fetching:
            now_s = self.clock.monotonic_s()
            if self.known.trusted is seen and now_s - self.known.refreshed_s >= REFRESH_S:
                self.known.refreshed_s = now_s
                self.send(RUN)
            return self.known.trusted or seen

    def admit(self, url: str, content: bytes, near: Nearness) -> None:
        """Verify a hub's description of the run: it must be the same run with the same root key."""
        signed = parsed(SignedDocument, f"{url}/run", content)
        with self.known.changing:
            known = self.known.trusted
            pinned = self.known.pinned if known is None else known.root_fingerprint
            found = open_run_info(signed, pinned, frozenset() if known is None else known.revoked)
            if known is not None and found.run != known.run:
                raise SignatureError(f"the hub at {url} belongs to run {found.run!r}, not to {known.run!r}")
            nearest = near if known is None else min(near, known.reach.nearest)
            self.known.trusted = replace(found, reach=Reach(nearest))
        self.hubs.named(found.info.hubs)

    def _meet(self, hub: HubAddress) -> bytes:
        """Fetch and verify the hub's description of its run. A hub of another run is dropped unless it is the only."""
        content, near = self._exchange(RUN, hub)
        try:
            self.admit(hub.url, content, near)
        except SignatureError as error:
            if not self.hubs.drop(hub):
                raise
            log.warning("the hub at %s is left out from now on: %s", hub.url, error)
            raise _Retry(str(error), after_s=0.0) from error
        except ProtocolError as error:
            if len(self.hubs.urls) == 1:
                raise
            raise _Retry(str(error), elsewhere=True) from error
        hub.verified = True
        return content

    def _exchange(self, call: HubCall, hub: HubAddress) -> tuple[bytes, Nearness]:
        options = self.options
        allowed_s = options.connect_timeout_s + options.answer_timeout_s + call.wait_s  # up to the answer's first byte
        limit = Limit(allowed_s + len(call.body) / LEAST_BYTES_PER_S, self.stop, self.clock)
        try:
            request = self._request(call, hub)
            response = self.http.send(request, limit)
            near = nearness_of_hub(hub.url, response.peer)
        except OSError as error:
            raise _Retry(str(error) or type(error).__name__, elsewhere=True) from error
        except ValueError as error:
            raise _Retry(f"{hub.url} is no address: {error}", elsewhere=True) from error
        if response.status == HTTPStatus.UNAUTHORIZED and HEADER_NONCE in request.headers:
            self._learn_time(request, response.body)
        return _sorted_out(response), near

    def _request(self, call: HubCall, hub: HubAddress) -> ClientRequest:
        headers = {**HEADERS, **({"content-type": call.content_type} if call.body else {})}
        reach = None if self.known.trusted is None else self.known.trusted.reach  # where hubs may send this machine
        is_checked = hub.named or hub.verified  # not at the first contact with one that the user gave
        request = ClientRequest(
            call.method, f"{hub.url}{call.path}{'?' * bool(call.params)}{urlencode(call.params)}", headers, call.body,
            reach if is_checked else None, self.options.connect_timeout_s, self.options.answer_timeout_s + call.wait_s,
            call.max_bytes,
        )  # fmt: skip
        if call.run is not None:
            at_ms = self.clock.now_ms() + self.known.ahead_ms
            headers.update(sign_request(self.key, call.run, call.method, request.target, call.body, at_ms))
        return request

    def _learn_time(self, request: ClientRequest, content: bytes) -> None:
        """Use the hub's clock from now on, if it refused this very request for its date, with a signature."""
        if (problem := _problem(content)) is None or problem.clock is None:
            return
        try:
            clock = open_document(problem.clock, HubClock, self.run().hub_keys)
        except ProtocolError as error:
            log.warning("%s says what time it is, and is not believed: %s", request.url, error)
            return
        asked = (self.run().run, self.key.node, request.headers[HEADER_NONCE])
        if (clock.run, clock.node, clock.nonce) != asked:
            return
        if abs(clock.now_ms - int(request.headers[HEADER_TIME])) < CLOCKS_AGREE_MS:
            return
        ahead_ms = clock.now_ms - self.clock.now_ms()
        side = "ahead of" if ahead_ms > 0 else "behind"
        if abs(ahead_ms) > MAX_CORRECTION_MS:
            off = f"the hub's clock is {abs(ahead_ms) / HOUR_MS:.1f} hours {side} this machine's"
            advice = f"at most {MAX_CORRECTION_MS // HOUR_MS} hours are corrected: set this machine's clock (NTP)"
            raise HubRefused(HTTPStatus.UNAUTHORIZED, "auth.skew", f"{off}; {advice}")
        if abs(ahead_ms - self.known.ahead_ms) >= CLOCKS_AGREE_MS:  # else another thread was told the same
            self.known.ahead_ms = ahead_ms
            text = "the hub's clock is %.0f s %s this machine's: requests are dated by the hub's from now on"
            log.warning(text, abs(ahead_ms) / 1000, side)
        raise _Retry("the clocks of the hub and of this machine differ")


def parsed(kind: type[M], where: str, content: bytes) -> M:
    try:
        return kind.model_validate_json(content, extra="ignore")
    except ValidationError as error:
        what = f"{where} answers, but not as a shoal hub of this version ({kind.__name__}: {first_problem(error)})"
        raise ProtocolError(f"{what}: check the address") from error


def _sorted_out(response: ClientResponse) -> bytes:
    """The content if the answer is a success; else the exception that it stands for. Only a hub refuses."""
    status = response.status
    if response.is_success and not response.headers.get("content-type", "").startswith("text/html"):
        return response.body
    problem, busy = _problem(response.body), status == HTTPStatus.TOO_MANY_REQUESTS
    is_page = problem is None and not busy and status < 500
    if busy or problem is None or status >= 500:
        sentence = "answers, but it is no shoal hub" if is_page else "the hub's address answered with an error"
        sentence = f"{sentence} [HTTP {status}]" if problem is None else f"{problem.message} [{problem.code}, {status}]"
        text = response.headers.get("retry-after", "")  # its date form, or nonsense, is left to the back-off
        after_s = min(float(text), MAX_RETRY_AFTER_S) if busy and text.isascii() and text.isdigit() else None
        raise _Retry(sentence, after_s, elsewhere=not busy, is_page=is_page)
    refusal = ShutOut if problem.code in ("node.banned", "node.suspended", "certificate.expired") else HubRefused
    raise refusal(status, problem.code, problem.message)


def _problem(content: bytes) -> Problem | None:
    try:
        return Problem.model_validate_json(content, extra="ignore")
    except ValidationError:
        return None
