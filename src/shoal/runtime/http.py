"""A small HTTP/1.1 server for hostile networks: h11 parses, asyncio carries, `answer` answers.

    accepted ─► too many connections of this client (429) or in all (503): closed
       │
       ▼
    head ──(10 s, 16 KiB)──► request ──► answer ──(read at a floor)──► idle ──(75 s)──► closed

A slow sender of heads and a reader that does not read cost one connection each, for a bounded time and number of bytes.
A body must arrive faster than a floor once `answer` reads it. Before the answer, at most one piece of an unread body or
of the next request is read. `OpenConnections` checks the times of all connections. A file is sent by the kernel
(`sendfile`), within a time that follows from its size.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from io import FileIO
from secrets import token_hex
from typing import cast
from urllib.parse import unquote

import h11

from shoal.errors import ResourceError
from shoal.runtime.stop import StopToken

HEAD_S, MAX_HEAD_BYTES, IDLE_S = 10.0, 16 * 1024, 75.0
BODY_DEADLINE_S = 300.0  # enough for 16 MiB at 60 kB/s
BODY_PAUSE_S, BODY_FLOOR_BYTES_S = 10.0, 4 * 1024  # a sender may be behind the floor by so much
READ_CHECK_S, READ_FLOOR_BYTES_S = 20.0, 4 * 1024
FILE_S, FILE_FLOOR_BYTES_S = 30.0, 32 * 1024  # a reader of a file may be behind the floor by so much
LOOK_S, STOP_CHECK_S = 0.25, 0.1
BACKLOG, TAKEN_S, TRY_AGAIN_S = 512, 2.0, 0.2
UNREAD_BYTES = 64 * 1024  # of a body that is not asked for yet
log = logging.getLogger(__name__)
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time


@dataclass
class Reply:
    """Its body is `body`, or the first `file_bytes` of `file`, which is closed afterwards."""

    status: int
    body: bytes = b""
    media: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    file: FileIO | None = None
    file_bytes: int = 0


class HttpRequest:
    def __init__(self, method: str, target: str, headers: Mapping[str, str], peer: str, body: bytes | None = None):
        self.method, self.target, self.headers, self.peer = method, target, headers, peer
        path, _, self.query = target.partition("?")
        self.path = unquote(path)
        self.number = token_hex(8)
        self.route = "other"
        self.client = ""  # the address as limits count it; empty: not limited
        self.node = ""  # only once it is proven
        self.code = ""  # of the refusal, if it is one
        self.waited_s = 0.0  # in a long poll
        self.sender, self.body_bytes = "", 0  # `sender`: the account of the bytes in memory
        self.is_complete, self.is_gone = body is not None, False
        self.want: Callable[[], None] = lambda: None  # lets the connection read on
        self._parts = [body] if body else []
        self._came: asyncio.Future[None] | None = None

    @property
    def unread_bytes(self) -> int:
        return sum(map(len, self._parts))

    def feed(self, part: bytes) -> None:
        self._parts.append(part)
        self._wake()

    def end(self, is_complete: bool) -> None:
        self.is_complete, self.is_gone = self.is_complete or is_complete, self.is_gone or not is_complete
        self._wake()

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    async def wait_for(self, happening: asyncio.Future[None]) -> None:
        """Wait for `happening`, or for a part or the end of this request (`is_gone`)."""
        self._came = asyncio.get_running_loop().create_future()
        await asyncio.wait([happening, self._came], return_when=asyncio.FIRST_COMPLETED)

    async def read(self) -> bytes:
        """The bytes received since the last call; empty at the end. `ConnectionError` if the peer closed before."""
        while not self._parts and not self.is_complete:
            if self.is_gone:
                raise ConnectionError("the connection was closed")
            self._came = asyncio.get_running_loop().create_future()
            self.want()
            await self._came
        parts, self._parts = self._parts, []
        return b"".join(parts)

    async def body(self, most_bytes: int, taken: Callable[[int, int], None]) -> bytes:
        """The whole body: at most `most_bytes` (`OverflowError`), faster than a floor (`TimeoutError`). `taken` gets
        the bytes of each part, and of the body so far."""
        declared, began_s, body = self.headers.get("content-length", ""), time.monotonic(), bytearray()
        if declared.isdigit() and int(declared) > most_bytes:
            raise OverflowError
        while True:
            allowed_s = min(BODY_DEADLINE_S, BODY_PAUSE_S + len(body) / BODY_FLOOR_BYTES_S)
            left_s = None if self.is_complete else began_s + allowed_s - time.monotonic()
            try:
                part = await (self.read() if left_s is None else asyncio.wait_for(self.read(), left_s))
            except TimeoutError as error:
                slow = f"the body came slower than {BODY_FLOOR_BYTES_S // 1024} KiB/s, or took {BODY_DEADLINE_S:.0f} s"
                raise TimeoutError(slow) from error
            if not part:
                return bytes(body)
            body += part
            if len(body) > most_bytes:
                raise OverflowError
            self.body_bytes = len(body)
            taken(len(part), len(body))


@dataclass
class OpenConnections:
    """The open connections of one server, and what they share. `client_of` maps an address to the client whose limit it
    counts for; "" has no limit. `refused` is called with the code of each refused connection."""

    answer: Callable[[HttpRequest], Awaitable[Reply]]
    refused: Callable[[str], None]
    client_of: Callable[[str], str]
    per_client: float
    in_all: float
    open: set[HttpConnection] = field(default_factory=set)
    by_client: Counter[str] = field(default_factory=Counter)
    stopping: bool = False
    sent_bytes: int = 0  # of bodies

    async def serve(
        self, listener: socket.socket, ended: Callable[[], bool], on_ready: Callable[[], None],
        on_end: Callable[[], None] = lambda: None, drain_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Serve until `ended()`; then answer running requests for at most `drain_s`. `on_end` releases held ones."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: HttpConnection(self), sock=listener, backlog=BACKLOG)
        watching = asyncio.create_task(self.watch())
        try:
            on_ready()
            while not (ended() or watching.done()):
                await asyncio.sleep(STOP_CHECK_S)
            if watching.done():
                watching.result()
        finally:
            on_end()
            server.close()
            watching.cancel()
            await self.drain(drain_s)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, HEAD_S / 4, READ_CHECK_S / 4))
            now_s = time.monotonic()
            for each in list(self.open):
                each.check(now_s)

    async def drain(self, within_s: float) -> None:
        self.stopping, end_s = True, time.monotonic() + within_s
        while self.open:
            for each in list(self.open):
                each.stop(now=time.monotonic() >= end_s)
            await asyncio.sleep(0.02)


class HttpConnection(asyncio.Protocol):
    def __init__(self, connections: OpenConnections) -> None:
        self._all = connections
        self._is_continued = self._is_last = False
        self._begin_parsing()
        self._client: str | None = None  # whose limit it counts for; None: not admitted
        self._request: HttpRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._waits, self._since_s = "head", time.monotonic()  # one of: head, answer, file, rest (of a body), idle
        self._unread: tuple[int, float] | None = None  # bytes of answers not read yet, and when measured
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer, shared = transport.get_extra_info("peername"), self._all
        self._peer = peer[0] if isinstance(peer, tuple) else ""
        client = shared.client_of(self._peer)
        if len(shared.open) >= shared.in_all:
            self._refuse(503, "hub.busy", "the server has as many connections as it can hold")
        elif client and shared.by_client[client] >= shared.per_client:
            self._refuse(429, "rate.connections", "your address has too many connections: close some")
        else:
            self._client = client
            shared.by_client[client] += 1
            shared.open.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        if self._client is not None:
            self._all.open.discard(self)
            self._all.by_client -= Counter([self._client])  # nothing is kept of a client without connections
        if self._request is not None:
            self._request.end(is_complete=False)

    def data_received(self, data: bytes) -> None:
        if self._client is None or self._transport.is_closing():
            return
        if self._waits == "idle":
            self._now_waits("head")
        self._parser.receive_data(data)
        self._read_on()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._next()

    def _now_waits(self, what: str) -> None:
        self._waits, self._since_s = what, time.monotonic()

    def _read_on(self) -> None:
        try:
            while self._take(self._parser.next_event()):
                pass
        except h11.RemoteProtocolError as error:
            if self._waits == "answer":
                self._cut()
            else:
                self._refuse(error.error_status_hint, "http.malformed", "this is no HTTP/1.1 request")

    def _take(self, event: object) -> bool:
        request = self._request
        if isinstance(event, h11.Request):
            self._begin(event)
        elif isinstance(event, h11.Data):
            if request is not None:
                request.feed(bytes(event.data))
                if request.unread_bytes > UNREAD_BYTES:
                    self._transport.pause_reading()
                    return False
        elif isinstance(event, h11.EndOfMessage):
            if request is not None:
                request.end(is_complete=True)
            elif self._waits == "rest":
                self._next()
                return False
        else:
            if event is h11.PAUSED:
                self._transport.pause_reading()
            return False
        return True

    def _begin(self, event: h11.Request) -> None:
        headers: dict[str, str] = {}
        for raw_name, raw_value in event.headers:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        request = HttpRequest(event.method.decode("ascii"), event.target.decode("latin-1"), headers, self._peer)
        request.want, self._request = self._want, request
        self._now_waits("answer")
        self._task = asyncio.get_running_loop().create_task(self._serve(request))

    def _want(self) -> None:
        if self._parser.they_are_waiting_for_100_continue and not self._is_continued:
            self._is_continued = True
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._transport.resume_reading()
        self._read_on()

    async def _serve(self, request: HttpRequest) -> None:
        reply = await self._all.answer(request)
        self._request = None
        with reply.file or contextlib.nullcontext():
            if not self._transport.is_closing():
                await self._send(reply, request.method != "HEAD")

    async def _send(self, reply: Reply, has_body: bool) -> None:
        size = len(reply.body) if reply.file is None else reply.file_bytes
        lines = [f"HTTP/1.1 {reply.status} {_PHRASES.get(reply.status, '')}", f"date: {_date(int(time.time()))}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        if reply.status != HTTPStatus.NO_CONTENT:
            lines += [f"content-type: {reply.media}", f"content-length: {size}"]
        if self._all.stopping or self._parser.their_state is h11.MUST_CLOSE:
            self._is_last = True
            lines.append("connection: close")
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + (reply.body if has_body else b""))
        if reply.file is not None and has_body and size:
            try:
                await self._send_file(reply.file, size)
            except OSError as error:  # of the client, of the disk, or a `TimeoutError`
                log.debug("a file was not sent whole: %r", error)
                self._cut()
                return
        self._all.sent_bytes += size if has_body else 0
        self._now_waits("rest")
        self._next()

    async def _send_file(self, file: FileIO, size: int) -> None:
        self._now_waits("file")
        async with asyncio.timeout(FILE_S + size / FILE_FLOOR_BYTES_S):
            if await asyncio.get_running_loop().sendfile(self._transport, file, 0, size) < size:
                raise ConnectionAbortedError("the file became shorter meanwhile")

    def _next(self) -> None:
        """Begin the next request after the answer to the last one was written and its body was received."""
        if self._waits != "rest" or self._is_full or self._transport.is_closing():
            return
        if self._is_last or self._parser.their_state is h11.MUST_CLOSE:
            self._transport.close()
            return
        self._transport.resume_reading()
        if self._parser.their_state is h11.DONE:
            ahead, _ = self._parser.trailing_data
            self._begin_parsing()
            self._now_waits("head" if ahead else "idle")
            if not ahead:
                return
            self._parser.receive_data(ahead)
        self._read_on()

    def _begin_parsing(self) -> None:
        """Each request gets a parser of h11; answers, whose length is always known, need no state machine."""
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._is_continued = self._is_last = False

    def check(self, now_s: float) -> None:
        left_bytes, waited_s, is_stuck = self._transport.get_write_buffer_size(), now_s - self._since_s, False
        if not left_bytes:
            self._unread = None
        elif self._unread is None or now_s - self._unread[1] >= READ_CHECK_S:
            before_bytes = math.inf if self._unread is None else self._unread[0]
            is_stuck = before_bytes - left_bytes < READ_FLOOR_BYTES_S * READ_CHECK_S
            self._unread = left_bytes, now_s
        if is_stuck or (self._waits in ("head", "rest") and waited_s >= HEAD_S and not left_bytes):
            self._cut()
        elif self._waits == "idle" and waited_s >= IDLE_S:
            self._transport.close()

    def stop(self, now: bool) -> None:
        if now:
            self._cut()
        elif self._waits not in ("answer", "file"):
            self._transport.close()

    def _refuse(self, status: int, code: str, sentence: str) -> None:
        self._all.refused(code)
        body = f'{{"code":"{code}","message":"{sentence}"}}'
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._transport.write(f"{head}retry-after: 2\r\nconnection: close\r\n\r\n{body}".encode())
        self._transport.close()

    def _cut(self) -> None:
        """Abort the connection without lingering: the system would keep megabytes of unread data for minutes."""
        if self._waits == "file" and self._task is not None:
            self._task.cancel()
        connected = self._transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self._transport.abort()


@lru_cache(maxsize=1)
def _date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)


def client_of(address: str) -> str:
    """The client of an address for limits; of IPv6 the /64 network, since a client has all addresses in it.

    >>> client_of("::ffff:192.0.2.7"), client_of("2001:db8::1:2:3:4%eth0")
    ('192.0.2.7', '2001:db8::/64')
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


def bind(host: str, port: int, section: str, stop: StopToken) -> socket.socket:
    """A listening socket, or `ResourceError`, which names the setting or option `{section}port` or `{section}host`. A
    taken port is tried again for a moment: while a server restarts, a client that connects to it may hold the port for
    an instant, as the other end of its own connection."""
    end_s, where = time.monotonic() + TAKEN_S, f"port {port} on {host}"
    while True:
        # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, every answer waits 40 ms.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                if time.monotonic() < end_s and not stop.wait(TRY_AGAIN_S):
                    continue
                other = f"choose another ({section}port; 0 takes any)"
                said = f"{where} is taken: stop the program that uses it, or {other}"
            elif error.errno == errno.EACCES:
                said = f"{where} needs more rights: choose a port above 1023 ({section}port)"
            else:
                said = f"cannot listen on {where}: {error.strerror or error}; check {section}host"
            raise ResourceError(said) from error
