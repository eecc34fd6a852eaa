"""What a server may hand out, and how a request waits for what is on its way.

A catalogue answers three questions: is a name there, will it come, and which chunks of a version are there? The
origin's folder only knows the first; a relay knows all, because a signed manifest told it what to expect.

Numbers for a monitoring system, as text that Prometheus and its relatives read.

# HELP shoal_cast_sent_bytes_total Bytes of bodies sent.
# TYPE shoal_cast_sent_bytes_total counter
shoal_cast_sent_bytes_total 1048576

Which of a version's chunks are here, as two bitmaps that others ask for in order to share the work.

    offered(manifest)   c0 c1 c2 c3 c4 c5 c6 c7 │ c8 …       one bit each, the lowest bit of the first byte is c0
    HAVE                 1  1  0  1  0  0  0  0 │ 0          verified and served now
    SOON                 0  0  1  0  0  0  0  0 │ 0          being fetched from upstream now

Kept up to date chunk by chunk, so that telling it costs a copy of the map and not a walk over the version.

A client that serves what it has fetched: verified chunks, out of the very files that it fills. Off by default.

    pool ─► PayloadFile ─ writes a chunk at its place ─► arrived ─┐
            <digest>.part ── renamed ──► <digest>.bin ─► moved    ├─► PayloadCatalogue ─► TreeServer ─► peers
            removed, or about to be written anew ──────► withdraw ┘

Whoever shares shows its address to its peers; that is why nobody does without being asked. Only chunks that a signed
manifest offers are served, only after their hash was seen to match, and nothing but spans of the client's own files.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from shoal.protocol import Chunk, PolicyManifest
from shoal.shardcast.manifest import Place, offered, place_of
from shoal.shardcast.tree import CHUNK, Tree, chunk_key, have_key, manifest_key


@dataclass(frozen=True)
class Blob:
    """Bytes on disk: a whole file, or a span of one."""

    path: Path
    offset: int
    size_bytes: int

    @classmethod
    def whole(cls, path: Path) -> Blob | None:
        """The file at `path`, if there is one."""
        try:
            return cls(path, 0, path.stat().st_size)
        except FileNotFoundError:
            return None


class Catalogue(Protocol):
    """What a server may hand out. Asked on the event loop, so no answer may wait for a disk that others write to."""

    def find(self, key: str) -> Blob | None:
        """The bytes of this name, if they may be served now."""

    def expects(self, key: str) -> bool:
        """Whether a name that is not there now is on its way."""

    def have(self, place: Place) -> bytes | None:
        """The two maps of a version (see `Inventory`); None if it is not known here."""

    def have_count(self, place: Place) -> int | None:
        """How many bits are set in the first of them."""

    def lost(self, key: str) -> None:
        """A file that was found is not there, or too short: whoever can get it again does. Not in the event loop."""

    def health(self) -> dict[str, Any]:
        """Numbers for /health; `ok` is false if a person has to look after it."""

    def metrics(self) -> Sequence[Metric]:
        """Numbers for /metrics."""


class FolderCatalogue:
    """A tree that somebody publishes into: what is there is whole, and nothing else is promised."""

    def __init__(self, folder: Path) -> None:
        self._tree = Tree(folder)

    def find(self, key: str) -> Blob | None:
        return Blob.whole(self._tree.path(key))

    def expects(self, key: str) -> bool:  # noqa: ARG002
        return False

    def have(self, place: Place) -> bytes | None:  # noqa: ARG002
        return None

    def have_count(self, place: Place) -> int | None:  # noqa: ARG002
        return None

    def lost(self, key: str) -> None:  # noqa: ARG002
        return  # retention, or somebody who tidies up: nothing here can mend it

    def health(self) -> dict[str, Any]:
        return {"role": "origin", "versions": [f"{place[0]}.{place[1]}" for place in self._tree.places()]}

    def metrics(self) -> Sequence[Metric]:
        return [Metric("versions", "gauge", "Versions held.", len(self._tree.places()))]


class Arrivals:
    """Lets requests wait for a name, and any thread say that it is there.

    Nobody is woken for a name that nobody waits for. A waiter registers first and looks then; whoever brings something
    puts it there first and notifies then: so one of the two always sees the other.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._lock = threading.Lock()

    def attach(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with self._lock:
            self._loop = loop

    def notify(self, key: str) -> None:
        """From any thread. Before `attach` nobody can be waiting, so nothing is lost."""
        if key not in self._waiting:
            return
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake, key)

    def waited_for(self, key: str) -> bool:
        return key in self._waiting

    @contextlib.contextmanager
    def waiter(self, key: str) -> Iterator[asyncio.Future[None]]:
        """A future that `notify(key)` fulfils; make it before looking whether the name is there."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        try:
            yield future
        finally:
            waiting = self._waiting.get(key, set())
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(key, None)

    def _wake(self, key: str) -> None:
        for future in self._waiting.pop(key, set()):
            if not future.done():
                future.set_result(None)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "shoal_cast_"


@dataclass(frozen=True)
class Metric:
    """One number, or one per value of a label. A counter only grows (and its name ends in `_total`)."""

    name: str
    type: Literal["counter", "gauge"]
    what: str
    value: float | None = None
    by: Mapping[str, float] = field(default_factory=dict)
    label: str = "source"


def render(metrics: Iterable[Metric]) -> str:
    """The text of a whole answer."""
    return "".join(_render_one(metric) for metric in metrics)


def _render_one(metric: Metric) -> str:
    name = PREFIX + metric.name
    lines = [f"# HELP {name} {metric.what}", f"# TYPE {name} {metric.type}"]
    if metric.value is not None:
        lines.append(f"{name} {_number(metric.value)}")
    lines += [f'{name}{{{metric.label}="{_escaped(key)}"}} {_number(value)}' for key, value in metric.by.items()]
    return "\n".join([*lines, ""])


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Inventory:
    """The map of one version. One thread adds at a time; any thread may read.

    >>> chunks = [Chunk(hash=character * 64, size_bytes=1) for character in "aba"]
    >>> inventory = Inventory(chunks)
    >>> inventory.add("a" * 64), inventory.count, inventory.body(soon=["b" * 64])
    (True, 2, b'\\x05\\x02')
    """

    def __init__(self, chunks: Sequence[Chunk], here: Container[str] = ()) -> None:
        self._have = bytearray(-(-len(chunks) // 8))
        self._missing: dict[str, list[int]] = {}
        self.count = 0  # bits that are set
        for index, chunk in enumerate(chunks):
            self._missing.setdefault(chunk.hash, []).append(index)
        for chunk_hash in list(self._missing):
            if chunk_hash in here:
                self.add(chunk_hash)

    @property
    def complete(self) -> bool:
        return not self._missing

    def add(self, chunk_hash: str) -> bool:
        """Note that a chunk is here; false if it is none of this version's, or was here already."""
        indices = self._missing.pop(chunk_hash, None)
        if indices is None:
            return False
        for index in indices:
            self._have[index // 8] |= 1 << index % 8
        self.count += len(indices)
        return True

    def body(self, soon: Iterable[str]) -> bytes:
        """HAVE, then SOON."""
        coming = bytearray(len(self._have))
        for chunk_hash in soon:
            for index in self._missing.get(chunk_hash, ()):
                coming[index // 8] |= 1 << index % 8
        return bytes(self._have) + bytes(coming)


class PayloadCatalogue:
    """What a client shares. Any thread may call it.

    >>> catalogue = PayloadCatalogue()
    >>> catalogue.offer(manifest, Path("cache/<digest>.json"))             # before its chunks arrive
    >>> catalogue.arrived(chunk, Path("cache/<digest>.part"), offset=0)    # its hash has been seen to match
    >>> catalogue.moved(Path("cache/<digest>.part"), Path("cache/<digest>.bin"))
    """

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.announced: Callable[[], Iterable[str]] = tuple  # chunks that are being fetched: `ChunkPool.announced`
        self._lock = threading.Lock()
        self._documents: dict[str, Path] = {}  # manifests, by their keys
        self._manifests: dict[Place, PolicyManifest] = {}
        self._offered: set[str] = set()
        self._blobs: dict[str, Blob] = {}
        self._inventories: dict[Place, Inventory] = {}

    # What the client says

    def offer(self, manifest: PolicyManifest, document: Path) -> None:
        """From now on peers may ask for this version; `document` is its manifest's file. Again is harmless."""
        place = place_of(manifest)
        with self._lock:
            self._documents = self._documents | {manifest_key(place): document}
            if place not in self._manifests:
                self._manifests[place] = manifest
                self._take_stock()
        self.arrivals.notify(have_key(place))

    def arrived(self, chunk: Chunk, path: Path, offset: int) -> None:
        """A chunk has been verified and lies in the file at `path`. One that no version offers is not shared."""
        with self._lock:
            if chunk.hash not in self._offered:
                return
            self._blobs[chunk.hash] = Blob(path, offset, chunk.size_bytes)
            told = [place for place, inventory in self._inventories.items() if inventory.add(chunk.hash)]
        self.arrivals.notify(chunk_key(chunk.hash))
        for place in told:
            self.arrivals.notify(have_key(place))

    def moved(self, before: Path, after: Path) -> None:
        """A file has another name now. A request in between finds nothing and comes again."""
        with self._lock:
            self._blobs = {
                chunk_hash: replace(blob, path=after) if blob.path == before else blob
                for chunk_hash, blob in self._blobs.items()
            }

    def withdraw(self, path: Path) -> None:
        """A file is about to be removed or written anew: nothing of it is served any more.

        A version goes with its manifest's file. What is being sent at this moment is sent to its end.
        """
        with self._lock:
            gone = {key for key, document in self._documents.items() if document == path}
            self._documents = {key: document for key, document in self._documents.items() if key not in gone}
            self._manifests = {
                place: manifest for place, manifest in self._manifests.items() if manifest_key(place) not in gone
            }
            self._blobs = {chunk_hash: blob for chunk_hash, blob in self._blobs.items() if blob.path != path}
            before = list(self._inventories)
            self._take_stock()
        for place in before:
            self.arrivals.notify(have_key(place))

    # What the server asks, without the lock: each look is at one object

    def find(self, key: str) -> Blob | None:
        match = CHUNK.fullmatch(key)
        if match is not None:
            return self._blobs.get(match[2])
        document = self._documents.get(key)
        return None if document is None else Blob.whole(document)

    def expects(self, key: str) -> bool:  # noqa: ARG002  a peer looks at the map before it asks
        return False

    def have(self, place: Place) -> bytes | None:
        inventory = self._inventories.get(place)
        return None if inventory is None else inventory.body(self.announced())

    def have_count(self, place: Place) -> int | None:
        inventory = self._inventories.get(place)
        return None if inventory is None else inventory.count

    def lost(self, key: str) -> None:  # noqa: ARG002
        return  # the client notices by itself, and says so

    def health(self) -> dict[str, Any]:
        versions = [f"{place[0]}.{place[1]}" for place in sorted(self._inventories)]
        return {"role": "client", "versions": versions, "chunks": len(self._blobs)}

    def metrics(self) -> Sequence[Metric]:
        return [
            Metric("versions", "gauge", "Versions shared, whole or not.", len(self._inventories)),
            Metric("chunks", "gauge", "Chunks shared.", len(self._blobs)),
        ]

    def _take_stock(self) -> None:
        """After versions or files have come or gone."""
        self._offered = {chunk.hash for manifest in self._manifests.values() for chunk in offered(manifest)}
        self._blobs = {chunk_hash: blob for chunk_hash, blob in self._blobs.items() if chunk_hash in self._offered}
        self._inventories = {
            place: Inventory(offered(manifest), self._blobs) for place, manifest in self._manifests.items()
        }
