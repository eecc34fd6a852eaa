"""An HTTP server for a published tree: asyncio and `sendfile`; GET and HEAD of the names that a tree can hold.

    connection ─► limits ─► request head (bounded, timed) ─► name ─► catalogue ─┬─ here:    sendfile
                   │                                                            ├─ coming:  held, or 503
                   └─ full: 503, or 429 for the limit of one client             └─ unknown: 404

    GET /head.json?after=0.12&wait_s=20       held until the head is newer than 0.12, at most wait_s seconds
    GET /have/0.12?count=5&wait_s=20          which chunks are here; held until they are more than 5
    GET /health                               counters, as JSON

    offered(manifest)   c0 c1 c2 c3 c4 c5 c6 c7 │ c8 …       one bit each, the lowest bit of the first byte is c0
    HAVE                 1  1  0  1  0  0  0  0 │ 0          verified and served now
    SOON                 0  0  1  0  0  0  0  0 │ 0          being fetched from upstream now

A client that reads more slowly than `min_rate_bytes_s`, or sends nothing for `idle_s`, is disconnected. A held request
costs one future, which an arrival or a disconnect wakes. Requests have no body, answers have a known length, and a
range request gets the whole file.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import threading
from asyncio import StreamReader, StreamWriter
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from shoal.errors import ResourceError
from shoal.protocol import Chunk
from shoal.runtime.files import resource_error
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import parse_headers
from shoal.shardcast.limits import ServerLimits, client_of
from shoal.shardcast.manifest import MAX_WITNESS_BYTES, Place
from shoal.shardcast.tree import HEAD, WITNESS, Tree, have_key, is_key, parse_label

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 * 1024
MAX_QUERY_FIELDS = 8
MAX_WAIT_S = 60.0
MAX_HAVE_WAIT_S = 20.0
HAVE_PAUSE_S = 0.05  # chunks that arrive within this time are reported together
STOP_POLL_S = 0.1
PART_S = 1.0
BACKLOG = 1024
JSON, BYTES, TEXT = "application/json", "application/octet-stream", "text/plain; charset=utf-8"
IMMUTABLE, REPLACED, NO_STORE = "public, max-age=31536000, immutable", "no-cache", "no-store"
WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


class Blob(NamedTuple):
    path: Path
    size_bytes: int


class Inventory:
    """The chunks of one version that are here. One thread at a time adds; any thread may read."""

    def __init__(self, chunks: Sequence[Chunk], here: Container[str] = ()) -> None:
        self._size_bytes, self._have = -(-len(chunks) // 8), 0
        self._missing: dict[str, list[int]] = defaultdict(list)
        for index, chunk in enumerate(chunks):
            self._missing[chunk.hash].append(index)
        for chunk_hash in [one for one in self._missing if one in here]:
            self.add(chunk_hash)

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def count(self) -> int:
        return self._have.bit_count()

    def add(self, chunk_hash: str) -> bool:
        """Note that a chunk is here; false if it is not in this version, or was here before."""
        indices = self._missing.pop(chunk_hash, [])
        self._have |= sum(1 << index for index in indices)
        return bool(indices)

    def body(self, soon: Iterable[str]) -> bytes:
        """HAVE, then SOON."""
        coming = sum(1 << index for chunk_hash in set(soon) for index in self._missing.get(chunk_hash, ()))
        return b"".join(bits.to_bytes(self._size_bytes, "little") for bits in (self._have, coming))


class Arrivals:
    """Requests wait here for a name; any thread announces one. A waiter registers before it looks, a writer stores
    before it notifies, so no arrival is missed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._lock = threading.Lock()

    def attach(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with self._lock:
            self._loop = loop

    def notify(self, *keys: str) -> None:
        """From any thread. Before `attach` no request waits."""
        for key in filter(self._waiting.__contains__, keys):
            with self._lock:
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._wake, key)

    def waited_for(self, key: str) -> bool:
        return key in self._waiting

    @contextlib.contextmanager
    def waiter(self, key: str) -> Iterator[asyncio.Future[None]]:
        """A future that `notify(key)` fulfils; make it before looking whether the name is there."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key].add(future)
        try:
            yield future
        finally:
            self._waiting[key].discard(future)
            if not self._waiting[key]:
                del self._waiting[key]

    def _wake(self, key: str) -> None:
        for future in self._waiting.pop(key, set()):
            if not future.done():
                future.set_result(None)


class Catalogue:
    """The files that a server offers: here those of a folder that an origin publishes into. Called on the event loop,
    so no method may wait for a disk."""

    role = "origin"

    def __init__(self, folder: Path) -> None:
        self._tree, self.arrivals = Tree(folder), Arrivals()
        self.inventories: dict[Place, Inventory] = {}  # which chunks are here, of the versions known here

    def find(self, key: str) -> Blob | None:
        path = self._tree.path(key)
        with contextlib.suppress(FileNotFoundError):
            return Blob(path, path.stat().st_size)
        return None

    def expects(self, key: str) -> bool:  # noqa: ARG002
        return False

    def announced(self) -> Iterable[str]:
        return ()

    def lost(self, key: str) -> None:
        """A file that `find` has named is missing or too short. Not called on the event loop."""

    def places(self) -> list[Place]:
        return self._tree.places()

    def health(self) -> dict[str, Any]:
        """Numbers for /health; `ok` is false if a person must act."""
        return {"role": self.role, "versions": [f"{place[0]}.{place[1]}" for place in self.places()]}


class _Protocol(asyncio.StreamReaderProtocol):
    """A stream whose future `gone` ends when the client disconnects."""

    def __init__(self, accept: Callable[[StreamReader, StreamWriter], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = loop.create_future()
        super().__init__(StreamReader(limit=MAX_REQUEST_BYTES, loop=loop), accept, loop)

    def eof_received(self) -> bool | None:
        self.gone.cancel()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.cancel()
        super().connection_lost(exc)


@dataclass(frozen=True)
class Request:
    writer: StreamWriter
    method: str = ""
    path: str = ""
    query: dict[str, list[str]] = field(default_factory=dict)
    keep_alive: bool = False

    @classmethod
    def parse(cls, head: bytes, writer: StreamWriter) -> Request | None:
        """None unless it is a request of HTTP/1 without a body."""
        first, *lines = head.decode("latin-1").split("\r\n")
        parts, headers = first.split(" "), parse_headers(lines)
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if len(parts) != 3 or parts[2] not in ("HTTP/1.0", "HTTP/1.1") or not parts[1].startswith("/") or has_body:
            return None
        path, _, query = parts[1].partition("?")
        connection = headers.get("connection", "keep-alive" if parts[2] == "HTTP/1.1" else "close").lower()
        try:
            fields = parse_qs(query, max_num_fields=MAX_QUERY_FIELDS) if query else {}
        except ValueError:
            return None
        return cls(writer, parts[0], path, fields, connection == "keep-alive")

    def field(self, name: str) -> str:
        return self.query.get(name, [""])[0]

    def seconds(self, name: str, most_s: float) -> float:
        """A field as seconds from 0 to `most_s`; 0 if it is absent or not a number."""
        with contextlib.suppress(ValueError):
            seconds = float(self.field(name))
            return min(max(seconds, 0.0), most_s) if seconds == seconds else 0.0
        return 0.0

    async def wait_for(self, arrived: asyncio.Future[None]) -> None:
        """Wait for an arrival; `ConnectionResetError` if the client disconnects before."""
        protocol = self.writer.transport.get_protocol()
        assert isinstance(protocol, _Protocol)
        await asyncio.wait([arrived, protocol.gone], return_when=asyncio.FIRST_COMPLETED)
        if protocol.gone.done():
            raise ConnectionResetError("the client hung up")


class TreeServer:
    """Serves from `await start()` to `await close()`. `instance`, in /health, lets a relay recognise itself."""

    def __init__(self, catalogue: Catalogue, limits: ServerLimits = ServerLimits()) -> None:
        self._catalogue, self._arrivals, self._limits = catalogue, catalogue.arrivals, limits
        self._by_client: Counter[str] = Counter()  # connections
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.instance = secrets.token_hex(8)
        self.sent_bytes = self.connections = 0

    async def start(self, host: str, port: int) -> str:
        """The URL under which the tree is reached on this machine."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Protocol(self._accept), host, port, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                advice = "stop the program that uses it, or choose another (port 0 is any free one)"
                raise ResourceError(f"port {port} on {host} is taken: {advice}") from error
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ResourceError(f"cannot listen on {host}: it is not an address of this machine") from error
            raise resource_error("listen on", Path(f"{host}:{port}"), error) from error
        self._arrivals.attach(loop)
        self._tasks.add(asyncio.create_task(self._watch_head()))
        return local_url(host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._arrivals.attach(None)
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch_head(self) -> None:
        """Notice a head that another process has replaced, while somebody waits for one."""
        seen: tuple[int, int] | None = None
        while True:
            await asyncio.sleep(self._limits.watch_head_s)
            blob = self._catalogue.find(HEAD) if self._arrivals.waited_for(HEAD) else None
            with contextlib.suppress(OSError):
                status = None if blob is None else blob.path.stat()
                if status is not None and (status.st_ino, status.st_mtime_ns) != seen:
                    seen = (status.st_ino, status.st_mtime_ns)
                    self._arrivals.notify(HEAD)

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._receive(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("a connection ended: %r", error)
        except asyncio.CancelledError:
            log.debug("a connection is cut: the server closes")
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _receive(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve a connection, or refuse it with a reason; beyond twice the limit it is closed without one."""
        address, most = client_of((writer.get_extra_info("peername") or ("",))[0]), self._limits.connections_per_client
        is_full = self.connections >= self._limits.max_connections
        if is_full or (most is not None and self._by_client[address] >= most):
            status, who = (503, "this server has") if is_full else (429, "your address has")
            if len(self._tasks) < 2 * self._limits.max_connections + 1:
                await self._send_text(Request(writer), status, f"{who} as many connections as are allowed")
                await _end_cleanly(reader, writer)
            return
        self.connections += 1
        self._by_client[address] += 1
        try:
            while True:  # requests of one connection, one after the other
                async with asyncio.timeout(self._limits.idle_s):  # covers silence and dripping alike
                    head = await reader.readuntil(b"\r\n\r\n")
                request = Request.parse(head, writer)
                if request is None:
                    await self._send_text(
                        Request(writer), 400, "only plain HTTP/1.1 requests without a body are understood"
                    )
                    break
                await self._answer(request)
                if not request.keep_alive:
                    break
            await _end_cleanly(reader, writer)
        finally:
            self.connections -= 1
            self._by_client[address] -= 1
            self._by_client += Counter()  # without those that are 0

    async def _answer(self, request: Request) -> None:
        key = request.path[1:]
        place = parse_label(key.removeprefix("have/")) if key.startswith("have/") else None
        if request.method not in ("GET", "HEAD"):
            await self._send_text(request, 405, "only GET and HEAD are allowed")
        elif key == "health":
            own = {"ok": True, "instance": self.instance, "bytes_out": self.sent_bytes, "connections": self.connections}
            await self._send(request, json.dumps(own | self._catalogue.health()).encode(), JSON)
        elif place is not None:
            await self._send_have(place, request)
        elif key == HEAD or WITNESS.fullmatch(key):
            await self._send_replaced(key, request)
        elif is_key(key):
            await self._send_key(key, request)
        else:
            await self._send_text(request, 404, "there is no such name in a published tree")

    async def _hold(self, request: Request, key: str, seconds: float, is_answered: Callable[[], bool]) -> None:
        """Hold a request until it can be answered, at most so long; checked whenever `key` arrives."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_answered():
                    with self._arrivals.waiter(key) as arrived:
                        if not is_answered():
                            await request.wait_for(arrived)

    async def _send_key(self, key: str, request: Request) -> None:
        """A manifest or a chunk, which never changes; waits up to `hold_s` if it is being fetched."""
        find, expects = self._catalogue.find, self._catalogue.expects
        await self._hold(request, key, self._limits.hold_s, lambda: find(key) is not None or not expects(key))
        if (blob := find(key)) is not None:
            if await self._send_blob(blob, key, request):
                return
            await asyncio.to_thread(self._catalogue.lost, key)
        if blob is None and expects(key):
            await self._send_text(request, 503, "it is being fetched and is not here yet")
        else:
            await self._send_text(request, 404, "this version or chunk is not here")

    async def _send_replaced(self, key: str, request: Request) -> None:
        """A head, held until it is new enough, or a witness's document."""
        if key == HEAD:
            after = parse_label(request.field("after"))
            await self._hold(request, HEAD, request.seconds("wait_s", MAX_WAIT_S), lambda: self._is_newer_than(after))
        if (data := self._read(key)) is None or (key != HEAD and len(data) > MAX_WITNESS_BYTES):
            await self._send_text(request, 404, "nothing has been published here yet")
            return
        await self._send(request, data, JSON, REPLACED)
        self.sent_bytes += len(data) if request.method == "GET" else 0

    def _is_newer_than(self, after: Place | None) -> bool:
        """Of the head, which was verified before it was written."""
        try:
            policy = json.loads(self._read(HEAD) or b"")["document"]["policy"]
            return after is None or (int(policy["incarnation"]), int(policy["version"])) > after
        except (ValueError, KeyError, TypeError):
            return False

    def _read(self, key: str) -> bytes | None:
        """Read at once: another process may replace the file."""
        blob = self._catalogue.find(key)
        try:
            return None if blob is None else blob.path.read_bytes()
        except FileNotFoundError:
            return None

    async def _send_have(self, place: Place, request: Request) -> None:
        count, key = request.field("count"), have_key(place)
        more_than = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else -1

        def has_more() -> bool:
            inventory = self._catalogue.inventories.get(place)
            return inventory is None or inventory.count > more_than

        if not has_more():
            await self._hold(request, key, request.seconds("wait_s", MAX_HAVE_WAIT_S), has_more)
            await asyncio.sleep(HAVE_PAUSE_S)
        if (inventory := self._catalogue.inventories.get(place)) is None:
            await self._send_text(request, 404, "there is no map of this version here")
            return
        await self._send(request, inventory.body(self._catalogue.announced()), BYTES)

    async def _send_blob(self, blob: Blob, key: str, request: Request) -> bool:
        """False, with nothing sent, if the file was removed."""
        try:
            file = blob.path.open("rb", buffering=0)
        except FileNotFoundError:
            return False
        with file:
            if os.fstat(file.fileno()).st_size < blob.size_bytes:
                return False
            kind, size = JSON if key.endswith(".json") else BYTES, blob.size_bytes if request.method == "GET" else 0
            request.writer.write(answer_head(200, blob.size_bytes, request.keep_alive, kind, IMMUTABLE))
            async with asyncio.timeout(self._limits.idle_s + size / self._limits.min_rate_bytes_s):
                await request.writer.drain()
                if size:
                    moved = await asyncio.get_running_loop().sendfile(request.writer.transport, file, 0, size)
                    self.sent_bytes += moved
                    if moved < size:
                        raise ConnectionAbortedError("a file became shorter while it was sent")
        return True

    async def _send_text(self, request: Request, status: int, sentence: str) -> None:
        await self._send(request, f"{sentence}\n".encode(), TEXT, status=status)

    async def _send(self, request: Request, body: bytes, kind: str, cache: str = NO_STORE, status: int = 200) -> None:
        head = answer_head(status, len(body), request.keep_alive, kind, cache)
        request.writer.write(head if request.method == "HEAD" else head + body)
        async with asyncio.timeout(self._limits.idle_s):
            await request.writer.drain()


def answer_head(status: int, size_bytes: int, keep_alive: bool, kind: str, cache: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Length: {size_bytes}",
        f"Connection: {'keep-alive' if keep_alive else 'close'}", f"Content-Type: {kind}", f"Cache-Control: {cache}",
        *(["Retry-After: 2"] if status in (429, 503) else []),
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


async def _end_cleanly(reader: StreamReader, writer: StreamWriter) -> None:
    """Close so that the last answer arrives: closing with unread input would reset the connection."""
    writer.write_eof()
    async with asyncio.timeout(PART_S):
        while await reader.read(MAX_REQUEST_BYTES):
            pass


async def serve(
    server: TreeServer, host: str, port: int, ended: Callable[[], bool], on_ready: Callable[[str], None]
) -> None:
    url = await server.start(host, port)
    log.info("serving at %s", url)
    try:
        on_ready(url)
        while not ended():
            await asyncio.sleep(STOP_POLL_S)
    finally:
        await server.close()


def run_origin(folder: Path, host: str, port: int, stop: StopToken, on_ready: Callable[[str], None]) -> None:
    """Serve the tree in `folder`, which an `Origin` publishes into, until `stop`. Port 0 is any free one."""
    Tree(folder).prepare()
    asyncio.run(serve(TreeServer(Catalogue(folder)), host, port, stop.is_set, on_ready))


def local_url(host: str, port: int) -> str:
    host = WILDCARD_HOSTS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
