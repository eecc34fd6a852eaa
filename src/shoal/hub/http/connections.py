"""One connection to the hub, and how long it may take over what it does: `Guard` stands before uvicorn's own protocol.

    accepted ─► of its address too many, or of all: 429 or 503, closed
       │
       ▼
    head ──(10 s, 16 KiB)──► request ──► answer ──(read at a floor)──► idle ──(75 s)──► closed
                               │
                               └─ what is sent ahead meanwhile: 64 KiB at the most

A slow sender of heads, a reader that does not read and a sender that does not wait cost one connection each, for a
bounded time and a bounded number of bytes. (Slow bodies are `auth`'s: only there it is known who sends them.)
The middleware tells the guard when a request has begun and ended: it finds it in the request's scope.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, cast

import h11
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from shoal.hub.limits import Addresses

GUARD: Final = "shoal.guard"
HEAD_S = 10.0
MAX_HEAD_BYTES = 16 * 1024
IDLE_S = 75
AHEAD_BYTES = 64 * 1024
READ_CHECK_S = 20.0
READ_FLOOR_BYTES_S = 4 * 1024
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time

TOO_MANY = "your address has as many connections as it may have: close some, or use one for several requests"
FULL = "the hub has as many connections as it can hold: try again in a moment"


class Gatekeeper:
    """Who may connect: so many of one address, so many in all. Shared by the connections of one server.

    A proxy that the owner trusts, and this machine itself, connect as often as they like.
    """

    def __init__(
        self, addresses: Addresses, per_address: int, in_all: int, refused: Callable[[str], None] = lambda _code: None
    ) -> None:
        self.addresses = addresses
        self.open: Counter[str] = Counter()  # by client
        self._per_address, self._in_all = per_address or math.inf, in_all  # 0 is no limit
        self._refused = refused  # is told the code of every refusal

    def admit(self, address: str, open_now: int) -> tuple[str, bytes | None]:
        """The client to count the connection under (empty: under none), and the answer if it may not stay."""
        if open_now > self._in_all:
            self._refused("hub.busy")
            return "", _answer(503, "Service Unavailable", "hub.busy", FULL)
        client = "" if self.addresses.is_proxy(address) else self.addresses.client(address)
        if client and self.open[client] >= self._per_address:
            self._refused("rate.connections")
            return "", _answer(429, "Too Many Requests", "rate.connections", TOO_MANY)
        if client:
            self.open[client] += 1
        return client, None

    def leave(self, client: str) -> None:
        self.open[client] -= 1
        if self.open[client] <= 0:  # nothing is kept of who has none
            del self.open[client]


class Guard(asyncio.Protocol):
    """A connection that the gatekeeper admitted goes to uvicorn, and is watched; any other is answered and closed."""

    def __init__(
        self, keeper: Gatekeeper, config: Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        self._keeper, self._open = keeper, server_state.connections
        self._http = H11Protocol(config, server_state, {**app_state, GUARD: self}, _loop)
        self._client, self._admitted = "", False
        self._requests = 0  # that have begun and not ended
        self._ahead_bytes = 0.0  # received beyond the body of the last request; below 0 while that is coming in
        self._timers: dict[str, asyncio.TimerHandle] = {}  # "head", "read"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        address = peer[0] if isinstance(peer, tuple) else ""
        self._client, refusal = self._keeper.admit(address, len(self._open) + 1)
        if refusal is not None:
            self._transport.write(refusal)
            self._transport.close()
            return
        self._admitted = True
        self._http.connection_made(self._transport)
        self._start("head", HEAD_S, self._cut)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop(name)
        if self._admitted:
            self._keeper.leave(self._client)
            self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._admitted or self._transport.is_closing():
            return
        if self._requests:
            self._ahead_bytes += len(data)
        elif "head" not in self._timers:
            self._start("head", HEAD_S, self._cut)
        try:
            self._http.data_received(data)
        except h11.LocalProtocolError:  # bytes that are no request, in the middle of an answer
            self._cut()
        if self._ahead_bytes > AHEAD_BYTES:
            self._cut()  # requests ahead of their answers: reading stops, but every look at the client reads on

    def began(self, scope: Scope) -> None:
        """A head was read whole. (What came with it in one piece is not counted: that is 256 KiB at the most.)"""
        self._stop("head")
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        self._ahead_bytes = -math.inf if b"transfer-encoding" in headers else -float(length)
        self._requests += 1

    def ended(self) -> None:
        self._requests -= 1
        if self._transport.is_closing() or self._requests:
            return
        if self._ahead_bytes > 0:
            self._start("head", HEAD_S, self._cut)
        if self._transport.get_write_buffer_size() > 0:  # should nobody read it, closing would wait for that
            self._watch_reader()

    def pause_writing(self) -> None:
        self._http.pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def _watch_reader(self) -> None:
        unread_bytes = self._transport.get_write_buffer_size()
        self._start("read", READ_CHECK_S, lambda: self._check_reader(unread_bytes))

    def _check_reader(self, unread_bytes: int) -> None:
        left_bytes = self._transport.get_write_buffer_size()
        if left_bytes and unread_bytes - left_bytes < READ_FLOOR_BYTES_S * READ_CHECK_S:
            self._cut()
        elif left_bytes:
            self._watch_reader()

    def _cut(self) -> None:
        """End it now. Without lingering: the system would keep what nobody reads for minutes, megabytes of it."""
        connected = self._transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self._transport.abort()

    def _start(self, name: str, after_s: float, action: Callable[[], None]) -> None:
        self._stop(name)
        self._timers[name] = asyncio.get_running_loop().call_later(after_s, action)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


def _answer(status: int, phrase: str, code: str, sentence: str) -> bytes:
    body = f'{{"code":"{code}","message":"{sentence}"}}'.encode()
    head = (
        f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "retry-after: 2\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
