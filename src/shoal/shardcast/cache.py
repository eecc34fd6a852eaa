"""The payloads on a client's disk: one file per set of weights, filled chunk by chunk, mapped when it is complete.

    <digest>.json            the signed manifest
    <digest>.part            incomplete, sparse; after a restart it is hashed and only missing chunks are fetched
    <digest>.bin             complete; mapped read-only, tensors are views of it
    <base>-<digest>.delta    a delta between two payloads

A chunk that another payload has is copied, not fetched. Files of an earlier process are hashed before use.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from shoal.errors import DeltaRefused, ManifestRefused, ResourceError
from shoal.protocol import Chunk, PolicyManifest, PolicyRef
from shoal.runtime import MachineLimits, ensure_folder, open_in_place, resource_error, show_bytes, write_atomically
from shoal.runtime.extras import require
from shoal.shardcast.lookup import Route, Step
from shoal.shardcast.manifest import read_manifest
from shoal.shardcast.payload import Payload, open_payload, os_errors, read_fully

if TYPE_CHECKING:
    from shoal.shardcast.delta import AppliedDeltas

log = logging.getLogger(__name__)

Places = Mapping[str, tuple[Path, int]]  # chunk → a file that may contain it, and the offset


class PartFiles:
    """The files that a pool fills, as its `ChunkStore`. A chunk is written to every place that needs it; it may be on
    the disk already, in this file or at a place in `present`."""

    def __init__(self) -> None:
        self._files: dict[Path, FileIO] = {}
        self._wanted: dict[str, list[tuple[Path, int]]] = defaultdict(list)  # by chunk: files and offsets
        self._present: dict[str, list[tuple[Path, int]]] = defaultdict(list)
        self._writing = threading.Lock()  # threads that write to one file at once spin on it in the kernel

    def add(self, path: Path, chunks: Sequence[Chunk], chunk_size_bytes: int, present: Places | None = None) -> None:
        resumed = path.exists()
        with os_errors("write", path):
            self._files[path] = os.fdopen(open_in_place(path, os.O_RDWR), "r+b", buffering=0)
            os.ftruncate(self._files[path].fileno(), sum(chunk.size_bytes for chunk in chunks))
        for index, chunk in enumerate(chunks):
            if resumed and chunk.hash not in self._wanted:  # a repeated chunk is checked once
                self._present[chunk.hash].append((path, index * chunk_size_bytes))
            self._wanted[chunk.hash].append((path, index * chunk_size_bytes))
        for chunk_hash, place in (present or {}).items():
            self._present[chunk_hash].append(place)

    def has(self, chunk: Chunk, scratch: memoryview) -> bool:
        for path, offset in self._present.get(chunk.hash, ()):
            with suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
                if _holds(file.fileno(), offset, chunk, scratch):
                    self._write([place for place in self._wanted[chunk.hash] if place != (path, offset)], scratch)
                    return True
        return False

    def keep(self, chunk: Chunk, data: memoryview) -> None:
        self._write(self._wanted[chunk.hash], data)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _write(self, places: Iterable[tuple[Path, int]], data: memoryview) -> None:
        for path, offset in places:
            with os_errors("write", path), self._writing:
                written = 0
                while written < data.nbytes:
                    written += os.pwrite(self._files[path].fileno(), data[written:], offset + written)


class PayloadCache:
    """The payloads in one folder, which belongs to one process."""

    def __init__(self, folder: Path, run: str | None, trusted_key: str, remember_changes: bool = True) -> None:
        self._folder = ensure_folder(folder)
        self.run = run
        self._remember_changes, self._trusted_key = remember_changes, trusted_key
        self._verified: dict[str, PolicyManifest] = {}  # payloads that this process has hashed completely
        self._made: dict[str, AppliedDeltas] = {}  # of payloads that were made by deltas

    def manifest(self, ref: PolicyRef) -> PolicyManifest | None:
        manifest = self._read_manifest(ref.digest)
        return manifest if manifest is not None and manifest.policy == ref else None

    def is_verified(self, ref: PolicyRef) -> bool:
        return ref.digest in self._verified and self._path(ref.digest, "bin").exists()

    def held(self) -> dict[str, PolicyManifest]:
        """The payloads that a delta could start from, by digest. Unverified ones may be damaged."""
        found = {path.stem: self._read_manifest(path.stem) for path in self._folder.glob("*.bin")}
        return {digest: manifest for digest, manifest in found.items() if manifest is not None}

    def remember(self, manifest: PolicyManifest, data: bytes) -> None:
        digest = manifest.policy.digest
        write_atomically(self._path(digest, "json"), data)
        if digest in self._verified:  # the same weights under another version
            self._verified[digest] = manifest

    def forget_unused(self, ref: PolicyRef) -> None:
        if not any(path.stat().st_blocks for path in self._files_of(ref.digest) if path.suffix != ".json"):
            self._forget(ref.digest)

    def adopt(self, manifest: PolicyManifest) -> bool:
        """Use a complete payload of an earlier process; false if it is missing or damaged."""
        if not self.is_whole(manifest.policy):
            self._reopen(manifest.policy.digest)
            return False
        self._verified[manifest.policy.digest] = manifest
        return True

    def fill(self, manifest: PolicyManifest, filling: PartFiles) -> None:
        wanted = {chunk.hash for chunk in manifest.chunks}
        present = {
            chunk.hash: (self._path(digest, "bin"), index * other.chunk_size_bytes)
            for digest, other in self.held().items()
            for index, chunk in enumerate(other.chunks)
            if chunk.hash in wanted and digest != manifest.policy.digest
        }
        filling.add(self._reopen(manifest.policy.digest), manifest.chunks, manifest.chunk_size_bytes, present)

    def fill_delta(self, step: Step, filling: PartFiles) -> None:
        filling.add(self._delta_path(step), step.delta.chunks, step.manifest.chunk_size_bytes)

    def finish(self, manifest: PolicyManifest) -> None:
        digest, part = manifest.policy.digest, self._path(manifest.policy.digest, "part")
        with os_errors("rename", part):
            part.replace(self._path(digest, "bin"))
        self._verified[digest] = manifest
        self._made.pop(digest, None)

    def apply_deltas(self, begin: PolicyRef, steps: Sequence[Step]) -> None:
        """Make the last step's payload from that of `begin`; `DeltaRefused` if it is not the signed one."""
        if find_spec("numpy") is None:
            require("data", f"version {steps[-1].manifest.policy.label}, which is a delta to an earlier one,")
        from shoal.shardcast.delta import make_payload  # numpy is needed for deltas only

        target = steps[-1].manifest
        if not all(step.manifest.entries == target.entries for step in steps):
            raise DeltaRefused(f"a delta to policy {target.policy.label} starts from a payload of another shape")
        part, base = self._path(target.policy.digest, "part"), self._path(begin.digest, "bin")
        part.unlink(missing_ok=True)
        deltas = [self._delta_path(step) for step in steps]
        try:
            with os_errors("write", part):
                applied = make_payload(target, base, deltas, part, begin, self._remember_changes)
        except DeltaRefused:
            part.unlink(missing_ok=True)
            raise
        self.finish(target)
        self._made = {target.policy.digest: applied}  # an engine is at most one version behind

    def is_whole(self, ref: PolicyRef) -> bool:
        if (manifest := self.held().get(ref.digest)) is None:
            return False
        scratch = memoryview(bytearray(manifest.chunk_size_bytes))
        with self._path(ref.digest, "bin").open("rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size == manifest.size_bytes and all(
                _holds(file.fileno(), index * manifest.chunk_size_bytes, chunk, scratch[: chunk.size_bytes])
                for index, chunk in enumerate(manifest.chunks)
            )

    def discard(self, ref: PolicyRef) -> None:
        self._verified.pop(ref.digest, None)
        self._path(ref.digest, "bin").unlink(missing_ok=True)

    def load(self, manifest: PolicyManifest) -> Payload:
        path = self._path(manifest.policy.digest, "bin")
        with os_errors("read", path), path.open("rb") as file:
            os.utime(path)  # `retain` removes the oldest first
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if manifest.size_bytes else b""
        return open_payload(manifest, memoryview(whole), path, self._made.get(manifest.policy.digest))

    def retain(self, count: int) -> None:
        """Keep the `count` most recently used payloads, remove all others and all parts. Mappings stay valid."""
        whole = sorted(self._folder.glob("*.bin"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        kept = {path.stem for path in whole[:count]}
        for digest in set(self._digests()) - kept:
            self._forget(digest)

    def make_room(self, target: PolicyManifest, route: Route, limits: MachineLimits) -> None:
        """Remove unneeded payloads, the least recently used first; `ResourceError` if the route does not fit."""
        filling = {target.policy.digest, *(manifest.policy.digest for manifest in route.manifests())}
        needed = route.size_bytes + (target.size_bytes if route.steps else 0)
        needed += sum(path.stat().st_size for path in self._folder.glob("*.json") if path.stem in filling)
        needed -= self._used_bytes(filling)  # received already
        others = sorted(
            set(self._digests()) - filling - {route.begin.digest},
            key=lambda digest: max(path.stat().st_mtime_ns for path in self._files_of(digest)),
        )
        most = limits.disk(self._folder)
        while others and self._used_bytes(self._digests()) + needed > most:
            self._forget(others.pop(0))
        if self._used_bytes(self._digests()) + needed <= most:
            return
        if limits.disk_bytes is None and needed > shutil.disk_usage(self._folder).free:
            part = self._path(target.policy.digest, "part")
            raise resource_error("write", part, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        what = f"policy {target.policy.label} needs {show_bytes(needed)} of disk with the payload and deltas behind it"
        raise ResourceError(f"{what}, and {show_bytes(most)} are allowed in {self._folder}: allow more (--max-disk)")

    def _digests(self) -> Iterator[str]:
        for path in self._folder.glob("*.*"):
            name = path.name.partition(".")[0]  # a digest, or a delta's two
            if len(name) >= 64:
                yield name.rpartition("-")[2]

    def _files_of(self, digest: str) -> list[Path]:
        return [*self._folder.glob(f"{digest}.*"), *self._folder.glob(f"*-{digest}.*")]

    def _used_bytes(self, digests: Iterable[str]) -> int:
        return sum(path.stat().st_blocks * 512 for digest in set(digests) for path in self._files_of(digest))

    def _forget(self, digest: str) -> None:
        self._verified.pop(digest, None)
        for path in self._files_of(digest):
            path.unlink(missing_ok=True)

    def _reopen(self, digest: str) -> Path:
        """The part to fill. A complete file of an earlier process becomes a part, which is hashed again."""
        whole, part = self._path(digest, "bin"), self._path(digest, "part")
        if whole.exists():
            log.warning("the payload %s… on this disk is damaged; it is repaired", digest[:16])
            whole.replace(part)
        return part

    def _path(self, digest: str, suffix: str) -> Path:
        return self._folder / f"{digest}.{suffix}"

    def _delta_path(self, step: Step) -> Path:
        return self._folder / f"{step.name}.delta"

    def _read_manifest(self, digest: str) -> PolicyManifest | None:
        if digest in self._verified:
            return self._verified[digest]
        if self.run is None:
            return None
        try:
            return read_manifest(self._path(digest, "json").read_bytes(), self.run, self._trusted_key)
        except (FileNotFoundError, ManifestRefused):
            return None  # it is fetched again


def _holds(descriptor: int, offset: int, chunk: Chunk, scratch: memoryview) -> bool:
    """Whether the chunk is at `offset`; then `scratch` has its bytes."""
    return read_fully(descriptor, offset, scratch) and blake3(scratch).hexdigest() == chunk.hash
