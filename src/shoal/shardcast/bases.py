"""What an origin remembers of versions it has published, so that later ones can be told as differences to them.

    <tree>/.bases/0.12.json   a version's signed manifest
    <tree>/.bases/0.12/3      chunk 3 of its payload, unless it is an anchor: then its chunks are in the tree anyway

A file for each chunk, since threads that write to one file wait for each other. Only a few versions are kept (see
`OriginSettings.delta_strides`). They are no part of what is served. A payload that this process did not write itself is
hashed from end to end before a delta is made from it: a torn one would give every client the wrong weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.errors import ManifestRefused
from shoal.protocol import PolicyManifest
from shoal.runtime.files import ensure_folder, resource_error, write_atomically
from shoal.shardcast.content import chunk_of
from shoal.shardcast.manifest import Place, place_of, read_manifest
from shoal.shardcast.payload import read_fully
from shoal.shardcast.tree import Tree, chunk_key, parse_label

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
