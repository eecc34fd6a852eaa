"""The origin: the trainer publishes here, atomically.

    content ─► deltas to earlier versions ─► payload, chunk by chunk ─► names synced ─► manifest ─► head ─► remove old
               a few MiB in memory           hashed; written if anchor                              ▲
                                                      after a crash before this the old version is served

A version is an anchor (its whole payload is offered) if it is the first, if a delta would save too little, if the
deltas from the last anchor are together larger than the payload, or if that anchor is too old; all others are offered
as deltas only. Any server of the folder can be used (`run_origin`, nginx, a bucket).

For the next delta earlier payloads are made again from the tree, block by block. Chunks that this process did not write
are hashed before: a damaged one would give every client wrong weights.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path

from pydantic import BaseModel, Field

from shoal.errors import DeltaRefused, ManifestRefused, PolicyMismatch, VersionNotFound
from shoal.protocol import BroadcastHead, Chunk, Delta, LedgerHead, PolicyManifest, PolicyRef, SigningKey, TensorView
from shoal.protocol.policy import content_digest
from shoal.runtime import Clock, FolderLock, StopToken, SystemClock, point
from shoal.shardcast import manifest as manifests
from shoal.shardcast.content import THREADS, Content, chunk_of, in_order
from shoal.shardcast.lookup import Route, find_route
from shoal.shardcast.manifest import Place, offered
from shoal.shardcast.tree import HEAD, ChunkFiles, Tree, chunk_key, manifest_key

log = logging.getLogger(__name__)

LOCK_WAIT_S = 10.0
DELTA_STRIDES = (2, 4, 8)  # besides a delta to the version before
DELTA_PAYS = 0.6  # of the whole payload's bytes; a larger delta saves too little
JUDGED_AFTER = 32 * 1024 * 1024  # bytes of the payload, before which the share is not judged
WRITERS = 32  # threads that hash chunks and wait for the disk

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all


class OriginSettings(BaseModel, frozen=True, extra="forbid"):
    """`keep_versions` must cover the versions that open leases may still name (max_staleness + 2)."""

    chunk_size_bytes: int | None = Field(default=None, gt=0, le=manifests.MAX_CHUNK_BYTES)
    keep_versions: int = Field(default=5, ge=1, le=500)
    anchor_every: int = Field(default=16, ge=1, le=60)
    delta_from_bytes: int = Field(default=128 * 1024, ge=0)


@dataclass(frozen=True)
class Draft:
    place: Place
    content: Content
    chunk_size_bytes: int
    head: BroadcastHead | None
    ledger_head: LedgerHead | None


class _DeltaWriter:
    def __init__(self, put: Callable[[memoryview], Chunk], chunk_size_bytes: int, begin: bytes) -> None:
        self._put, self._chunk_size_bytes = put, chunk_size_bytes
        self._pending = bytearray(begin)
        self._chunks: list[Chunk] = []
        self.size_bytes = len(begin)

    def add(self, part: bytes) -> None:
        self._pending += part
        self.size_bytes += len(part)
        while len(self._pending) >= self._chunk_size_bytes:
            self._flush()

    def finish(self, base: PolicyRef) -> Delta:
        if self._pending:
            self._flush()
        return Delta(base=base, size_bytes=self.size_bytes, chunks=tuple(self._chunks))

    def _flush(self) -> None:
        self._chunks.append(self._put(memoryview(bytes(self._pending[: self._chunk_size_bytes]))))
        del self._pending[: self._chunk_size_bytes]


class Origin:
    """Publishes versions into a folder, signed with the trainer's key.

    >>> origin = Origin(Path("origin"), "run-0123", SigningKey.generate())
    >>> origin.publish(1, Path("model.safetensors")).policy.label        # a file, or a folder
    '0.1'
    """

    def __init__(
        self, folder: Path | str, run: str, key: SigningKey, clock: Clock = SystemClock(),
        settings: OriginSettings = OriginSettings(),
    ) -> None:  # fmt: skip
        self._tree = Tree(Path(folder))
        self._run, self._key, self._clock, self._settings = run, key, clock, settings
        self._tree.prepare()
        self._written: set[str] = set()  # chunks that are known to be intact
        self._read: dict[Place, tuple[bytes, PolicyManifest]] = {}  # checked manifests

    def head(self) -> BroadcastHead | None:
        data = self._tree.read(HEAD)
        return None if data is None else manifests.read_head(data, self._run, self._key.public_key)

    def publish(
        self, version: int, content: Content | Path | str | Sequence[TensorView], *, incarnation: int = 0,
        ledger_head: LedgerHead | None = None, on_progress: OnProgress | None = None,
    ) -> PolicyManifest:  # fmt: skip
        """Publishing the same version with the same content again is allowed; with other content it is an error. A
        version behind the head that is no longer kept (after a resume from an old checkpoint) is signed and returned
        but not written: the head never goes back."""
        if isinstance(content, Path | str):
            content = Content.at(Path(content))
        elif not isinstance(content, Content):
            content = Content.of({}, content)
        place = (incarnation, version)
        with FolderLock(self._tree.folder).acquire(StopToken(), LOCK_WAIT_S):
            head, published = self.head(), self._published(place)
            superseded = head is not None and place < head.policy.place
            if head is None or place > head.policy.place:
                published = None  # written before a crash and never announced
            size = self._settings.chunk_size_bytes or manifests.chunk_size_for(content.size_bytes)
            size = size if published is None else published.chunk_size_bytes
            draft = Draft(place, content, size, head, ledger_head)
            if published is not None or superseded:
                manifest = self._republish(draft, published)
            else:
                try:
                    manifest = self._publish_new(draft, on_progress)
                except Exception:
                    self._remove_old(self.known())  # remove its chunks: the disk may be full
                    raise
            if not superseded and (head is None or head.policy.place != place):
                self._advance(manifest, self._settings.keep_versions)
            return manifest

    def keep_newest(self, versions: int) -> None:
        """The run is finished: keep so many versions, back to an anchor."""
        with FolderLock(self._tree.folder).acquire(StopToken(), LOCK_WAIT_S):
            head = self.head()
            newest = None if head is None else self._published(head.policy.place)
            if newest is not None:
                self._advance(newest, versions)

    def _republish(self, draft: Draft, published: PolicyManifest | None) -> PolicyManifest:
        chunks = list(draft.content.chunks(draft.chunk_size_bytes, chunk_of))
        manifest = self._manifest(draft, chunks, True, ())
        if published is None:
            log.info("policy %d.%d is behind the head and not kept: signed, not served", *draft.place)
            return manifest
        if (old := published.policy.digest) != (new := manifest.policy.digest):
            what = f"policy {published.policy.label} is already published with digest {old[:16]}…, not {new[:16]}…"
            raise PolicyMismatch(f"{what}; continue under a new incarnation")
        return published

    def _publish_new(self, draft: Draft, on_progress: OnProgress | None) -> PolicyManifest:
        content, chunk_size = draft.content, draft.chunk_size_bytes
        known = {manifest.policy: manifest for other, manifest in self.known().items() if other < draft.place}
        routes: dict[Place, Route] = {}
        for manifest in known.values():
            with suppress(VersionNotFound):
                routes[manifest.policy.place] = find_route(manifest, (), known.get)
        # A small payload (an adapter) is published whole.
        small = not content.entries or content.size_bytes <= self._settings.delta_from_bytes
        deltas = () if small or not routes else self._deltas(draft, routes[max(routes)])
        # Every kept version can be made from an anchor, by deltas that are together no larger than the payload.
        anchors = (place for place, route in routes.items() if not route.steps)
        (incarnation, version), last = draft.place, max(anchors, default=None)
        costs = [routes[delta.base.place].delta_bytes + delta.size_bytes for delta in deltas]
        far = last is None or last[0] != incarnation or version - last[1] >= self._settings.anchor_every
        anchor = far or min(costs, default=content.size_bytes + 1) > content.size_bytes
        chunks: list[Chunk] = []
        work, threads = (
            (self._put, WRITERS) if anchor else (chunk_of, THREADS)
        )  # chunks are written if they are offered
        for chunk in content.chunks(chunk_size, work, threads):
            chunks.append(chunk)
            if on_progress is not None:
                on_progress(min(len(chunks) * chunk_size, content.size_bytes), content.size_bytes)
        content.check_unchanged()
        manifest = self._manifest(draft, chunks, anchor, deltas)
        signed = manifests.encode(manifest, self._key)
        manifests.read_manifest(signed, self._run, self._key.public_key)  # refuses what clients would refuse
        self._tree.sync_chunks(chunk.hash for chunk in offered(manifest))
        point("trainer.publish.before_manifest")
        self._tree.write(manifest_key(draft.place), signed)
        return manifest

    def _deltas(self, draft: Draft, route: Route) -> tuple[Delta, ...]:
        """The deltas that save enough, nearest base first, written as chunks; none if the delta to the version before
        does not. A version whose number is a multiple of a longer stride also has a delta over that stride, so that a
        client that is n versions behind needs about log n deltas. All these bases are on the route to the version
        before, unless an anchor is between: then its own delta leads there."""
        incarnation, version = draft.place
        passed, anchor = route.manifests(), route.manifests()[0]
        chunked = [(step.delta.chunks, step.manifest.chunk_size_bytes) for step in route.steps]
        chunked.insert(0, (anchor.chunks, anchor.chunk_size_bytes))
        if any(manifest.entries != draft.content.entries for manifest in passed):
            return ()
        needed = {chunk.hash: chunk for chunks, _ in chunked for chunk in chunks}

        def is_whole(chunk: Chunk) -> bool:
            data = self._tree.read(chunk_key(chunk.hash))
            return data is not None and chunk_of(memoryview(data)) == chunk

        if not all(in_order(is_whole, [chunk for hash_, chunk in needed.items() if hash_ not in self._written])):
            return ()
        self._written = set(needed)
        skipped = [(incarnation, version - stride) for stride in DELTA_STRIDES if version % stride == 0]
        last = len(passed) - 1
        wanted = [index for index, base in enumerate(passed) if index == last or base.policy.place in skipped]
        if find_spec("numpy") is None:
            return ()
        from shoal.shardcast.delta import MAGIC, differences  # numpy is needed for deltas only

        writers = {index: _DeltaWriter(self._put, draft.chunk_size_bytes, MAGIC) for index in reversed(wanted)}
        payload, *steps = (ChunkFiles(self._tree, *each) for each in chunked)
        try:
            for end, parts in differences(payload, [BufferedReader(step) for step in steps], draft.content, wanted):
                most = DELTA_PAYS * max(end, min(JUDGED_AFTER, draft.content.size_bytes))
                for index in parts.keys() & writers.keys():
                    writers[index].add(parts[index])
                    if writers[index].size_bytes > most:
                        del writers[index]
                if last not in writers:
                    return ()  # longer strides save even less
        except (FileNotFoundError, DeltaRefused) as error:
            log.warning("policy %d.%d is offered whole: an earlier one is incomplete: %s", *draft.place, error)
            return ()
        return tuple(each.finish(passed[index].policy) for index, each in writers.items())

    def _put(self, data: memoryview) -> Chunk:
        chunk = chunk_of(data)
        if not self._tree.has_chunk(chunk.hash, chunk.size_bytes):
            self._tree.put_chunk(chunk.hash, data, durable=True)
            self._written.add(chunk.hash)
        return chunk

    def _manifest(
        self, draft: Draft, chunks: Sequence[Chunk], anchor: bool, deltas: tuple[Delta, ...]
    ) -> PolicyManifest:
        (incarnation, version), head, entries = draft.place, draft.head, draft.content.entries
        digest = content_digest(entries, draft.chunk_size_bytes, tuple(chunks))
        same_incarnation = head is not None and head.policy.incarnation == incarnation
        return PolicyManifest(
            run=self._run, policy=PolicyRef(incarnation=incarnation, version=version, digest=digest),
            parent_version=head.policy.version if head is not None and same_incarnation else None, entries=entries,
            chunk_size_bytes=draft.chunk_size_bytes, chunks=tuple(chunks), size_bytes=draft.content.size_bytes,
            anchor=anchor, deltas=deltas, ledger_head=draft.ledger_head, created_at_ms=self._clock.now_ms(),
        )  # fmt: skip

    def _published(self, place: Place) -> PolicyManifest | None:
        if (data := self._tree.read(manifest_key(place))) is None:
            return None
        if place not in self._read or self._read[place][0] != data:
            self._read[place] = data, manifests.read_manifest(data, self._run, self._key.public_key)
        return self._read[place][1]

    def _advance(self, manifest: PolicyManifest, count: int) -> None:
        data = self._tree.read(manifest_key(manifest.policy.place))
        assert data is not None
        known = self.known()
        places = [place for place in self._tree.places() if place <= manifest.policy.place]
        anchors = {place: place not in known or known[place].anchor for place in places}
        kept = manifests.kept_places(anchors, count)
        head = BroadcastHead(
            run=self._run, policy=manifest.policy, manifest_hash=manifests.manifest_hash(data),
            versions=tuple(f"{incarnation}.{version}" for incarnation, version in sorted(kept)),
            created_at_ms=self._clock.now_ms(),
        )  # fmt: skip
        point("trainer.publish.before_head")
        self._tree.write(HEAD, manifests.encode(head, self._key))
        self._remove_old(known, kept)

    def known(self) -> dict[Place, PolicyManifest]:
        """All readable manifests (if one cannot be read, no chunks are removed)."""
        known: dict[Place, PolicyManifest] = {}
        for place in self._tree.places():
            try:
                if (manifest := self._published(place)) is not None:
                    known[place] = manifest
            except ManifestRefused as error:
                log.warning("%s", error)
        return known

    def _remove_old(self, known: dict[Place, PolicyManifest], kept: Collection[Place] = ()) -> None:
        """Remove manifests that are not kept, then chunks without a manifest; so every manifest has all its chunks."""
        for place in self._tree.places():
            if kept and place not in kept and place < max(kept):
                self._tree.remove_manifest(place)
                self._read.pop(place, None)
                known.pop(place, None)
        self._tree.sweep_temporaries()
        if set(self._tree.places()) - known.keys():
            log.warning("old chunks are not removed this time: a manifest here cannot be read")
            return
        self._tree.remove_chunks_except({chunk.hash for manifest in known.values() for chunk in offered(manifest)})
