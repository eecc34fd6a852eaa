"""What an origin remembers of versions it has published, so that later ones can be told as differences to them.

    <tree>/.bases/0.12.json   a version's signed manifest
    <tree>/.bases/0.12.bin    its payload, as one file, unless it is an anchor: then its chunks are here anyway

Only a few are kept (see `OriginSettings.delta_strides`). They are no part of what is served. A file that this process
did not write itself is hashed from end to end before a delta is made from it: a torn one would give every client the
wrong weights.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.errors import ManifestRefused
from shoal.protocol import PolicyManifest
from shoal.runtime.files import ensure_folder, resource_error, write_atomically
from shoal.shardcast.content import chunk_of
from shoal.shardcast.manifest import Place, place_of, read_manifest
from shoal.shardcast.payload import read_fully
from shoal.shardcast.tree import Tree, chunk_key, parse_label

FOLDER = ".bases"


class Base(ABC):
    """A payload on the disk, read a part at a time."""

    def __init__(self, manifest: PolicyManifest) -> None:
        self.manifest = manifest

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill `buffer`; false if the payload is not all there."""

    @abstractmethod
    def close(self) -> None: ...

    def is_whole(self) -> bool:
        """Whether every chunk has the hash that was signed."""
        size = self.manifest.chunk_size_bytes
        scratch = memoryview(bytearray(size))
        for index, chunk in enumerate(self.manifest.chunks):
            part = scratch[: chunk.size_bytes]
            if not self.read_into(index * size, part) or chunk_of(part) != chunk:
                return False
        return True


class CopiedBase(Base):
    """The copy of a payload that was offered as deltas alone."""

    def __init__(self, path: Path, manifest: PolicyManifest) -> None:
        super().__init__(manifest)
        self._file = path.open("rb", buffering=0)

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        return read_fully(self._file.fileno(), offset, buffer)

    def close(self) -> None:
        self._file.close()


class AnchorBase(Base):
    """The chunks of an anchor, for as long as they are offered: no second copy is needed."""

    def __init__(self, tree: Tree, manifest: PolicyManifest) -> None:
        super().__init__(manifest)
        self._tree = tree

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        size = self.manifest.chunk_size_bytes
        while buffer.nbytes:
            inside = offset % size
            count = min(size - inside, buffer.nbytes)
            try:
                path = self._tree.path(chunk_key(self.manifest.chunks[offset // size].hash))
                with path.open("rb", buffering=0) as file:
                    if not read_fully(file.fileno(), inside, buffer[:count]):
                        return False
            except FileNotFoundError:
                return False
            offset, buffer = offset + count, buffer[count:]
        return True

    def close(self) -> None:
        return


class Bases:
    """The payloads that an origin can tell differences to."""

    def __init__(self, tree: Tree, run: str, key: str, strides: Sequence[int]) -> None:
        self._tree = tree
        self._folder = tree.folder / FOLDER
        self._run, self._key = run, key
        self._strides = sorted(set(strides))
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

    @contextlib.contextmanager
    def open(self, place: Place) -> Iterator[Base | None]:
        """The payload of `place`; None if it is not here or not what was signed (it is forgotten then)."""
        path = self._path(place, "bin")
        try:
            manifest = read_manifest(self._path(place, "json").read_bytes(), self._run, self._key)
            file = AnchorBase(self._tree, manifest) if manifest.anchor else CopiedBase(path, manifest)
        except (OSError, ManifestRefused):
            self._forget(place)
            yield None
            return
        try:
            if place in self._written or file.is_whole():
                self._written.add(place)
                yield file
            else:
                self._forget(place)
                yield None
        finally:
            file.close()

    def writer(self, anchor: bool) -> BaseWriter | None:
        """Where the next payload is remembered; None if that needs no copy."""
        if anchor or not self._strides:
            return None
        ensure_folder(self._folder)
        return BaseWriter(self._folder / ".new")

    def remember(self, writer: BaseWriter | None, manifest: PolicyManifest, data: bytes) -> None:
        """The payload just written is `manifest`'s, whose bytes are `data`; forget those no longer needed."""
        if not self._strides:
            return
        place = place_of(manifest)
        ensure_folder(self._folder)
        if writer is not None:
            writer.path.replace(self._path(place, "bin"))
        write_atomically(self._path(place, "json"), data)
        self._written.add(place)
        self.sweep()
        needed = {(place[0], place[1] - place[1] % stride) for stride in self._strides} | {place}
        for other in self._known():
            if other not in needed:
                self._forget(other)

    def sweep(self) -> None:
        """Remove what a crash or a failure has left: a payload without its manifest, or half of one."""
        for path in [*self._folder.glob("*.bin"), *self._folder.glob(".new")]:
            if not path.with_suffix(".json").exists() or path.name == ".new":
                path.unlink(missing_ok=True)

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
        for suffix in ("bin", "json"):
            self._path(place, suffix).unlink(missing_ok=True)

    def _path(self, place: Place, suffix: str) -> Path:
        return self._folder / f"{place[0]}.{place[1]}.{suffix}"


class BaseWriter:
    """Writes a payload as one file, from several threads. It counts for nothing until it is remembered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = threading.Lock()
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise resource_error("write", path, error) from error

    def write_at(self, offset: int, data: memoryview) -> None:
        try:
            with self._writing:
                written = 0
                while written < data.nbytes:
                    written += os.pwrite(self._file.fileno(), data[written:], offset + written)
        except OSError as error:
            raise resource_error("write", self.path, error) from error

    def close(self) -> None:
        self._file.close()
