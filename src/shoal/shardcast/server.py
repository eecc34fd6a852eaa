"""Serving a published tree: asyncio and `sendfile`, nothing but GET and HEAD of the names a tree can hold.

    connection ─► cap ─► request head (bounded, timed) ─► name ─► catalogue ─┬─ there:  sendfile
                    │                                                    ├─ on its way: held until it arrives, or 503
                    └─ full: 503, Retry-After                            └─ unknown: 404

    GET /head.json?after=0.12&wait_s=20    held until the head is newer than 0.12, at most wait_s seconds
    GET /health                            counters as JSON

Back-pressure: a client that reads slowly holds only its own connection, and no longer than `min_rate_bytes_s` allows;
a client that sends nothing is cut off after `idle_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

from shoal.errors import ResourceError
from shoal.runtime.files import resource_error
from shoal.runtime.stop import StopToken
from shoal.shardcast.catalogue import Arrivals, Catalogue, FolderCatalogue
from shoal.shardcast.manifest import MAX_HEAD_BYTES, Place
from shoal.shardcast.tree import HEAD, Tree, is_key, parse_label

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 * 1024
MAX_WAIT_S = 60.0
STOP_POLL_S = 0.1
GONE_CHECK_S = 0.5
PART_S = 1.0
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True)
class ServerLimits:
    """What one client can cost. `watch_head_s`: how often a head written by another process is looked at."""

    max_connections: int = 512
    idle_s: float = 30.0
    hold_s: float = 8.0  # below the time a client waits for a first byte, so that it hears "busy", not silence
    min_rate_bytes_s: float = 32 * 1024
    watch_head_s: float = 0.05


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    keep_alive: bool

    @classmethod
    def parse(cls, head: bytes) -> Request | None:
        """None if it is not a request that this server understands: HTTP/1, no body."""
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if len(parts) != 3 or parts[2] not in ("HTTP/1.0", "HTTP/1.1") or not parts[1].startswith("/") or has_body:
            return None
        path, _, query = parts[1].partition("?")
        connection = headers.get("connection", "keep-alive" if parts[2] == "HTTP/1.1" else "close").lower()
        try:
            fields = parse_qs(query, max_num_fields=8)
        except ValueError:
            return None
        return cls(parts[0], path, fields, connection == "keep-alive")


class TreeServer:
    """One listening socket over one catalogue. `await start()`, then it serves until `await close()`."""

    def __init__(self, catalogue: Catalogue, arrivals: Arrivals, limits: ServerLimits = ServerLimits()) -> None:
        self._catalogue = catalogue
        self._arrivals = arrivals
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.sent_bytes = 0
        self.connections = 0

    async def start(self, host: str, port: int) -> str:
        """Listen; the URL under which the tree is reached on this machine."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            raise _listen_error(host, port, error) from error
        self._arrivals.attach(asyncio.get_running_loop())
        self._tasks.add(asyncio.create_task(self._watch_head()))
        return _url(host, self._server.sockets[0])

    async def close(self) -> None:
        self._arrivals.attach(None)
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch_head(self) -> None:
        """Notice a head that another process has replaced; costs nothing while nobody waits for one."""
        seen: tuple[int, int] | None = None
        while True:
            await asyncio.sleep(self._limits.watch_head_s)
            path = self._catalogue.find(HEAD) if self._arrivals.waited_for(HEAD) else None
            if path is None:
                continue
            with contextlib.suppress(OSError):
                status = path.stat()
                if (status.st_ino, status.st_mtime_ns) != seen:
                    seen = (status.st_ino, status.st_mtime_ns)
                    self._arrivals.notify(HEAD)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.connections < self._limits.max_connections:
                await self._admit(reader, writer)
            elif len(self._tasks) < 2 * self._limits.max_connections + 1:  # beyond that, not even words
                await self._say(writer, 503, "this server has as many connections as it allows", retry_after_s=2)
                await _part(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("a connection ended: %r", error)
        except asyncio.CancelledError:
            log.debug("a connection is cut: the server closes")  # the task ends here, so nobody is left to tell
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._converse(reader, writer)
            await _part(reader, writer)
        finally:
            self.connections -= 1

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, one after the other. The time-out covers silence and dripping alike."""
        while True:
            async with asyncio.timeout(self._limits.idle_s):
                head = await reader.readuntil(b"\r\n\r\n")
            request = Request.parse(head)
            if request is None:
                await self._say(writer, 400, "only plain HTTP/1.1 requests without a body are understood")
                return
            await self._answer(request, reader, writer)
            if not request.keep_alive:
                return

    async def _answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key = request.path[1:]
        if request.method not in ("GET", "HEAD"):
            await self._say(writer, 405, "only GET and HEAD are allowed", request)
        elif key == "health":
            await self._say_health(request, writer)
        elif not is_key(key):
            await self._say(writer, 404, "there is no such name in a published tree", request)
        elif key == HEAD:
            await self._send_head(request, reader, writer)
        else:
            path = await self._found(key, reader)
            if path is not None and await self._send_file(path, request, writer):
                return
            if path is None and self._catalogue.expects(key):
                await self._say(writer, 503, "it is on its way but not here yet", request, retry_after_s=1)
            else:
                await self._say(writer, 404, "this version or chunk is not here", request)

    async def _found(self, key: str, reader: asyncio.StreamReader) -> Path | None:
        """The file, waiting up to `hold_s` if it is on its way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.hold_s):
                while True:
                    with self._arrivals.waiter(key) as arrived:
                        path = self._catalogue.find(key)
                        if path is not None or not self._catalogue.expects(key):
                            return path
                        await _unless_gone(arrived, reader)
        return self._catalogue.find(key)

    async def _send_head(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        after = parse_label(request.query.get("after", [""])[0])
        wait_s = _seconds(request.query.get("wait_s", ["0"])[0])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._newer_than(after):
                    with self._arrivals.waiter(HEAD) as arrived:
                        if not self._newer_than(after):
                            await _unless_gone(arrived, reader)
        path = self._catalogue.find(HEAD)
        if path is None or not await self._send_file(path, request, writer):
            await self._say(writer, 404, "nothing has been published yet", request)

    def _newer_than(self, after: Place | None) -> bool:
        path = self._catalogue.find(HEAD)
        place = None if path is None else _place_in(path)
        return place is not None and (after is None or place > after)

    async def _send_file(self, path: Path, request: Request, writer: asyncio.StreamWriter) -> bool:
        """False if the file is gone (retention); nothing has been sent then."""
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            size = os.fstat(file.fileno()).st_size
            cache = "no-cache" if path.name == HEAD else "public, max-age=31536000, immutable"
            kind = "application/json" if path.suffix == ".json" else "application/octet-stream"
            writer.write(_head(200, size, request, {"Content-Type": kind, "Cache-Control": cache}))
            async with asyncio.timeout(self._limits.idle_s + size / self._limits.min_rate_bytes_s):
                await writer.drain()
                if request.method == "GET" and size:
                    await asyncio.get_running_loop().sendfile(writer.transport, file, 0, size)
                    self.sent_bytes += size
        return True

    async def _say_health(self, request: Request, writer: asyncio.StreamWriter) -> None:
        counters = {"ok": True, "bytes_out": self.sent_bytes, "connections": self.connections}
        body = json.dumps(counters | self._catalogue.health()).encode()
        await self._send(writer, _head(200, len(body), request, {"Content-Type": "application/json"}), body, request)

    async def _say(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        sentence: str,
        request: Request | None = None,
        retry_after_s: int = 0,
    ) -> None:
        """A short answer in words; without a request (it was not understood) the connection ends after it."""
        body = f"{sentence}\n".encode()
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        if retry_after_s:
            headers["Retry-After"] = str(retry_after_s)
        await self._send(writer, _head(status, len(body), request, headers), body, request)

    async def _send(self, writer: asyncio.StreamWriter, head: bytes, body: bytes, request: Request | None) -> None:
        writer.write(head if request is not None and request.method == "HEAD" else head + body)
        async with asyncio.timeout(self._limits.idle_s):
            await writer.drain()


async def serve(
    server: TreeServer, host: str, port: int, ended: Callable[[], bool], on_ready: Callable[[str], None]
) -> None:
    """Serve until `ended()`."""
    url = await server.start(host, port)
    log.info("serving at %s", url)
    try:
        on_ready(url)
        while not ended():
            await asyncio.sleep(STOP_POLL_S)
    finally:
        await server.close()


async def _unless_gone(arrived: asyncio.Future[None], reader: asyncio.StreamReader) -> None:
    """Wait for what a held request waits for; a client that hung up meanwhile gives its place to others."""
    while not arrived.done():
        await asyncio.wait([arrived], timeout=GONE_CHECK_S)
        if reader.at_eof():
            raise ConnectionResetError("the client hung up")


async def _part(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End a connection so that the last answer arrives: closing while bytes lie unread would reset it away."""
    writer.write_eof()
    async with asyncio.timeout(PART_S):
        while await reader.read(MAX_REQUEST_BYTES):
            pass


def run_origin(folder: Path, host: str, port: int, stop: StopToken, on_ready: Callable[[str], None]) -> None:
    """Serve the tree in `folder`, which an `Origin` publishes into, until `stop`. Port 0 is any free one."""
    Tree(folder).prepare()
    asyncio.run(serve(TreeServer(FolderCatalogue(folder), Arrivals()), host, port, stop.is_set, on_ready))


def _head(status: int, size: int, request: Request | None, headers: dict[str, str]) -> bytes:
    connection = "keep-alive" if request is not None and request.keep_alive else "close"
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", f"Content-Length: {size}", f"Connection: {connection}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def _place_in(path: Path) -> Place | None:
    """Which version a head file names. The file is our own or was verified before it was written."""
    try:
        policy = json.loads(path.read_bytes()[:MAX_HEAD_BYTES])["document"]["policy"]
        return int(policy["incarnation"]), int(policy["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), MAX_WAIT_S) if seconds == seconds else 0.0


def _url(host: str, listening: socket.socket) -> str:
    port = listening.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _listen_error(host: str, port: int, error: OSError) -> ResourceError:
    if error.errno == errno.EADDRINUSE:
        return ResourceError(
            f"port {port} on {host} is taken: stop the program that uses it, or choose another (port 0 is any free one)"
        )
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ResourceError(f"cannot listen on {host}: it is not an address of this machine")
    return resource_error("listen on", Path(f"{host}:{port}"), error)
