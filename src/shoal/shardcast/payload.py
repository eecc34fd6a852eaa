"""The payload on a client's disk: one file per set of weights, filled chunk by chunk, mapped when it is whole.

    <digest>.json   the signed manifest
    <digest>.part   being filled, sparse; a restart looks through it by hash and fetches only what is missing
    <digest>.bin    whole; mapped read-only, so that tensors are views of it and cost no memory of their own

Chunks are written straight to their place, so the disk holds a version once, not twice. A chunk that another payload
here already has is copied instead of fetched. No byte is believed because of its file's name: what this process has
not hashed itself, it hashes before use.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from shoal.errors import ManifestRefused
from shoal.protocol import Chunk, PolicyManifest, PolicyRef, TensorView
from shoal.runtime.files import ensure_folder, resource_error, write_atomically
from shoal.shardcast.manifest import read_manifest


@dataclass(frozen=True)
class Payload:
    """A version that has arrived and been verified. `tensors` are views of one read-only mapping: copy to change.

    Values lie back to back, so a view may be unaligned when tensors of several types are mixed.
    """

    manifest: PolicyManifest
    files: dict[str, bytes]
    tensors: list[TensorView]


@dataclass(frozen=True)
class _Donor:
    """A chunk that another payload on this disk may hold."""

    path: Path
    offset: int


class PayloadFile:
    """A payload being filled; a `Keeper` for the pool."""

    def __init__(self, path: Path, manifest: PolicyManifest, donors: dict[str, _Donor]) -> None:
        self.path = path
        self.manifest = manifest
        self._donors = donors
        self._offsets: dict[str, list[int]] = defaultdict(list)
        for index, chunk in enumerate(manifest.chunks):
            self._offsets[chunk.hash].append(index * manifest.chunk_size_bytes)
        self._resumed = path.exists()
        try:
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
            os.ftruncate(self._file.fileno(), manifest.size_bytes)
        except OSError as error:
            raise resource_error("write", path, error) from error

    def has(self, chunk: Chunk, scratch: memoryview) -> bool:
        offsets = self._offsets[chunk.hash]
        if self._resumed and _holds(self._file.fileno(), offsets[0], chunk, scratch):
            self._write(scratch, offsets[1:])
            return True
        donor = self._donors.get(chunk.hash)
        if donor is None or not _donated(donor, chunk, scratch):
            return False
        self._write(scratch, offsets)
        return True

    def keep(self, chunk: Chunk, data: memoryview) -> None:
        self._write(data, self._offsets[chunk.hash])

    def close(self) -> None:
        self._file.close()

    def _write(self, data: memoryview, offsets: list[int]) -> None:
        try:
            for offset in offsets:
                written = 0
                while written < data.nbytes:
                    written += os.pwrite(self._file.fileno(), data[written:], offset + written)
        except OSError as error:
            raise resource_error("write", self.path, error) from error


class PayloadCache:
    """The payloads in one folder, which belongs to one process."""

    def __init__(self, folder: Path, run: str, trusted_key: str) -> None:
        self._folder = ensure_folder(folder)
        self._run = run
        self._trusted_key = trusted_key
        self._verified: dict[str, PolicyManifest] = {}  # payloads that this process has hashed from end to end

    def manifest(self, ref: PolicyRef) -> PolicyManifest | None:
        """The manifest of `ref`, if it is here."""
        manifest = self._read_manifest(ref.digest)
        return manifest if manifest is not None and manifest.policy == ref else None

    def is_verified(self, ref: PolicyRef) -> bool:
        return ref.digest in self._verified and self._path(ref.digest, "bin").exists()

    def remember(self, manifest: PolicyManifest, data: bytes) -> None:
        digest = manifest.policy.digest
        write_atomically(self._path(digest, "json"), data)
        if digest in self._verified:  # the same weights under another version
            self._verified[digest] = manifest

    def fill(self, manifest: PolicyManifest) -> PayloadFile:
        """The payload's file, to be filled. A whole one left by an earlier process is filled again: by looking."""
        whole, part = (self._path(manifest.policy.digest, suffix) for suffix in ("bin", "part"))
        if whole.exists():
            whole.replace(part)
        return PayloadFile(part, manifest, self._find_donors(manifest))

    def finish(self, file: PayloadFile) -> None:
        """The file is whole: every chunk of it has been verified."""
        file.close()
        digest = file.manifest.policy.digest
        try:
            file.path.replace(self._path(digest, "bin"))
        except OSError as error:
            raise resource_error("rename", file.path, error) from error
        self._verified[digest] = file.manifest

    def load(self, manifest: PolicyManifest) -> Payload:
        """Map a verified payload."""
        path = self._path(manifest.policy.digest, "bin")
        try:
            os.utime(path)  # the order in which `retain` removes
            with path.open("rb") as file:
                whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if manifest.size_bytes else b""
        except OSError as error:
            raise resource_error("read", path, error) from error
        return _open_payload(manifest, memoryview(whole))

    def retain(self, count: int) -> None:
        """Keep the `count` payloads used last and remove the rest, abandoned parts included.

        A mapping of a removed payload stays valid for as long as somebody holds it.
        """
        whole = sorted(self._folder.glob("*.bin"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        kept = {path.stem for path in whole[:count]}
        for path in self._folder.glob("*.*"):
            if path.suffix in (".bin", ".part", ".json") and len(path.stem) == 64 and path.stem not in kept:
                path.unlink(missing_ok=True)
        self._verified = {digest: manifest for digest, manifest in self._verified.items() if digest in kept}

    def _path(self, digest: str, suffix: str) -> Path:
        return self._folder / f"{digest}.{suffix}"

    def _read_manifest(self, digest: str) -> PolicyManifest | None:
        if digest in self._verified:
            return self._verified[digest]
        try:
            return read_manifest(self._path(digest, "json").read_bytes(), self._run, self._trusted_key)
        except (FileNotFoundError, ManifestRefused):
            return None  # it is fetched again

    def _find_donors(self, manifest: PolicyManifest) -> dict[str, _Donor]:
        """Where chunks of `manifest` may already lie on this disk."""
        wanted = {chunk.hash for chunk in manifest.chunks}
        donors: dict[str, _Donor] = {}
        for path in self._folder.glob("*.bin"):
            other = self._read_manifest(path.stem)
            for index, chunk in enumerate(other.chunks if other is not None else ()):
                if other is not None and chunk.hash in wanted:
                    donors[chunk.hash] = _Donor(path, index * other.chunk_size_bytes)
        return donors


def _open_payload(manifest: PolicyManifest, whole: memoryview) -> Payload:
    files: dict[str, bytes] = {}
    tensors: list[TensorView] = []
    for entry in manifest.entries:
        span = whole[entry.offset : entry.offset + entry.size_bytes]
        if entry.type == "file":
            files[entry.name] = bytes(span)
        elif entry.dtype is not None and entry.shape is not None:
            tensors.append(TensorView(entry.name, entry.dtype, entry.shape, span))
    return Payload(manifest, files, tensors)


def _holds(descriptor: int, offset: int, chunk: Chunk, scratch: memoryview) -> bool:
    """Whether the chunk lies at `offset`; then `scratch` holds it."""
    filled = 0
    while filled < scratch.nbytes:
        count = os.preadv(descriptor, [scratch[filled:]], offset + filled)
        if count == 0:
            return False
        filled += count
    return blake3(scratch).hexdigest() == chunk.hash


def _donated(donor: _Donor, chunk: Chunk, scratch: memoryview) -> bool:
    try:
        with donor.path.open("rb", buffering=0) as file:
            return _holds(file.fileno(), donor.offset, chunk, scratch)
    except FileNotFoundError:
        return False
