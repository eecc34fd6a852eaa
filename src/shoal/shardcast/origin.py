"""The origin: where the trainer publishes. Every publication is whole or not there.

    content ─► deltas to earlier versions ─► payload, chunk by chunk ─► names synced ─► manifest ─► head ─► remove old
               a few MiB in memory           hashed; written if anchor                              ▲
                                                      a crash before this leaves the version before served

A version is an anchor (its whole payload is offered) if it is the first, if a delta would not pay, if the deltas from
the last anchor are together larger than the payload, or if that anchor lies far enough back; all others are offered as
deltas alone. Serving is somebody else's: `run_origin` in another process or thread, nginx, a bucket. They share only
the folder.

What an origin remembers of versions it has published, so that later ones can be told as differences to them.

    <tree>/.bases/0.12.json   a version's signed manifest
    <tree>/.bases/0.12/3      chunk 3 of its payload, unless it is an anchor: then its chunks are in the tree anyway

A file for each chunk, since threads that write to one file wait for each other. Only a few versions are kept (see
`OriginSettings.delta_strides`). They are no part of what is served. A payload that this process did not write itself is
hashed from end to end before a delta is made from it: a torn one would give every client the wrong weights.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shoal.errors import ManifestRefused, PolicyMismatch
from shoal.protocol import (
    BroadcastHead,
    Chunk,
    Delta,
    LedgerHead,
    PolicyManifest,
    PolicyRef,
    SigningKey,
    TensorView,
    content_digest,
)
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.crash import point
from shoal.runtime.files import ensure_folder, resource_error, write_atomically
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
from shoal.shardcast.content import Content, chunk_of, in_order
from shoal.shardcast.manifest import (
    MAX_CHUNK_BYTES,
    Place,
    chunk_size_for,
    encode,
    kept_places,
    manifest_hash,
    offered,
    place_of,
    read_head,
    read_manifest,
)
from shoal.shardcast.payload import read_fully
from shoal.shardcast.tree import HEAD, Tree, chunk_key, manifest_key, parse_label

log = logging.getLogger(__name__)

LOCK_WAIT_S = 10.0
DELTA_PAYS = 0.6  # of the whole payload's bytes; a larger one saves too little to be worth its detour

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all


class OriginSettings(BaseModel):
    """`kept_versions` must cover the versions that open leases may still name (max_staleness + 2)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk_size_bytes: int | None = Field(default=None, gt=0, le=MAX_CHUNK_BYTES)
    kept_versions: int = Field(default=5, ge=1, le=500)
    anchor_every: int = Field(default=16, ge=1, le=60)
    delta_strides: tuple[int, ...] = (1, 2, 4, 8)
    delta_from_bytes: int = Field(default=128 * 1024, ge=0)


@dataclass(frozen=True)
class _Draft:
    """A version that is to be published, and what was there when it began."""

    place: Place
    content: Content
    chunk_size_bytes: int
    head: BroadcastHead | None
    ledger_head: LedgerHead | None


class Origin:
    """Publishes versions into a folder, signed with the trainer's key.

    >>> origin = Origin(Path("origin"), "run-0123", SigningKey.generate())
    >>> origin.publish(1, Path("model.safetensors")).policy.label        # a file, or a folder
    '0.1'
    >>> origin.publish(2, {"weight": np.zeros((4, 4), np.float32)}).policy.label
    '0.2'
    >>> origin.publish(3, Content.of({"config.json": b"{}"}, tensors), ledger_head=head).policy.label
    '0.3'
    """

    def __init__(
        self,
        folder: Path | str,
        run: str,
        key: SigningKey,
        clock: Clock = SystemClock(),
        settings: OriginSettings = OriginSettings(),
    ) -> None:
        self._tree = Tree(Path(folder))
        self._run = run
        self._key = key
        self._clock = clock
        self._settings = settings
        self._tree.prepare()
        self._bases = Bases(self._tree, run, key.public_key, settings.delta_strides)

    def head(self) -> BroadcastHead | None:
        """The newest version published, if there is one."""
        data = self._tree.read(HEAD)
        return None if data is None else read_head(data, self._run, self._key.public_key)

    def publish(
        self,
        version: int,
        content: Content | Path | str | Mapping[str, Any] | Sequence[TensorView],
        *,
        incarnation: int = 0,
        ledger_head: LedgerHead | None = None,
        on_progress: OnProgress | None = None,
    ) -> PolicyManifest:
        """Publish a version. The same version with the same content again is harmless; with another it is an error.

        A version behind the head that is not kept any more (a trainer resumed from an old checkpoint) is signed and
        returned but not written: the head never goes back, and retention would remove it at once.
        """
        content = _as_content(content)
        place = (incarnation, version)
        with FolderLock(self._tree.folder).acquire(StopToken(), LOCK_WAIT_S):
            head = self.head()
            published = self._published(place)
            superseded = head is not None and place < place_of(head)
            if head is None or place > place_of(head):
                published = None  # written before a crash and never announced: nobody knows it
            size = self._settings.chunk_size_bytes or chunk_size_for(content.size_bytes)
            size = size if published is None else published.chunk_size_bytes
            draft = _Draft(place, content, size, head, ledger_head)
            if published is not None or superseded:
                manifest = self._again(draft, published)
            else:
                try:
                    manifest = self._first_time(draft, on_progress)
                except Exception:
                    self._collect(self._known())  # what it has written is of no use, and the disk may be full of it
                    self._bases.sweep()
                    raise
            if not superseded and (head is None or place_of(head) != place):
                self._advance(manifest, self._settings.kept_versions)
            return manifest

    def keep_newest(self, versions: int) -> None:
        """The run is finished: so many versions stay, back to an anchor, and nothing to make deltas from."""
        with FolderLock(self._tree.folder).acquire(StopToken(), LOCK_WAIT_S):
            head = self.head()
            newest = None if head is None else self._published(place_of(head))
            if newest is not None:
                self._advance(newest, versions)
            self._bases.clear()

    def _again(self, draft: _Draft, published: PolicyManifest | None) -> PolicyManifest:
        """A version that was published before, or is too old to be: nothing is written."""
        chunks = [chunk_of(data) for data in draft.content.cut(draft.chunk_size_bytes)]
        manifest = self._manifest(draft, chunks, True, ())
        if published is None:
            log.info("policy %d.%d is behind the head and not kept: signed, not served", *draft.place)
            return manifest
        if published.policy.digest != manifest.policy.digest:
            raise PolicyMismatch(
                f"policy {published.policy.label} is already published with digest {published.policy.digest[:16]}…, "
                f"not {manifest.policy.digest[:16]}…; continue under a new incarnation"
            )
        return published

    def _first_time(self, draft: _Draft, on_progress: OnProgress | None) -> PolicyManifest:
        content, chunk_size = draft.content, draft.chunk_size_bytes
        # A small payload (an adapter) travels whole: one chunk more or less costs nobody anything.
        remembered = bool(content.entries) and content.size_bytes > self._settings.delta_from_bytes
        deltas = self._deltas(draft) if remembered else ()
        anchor = self._must_be_anchor(draft.place, deltas, content.size_bytes)
        writer = self._bases.writer(anchor) if remembered else None
        scratch = threading.local()

        def take(offset: int) -> Chunk:
            """One chunk: read, hashed, and written where it has to be."""
            if not hasattr(scratch, "buffer"):
                scratch.buffer = memoryview(bytearray(chunk_size))
            data = content.part(offset, min(chunk_size, content.size_bytes - offset), scratch.buffer)
            if writer is not None:
                writer(offset // chunk_size, data)
            return self._put(data) if anchor else chunk_of(data)

        chunks: list[Chunk] = []
        done = 0
        for chunk in in_order(take, range(0, content.size_bytes, chunk_size)):
            chunks.append(chunk)
            done += chunk.size_bytes
            if on_progress is not None:
                on_progress(done, content.size_bytes)
        content.check_unchanged()
        manifest = self._manifest(draft, chunks, anchor, deltas)
        signed = encode(manifest, self._key)
        read_manifest(signed, self._run, self._key.public_key)  # what nobody could read is not announced
        self._tree.sync_chunks(chunk.hash for chunk in offered(manifest))
        point("trainer.publish.before_manifest")
        self._tree.write(manifest_key(draft.place), signed)
        if remembered:
            self._bases.remember(manifest, signed)
        return manifest

    def _must_be_anchor(self, place: Place, deltas: Sequence[Delta], size_bytes: int) -> bool:
        """Whether the whole payload has to be offered: so that every version kept can be reached from an anchor, by
        deltas that are together no larger than the payload."""
        known = {other: manifest for other, manifest in self._known().items() if other < place}
        last = max((other for other, manifest in known.items() if manifest.anchor), default=None)
        if last is None or last[0] != place[0] or place[1] - last[1] >= self._settings.anchor_every:
            return True
        cost = {last: 0}  # of the deltas from there
        between = {other: manifest.deltas for other, manifest in sorted(known.items()) if other > last}
        for other, ways in (*between.items(), (place, deltas)):
            bases = [((way.base.incarnation, way.base.version), way.size_bytes) for way in ways]
            reached = [cost[base] + size for base, size in bases if base in cost]
            cost[other] = min(reached, default=size_bytes + 1)
        return cost[place] > size_bytes

    def _deltas(self, draft: _Draft) -> tuple[Delta, ...]:
        """The deltas that pay, written as chunks; none if not even the one to the version before does."""
        deltas: list[Delta] = []
        for place in self._bases.candidates(draft.place):
            base = self._bases.get(place)
            if base is None or base.manifest.entries != draft.content.entries:
                continue
            from shoal.shardcast.delta import DoesNotPay, difference  # needs numpy; a first version does not

            try:
                parts = difference(base, draft.content, draft.chunk_size_bytes, DELTA_PAYS)
                chunks = tuple(self._put(part) for part in parts)
            except DoesNotPay:
                if not deltas:
                    break  # a longer stride pays even less
                continue
            size = sum(chunk.size_bytes for chunk in chunks)
            deltas.append(Delta(base=base.manifest.policy, size_bytes=size, chunks=chunks))
        return tuple(deltas)

    def _put(self, data: memoryview) -> Chunk:
        chunk = chunk_of(data)
        if not self._tree.has_chunk(chunk.hash, chunk.size_bytes):
            self._tree.put_chunk(chunk.hash, data, durable=True)
        return chunk

    def _manifest(
        self, draft: _Draft, chunks: Sequence[Chunk], anchor: bool, deltas: tuple[Delta, ...]
    ) -> PolicyManifest:
        (incarnation, version), head, entries = draft.place, draft.head, draft.content.entries
        digest = content_digest(entries, draft.chunk_size_bytes, tuple(chunks))
        same_incarnation = head is not None and head.policy.incarnation == incarnation
        return PolicyManifest(
            run=self._run,
            policy=PolicyRef(incarnation=incarnation, version=version, digest=digest),
            parent_version=head.policy.version if head is not None and same_incarnation else None,
            entries=entries,
            chunk_size_bytes=draft.chunk_size_bytes,
            chunks=tuple(chunks),
            size_bytes=draft.content.size_bytes,
            anchor=anchor,
            deltas=deltas,
            ledger_head=draft.ledger_head,
            created_at_ms=self._clock.now_ms(),
        )

    def _published(self, place: Place) -> PolicyManifest | None:
        data = self._tree.read(manifest_key(place))
        return None if data is None else read_manifest(data, self._run, self._key.public_key)

    def _advance(self, manifest: PolicyManifest, kept_versions: int) -> None:
        """Make `manifest` the head, then remove what is no longer kept. Clients see the new head before that."""
        data = self._tree.read(manifest_key(place_of(manifest)))
        assert data is not None
        known = self._known()
        anchors = {
            place: place not in known or known[place].anchor
            for place in self._tree.places()
            if place <= place_of(manifest)
        }
        kept = kept_places(anchors, kept_versions)
        head = BroadcastHead(
            run=self._run,
            policy=manifest.policy,
            manifest_hash=manifest_hash(data),
            kept_versions=tuple(f"{incarnation}.{version}" for incarnation, version in sorted(kept)),
            created_at_ms=self._clock.now_ms(),
        )
        point("trainer.publish.before_head")
        self._tree.write(HEAD, encode(head, self._key))
        self._collect(known, kept)

    def _known(self) -> dict[Place, PolicyManifest]:
        """The manifests here; one that cannot be read is left out (and its chunks are not removed this time)."""
        known: dict[Place, PolicyManifest] = {}
        for place in self._tree.places():
            try:
                manifest = self._published(place)
            except ManifestRefused as error:
                log.warning("%s", error)
                continue
            if manifest is not None:
                known[place] = manifest
        return known

    def _collect(self, known: dict[Place, PolicyManifest], kept: Collection[Place] = ()) -> None:
        """Remove the manifests behind those that are kept, then the chunks of none: no manifest here ever lacks a
        chunk. Then what is half written."""
        for place in self._tree.places():
            if kept and place not in kept and place < max(kept):
                self._tree.remove_manifest(place)
                known.pop(place, None)
        self._tree.sweep_temporaries()
        if set(self._tree.places()) - known.keys():
            log.warning("old chunks are not removed this time: a manifest here cannot be read")
            return
        self._tree.remove_chunks_except({chunk.hash for manifest in known.values() for chunk in offered(manifest)})


def _as_content(content: Content | Path | str | Mapping[str, Any] | Sequence[TensorView]) -> Content:
    if isinstance(content, Content):
        return content
    if isinstance(content, Path | str):
        return Content.at(Path(content))
    if isinstance(content, Mapping):
        return Content.of_arrays(content)
    if all(isinstance(tensor, TensorView) for tensor in content):
        return Content.of({}, content)
    raise TypeError("what can be published: a path, arrays by name, tensors (TensorView), or a Content")


FOLDER = ".bases"


class Base:
    """A payload on the disk in files of one chunk each, read a part at a time. `path_of` names a chunk's file."""

    def __init__(self, manifest: PolicyManifest, path_of: Callable[[int], Path]) -> None:
        self.manifest = manifest
        self._path_of = path_of

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill `buffer`; false if the payload is not all there."""
        size = self.manifest.chunk_size_bytes
        while buffer.nbytes:
            inside = offset % size
            count = min(size - inside, buffer.nbytes)
            try:
                with self._path_of(offset // size).open("rb", buffering=0) as file:
                    if not read_fully(file.fileno(), inside, buffer[:count]):
                        return False
            except FileNotFoundError:
                return False
            offset, buffer = offset + count, buffer[count:]
        return True

    def is_whole(self) -> bool:
        """Whether every chunk has the hash that was signed."""
        size = self.manifest.chunk_size_bytes
        scratch = memoryview(bytearray(size))
        for index, chunk in enumerate(self.manifest.chunks):
            part = scratch[: chunk.size_bytes]
            if not self.read_into(index * size, part) or chunk_of(part) != chunk:
                return False
        return True


class Bases:
    """The payloads that an origin can tell differences to."""

    def __init__(self, tree: Tree, run: str, key: str, strides: Sequence[int]) -> None:
        self._tree = tree
        self._folder = tree.folder / FOLDER
        self._run, self._key = run, key
        self._strides = sorted(set(strides))
        self._new = self._folder / "new"
        self._written: set[Place] = set()  # by this process, so known to be whole

    def candidates(self, place: Place) -> list[Place]:
        """The versions that `place` should have a delta to, nearest first.

        Every version has one to the nearest before it; one whose number is a multiple of a longer stride also skips
        back by that stride, so that whoever lags by n versions needs about log n deltas.
        """
        known = self._known()
        before = [other for other in known if other < place]
        wanted = [max(before)] if before and 1 in self._strides else []
        for stride in self._strides:
            target = (place[0], place[1] - stride)
            if place[1] % stride == 0 and target in known and target not in wanted:
                wanted.append(target)
        return wanted

    def get(self, place: Place) -> Base | None:
        """The payload of `place`; None if it is not here or not what was signed (it is forgotten then)."""
        try:
            manifest = read_manifest(self._manifest(place).read_bytes(), self._run, self._key)
        except (OSError, ManifestRefused):
            self._forget(place)
            return None
        offered, copied = self._tree.path, self._payload(place)
        base = Base(manifest, lambda index: offered(chunk_key(manifest.chunks[index].hash)))
        if not manifest.anchor:
            base = Base(manifest, lambda index: copied / str(index))
        if place not in self._written and not base.is_whole():
            self._forget(place)
            return None
        self._written.add(place)
        return base

    def writer(self, anchor: bool) -> Callable[[int, memoryview], None] | None:
        """What writes the chunks of the next payload, by their index; None if no copy is needed. They count for
        nothing until they are remembered."""
        if anchor or not self._strides:
            return None
        self.sweep()
        ensure_folder(self._new)
        return self._write

    def _write(self, index: int, data: memoryview) -> None:
        path = self._new / str(index)
        try:
            with path.open("wb", buffering=0) as file:
                while data.nbytes:
                    data = data[file.write(data) :]
        except OSError as error:
            raise resource_error("write", path, error) from error

    def remember(self, manifest: PolicyManifest, data: bytes) -> None:
        """The payload just written is `manifest`'s, whose bytes are `data`; forget those no longer needed."""
        if not self._strides:
            return
        place = place_of(manifest)
        ensure_folder(self._folder)
        self._forget(place)
        if not manifest.anchor:
            self._new.replace(self._payload(place))
        write_atomically(self._manifest(place), data)
        self._written.add(place)
        self.sweep()
        needed = {(place[0], place[1] - place[1] % stride) for stride in self._strides} | {place}
        for other in self._known():
            if other not in needed:
                self._forget(other)

    def sweep(self) -> None:
        """Remove what a crash or a failure has left: a payload without its manifest, or half of one."""
        for path in self._folder.glob("*"):
            if path.is_dir() and not path.with_name(f"{path.name}.json").exists():
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Forget all of them: the next version is offered whole."""
        for place in self._known():
            self._forget(place)
        self.sweep()

    def _known(self) -> set[Place]:
        names = (path.stem for path in self._folder.glob("*.json"))
        return {place for name in names if (place := parse_label(name)) is not None}

    def _forget(self, place: Place) -> None:
        self._written.discard(place)
        self._manifest(place).unlink(missing_ok=True)
        shutil.rmtree(self._payload(place), ignore_errors=True)

    def _manifest(self, place: Place) -> Path:
        return self._folder / f"{place[0]}.{place[1]}.json"

    def _payload(self, place: Place) -> Path:
        return self._folder / f"{place[0]}.{place[1]}"
