"""One connection to the hub, and how long it may take over what it does.

    accepted ─► of its address too many, or of all: 429 or 503, closed
       │
       ▼
    head ──(10 s, 16 KiB)──► request ──► answer ──(read at a floor)──► idle ──(75 s)──► closed
                               │
                               └─ what is sent ahead meanwhile: 64 KiB at the most

A slow sender of heads, a reader that does not read and a sender that does not wait cost one connection each, for a
bounded time and a bounded number of bytes. (Slow bodies are `bodies.py`'s: only there it is known who sends them.)
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from shoal.hub.limits import Addresses

HEAD_S = 10.0
MAX_HEAD_BYTES = 16 * 1024
IDLE_S = 75
AHEAD_BYTES = 64 * 1024
READ_CHECK_S = 20.0
READ_FLOOR_BYTES_S = 4 * 1024
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time

TOO_MANY = "your address has as many connections as it may have: close some, or use one for several requests"
FULL = "the hub has as many connections as it can hold: try again in a moment"

NO_REQUEST = "this is no HTTP/1.1 request, or its head is larger than 16 KiB"


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


def guarded_by(gatekeeper: Gatekeeper) -> type[H11Protocol]:
    """The protocol class that a server is given: its connections ask this gatekeeper."""

    class Guarded(GuardedConnection):
        keeper = gatekeeper

    return Guarded


class GuardedConnection(H11Protocol):
    keeper: Gatekeeper

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._client = ""
        self._timers: dict[str, asyncio.TimerHandle] = {}  # "head", "read"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        self._client, refusal = self.keeper.admit(address, len(self.connections))
        if refusal is not None:
            transport.write(refusal)
            transport.close()
            return
        self._start("head", HEAD_S, self._cut)

    def connection_lost(self, exc: Exception | None) -> None:
        self.keeper.leave(self._client)
        self._client = ""
        self._stop("head")
        self._stop("read")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop("head")
            if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > AHEAD_BYTES:
                self._cut()  # requests ahead of their answers: reading stops, but every look at the client reads on
        elif "head" not in self._timers:
            self._start("head", HEAD_S, self._cut)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  ours says more
        """Bytes that are no request. Nothing is logged: whoever sends them must not fill the disk with it either."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_answer(400, "Bad Request", "http.400", NO_REQUEST))
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size() > 0:  # nobody reads the last answer; closing would wait for that
            self._cut()
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop("read")
        super().resume_writing()

    def _watch_reader(self, unread_bytes: int) -> None:
        self._stop("read")
        self._start("read", READ_CHECK_S, lambda: self._check_reader(unread_bytes))

    def _check_reader(self, unread_bytes: int) -> None:
        left_bytes = self.transport.get_write_buffer_size()
        if unread_bytes - left_bytes < READ_FLOOR_BYTES_S * READ_CHECK_S:
            self._cut()
        else:
            self._watch_reader(left_bytes)

    def _cut(self) -> None:
        """End it now. Without lingering: the system would keep what nobody reads for minutes, megabytes of it."""
        self._stop("head")
        connected = self.transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self.transport.abort()

    def _start(self, name: str, after_s: float, action: Callable[[], None]) -> None:
        self._timers[name] = self.loop.call_later(after_s, action)

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
