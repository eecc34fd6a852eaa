"""One HTTP call to the hub: signed, retried under a deadline, and its failure said in one sentence.

    call ─► sign (fresh time and nonce) ─► send ─┬─ 2xx ─────────────────────► answer
              ▲                                  ├─ 4xx but 429 ─────────────► HubRefused, at once
              │                                  └─ no answer, 5xx, 429 ─┐
              └──── back-off, or the hub's Retry-After ◄─────────────────┘   past the patience: HubUnreachable

Every call is idempotent on the hub's side, so sending it again after a lost answer is always right.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from http import HTTPStatus

import httpx
from pydantic import ValidationError

from shoal.errors import CodecError, DeadlineExceeded, HubRefused, HubUnreachable
from shoal.protocol import Problem, SigningKey, sign_request
from shoal.runtime.clock import Clock
from shoal.runtime.retry import Backoff
from shoal.runtime.stop import StopToken

log = logging.getLogger(__name__)

MIB = 1024 * 1024
MAX_RETRY_AFTER_S = 60.0
MAX_ERROR_TEXT = 200


@dataclass(frozen=True)
class ClientOptions:
    """How long a call keeps trying (`patience_s`), how long one attempt may take, and the pauses in between."""

    patience_s: float = 60.0
    connect_timeout_s: float = 10.0
    answer_timeout_s: float = 30.0
    backoff: Backoff = field(default_factory=Backoff)


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


class _Again(Exception):
    """This attempt failed in a way that another one may mend."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


@dataclass(frozen=True)
class Transport:
    """Sends calls as one key. Holds no state of its own, so threads may share it."""

    http: httpx.Client
    url: str
    key: SigningKey
    stop: StopToken
    clock: Clock
    options: ClientOptions

    def send(self, call: Call) -> bytes:
        """The body of the hub's answer, or `HubRefused`, `HubUnreachable`; `DeadlineExceeded` if told to stop."""
        began = self.clock.monotonic_s()
        attempt = 0
        while True:
            try:
                return self._attempt(call)
            except _Again as failure:
                pause = self.options.backoff.wait_s(attempt) if failure.after_s is None else failure.after_s
                tried_s = self.clock.monotonic_s() - began
                if tried_s + pause > self.options.patience_s:
                    raise self._unreachable(call, tried_s, failure) from failure
                self._note(call, attempt, failure, pause)
                if self.stop.wait(pause):
                    raise DeadlineExceeded(f"stopped ({self.stop.reason}) while calling the hub: {failure}") from None
                attempt += 1

    def _attempt(self, call: Call) -> bytes:
        request = self.http.build_request(
            call.method,
            self.url + call.path,
            params=list(call.params) or None,
            content=call.body,
            headers={"content-type": call.content_type} if call.body else None,
            timeout=httpx.Timeout(self.options.answer_timeout_s + call.wait_s, connect=self.options.connect_timeout_s),
        )
        if call.run is not None:
            target = request.url.raw_path.decode("ascii")
            at_ms = self.clock.now_ms()
            request.headers.update(sign_request(self.key, call.run, call.method, target, call.body, at_ms))
        try:
            response = self.http.send(request, stream=True)
            try:
                content = _capped(response, call.max_bytes)
            finally:
                response.close()
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _Again(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        return _sorted_out(response, content)

    def _note(self, call: Call, attempt: int, failure: _Again, pause: float) -> None:
        level = logging.WARNING if attempt == 3 else logging.DEBUG  # once per outage, and not for a hiccup
        log.log(level, "the hub at %s does not answer %s (%s); trying again", self.url, call.path, failure)
        log.debug("next attempt in %.1f s", pause)

    def _unreachable(self, call: Call, tried_s: float, failure: _Again) -> HubUnreachable:
        return HubUnreachable(
            f"no usable answer from the hub at {self.url} ({call.method} {call.path}) for {tried_s:.0f} s: {failure}; "
            "check the address, that the hub is running, and this machine's network"
        )


def _capped(response: httpx.Response, max_bytes: int) -> bytes:
    """The whole body, read piece by piece so that one over the cap is never held."""
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) > max_bytes:
            raise CodecError(f"the answer of {response.request.url} is longer than {max_bytes} bytes; it was not read")
    return bytes(content)


def _sorted_out(response: httpx.Response, content: bytes) -> bytes:
    """The content if the answer is a success; else the exception that it stands for."""
    if response.is_success:
        return content
    code, message = _problem(response, content)
    busy = response.status_code == HTTPStatus.TOO_MANY_REQUESTS
    if busy or response.is_server_error:
        raise _Again(f"{message} [{code}, HTTP {response.status_code}]", _retry_after_s(response) if busy else None)
    raise HubRefused(response.status_code, code, message)


def _problem(response: httpx.Response, content: bytes) -> tuple[str, str]:
    """The code and sentence of an error answer; a proxy's page gives a code of ours."""
    try:
        problem = Problem.model_validate_json(content)
    except ValidationError:
        text = " ".join(content[:MAX_ERROR_TEXT].decode(errors="replace").split())
        return "hub.http", f"the hub's address answered {response.reason_phrase or 'an error'}: {text or 'no text'}"
    return problem.code, problem.message


def _retry_after_s(response: httpx.Response) -> float | None:
    """`Retry-After` in seconds; its date form, or nonsense, is left to the back-off."""
    text = response.headers.get("retry-after", "")
    return min(float(text), MAX_RETRY_AFTER_S) if text.isascii() and text.isdigit() else None
