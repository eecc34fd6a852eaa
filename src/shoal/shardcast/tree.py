"""The published tree: plain immutable files for any HTTP server, and the names that are allowed in it.

    head.json                               signed; replaced with every version
    manifests/<incarnation>.<version>.json  signed
    chunks/<2 hex>/<blake3 hex>             by content
    witness/<public key>.json               signed by that key: the newest ledger head that a witness saw; replaced, too

Files appear atomically: each is written under a hidden name and renamed.
"""

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import Any

from shoal.errors import DeltaRefused
from shoal.protocol import Chunk
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically
from shoal.shardcast.manifest import Place
from shoal.shardcast.payload import atomic_file, os_errors

HEAD = "head.json"
SYNCING = 32  # threads that wait for the disk
NUMBER = "(0|[1-9][0-9]{0,9})"
LABEL = re.compile(rf"{NUMBER}\.{NUMBER}", re.ASCII)
MANIFEST = re.compile(rf"manifests/{NUMBER}\.{NUMBER}\.json", re.ASCII)
WITNESS = re.compile(r"witness/[0-9a-f]{64}\.json", re.ASCII)
CHUNK = re.compile(r"chunks/([0-9a-f]{2})/(\1[0-9a-f]{62})", re.ASCII)


def is_key(key: str) -> bool:
    return key == HEAD or bool(MANIFEST.fullmatch(key) or CHUNK.fullmatch(key) or WITNESS.fullmatch(key))


def witness_key(public_key: str) -> str:
    return f"witness/{public_key}.json"


def manifest_key(place: Place) -> str:
    return f"manifests/{place[0]}.{place[1]}.json"


def chunk_key(chunk_hash: str) -> str:
    return f"chunks/{chunk_hash[:2]}/{chunk_hash}"


def parse_label(label: str) -> Place | None:
    match = LABEL.fullmatch(label)
    return (int(match[1]), int(match[2])) if match else None


def have_key(place: Place) -> str:
    return f"have/{place[0]}.{place[1]}"


class Tree:
    """A folder with a published tree. Several threads may write files; one owner removes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        for name in ("manifests", "chunks"):
            ensure_folder(self.folder / name)

    def path(self, key: str) -> Path:
        if not is_key(key):
            raise ValueError(f"{key!r} is not a name in a published tree")
        return self.folder / key

    def read(self, key: str) -> bytes | None:
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise resource_error("read", self.path(key), error) from error

    def write(self, key: str, data: bytes) -> None:
        ensure_folder(self.path(key).parent)
        write_atomically(self.path(key), data)

    def places(self) -> list[Place]:
        names = (path.name.removesuffix(".json") for path in (self.folder / "manifests").glob("*.json"))
        return sorted(place for name in names if (place := parse_label(name)) is not None)

    def has_chunk(self, chunk_hash: str, size_bytes: int) -> bool:
        try:
            return self.path(chunk_key(chunk_hash)).stat().st_size == size_bytes
        except FileNotFoundError:
            return False

    def put_chunk(self, chunk_hash: str, data: memoryview, durable: bool) -> None:
        """Write a chunk. `durable`: its bytes are on the disk on return, its name after `sync_chunks`."""
        path = self.path(chunk_key(chunk_hash))
        with os_errors("write", path):
            path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as temporary, temporary.open("xb", buffering=0) as file:
            written = 0
            while written < data.nbytes:
                written += file.write(data[written:]) or 0
            if durable:
                os.fdatasync(file.fileno())

    def sync_chunks(self, chunk_hashes: Iterable[str]) -> None:
        folders = {self.folder / "chunks" / chunk_hash[:2] for chunk_hash in chunk_hashes}
        with ThreadPoolExecutor(SYNCING) as pool:
            list(pool.map(sync_folder, [*folders, self.folder / "chunks"]))

    def remove_manifest(self, place: Place) -> None:
        self.path(manifest_key(place)).unlink(missing_ok=True)

    def remove_chunks_except(self, kept: set[str]) -> None:
        for path in (self.folder / "chunks").glob("??/*"):
            if path.name not in kept and not path.name.startswith("."):
                path.unlink(missing_ok=True)

    def sweep_temporaries(self) -> None:
        """Remove unfinished files of a crash. Only while nobody else writes."""
        for pattern in ("chunks/??/.*", "manifests/.*", f".{HEAD}.*"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)


class ChunkFiles(RawIOBase):
    def __init__(self, tree: Tree, chunks: Sequence[Chunk], chunk_size_bytes: int) -> None:
        self._paths = [tree.path(chunk_key(chunk.hash)) for chunk in chunks]
        self._chunk_size_bytes, self._at = chunk_size_bytes, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count = self._read_once(self._at, memoryview(buffer).cast("B"))
        self._at += count
        return count

    def read_at(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; thread-safe. `DeltaRefused` if there are too few bytes."""
        while buffer.nbytes:
            if (count := self._read_once(offset, buffer)) == 0:
                raise DeltaRefused("a version is shorter than its manifest says")
            offset, buffer = offset + count, buffer[count:]

    def _read_once(self, offset: int, buffer: memoryview) -> int:
        index, inside = divmod(offset, self._chunk_size_bytes)
        if index >= len(self._paths):
            return 0
        with self._paths[index].open("rb", buffering=0) as file:
            return os.preadv(file.fileno(), [buffer], inside)
