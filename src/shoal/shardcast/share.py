"""A client that serves what it has fetched: verified chunks, out of the very files that it fills. Off by default.

    pool ─► PayloadFile ─ writes a chunk at its place ─► arrived ─┐
            <digest>.part ── renamed ──► <digest>.bin ─► moved    ├─► PayloadCatalogue ─► TreeServer ─► peers
            removed, or about to be written anew ──────► withdraw ┘

Whoever shares shows its address to its peers; that is why nobody does without being asked. Only chunks that a signed
manifest offers are served, only after their hash was seen to match, and nothing but spans of the client's own files.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.protocol import Chunk, PolicyManifest
from shoal.runtime.stop import StopToken
from shoal.shardcast.catalogue import Arrivals, Blob
from shoal.shardcast.inventory import Inventory
from shoal.shardcast.limits import ServerLimits
from shoal.shardcast.manifest import Place, offered, place_of
from shoal.shardcast.metrics import Metric
from shoal.shardcast.server import TreeServer, serve
from shoal.shardcast.tree import CHUNK, chunk_key, have_key, manifest_key


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


def run_share(
    catalogue: PayloadCatalogue,
    host: str,
    port: int,
    stop: StopToken,
    on_ready: Callable[[str], None],
    limits: ServerLimits = ServerLimits(),
) -> None:
    """Serve what a client holds until `stop`; for a thread beside the `Downloader`. Port 0 is any free one."""
    asyncio.run(serve(TreeServer(catalogue, catalogue.arrivals, limits), host, port, stop.is_set, on_ready))
