"""What a server may hand out, which chunks of a version are here, and how a request waits for what is on its way.

    offered(manifest)   c0 c1 c2 c3 c4 c5 c6 c7 │ c8 …       one bit each, the lowest bit of the first byte is c0
    HAVE                 1  1  0  1  0  0  0  0 │ 0          verified and served now
    SOON                 0  0  1  0  0  0  0  0 │ 0          being fetched from upstream now

A folder that somebody publishes into, or a relay (`mirror`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.protocol import Chunk
from shoal.shardcast.manifest import Place
from shoal.shardcast.tree import Tree


class Blob(NamedTuple):
    """A file on disk, of this size."""

    path: Path
    size_bytes: int


class Inventory:
    """Which chunks of one version are here. One thread adds at a time; any thread may read.

    >>> chunks = [Chunk(hash=character * 64, size_bytes=1) for character in "aba"]
    >>> inventory = Inventory(chunks)
    >>> inventory.add("a" * 64), inventory.count, inventory.body(soon=["b" * 64])
    (True, 2, b'\\x05\\x02')
    """

    def __init__(self, chunks: Sequence[Chunk], here: Container[str] = ()) -> None:
        self._have = bytearray(-(-len(chunks) // 8))
        self._missing: dict[str, list[int]] = defaultdict(list)
        self.count = 0  # bits that are set
        for index, chunk in enumerate(chunks):
            self._missing[chunk.hash].append(index)
        for chunk_hash in [one for one in self._missing if one in here]:
            self.add(chunk_hash)

    @property
    def complete(self) -> bool:
        return not self._missing

    def add(self, chunk_hash: str) -> bool:
        """Note that a chunk is here; false if it is none of this version's, or was here already."""
        indices = self._missing.pop(chunk_hash, [])
        for index in indices:
            self._have[index // 8] |= 1 << index % 8
        self.count += len(indices)
        return bool(indices)

    def body(self, soon: Iterable[str]) -> bytes:
        """HAVE, then SOON."""
        coming = bytearray(len(self._have))
        for index in (index for chunk_hash in soon for index in self._missing.get(chunk_hash, ())):
            coming[index // 8] |= 1 << index % 8
        return bytes(self._have) + bytes(coming)


class Arrivals:
    """Lets requests wait for a name, and any thread say that it is there. A waiter registers first and looks then;
    whoever brings something puts it there first and notifies then: so one of the two always sees the other."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._lock = threading.Lock()

    def attach(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with self._lock:
            self._loop = loop

    def notify(self, *keys: str) -> None:
        """From any thread. Before `attach` nobody can be waiting, so nothing is lost."""
        for key in keys:
            if key in self._waiting:
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


class Catalogue:
    """What a server may hand out: of a tree that somebody publishes into, whatever is there, for that is whole. A relay
    knows more. Asked on the event loop, so no answer may wait for a disk that others write to."""

    role = "origin"

    def __init__(self, folder: Path) -> None:
        self._tree = Tree(folder)
        self.arrivals = Arrivals()
        self.inventories: dict[Place, Inventory] = {}  # which chunks are here, of the versions known here

    def find(self, key: str) -> Blob | None:
        """The bytes of this name, if they may be served now."""
        path = self._tree.path(key)
        with contextlib.suppress(FileNotFoundError):
            return Blob(path, path.stat().st_size)
        return None

    def expects(self, key: str) -> bool:  # noqa: ARG002
        """Whether a name that is not there now is on its way."""
        return False

    def announced(self) -> Iterable[str]:
        """The chunks that are being fetched from upstream."""
        return ()

    def lost(self, key: str) -> None:
        """A file that was found is not there, or too short: whoever can get it again does. Not in the event loop."""

    def places(self) -> list[Place]:
        return self._tree.places()

    def health(self) -> dict[str, Any]:
        """Numbers for /health; `ok` is false if a person has to look after it."""
        return {"role": self.role, "versions": [f"{place[0]}.{place[1]}" for place in self.places()]}
