"""A published tree over HTTP (`runtime.http`): GET and HEAD of the names that a tree can hold.

    request ─► name ─► catalogue ─┬─ here:    the file
                                  ├─ coming:  held, or 503
                                  └─ unknown: 404

    GET /head.json?after=0.12&wait_s=20       held until the head is newer than 0.12, at most wait_s seconds
    GET /have/0.12?count=5&wait_s=20          which chunks are here; held until they are more than 5
    GET /health                               counters, as JSON

    offered(manifest)   c0 c1 c2 c3 c4 c5 c6 c7 │ c8 …       one bit each, the lowest bit of the first byte is c0
    HAVE                 1  1  0  1  0  0  0  0 │ 0          verified and served now
    SOON                 0  0  1  0  0  0  0  0 │ 0          being fetched from upstream now

A held request costs one future, which an arrival or a disconnect wakes. A range request gets the whole file.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from shoal.protocol import Chunk
from shoal.runtime.http import HttpRequest, OpenConnections, Reply, bind, client_of
from shoal.runtime.stop import StopToken
from shoal.runtime.targets import own_address
from shoal.shardcast.manifest import MAX_WITNESS_BYTES, Place
from shoal.shardcast.tree import HEAD, WITNESS, Tree, have_key, is_key, parse_label

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
MAX_QUERY_FIELDS = 8
MAX_WAIT_S = 60.0
MAX_HAVE_WAIT_S = 20.0
HAVE_PAUSE_S = 0.05  # chunks that arrive within this time are reported together
HOLD_S = 8.0  # less than a client waits for the first byte, so that it gets a 503, not silence
WATCH_HEAD_S = 0.05  # between two looks for a head of another process
JSON, BYTES, TEXT = "application/json", "application/octet-stream", "text/plain; charset=utf-8"
IMMUTABLE = {"cache-control": "public, max-age=31536000, immutable"}
REPLACED, NO_STORE = {"cache-control": "no-cache"}, {"cache-control": "no-store"}
WILDCARD_HOSTS = ("0.0.0.0", "", "::")


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
        indices = self._missing.pop(chunk_hash, [])
        self._have |= sum(1 << index for index in indices)
        return bool(indices)

    def body(self, soon: Iterable[str]) -> bytes:
        coming = sum(1 << index for chunk_hash in set(soon) for index in self._missing.get(chunk_hash, ()))
        return b"".join(bits.to_bytes(self._size_bytes, "little") for bits in (self._have, coming))


class Arrivals:
    """Requests wait here for a name; any thread announces one. A waiter registers before it looks, a writer stores
    before it notifies, so no arrival is missed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the waiters
        self._waiting: dict[str, set[asyncio.Future[None]]] = defaultdict(set)

    def notify(self, *keys: str) -> None:
        for key in filter(self._waiting.__contains__, keys):
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all requests with it
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._wake, key)

    def waited_for(self, key: str) -> bool:
        return key in self._waiting

    @contextlib.contextmanager
    def waiter(self, key: str) -> Iterator[asyncio.Future[None]]:
        """A future that `notify(key)` fulfils; make it before looking whether the name is there."""
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = self._loop.create_future()
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
        return {"role": self.role, "versions": [f"{place[0]}.{place[1]}" for place in self.places()]}


class TreeServer:
    """Serves until `ended()`. `instance`, in /health, lets a relay recognise itself."""

    def __init__(self, catalogue: Catalogue, per_client: int | None = None) -> None:
        self._catalogue, self._arrivals = catalogue, catalogue.arrivals
        most = (math.inf if per_client is None else per_client, MAX_CONNECTIONS)
        self._connections = OpenConnections(self.answer, lambda _code: None, client_of, *most)
        self.instance = secrets.token_hex(8)

    async def serve(self, listener: socket.socket, ended: Callable[[], bool], on_ready: Callable[[], None]) -> None:
        looking = asyncio.create_task(self._watch_head())
        try:
            await self._connections.serve(listener, ended, on_ready)
        finally:
            looking.cancel()

    async def _watch_head(self) -> None:
        seen: tuple[int, int] | None = None
        while True:
            await asyncio.sleep(WATCH_HEAD_S)
            blob = self._catalogue.find(HEAD) if self._arrivals.waited_for(HEAD) else None
            with contextlib.suppress(OSError):
                status = None if blob is None else blob.path.stat()
                if status is not None and (status.st_ino, status.st_mtime_ns) != seen:
                    seen = (status.st_ino, status.st_mtime_ns)
                    self._arrivals.notify(HEAD)

    async def answer(self, request: HttpRequest) -> Reply:
        key = request.path[1:]
        place = parse_label(key.removeprefix("have/")) if key.startswith("have/") else None
        try:
            query = dict(parse_qsl(request.query, max_num_fields=MAX_QUERY_FIELDS))
        except ValueError:
            return _text(400, "there are too many fields in the query")
        if request.method not in ("GET", "HEAD"):
            return _text(405, "only GET and HEAD are allowed")
        if key == "health":
            sent_bytes, connections = self._connections.sent_bytes, len(self._connections.open)
            own = {"ok": True, "instance": self.instance, "bytes_out": sent_bytes, "connections": connections}
            return Reply(200, json.dumps(own | self._catalogue.health()).encode(), headers=NO_STORE)
        try:
            if place is not None:
                return await self._have(place, request, query)
            if key == HEAD or WITNESS.fullmatch(key):
                return await self._replaced(key, request, query)
            if is_key(key):
                return await self._key(key, request)
        except OSError as error:
            log.warning("%s cannot be read: %s", key, error)
            return _text(503, "it cannot be read just now")
        return _text(404, "there is no such name in a published tree")

    async def _hold(self, request: HttpRequest, key: str, wait_s: float, is_answered: Callable[[], bool]) -> None:
        """Hold a request until it can be answered, at most `wait_s`; checked whenever `key` arrives."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (is_answered() or request.is_gone):
                    with self._arrivals.waiter(key) as arrived:
                        if not is_answered():
                            await request.wait_for(arrived)

    async def _key(self, key: str, request: HttpRequest) -> Reply:
        """A manifest or a chunk, which never changes; waits up to `HOLD_S` if it is being fetched."""
        find, expects = self._catalogue.find, self._catalogue.expects
        await self._hold(request, key, HOLD_S, lambda: find(key) is not None or not expects(key))
        if (blob := find(key)) is not None:
            if (file := _opened(blob)) is not None:
                kind = JSON if key.endswith(".json") else BYTES
                return Reply(200, media=kind, headers=IMMUTABLE, file=file, file_bytes=blob.size_bytes)
            await asyncio.to_thread(self._catalogue.lost, key)
        if blob is None and expects(key):
            return _text(503, "it is being fetched and is not here yet")
        return _text(404, "this version or chunk is not here")

    async def _replaced(self, key: str, request: HttpRequest, query: Mapping[str, str]) -> Reply:
        if key == HEAD:
            after = parse_label(query.get("after", ""))
            await self._hold(request, HEAD, held_s(query, MAX_WAIT_S), lambda: self._is_newer_than(after))
        if (data := self._read(key)) is None or (key != HEAD and len(data) > MAX_WITNESS_BYTES):
            return _text(404, "nothing has been published here yet")
        return Reply(200, data, headers=REPLACED)

    def _is_newer_than(self, after: Place | None) -> bool:
        try:
            policy = json.loads(self._read(HEAD) or b"")["document"]["policy"]
            return after is None or (int(policy["incarnation"]), int(policy["version"])) > after
        except (ValueError, KeyError, TypeError):
            return False

    def _read(self, key: str) -> bytes | None:
        blob = self._catalogue.find(key)
        try:
            return None if blob is None else blob.path.read_bytes()
        except FileNotFoundError:
            return None

    async def _have(self, place: Place, request: HttpRequest, query: Mapping[str, str]) -> Reply:
        count, key = query.get("count", ""), have_key(place)
        more_than = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else -1

        def has_more() -> bool:
            inventory = self._catalogue.inventories.get(place)
            return inventory is None or inventory.count > more_than

        if not has_more():
            await self._hold(request, key, held_s(query, MAX_HAVE_WAIT_S), has_more)
            await asyncio.sleep(HAVE_PAUSE_S)
        if (inventory := self._catalogue.inventories.get(place)) is None:
            return _text(404, "there is no map of this version here")
        return Reply(200, inventory.body(self._catalogue.announced()), BYTES, NO_STORE)


def _text(status: int, sentence: str) -> Reply:
    again = {"retry-after": "2"} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    return Reply(status, f"{sentence}\n".encode(), TEXT, {**NO_STORE, **again})


def _opened(blob: Blob) -> FileIO | None:
    try:
        file = blob.path.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    if os.fstat(file.fileno()).st_size >= blob.size_bytes:
        return file
    file.close()
    return None


def held_s(query: Mapping[str, str], most_s: float) -> float:
    """`wait_s` of a query, from 0 to `most_s`; 0 if it is absent or not a number."""
    with contextlib.suppress(ValueError):
        wanted_s = float(query.get("wait_s", ""))
        return min(max(wanted_s, 0.0), most_s) if wanted_s == wanted_s else 0.0
    return 0.0


def run_origin(folder: Path, host: str, port: int, stop: StopToken, on_ready: Callable[[str], None]) -> None:
    """Serve the tree in `folder`, which an `Origin` publishes into, until `stop`. Port 0 is any free one."""
    Tree(folder).prepare()
    run_server(TreeServer(Catalogue(folder)), host, port, stop, stop.is_set, on_ready)


def run_server(
    server: TreeServer, host: str, port: int, stop: StopToken, ended: Callable[[], bool],
    on_ready: Callable[[str], None],
) -> None:  # fmt: skip
    with contextlib.closing(bind(host, port, "--", stop)) as listener:
        url = public_url(host, listener.getsockname()[1])
        log.info("serving at %s", url)
        asyncio.run(server.serve(listener, ended, lambda: on_ready(url)))


def public_url(host: str, port: int) -> str:
    """For other machines: of a server that listens at all addresses, this machine's own."""
    host = own_address() if host in WILDCARD_HOSTS else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
