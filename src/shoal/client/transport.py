"""One HTTP call to a hub of the run: signed, retried under a deadline, and its failure said in one sentence.

    call ─► sign (fresh time and nonce) ─► send ─┬─ 2xx ─────────────────────► answer
              ▲                                  ├─ 4xx, a `Problem` ────────► HubRefused, at once
              │                                  ├─ 401, signed hub's time ──┐   dated by the hub's clock from then on
              │                                  ├─ no answer, 5xx, a page ──┤   another hub at once, if there is one
              │                                  └─ 429 ─────────────────────┤
              └──── back-off, or the hub's Retry-After ◄─────────────────────┘   past the patience: HubUnreachable

A page is what a proxy, a load balancer or a hotel's network says in the hub's place, with whatever status. Before a hub
is first sent something signed, or asked anything where the root key is known, it has to show that it belongs to the run
(`admit`). Every call is idempotent on the hub's side, so sending it again after a lost answer is always right.

A run may have several hubs. One that does not answer rests, twice as long with every failure in a row, and the next
that does not rest is asked; when all rest, there is a pause, and then the one that has rested longest is asked.

What time it is, only a certified hub may say, and only in answer to this very request (`HubClock`): otherwise whoever
is on the way could collect requests that are dated for next week. No correction exceeds `MAX_CORRECTION_MS`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus

import httpx
from pydantic import ValidationError

from shoal.client.http import HEADERS, REACH
from shoal.errors import (
    ConfigError,
    DeadlineExceeded,
    HubRefused,
    HubUnreachable,
    ProtocolError,
    ShutOut,
    SignatureError,
)
from shoal.protocol import HubClock, Problem, SignedDocument, SigningKey, sign_request
from shoal.protocol.signing import HEADER_NONCE, HEADER_TIME
from shoal.runtime.clock import Backoff, Clock
from shoal.runtime.exchange import LEAST_BYTES_PER_S, limited, read_body
from shoal.runtime.stop import StopToken
from shoal.runtime.targets import Nearness, Reach, TargetRefused, check_url, nearness_of_hub

log = logging.getLogger(__name__)

MIB = 1024 * 1024
MAX_RETRY_AFTER_S = 60.0
CLOCKS_AGREE_MS = 1_000
HOUR_MS = 3_600_000
MAX_CORRECTION_MS = 15 * HOUR_MS  # time zones reach 14: a clock of local time as if it were UTC is no further off
FIRST_REST_S = 5.0
LONGEST_REST_S = 300.0
LEAST_ATTEMPT_S = 2.0  # a busy hub may take that long, however short somebody's patience is
SHUT_OUT_CODES = ("node.banned", "node.suspended")


@dataclass(frozen=True)
class ClientOptions:
    """How long a call keeps trying (`patience_s`), how long one attempt may take, and the pauses in between.

    A hub that does not answer for `tell_after_s` is mentioned in the log, once per call. `retries_pages`: what no hub
    answers (a page, a web server's 404) may come from somebody in the hub's place, for a while.

    >>> ClientOptions.of_a_person(10.0).patience_s
    10.0
    """

    patience_s: float = 60.0
    connect_timeout_s: float = 10.0
    answer_timeout_s: float = 20.0
    tell_after_s: float = 3.0
    retries_pages: bool = True
    backoff: Backoff = field(default_factory=Backoff)

    @classmethod
    def of_a_person(cls, wait_s: float) -> ClientOptions:
        """Somebody waits at the terminal: no longer than `wait_s`, and what is wrong is said once, at the end."""
        connect_s, answer_s = max(1.0, min(10.0, wait_s)), max(5.0, min(10.0, wait_s))
        return cls(wait_s, connect_s, answer_s, tell_after_s=math.inf, retries_pages=False)

    def with_patience(self, patience_s: float, hubs: int) -> ClientOptions:
        """The same with another patience, which one hub that is frozen does not use up if there are several.

        >>> ClientOptions().with_patience(5.0, hubs=2).answer_timeout_s
        2.5
        """
        attempt_s = max(LEAST_ATTEMPT_S, patience_s / min(hubs, 2))
        connect_s, answer_s = min(self.connect_timeout_s, attempt_s), min(self.answer_timeout_s, attempt_s)
        return replace(self, patience_s=patience_s, connect_timeout_s=connect_s, answer_timeout_s=answer_s)


@dataclass(frozen=True)
class Call:
    """One request: `wait_s` is the long poll inside it, which its time-out has to outlast."""

    method: str
    path: str
    body: bytes = b""
    params: tuple[tuple[str, str], ...] = ()
    content_type: str = "application/json"
    wait_s: float = 0.0
    run: str | None = None  # signed for this run; None: a public call, unsigned
    max_bytes: int = 64 * MIB  # of the answer: whoever is at the address has no hold on this machine's memory


RUN = Call("GET", "/run", max_bytes=2 * MIB)


class _Again(Exception):
    """This attempt failed in a way that another one may mend; `elsewhere`: at another hub, at once. `is_page`: somebody
    answered who is no hub, nor a proxy that says that its hub is away (5xx)."""

    def __init__(
        self, message: str, after_s: float | None = None, elsewhere: bool = False, is_page: bool = False
    ) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.elsewhere = elsewhere
        self.is_page = is_page


class HubTime:
    """What requests are dated by: this machine's clock, corrected once the hub has said that theirs differ too much."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_ms = 0  # of the hub's clock; one number, so that threads may share it without a lock

    def now_ms(self) -> int:
        return self._clock.now_ms() + self._ahead_ms

    def learn(self, hub_ms: int) -> None:
        """Go by the hub's clock, which shows `hub_ms`; refuse if this machine's is too far from it."""
        ahead_ms = hub_ms - self._clock.now_ms()
        if abs(ahead_ms) > MAX_CORRECTION_MS:
            side = "behind" if ahead_ms > 0 else "ahead of"
            off = f"this machine's clock is {abs(ahead_ms) / HOUR_MS:.1f} hours {side} the hub's"
            advice = f"at most {MAX_CORRECTION_MS // HOUR_MS} hours are corrected: set this machine's clock (NTP)"
            raise HubRefused(HTTPStatus.UNAUTHORIZED, "auth.skew", f"{off}; {advice}")
        if abs(ahead_ms - self._ahead_ms) < CLOCKS_AGREE_MS:
            return  # another thread was told the same
        self._ahead_ms = ahead_ms
        log.warning(
            "the hub's clock is %.0f s %s this machine's: requests are dated by the hub's from now on",
            abs(ahead_ms) / 1000, "ahead of" if ahead_ms > 0 else "behind",
        )  # fmt: skip


@dataclass
class _Hub:
    url: str
    failures: int = 0
    rests_until_s: float = 0.0
    verified: bool = False
    named: bool = False  # by another hub, not by the user


class Hubs:
    """Threads may share it."""

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        if not urls:
            raise ConfigError("no hub was given: give the run's join URL")
        self._clock = clock
        self._lock = threading.Lock()
        self._known = [_Hub(url) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        self._present = 0

    @property
    def present(self) -> str:
        with self._lock:
            return self._known[self._present].url

    @property
    def urls(self) -> list[str]:
        with self._lock:
            return [hub.url for hub in self._known]

    def named(self, urls: Iterable[str]) -> None:
        """Further addresses of the same run, behind those given; they replace the ones that were named before, but for
        the present one. What is no address is left out."""
        with self._lock:
            present, known = self._known[self._present], {hub.url: hub for hub in self._known}
            given = [hub for hub in self._known if not hub.named or hub is present]
            named = []
            for url in dict.fromkeys(url.rstrip("/") for url in urls):
                with suppress(TargetRefused):
                    check_url(url)
                    named.append(known.get(url) or _Hub(url, named=True))
            self._known = [*given, *(hub for hub in named if hub not in given)]
            self._present = given.index(present)

    def answered(self, url: str) -> None:
        with self._lock:
            for hub in self._at(url):
                hub.failures, hub.rests_until_s = 0, 0.0

    def failed(self, url: str) -> bool:
        """That one did not answer. True if another can be asked at once, which is then the present one."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            for hub in self._at(url):
                hub.failures += 1
                hub.rests_until_s = now_s + min(FIRST_REST_S * 2 ** min(hub.failures - 1, 10), LONGEST_REST_S)
            if self._known[self._present].url != url:
                return True  # another thread has moved on already
            return self._choose(self._present + 1)

    def is_checked(self, url: str) -> bool:
        """Whether the place of this address is checked: not at the first contact with one that the user gave."""
        with self._lock:
            return any(hub.named or hub.verified for hub in self._at(url))

    def is_verified(self, url: str) -> bool:
        """Whether the hub at this address was seen to belong to the run."""
        with self._lock:
            return any(hub.verified for hub in self._at(url))

    def verified(self, url: str) -> None:
        with self._lock:
            for hub in self._at(url):
                hub.verified = True

    def drop(self, url: str) -> bool:
        """Never ask that one again: it belongs to another run. False if there is no other, and it stays."""
        with self._lock:
            index = next((i for i, hub in enumerate(self._known) if hub.url == url), None)
            if index is None:
                return True
            if len(self._known) == 1:
                return False
            del self._known[index]
            if self._present > index:
                self._present -= 1
            elif self._present == index:
                self._choose(index)
            return True

    def _at(self, url: str) -> list[_Hub]:
        return [hub for hub in self._known if hub.url == url]

    def _choose(self, first: int) -> bool:
        """Make the next from `first` on that does not rest the present one; False if all rest."""
        now_s, count = self._clock.monotonic_s(), len(self._known)
        order = [(first + offset) % count for offset in range(count)]
        rested = [index for index in order if self._known[index].rests_until_s <= now_s]
        self._present = rested[0] if rested else min(order, key=lambda index: self._known[index].rests_until_s)
        return bool(rested)


@dataclass(frozen=True)
class Transport:
    """Sends calls as one key; threads may share it."""

    http: httpx.Client
    hubs: Hubs
    key: SigningKey
    stop: StopToken
    clock: Clock
    hub_time: HubTime
    options: ClientOptions
    admit: Callable[[str, bytes, Nearness], None]  # what a hub says of the run, and how near it is; raises: a lie
    opened: Callable[[SignedDocument], HubClock]  # the hub's time, if a hub of the run signed it
    reach: Callable[[], Reach | None]  # where the run's hubs may send this machine; None until one is known
    insists: bool = False  # the root key is known: a hub shows that it belongs to it before anything else is asked

    def send(self, call: Call) -> bytes:
        """The body of a hub's answer, or `HubRefused`, `HubUnreachable`; `DeadlineExceeded` if told to stop."""
        began = self.clock.monotonic_s()
        attempt, told = 0, False
        while True:
            url = self.hubs.present
            try:
                if call is not RUN and (call.run is not None or self.insists) and not self.hubs.is_verified(url):
                    self._meet(url)
                content = self._meet(url) if call is RUN else self._exchange(call, url)[0]
                self.hubs.answered(url)
                if told:
                    log.info("the hub at %s answers again, after %.0f s", url, self.clock.monotonic_s() - began)
                return content
            except _Again as failure:
                if failure.is_page and not self.options.retries_pages and len(self.hubs.urls) == 1:
                    raise HubUnreachable(
                        f"{url} {failure}; check the address, and whether a proxy or a network's login page answers"
                    ) from failure
                tried_s = self.clock.monotonic_s() - began
                pause = self.options.backoff.wait_s(attempt) if failure.after_s is None else failure.after_s
                if failure.elsewhere and self.hubs.failed(url):
                    log.warning("the hub at %s does not answer (%s): going on with %s", url, failure, self.hubs.present)
                    pause = 0.0
                if tried_s + pause > self.options.patience_s:
                    urls = self.hubs.urls
                    raise HubUnreachable(
                        f"no usable answer from the hub{'s' if len(urls) > 1 else ''} at {', '.join(urls)} "
                        f"({call.method} {call.path}) for {tried_s:.0f} s: {failure}; "
                        "check the address, that the hub is running, and this machine's network"
                    ) from failure
                if not told and tried_s >= self.options.tell_after_s:
                    log.warning("the hub at %s does not answer %s (%s); trying again", url, call.path, failure)
                    told = True
                if self.stop.wait(pause):
                    raise DeadlineExceeded(f"stopped ({self.stop.reason}) while calling the hub: {failure}") from None
                attempt += pause > 0

    def _meet(self, url: str) -> bytes:
        """Ask a hub what it runs. One of another run is never asked again, unless it is the only one there is."""
        content, near = self._exchange(RUN, url)
        try:
            self.admit(url, content, near)
        except SignatureError as error:
            if not self.hubs.drop(url):
                raise
            log.warning("the hub at %s is left out from now on: %s", url, error)
            raise _Again(str(error), after_s=0.0) from error
        except ProtocolError as error:
            if len(self.hubs.urls) == 1:
                raise
            raise _Again(str(error), elsewhere=True) from error
        self.hubs.verified(url)
        return content

    def _exchange(self, call: Call, url: str) -> tuple[bytes, Nearness]:
        """The body of the answer, and how near the hub is that gave it."""
        request = self._request(call, url)
        if call.run is not None:
            target = request.url.raw_path.decode("ascii")
            at_ms = self.hub_time.now_ms()
            request.headers.update(sign_request(self.key, call.run, call.method, target, call.body, at_ms))
        options = self.options  # for one attempt, up to the first byte of the answer's body
        allowed_s = options.connect_timeout_s + options.answer_timeout_s + call.wait_s
        try:
            with limited(allowed_s + len(call.body) / LEAST_BYTES_PER_S, self.stop, self.clock):
                response = self.http.send(request, stream=True)
                try:
                    stream = response.extensions.get("network_stream")  # none: from this process
                    peer = None if stream is None else stream.get_extra_info("server_addr")
                    near = nearness_of_hub(url, str(peer[0]) if isinstance(peer, tuple) else None)
                    content = read_body(response, call.max_bytes)
                finally:
                    response.close()
        except (httpx.TransportError, httpx.DecodingError) as error:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise _Again(what, elsewhere=True) from error
        hub_ms = self._hub_ms(request, response, content)
        if hub_ms is not None and abs(hub_ms - int(request.headers[HEADER_TIME])) >= CLOCKS_AGREE_MS:
            self.hub_time.learn(hub_ms)
            raise _Again("the clocks of the hub and of this machine differ")
        return _sorted_out(response, content), near

    def _request(self, call: Call, url: str) -> httpx.Request:
        headers = {**HEADERS, **({"content-type": call.content_type} if call.body else {})}
        timeout = httpx.Timeout(self.options.answer_timeout_s + call.wait_s, connect=self.options.connect_timeout_s)
        reach = {REACH: self.reach()} if self.hubs.is_checked(url) else None
        try:
            return self.http.build_request(
                call.method, url + call.path, params=list(call.params) or None, content=call.body, headers=headers,
                timeout=timeout, extensions=reach,
            )  # fmt: skip
        except httpx.InvalidURL as error:
            raise _Again(f"{url} is no address: {error}", elsewhere=True) from error

    def _hub_ms(self, request: httpx.Request, response: httpx.Response, content: bytes) -> int | None:
        """What time it is at the hub, if it has refused this very request for its date and has signed that."""
        problem = _problem(content) if response.status_code == HTTPStatus.UNAUTHORIZED else None
        if problem is None or problem.clock is None or HEADER_NONCE not in request.headers:
            return None
        try:
            clock = self.opened(problem.clock)
        except ProtocolError as error:
            log.warning("%s says what time it is, and is not believed: %s", request.url.host, error)
            return None
        return clock.now_ms if (clock.node, clock.nonce) == (self.key.node, request.headers[HEADER_NONCE]) else None


def _sorted_out(response: httpx.Response, content: bytes) -> bytes:
    """The content if the answer is a success; else the exception that it stands for. Only a hub's own no is one."""
    if response.is_success and not response.headers.get("content-type", "").startswith("text/html"):
        return content
    problem = _problem(content)
    busy = response.status_code == HTTPStatus.TOO_MANY_REQUESTS
    is_page = problem is None and not busy and not response.is_server_error
    if is_page:
        sentence = f"answers, but it is no shoal hub [HTTP {response.status_code}]"
    elif problem is None:
        sentence = f"the hub's address answered {response.reason_phrase or 'an error'} [HTTP {response.status_code}]"
    else:
        sentence = f"{problem.message} [{problem.code}, HTTP {response.status_code}]"
    if busy or problem is None or response.is_server_error:
        text = response.headers.get("retry-after", "")  # its date form, or nonsense, is left to the back-off
        after_s = min(float(text), MAX_RETRY_AFTER_S) if busy and text.isascii() and text.isdigit() else None
        raise _Again(sentence, after_s, elsewhere=not busy, is_page=is_page)
    refusal = ShutOut if problem.code in SHUT_OUT_CODES else HubRefused
    raise refusal(response.status_code, problem.code, problem.message)


def _problem(content: bytes) -> Problem | None:
    """What a hub says is wrong; None if these are not a hub's words."""
    try:
        return Problem.model_validate_json(content, extra="ignore")
    except ValidationError:
        return None
