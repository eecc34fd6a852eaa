"""HTTP requests to untrusted peers: bounded in time and in bytes, whatever the peer sends.

    HttpClient.send(request, limit) ─► a socket (`targets.dial`: checked address, proxy, sandbox) ─► h11 ─► answer

The limit covers connecting, sending, the head and the body; received bytes of a body extend it. An HTTP library limits
each receive only: a slowly dripping head, or one 1xx answer after another, could block a caller for days. Redirects are
not followed, and a compressed answer is refused: a few bytes can become gigabytes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

import h11

from shoal.errors import CodecError
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.stop import StopToken
from shoal.runtime.targets import Proxy, Reach, dial, endpoint_of, netloc, proxy_of

SLICE_S = 0.2
STOP_GRACE_S = 5.0  # time for an exchange that is running when a stop comes
KEPT_S = 5.0  # an idle connection
LEAST_BYTES_PER_S = 10_000  # a modem from 1998 is not much slower
PIECE_BYTES = MAX_HEAD_BYTES = 64 * 1024
SLOW = "it takes too long in all"


class NoAnswer(OSError):
    """The peer sent no usable answer, or not in time."""


class Limit:
    """When an exchange must end. One that begins after a stop is bounded only by its time."""

    def __init__(self, seconds: float, stop: StopToken, clock: Clock = SystemClock(), grace_s: float = -1) -> None:
        self._clock, self._ends_s = clock, clock.monotonic_s() + seconds
        self._stop, self._grace_s = None if stop.is_set() else stop, STOP_GRACE_S if grace_s < 0 else grace_s

    def extend(self, size_bytes: int) -> None:
        self._ends_s += size_bytes / LEAST_BYTES_PER_S

    def left_s(self, most_s: float) -> float:
        """The time left, at most `most_s`; more than 0, or `NoAnswer`."""
        now_s = self._clock.monotonic_s()
        if self._stop is not None and self._stop.is_set():
            self._stop, self._ends_s = None, min(self._ends_s, now_s + self._grace_s)
        if self._ends_s <= now_s:
            raise NoAnswer(SLOW)
        return min(most_s, self._ends_s - now_s)


@dataclass(frozen=True)
class ClientRequest:
    """`reach`: allowed addresses (None: all). `silence_s`: the longest wait for a byte."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    reach: Reach | None = None
    connect_s: float = 10.0
    silence_s: float = 20.0
    max_bytes: int = 64 * 1024 * 1024  # of the answer

    @property
    def target(self) -> str:
        """The path with its query, as it is sent and signed."""
        parts = urlsplit(self.url)
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
        return f"{path}?{parts.query}" if parts.query else path


@dataclass
class ClientResponse:
    """Header names are in lower case. `peer`: the address that answered; None: a process on this machine."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    peer: str | None = None

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


Way = tuple[bool, str, int, Proxy | None, Reach | None]  # TLS, host and port, and what leads there


class HttpClient:
    """Keeps connections for later requests the same way. Thread-safe. The environment names proxies (`proxy_of`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Way, list[_Wire]] = defaultdict(list)

    def send(self, request: ClientRequest, limit: Limit) -> ClientResponse:
        """`OSError` without an answer, `CodecError` for one that is too long."""
        way = (request.url.startswith("https:"), *endpoint_of(request.url), proxy_of(request.url), request.reach)
        wire, is_reusable = self._kept(way) or _Wire(dial(*way, limit.left_s(request.connect_s))), False
        try:
            answer = wire.exchange(request, way, limit)
            if is_reusable := wire.parser.our_state is wire.parser.their_state is h11.DONE:
                wire.parser.start_next_cycle()
        except h11.ProtocolError as error:
            raise NoAnswer(f"this is no HTTP/1.1: {error}") from error
        finally:
            if not is_reusable:
                wire.socket.close()
        if is_reusable:
            with self._lock:
                self._idle[way].append(wire)
        return answer

    def close(self) -> None:
        with self._lock:
            for wire in (each for kept in self._idle.values() for each in kept):
                wire.socket.close()
            self._idle.clear()

    def _kept(self, way: Way) -> _Wire | None:
        """An idle connection whose other end has not closed it."""
        with self._lock:
            while self._idle[way]:
                wire = self._idle[way].pop()
                if time.monotonic() - wire.used_s < KEPT_S and not select.select([wire.socket], [], [], 0)[0]:
                    return wire
                wire.socket.close()
        return None


class _Wire:
    def __init__(self, connected: socket.socket) -> None:
        self.socket, self.used_s = connected, time.monotonic()
        self.parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)

    def exchange(self, request: ClientRequest, way: Way, limit: Limit) -> ClientResponse:
        is_secure, host, port, proxy, _ = way
        shown = netloc(host, port)
        headers, target = [("host", shown), *request.headers.items()], request.target
        if proxy is not None and not is_secure:
            target = f"http://{shown}{target}"
            headers += [("proxy-authorization", proxy.authorization)] if proxy.authorization else []
        if request.body:
            headers.append(("content-length", str(len(request.body))))
        data = self.parser.send(h11.Request(method=request.method, target=target, headers=headers)) or b""
        data += self.parser.send(h11.Data(data=request.body)) or b""
        self.parser.send(h11.EndOfMessage())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have answered before it read all
            for start in range(0, len(data), PIECE_BYTES):
                self.socket.settimeout(limit.left_s(request.silence_s))
                self.socket.sendall(data[start : start + PIECE_BYTES])
        answer, body = ClientResponse(0, {}, b""), bytearray()
        while not isinstance(event := self.parser.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                self.parser.receive_data(self._receive(request.silence_s, limit))
            elif isinstance(event, h11.Response):
                answer.status = event.status_code
                answer.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                if (coding := answer.headers.get("content-encoding", "identity")).lower() not in ("", "identity"):
                    raise NoAnswer(f"the answer is compressed ({coding[:100]}), which was not asked for")
            elif isinstance(event, h11.Data):
                body += event.data
                limit.extend(len(event.data))
                if len(body) > request.max_bytes:
                    size = f"longer than {request.max_bytes} bytes"
                    raise CodecError(f"the answer of {request.url} is {size}; it was not read")
            elif not isinstance(event, h11.InformationalResponse):
                raise NoAnswer("the connection was closed in the middle of the answer")
        self.used_s, peer = time.monotonic(), self.socket.getpeername()
        answer.body, answer.peer = bytes(body), str(peer[0]) if isinstance(peer, tuple) else None
        return answer

    def _receive(self, silence_s: float, limit: Limit) -> bytes:
        until_s = time.monotonic() + silence_s
        while True:
            self.socket.settimeout(limit.left_s(SLICE_S))
            try:
                if not (piece := self.socket.recv(PIECE_BYTES)) and self.parser.their_state is h11.SEND_RESPONSE:
                    raise NoAnswer("the connection was closed without an answer")
                return piece
            except TimeoutError:
                if time.monotonic() >= until_s:
                    raise NoAnswer(f"nothing was received for {silence_s:g} s") from None
