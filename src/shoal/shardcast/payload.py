"""A version that has arrived: its files and tensors, and how it differs from the one it was made from."""

from __future__ import annotations

import mmap
import os
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.errors import BroadcastError
from shoal.protocol import Entry, PolicyManifest, PolicyRef, TensorView
from shoal.runtime.files import ensure_folder, resource_error
from shoal.shardcast.delta import Bits, Block, Integers

COPY_BYTES = 8 * 1024 * 1024


class LazyFiles(Mapping[str, bytes]):
    """The files of a payload by name, read when asked for."""

    def __init__(self, spans: Mapping[str, memoryview]) -> None:
        self._spans = spans

    def __getitem__(self, name: str) -> bytes:
        return bytes(self._spans[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class ChangedValues:
    """What changed in one tensor: positions, in units of `width` bytes, and the bits that are there now."""

    name: str
    dtype: str
    width: int
    where: Integers
    values: Bits


@dataclass(frozen=True, eq=False)
class BlockChanges:
    """What changed in one block of a payload, remembered when it was made: positions, and the bits there now."""

    block: Block
    where: npt.NDArray[np.int32]
    values: Bits


@dataclass(frozen=True)
class Payload:
    """A version that has arrived and been verified. `tensors` are views of one read-only mapping: copy to change.

    Values lie back to back, so a view may be unaligned when tensors of several types are mixed.
    """

    manifest: PolicyManifest
    files: Mapping[str, bytes]
    tensors: list[TensorView]
    path: Path | None = None
    made_from: PolicyRef | None = None
    changed: Sequence[BlockChanges] = field(default=(), repr=False)

    def changes_from(self, ref: PolicyRef | None) -> Iterator[ChangedValues] | None:
        """What turns the tensors of `ref` into these; None if this payload was not made from `ref` by deltas.

        The values are those of this payload, whose digest has been verified. A position may come twice. Tensors alone:
        files must be compared by their bytes.
        """
        if ref is None or self.made_from is None or self.made_from.digest != ref.digest:
            return None
        return self._changes()

    def export(self, target: Path) -> list[Path]:
        """Write the files into the folder `target`; no name leaves it, not even through a link that lies in it."""
        ensure_folder(target)
        written = []
        for entry in self.manifest.entries:
            if entry.type == "file":
                written.append(_place_for(target, entry.name))
                write_file(written[-1], self._span(entry))
        return written

    def _span(self, entry: Entry) -> memoryview:
        if self.path is None or entry.size_bytes == 0:
            return memoryview(self.files[entry.name])
        with self.path.open("rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(whole)[entry.offset : entry.offset + entry.size_bytes]

    def _changes(self) -> Iterator[ChangedValues]:
        tensors = [entry for entry in self.manifest.entries if entry.type == "tensor"]
        for part in self.changed:
            for entry in _in_block(tensors, part.block):
                origin, width = entry.offset - part.block.offset, part.block.width
                inside = (part.where >= origin // width) & (part.where < (origin + entry.size_bytes) // width)
                where = part.where[inside].astype(np.int64) - origin // width
                if where.size:
                    yield ChangedValues(entry.name, entry.dtype or "", width, where, part.values[inside])


def write_file(path: Path, data: memoryview) -> None:
    """Write a file whole, under a hidden name until then."""
    temporary = path.with_name(f".shoal-{os.urandom(4).hex()}")
    try:
        with temporary.open("xb", buffering=0) as file:
            for at in range(0, data.nbytes, COPY_BYTES):
                piece = data[at : at + COPY_BYTES]
                while piece.nbytes:
                    piece = piece[file.write(piece) or 0 :]
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise resource_error("write", path, error) from error


def open_payload(
    manifest: PolicyManifest,
    whole: memoryview,
    path: Path | None = None,
    made_from: PolicyRef | None = None,
    changed: Sequence[BlockChanges] = (),
) -> Payload:
    files: dict[str, memoryview] = {}
    tensors: list[TensorView] = []
    for entry in manifest.entries:
        span = whole[entry.offset : entry.offset + entry.size_bytes]
        if entry.type == "file":
            files[entry.name] = span
        elif entry.dtype is not None and entry.shape is not None:
            tensors.append(TensorView(entry.name, entry.dtype, entry.shape, span))
    return Payload(manifest, LazyFiles(files), tensors, path, made_from, changed)


def _in_block(tensors: Sequence[Entry], block: Block) -> list[Entry]:
    first = bisect_right(tensors, block.offset, key=lambda entry: entry.offset + entry.size_bytes)
    last = bisect_left(tensors, block.end, key=lambda entry: entry.offset)
    return list(tensors[first:last])


def _place_for(target: Path, name: str) -> Path:
    """Where a file of this name goes below `target`; folders are made, links in between are refused."""
    path = target
    for part in name.split("/")[:-1]:
        path = path / part
        if path.is_symlink():
            raise BroadcastError(f"{name} is not written: {path} is a link, and might lead out of {target}")
        ensure_folder(path)
    return path / name.split("/")[-1]


def copy_or_link(source: Path, target: Path) -> None:
    """Give `source` a second name, or copy it where that is impossible (another disk)."""
    temporary = target.with_name(f".shoal-{os.urandom(4).hex()}")
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise resource_error("write", target, error) from error
