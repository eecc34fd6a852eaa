"""One keep-alive connection to a source: blocking sockets, large receives directly into the caller's buffer.

An HTTP library needs several times the CPU per byte, and its time-outs are per receive: a source that sends one byte a
second would occupy a thread for days. Here all bytes, headers too, are received under one deadline, and a stop is
noticed within `SLICE_S`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from blake3 import blake3

from shoal.errors import BroadcastError, ConfigError
from shoal.runtime.stop import StopToken
from shoal.runtime.targets import WANTS_PASSWORD, Reach, dial, netloc, proxy_of

SLICE_S = 0.2
MAX_ANSWER_HEAD_BYTES = 16 * 1024
MAX_DRAINED_BYTES = 64 * 1024
RECEIVE_BYTES = 1024 * 1024
HASHED_BYTES = 256 * 1024
# Eight chunks at a time over a slow link all arrive late; so a source begins with few, and gets as many as its link
# bears at this rate each.
FEW_ATTEMPTS, ATTEMPT_BYTES_S = 3, 128 * 1024

Check = Callable[[int], str | None]


class Throttle:
    """Limits the bytes that this process receives per second, over all connections and threads (a token bucket)."""

    BURST_S = 1.0  # seconds of the rate that may be received at once after a pause
    SLICE_S = 0.125

    def __init__(self, rate_bytes_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        self.slice_bytes = max(16 * 1024, int(rate_bytes_s * self.SLICE_S))  # received before the bucket is asked again
        self._level_bytes = self._full_bytes = rate_bytes_s * self.BURST_S
        self._filled_at_s, self._lock = float("-inf"), threading.Lock()

    def take(self, size_bytes: int, now_s: float) -> float:
        with self._lock:
            gained = (now_s - self._filled_at_s) * self.rate_bytes_s
            self._level_bytes = min(self._full_bytes, self._level_bytes + gained) - size_bytes
            self._filled_at_s = now_s
            return max(0.0, -self._level_bytes / self.rate_bytes_s)


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._at_s = time.monotonic() + seconds

    def remaining_s(self) -> float:
        return self._at_s - time.monotonic()

    def passed(self) -> bool:
        return self.remaining_s() <= 0

    def tighter(self, seconds: float) -> Deadline:
        return Deadline(min(seconds, self.remaining_s()))


@dataclass(frozen=True)
class Timeouts:
    """Time to connect, and to the next byte; `reach`: allowed addresses of sources (None: all)."""

    connect_s: float = 3.0
    stall_s: float = 15.0
    throttle: Throttle | None = None
    reach: Reach | None = None


@dataclass(frozen=True)
class PoolSettings:
    """`min_rate_bytes_s`: a source that is slower is left in the middle of a chunk."""

    connections: int = 8
    min_rate_bytes_s: float = 32 * 1024
    timeouts: Timeouts = field(default_factory=Timeouts)

    @classmethod
    def throttled(cls, rate_bytes_s: float | None, reach: Reach | None = None) -> PoolSettings:
        """Settings for a limited rate: fewer connections, and no source is left because this side is slow."""
        if rate_bytes_s is None:
            return cls(timeouts=Timeouts(reach=reach))
        connections = max(1, min(cls.connections, int(rate_bytes_s / ATTEMPT_BYTES_S)))
        least = min(cls.min_rate_bytes_s, rate_bytes_s / connections / 4)
        return cls(connections, least, Timeouts(throttle=Throttle(rate_bytes_s), reach=reach))


class Answer(NamedTuple):
    status: int
    size_bytes: int
    keep_alive: bool


@dataclass(frozen=True)
class Address:
    """The parts of a source's URL. `https://example.org/run` has its head at `/run/head.json`."""

    secure: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, source: str) -> Address:
        try:
            parts = urlsplit(source)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"the source {source!r} is not a URL: {error}") from error
        prefix = parts.path.rstrip("/")
        plain = prefix.isascii() and prefix.isprintable() and " " not in prefix and "@" not in parts.netloc
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or not plain:
            raise ConfigError(f"the source {source!r} is not a URL such as http://host:8471")
        return cls(parts.scheme == "https", parts.hostname, port, prefix)


class Connection:
    """GET requests to one source, one at a time. An error closes it; the next request opens it again."""

    def __init__(self, source: str, stop: StopToken, timeouts: Timeouts = Timeouts()) -> None:
        self.source, self._stop, self._timeouts = source, stop, timeouts
        self._address, self._proxy = Address.parse(source), proxy_of(source)
        self._socket: socket.socket | None = None
        self._early = b""  # bytes of the body that came together with the head
        self._answer: Answer | None = None
        self._check: Check | None = None
        self._filled = 0  # bytes of the body that have been received
        self.hung_up = False

    def get(self, target: str, deadline: Deadline, check: Check | None = None) -> Answer:
        """Send a request and read the answer's head; then call `read_into`, `read` or `drain` for the body. `check` is
        called at every receive with the size of the body so far; it returns a reason to leave the source, or None."""
        self._check, self._filled, self.hung_up = check, 0, False
        if self._answer is not None or self._early:  # an unread body, or too many bytes
            self.close()
        reused = self._socket is not None
        try:
            return self._ask(target, deadline)
        except BroadcastError:
            # The other side may have closed an idle connection, which is no failure of the source.
            if not reused or deadline.passed() or self._stop.is_set() or self.hung_up:
                raise
        return self._ask(target, deadline)

    def read_into(self, buffer: memoryview, deadline: Deadline, hasher: blake3 | None = None) -> None:
        assert self._answer is not None
        assert buffer.nbytes == self._answer.size_bytes
        hashed = 0
        while self._filled < buffer.nbytes:
            filled = self._filled
            if (received := self._receive(buffer[filled : filled + RECEIVE_BYTES], deadline)) == 0:
                raise self._broken(f"closed the connection after {filled} of {buffer.nbytes} bytes")
            self._filled = filled + received
            # in pieces that are large enough for a fast hash and still in the processor's cache
            if hasher is not None and (self._filled - hashed >= HASHED_BYTES or self._filled == buffer.nbytes):
                hasher.update(buffer[hashed : self._filled])
                hashed = self._filled
        keep_alive, self._answer = self._answer.keep_alive, None
        if not keep_alive:
            self.close()

    def read(self, max_bytes: int, deadline: Deadline) -> bytes:
        assert self._answer is not None
        if self._answer.size_bytes > max_bytes:
            raise self._broken(f"offers {self._answer.size_bytes} bytes where at most {max_bytes} are allowed")
        body = bytearray(self._answer.size_bytes)
        self.read_into(memoryview(body), deadline)
        return bytes(body)

    def drain(self, deadline: Deadline) -> None:
        if self._answer is not None and self._answer.size_bytes <= MAX_DRAINED_BYTES:
            self.read(MAX_DRAINED_BYTES, deadline)
        else:
            self.close()

    def hang_up(self) -> None:
        """From any thread: the exchange under way ends at once."""
        self.hung_up = True
        if (waiting := self._socket) is not None:
            with contextlib.suppress(OSError):
                # Not the TLS socket's own method, which would remove its state while another thread reads.
                socket.socket.shutdown(waiting, socket.SHUT_RDWR)

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket, self._answer, self._early = None, None, b""

    def _ask(self, target: str, deadline: Deadline) -> Answer:
        if self._socket is None:
            self._socket = self._connect(deadline)
        address, host = self._address, netloc(self._address.host, self._address.port)
        by_proxy = self._proxy.headers if self._proxy is not None and not address.secure else None
        where = "" if by_proxy is None else f"http://{host}"
        lines = [f"GET {where}{address.prefix}{target} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity"]
        lines += by_proxy or []
        try:
            self._socket.settimeout(max(0.01, min(deadline.remaining_s(), self._timeouts.stall_s)))
            self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            self._socket.settimeout(SLICE_S)
        except OSError as error:
            raise self._broken(f"does not take the request: {error}") from error
        piece = memoryview(bytearray(MAX_ANSWER_HEAD_BYTES))
        head = b""
        while b"\r\n\r\n" not in head:
            if len(head) >= MAX_ANSWER_HEAD_BYTES:
                raise self._broken("sends an endless answer head")
            if (received := self._receive(piece[: MAX_ANSWER_HEAD_BYTES - len(head)], deadline)) == 0:
                raise self._broken("closed the connection without an answer")
            head += piece[:received]
        text, self._early = head.split(b"\r\n\r\n", 1)
        first, *lines = text.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        status = rest[:3]
        if version not in ("HTTP/1.0", "HTTP/1.1") or not (status.isascii() and status.isdigit() and len(status) == 3):
            raise self._broken("does not speak HTTP/1.1")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = headers.get("content-length", "")
        if not (size.isascii() and size.isdigit() and len(size) <= 18) or "transfer-encoding" in headers:
            raise self._broken("does not say how long its answer is; a source must send Content-Length")
        connection = headers.get("connection", "keep-alive" if version == "HTTP/1.1" else "close").lower()
        self._answer = Answer(int(status), int(size), connection == "keep-alive")
        if self._proxy is not None and self._answer.status == WANTS_PASSWORD:
            raise self._broken(f"cannot be reached: the proxy {self._proxy.shown} wants a user and a password (407)")
        return self._answer

    def _connect(self, deadline: Deadline) -> socket.socket:
        address, proxy = self._address, self._proxy
        timeout_s = max(0.01, min(self._timeouts.connect_s, deadline.remaining_s()))
        try:
            return dial(address.secure, address.host, address.port, proxy, self._timeouts.reach, timeout_s)
        except OSError as error:
            way = f" through the proxy {proxy.shown}" if proxy else ""
            raise self._broken(f"cannot be reached{way}: {error.strerror or error}") from error

    def _receive(self, buffer: memoryview, deadline: Deadline) -> int:
        """The number of bytes received, at least one; 0 at the end of the stream."""
        if self._early:
            taken = min(len(self._early), buffer.nbytes)
            buffer[:taken] = self._early[:taken]
            self._early = self._early[taken:]
            return taken
        stall, throttle = Deadline(self._timeouts.stall_s), self._timeouts.throttle
        if throttle is not None:
            buffer = buffer[: throttle.slice_bytes]
        while True:
            # Checked also while bytes arrive: a slow drip must end.
            if deadline.passed():
                raise self._broken("is too slow: the deadline has passed")
            if self._stop.is_set():
                raise self._broken(f"was left: stopped ({self._stop.reason})")
            reason = self._check(self._filled) if self._check is not None else None
            if reason is not None:
                raise self._broken(reason)
            try:
                assert self._socket is not None
                received = self._socket.recv_into(buffer)
                if throttle is not None and received:  # TCP slows the source down
                    pause_s = throttle.take(received, time.monotonic())
                    self._stop.wait(max(0.0, min(pause_s, deadline.remaining_s())))
                return received
            except TimeoutError as error:
                if stall.passed():
                    raise self._broken(f"has sent nothing for {self._timeouts.stall_s:.0f} s") from error
            except OSError as error:
                raise self._broken(f"broke the connection: {error.strerror or error}") from error

    def _broken(self, problem: str) -> BroadcastError:
        self.close()
        return BroadcastError(f"{self.source} {problem}")


class Connections:
    def __init__(self, stop: StopToken, timeouts: Timeouts) -> None:
        self._stop, self._timeouts = stop, timeouts
        self._connections: dict[str, Connection] = {}

    def to(self, source: str) -> Connection:
        if source not in self._connections:
            self._connections[source] = Connection(source, self._stop, self._timeouts)
        return self._connections[source]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
