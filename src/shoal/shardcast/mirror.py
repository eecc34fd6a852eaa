"""What a relay holds and what it is waiting for: decided by signed documents, served only after a hash.

    head (signed) ─► manifest (signed, hash in head) ─► both on disk and served ─► chunks, newest version first
                                                        requests for chunks on their way are held, not refused

Invariants: the head never goes back; a manifest is served only with a valid signature; a chunk is served only if this
process has seen its hash match; no chunk of a kept manifest is removed.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal.errors import ManifestRefused
from shoal.protocol import BroadcastHead, Chunk, PolicyManifest
from shoal.shardcast.catalogue import Arrivals
from shoal.shardcast.config import RelayConfig
from shoal.shardcast.manifest import (
    Place,
    check_not_rolled_back,
    manifest_hash,
    place_of,
    read_head,
    read_manifest,
)
from shoal.shardcast.pool import ChunkPool, PoolSettings
from shoal.shardcast.sources import SourceScores
from shoal.shardcast.tree import CHUNK, HEAD, Tree, chunk_key, manifest_key, parse_label

log = logging.getLogger(__name__)


class Mirror:
    """A relay's catalogue and the keeper of its pool. Any thread may call it."""

    def __init__(self, config: RelayConfig, tree: Tree, arrivals: Arrivals, scores: SourceScores) -> None:
        self._tree = tree
        self._run, self._trusted_key = config.run, config.trusted_key
        self._kept_versions = config.settings.kept_versions
        self._arrivals = arrivals
        self._lock = threading.RLock()
        self._manifests: dict[Place, PolicyManifest] = {}
        self._promised: set[str] = set()  # keys of manifests that are being fetched
        self._expected: set[str] = set()  # hashes of all chunks of all manifests here
        self._complete: set[str] = set()  # those of them that this process has verified
        self.head: BroadcastHead | None = None
        self.pool = ChunkPool(scores, self, PoolSettings(connections=config.settings.connections))

    # What the server asks. Without the lock: it is held while files are written, and the event loop must not wait for
    # a disk. Each look is at one set, which is enough; a file that is removed just then is answered with 404.

    def find(self, key: str) -> Path | None:
        return self._tree.path(key) if self._is_here(key) else None

    def expects(self, key: str) -> bool:
        match = CHUNK.fullmatch(key)
        if match is None:
            return key in self._promised
        return match[2] in self._expected and match[2] not in self._complete

    def health(self) -> dict[str, Any]:
        with self._lock:
            return {
                "role": "relay",
                "head": None if self.head is None else self.head.policy.label,
                "versions": [manifest.policy.label for _, manifest in sorted(self._manifests.items())],
                "missing_chunks": len(self._expected - self._complete),
                "bytes_in": sum(self.pool.fetched_bytes.values()),
            }

    # What the pool asks

    def has(self, chunk: Chunk, scratch: memoryview) -> bool:
        """A chunk left by an earlier process counts once its bytes have been hashed again."""
        try:
            with self._tree.path(chunk_key(chunk.hash)).open("rb", buffering=0) as file:
                whole = file.readinto(scratch) == chunk.size_bytes and not file.read(1)
        except FileNotFoundError:
            return False
        if not whole or blake3(scratch).hexdigest() != chunk.hash:
            log.warning("chunk %s… on this disk is damaged; it is fetched again", chunk.hash[:16])
            return False
        self._arrived(chunk)
        return True

    def keep(self, chunk: Chunk, data: memoryview) -> None:
        self._tree.put_chunk(chunk.hash, data, durable=False)  # a restart hashes it again
        with self._lock:  # a retirement may have removed it just now, although it has become wanted again
            if chunk.hash in self._expected and not self._tree.has_chunk(chunk.hash, chunk.size_bytes):
                self._tree.put_chunk(chunk.hash, data, durable=False)
            self._arrived(chunk)

    # What the followers say

    def load(self) -> None:
        """Continue with what an earlier process left."""
        self._tree.sweep_temporaries()
        for place in self._tree.places():
            try:
                self._add(self._read_own_manifest(place))
            except ManifestRefused as error:
                log.warning("%s; it is fetched again", error)
                self._tree.remove_manifest(place)
        data = self._tree.read(HEAD)
        if data is not None:
            try:
                head = read_head(data, self._run, self._trusted_key)
                self.head = head if place_of(head) in self._manifests else None
            except ManifestRefused as error:
                log.warning("%s; it is fetched again", error)
        self._want_all()

    def adopt_head(self, head: BroadcastHead, head_data: bytes, manifest_data: bytes) -> bool:
        """Take a newer head with its manifest; false if another upstream was faster with this or a newer one."""
        if manifest_hash(manifest_data) != head.manifest_hash:
            raise ManifestRefused(f"the manifest of policy {head.policy.label} is not the one that its head names")
        manifest = read_manifest(manifest_data, self._run, self._trusted_key)
        if manifest.policy != head.policy:
            raise ManifestRefused(f"the head of policy {head.policy.label} names the manifest of another policy")
        with self._lock:
            if self.head is not None and place_of(head) <= place_of(self.head):
                check_not_rolled_back(head, self.head)
                return False
            self._tree.write(manifest_key(place_of(head)), manifest_data)
            self._tree.write(HEAD, head_data)  # after its manifest, so that whoever sees the head finds the manifest
            self.head = head
            self._add(manifest)
            self._retire()
            self._want_all()
        self._arrivals.notify(manifest_key(place_of(head)))
        self._arrivals.notify(HEAD)
        return True

    def adopt_manifest(self, place: Place, data: bytes) -> None:
        """Take the manifest of an older version that is still kept."""
        manifest = read_manifest(data, self._run, self._trusted_key)
        if place_of(manifest) != place:
            raise ManifestRefused(f"the manifest of policy {manifest.policy.label} was offered as another version")
        with self._lock:
            if place not in self.missing_places():
                return
            self._tree.write(manifest_key(place), data)
            self._add(manifest)
            self._want_all()
        self._arrivals.notify(manifest_key(place))

    def missing_places(self) -> list[Place]:
        """The older versions that should be here besides the head, newest first."""
        with self._lock:
            return [place for place in self._offered() if place not in self._manifests]

    def promise(self, place: Place, promised: bool) -> None:
        """Hold requests for this manifest while it is being fetched; when that ends, let go those still waiting."""
        with self._lock:
            (self._promised.add if promised else self._promised.discard)(manifest_key(place))
        if not promised:
            self._arrivals.notify(manifest_key(place))

    def _is_here(self, key: str) -> bool:
        if key == HEAD:
            return self.head is not None
        match = CHUNK.fullmatch(key)
        if match is not None:
            return match[2] in self._complete
        place = parse_label(key.removeprefix("manifests/").removesuffix(".json"))
        return place in self._manifests

    def _arrived(self, chunk: Chunk) -> None:
        with self._lock:
            if chunk.hash in self._expected:
                self._complete.add(chunk.hash)
        self._arrivals.notify(chunk_key(chunk.hash))

    def _read_own_manifest(self, place: Place) -> PolicyManifest:
        manifest = read_manifest(self._tree.read(manifest_key(place)) or b"", self._run, self._trusted_key)
        if place_of(manifest) != place:
            raise ManifestRefused(f"the manifest of policy {manifest.policy.label} lies under another name")
        return manifest

    def _add(self, manifest: PolicyManifest) -> None:
        self._manifests[place_of(manifest)] = manifest
        self._expected.update(chunk.hash for chunk in manifest.chunks)

    def _want_all(self) -> None:
        """Want what is not complete, newest version first."""
        wanted: dict[str, Chunk] = {}
        for _, manifest in sorted(self._manifests.items(), reverse=True):
            wanted.update({chunk.hash: chunk for chunk in manifest.chunks if chunk.hash not in self._complete})
        self.pool.want(wanted.values())

    def _offered(self) -> list[Place]:
        """The versions that the head offers and that this relay mirrors, newest first."""
        labels = self.head.kept_versions if self.head is not None else ()
        places = (parse_label(label) for label in labels)
        return sorted((place for place in places if place is not None), reverse=True)[: self._kept_versions]

    def _retire(self) -> None:
        """Remove versions beyond the newest few, and those that can no longer be completed."""
        newest = sorted(self._manifests, reverse=True)[: self._kept_versions]
        offered = set(self._offered())
        kept = {place for place in newest if place in offered or self._is_complete(self._manifests[place])}
        for place in set(self._manifests) - kept:
            self._tree.remove_manifest(place)
            del self._manifests[place]
        self._expected = {chunk.hash for manifest in self._manifests.values() for chunk in manifest.chunks}
        self.pool.forget_except(self._expected)
        self._complete = self._complete & self._expected
        self._tree.remove_chunks_except(self._expected)

    def _is_complete(self, manifest: PolicyManifest) -> bool:
        return all(chunk.hash in self._complete for chunk in manifest.chunks)
