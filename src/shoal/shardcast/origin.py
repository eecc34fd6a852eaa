"""The origin: where the trainer publishes. Every publication is whole or not there.

    tensors, files ─► cut ─► hash ─► chunk on disk ─► … all chunks, names synced ─► manifest ─► head ─► remove old
                      one chunk in memory                                                       ▲
                                              a crash before this leaves the version before served

Serving is somebody else's: `run_origin` in another process or thread, nginx, a bucket. They share only the folder.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shoal.errors import ManifestRefused, PolicyMismatch
from shoal.protocol import (
    BroadcastHead,
    Chunk,
    Entry,
    LedgerHead,
    PolicyManifest,
    PolicyRef,
    SigningKey,
    TensorView,
    content_digest,
)
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
from shoal.shardcast.manifest import (
    CHUNK_SIZE_BYTES,
    MAX_CHUNK_BYTES,
    Place,
    chunk_of,
    cut,
    digest_of,
    encode,
    lay_out,
    manifest_hash,
    place_of,
    read_head,
    read_manifest,
)
from shoal.shardcast.tree import HEAD, Tree, manifest_key

log = logging.getLogger(__name__)

LOCK_WAIT_S = 10.0


class OriginSettings(BaseModel):
    """`kept_versions` must cover the versions that open leases may still name (max_staleness + 2)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk_size_bytes: int = Field(default=CHUNK_SIZE_BYTES, gt=0, le=MAX_CHUNK_BYTES)
    kept_versions: int = Field(default=5, ge=1, le=1000)


@dataclass(frozen=True)
class _Content:
    entries: tuple[Entry, ...]
    chunks: tuple[Chunk, ...]
    digest: str

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)


class Origin:
    """Publishes versions into a folder, signed with the trainer's key.

    >>> origin = Origin(Path("origin"), "run-0123", SigningKey.generate())
    >>> manifest = origin.publish(0, 1, {"config.json": b"{}"}, tensors, ledger_head=None)
    >>> manifest.policy.label
    '0.1'
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        key: SigningKey,
        clock: Clock = SystemClock(),
        settings: OriginSettings = OriginSettings(),
    ) -> None:
        self._tree = Tree(folder)
        self._run = run
        self._key = key
        self._clock = clock
        self._settings = settings
        self._tree.prepare()

    def digest_of(self, files: Mapping[str, bytes], tensors: Sequence[TensorView]) -> str:
        """The digest that `publish` would sign for these."""
        return digest_of(files, tensors, self._settings.chunk_size_bytes)

    def head(self) -> BroadcastHead | None:
        """The newest version published, if there is one."""
        data = self._tree.read(HEAD)
        return None if data is None else read_head(data, self._run, self._key.public_key)

    def publish(
        self,
        incarnation: int,
        version: int,
        files: Mapping[str, bytes],
        tensors: Sequence[TensorView],
        ledger_head: LedgerHead | None,
    ) -> PolicyManifest:
        """Publish a version. The same version with the same content again is harmless; with another it is an error.

        A version behind the head that is not kept any more (a trainer resumed from an old checkpoint) is signed and
        returned but not written: the head never goes back, and retention would remove it at once.
        """
        place = (incarnation, version)
        with FolderLock(self._tree.folder).acquire(StopToken(), LOCK_WAIT_S):
            head = self.head()
            published = self._published(place)
            superseded = head is not None and place < place_of(head)
            write = published is None and not superseded
            content = self._cut(files, tensors, write)
            if published is None:
                published = self._manifest(place, content, head, ledger_head)
                if superseded:
                    log.info("policy %d.%d is behind the head and not kept: signed, not served", *place)
                    return published
                self._tree.write(manifest_key(place), encode(published, self._key))
            elif published.policy.digest != content.digest:
                raise PolicyMismatch(
                    f"policy {published.policy.label} is already published with digest "
                    f"{published.policy.digest[:16]}…, not {content.digest[:16]}…; "
                    "continue under a new incarnation"
                )
            if not superseded and (head is None or place_of(head) != place):
                self._advance(published)
            return published

    def _cut(self, files: Mapping[str, bytes], tensors: Sequence[TensorView], write: bool) -> _Content:
        entries, spans = lay_out(files, tensors)
        chunks: list[Chunk] = []
        for data in cut(spans, self._settings.chunk_size_bytes):
            chunk = chunk_of(data)
            if write and not self._tree.has_chunk(chunk.hash, chunk.size_bytes):
                self._tree.put_chunk(chunk.hash, data, durable=True)
            chunks.append(chunk)
        if write:
            self._tree.sync_chunks(chunk.hash for chunk in chunks)
        digest = content_digest(entries, self._settings.chunk_size_bytes, tuple(chunks))
        return _Content(entries, tuple(chunks), digest)

    def _manifest(
        self, place: Place, content: _Content, head: BroadcastHead | None, ledger_head: LedgerHead | None
    ) -> PolicyManifest:
        same_incarnation = head is not None and head.policy.incarnation == place[0]
        return PolicyManifest(
            run=self._run,
            policy=PolicyRef(incarnation=place[0], version=place[1], digest=content.digest),
            parent_version=head.policy.version if head is not None and same_incarnation else None,
            entries=content.entries,
            chunk_size_bytes=self._settings.chunk_size_bytes,
            chunks=content.chunks,
            size_bytes=content.size_bytes,
            ledger_head=ledger_head,
            created_at_ms=self._clock.now_ms(),
        )

    def _published(self, place: Place) -> PolicyManifest | None:
        data = self._tree.read(manifest_key(place))
        return None if data is None else read_manifest(data, self._run, self._key.public_key)

    def _advance(self, manifest: PolicyManifest) -> None:
        """Make `manifest` the head, then remove what is no longer kept. Clients see the new head before that."""
        data = self._tree.read(manifest_key(place_of(manifest)))
        assert data is not None
        kept = [place for place in self._tree.places() if place <= place_of(manifest)][-self._settings.kept_versions :]
        head = BroadcastHead(
            run=self._run,
            policy=manifest.policy,
            manifest_hash=manifest_hash(data),
            kept_versions=tuple(f"{incarnation}.{version}" for incarnation, version in kept),
            created_at_ms=self._clock.now_ms(),
        )
        self._tree.write(HEAD, encode(head, self._key))
        self._collect(set(kept))

    def _collect(self, kept: set[Place]) -> None:
        """Remove the manifests that are not kept, then the chunks of none: no manifest here ever lacks a chunk."""
        hashes: set[str] = set()
        for place in self._tree.places():
            if place not in kept and place < max(kept):
                self._tree.remove_manifest(place)
                continue
            try:
                manifest = self._published(place)
            except ManifestRefused as error:
                log.warning("old chunks are not removed this time: %s", error)
                return
            hashes.update(chunk.hash for chunk in (manifest.chunks if manifest else ()))
        self._tree.remove_chunks_except(hashes)
        self._tree.sweep_temporaries()
