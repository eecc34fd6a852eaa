"""Lossless deltas: the changes between two versions of a payload, in about one hundredth of the bytes.

    payload ─► spans (neighbouring entries of one width) ─► blocks of 4 MiB ─► one delta block each, in order

    old ─┐  where    positions that differ, as gaps ────────────┐ planes: all lowest bytes,
         ├─ by how   steps in units of the last place, zigzag ──┴ all second lowest, … ─► zstd each ─► a delta block
    new ─┘

Floating-point bits are read as sign and magnitude and mapped to a line on which neighbouring numbers differ by 1, so a
small update is a small step, also across zero and exponents. Nothing is rounded: the coding works for bf16, fp16, fp32
and plain bytes. Every count in a delta is checked before anything is allocated or written, and the result must have the
signed digest.

A payload is made from another in one pass, every block through all deltas:

    base, a block at a time ─► delta ─► delta ─► … ─► hashed by chunk ─► file
                                 └── changes are remembered, for an engine that has the base
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from shoal.errors import CodecError, DeltaRefused
from shoal.protocol import Entry, PolicyManifest, PolicyRef
from shoal.protocol.codec import ITEM_BYTES, inflate_exactly
from shoal.shardcast.content import Content, in_order
from shoal.shardcast.payload import ChangedValues, read_fully

if TYPE_CHECKING:
    from shoal.shardcast.tree import ChunkFiles

Bits = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]
Planes = npt.NDArray[np.uint8]

MAGIC = b"SHOALD1\n"
BLOCK_BYTES = 4 * 1024 * 1024
HEADER = struct.Struct("<IBB2x")  # changes, planes of gaps, planes of steps; then the packed size of every plane
SIZE = struct.Struct("<I")
NOTHING = HEADER.pack(0, 0, 0)
MAX_GAP_PLANES = 3  # a block has at most 2 ** 22 values
LEVEL = 1
COMPILED_FROM_BYTES = 128 * 1024 * 1024  # of a payload: below, numpy is done before numba is imported
FRAME_SLACK_BYTES = 1024  # what a zstd frame may cost beyond its content
UNSIGNED: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
SIGNED: dict[int, npt.DTypeLike] = {1: np.int8, 2: np.int16, 4: np.int32}


@dataclass(frozen=True)
class Block:
    offset: int
    size_bytes: int
    width: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes

    def read(self, delta: BinaryIO) -> Change:
        return Change.read(delta, self.size_bytes // self.width, self.width)


def blocks_of(entries: Sequence[Entry]) -> Iterator[Block]:
    """The blocks of a payload. Both sides compute them from the signed entries."""

    def width_of(entry: Entry) -> int:
        if entry.type == "tensor" and entry.dtype is not None:
            return min(4, ITEM_BYTES[entry.dtype])
        # Files are compared as 16-bit values where their size allows: most large ones hold bf16 weights.
        return 2 if entry.size_bytes % 2 == 0 else 1

    for width, group in groupby(entries, width_of):
        first, *_ = whole = list(group)
        end = whole[-1].offset + whole[-1].size_bytes
        for at in range(first.offset, end, BLOCK_BYTES):
            yield Block(at, min(BLOCK_BYTES, end - at), width)


def encode_block(old: memoryview, new: memoryview, width: int, fast: bool = False) -> bytes:
    was, now = (np.frombuffer(data, SIGNED[width]) for data in (old, new))
    gaps, codes = _compare_fast(was, now) if fast else _compare(was, now)
    if gaps.size == 0:
        return NOTHING
    gap_planes, step_planes = _planes(gaps), _planes(codes)
    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    packed = [compress(plane) for plane in (*gap_planes, *step_planes)]
    header = HEADER.pack(gaps.size, len(gap_planes), len(step_planes))
    return header + b"".join(SIZE.pack(len(plane)) for plane in packed) + b"".join(packed)


@dataclass(frozen=True)
class Change:
    """A delta block with checked counts; its planes are still compressed."""

    count: int
    gap_planes: int
    planes: list[bytes]

    @classmethod
    def read(cls, file: BinaryIO, values: int, width: int) -> Change:
        """The next one in a file; the counts are checked before the bytes are read."""
        count, gap_planes, step_planes = HEADER.unpack(_exactly(file, HEADER.size))
        fits = count <= values and gap_planes <= MAX_GAP_PLANES and step_planes <= width + 1
        present = (gap_planes > 0) == (step_planes > 0) == (count > 0)
        table = _exactly(file, SIZE.size * (gap_planes + step_planes)) if fits and present else b""
        sizes = [size for (size,) in SIZE.iter_unpack(table)]
        if not (fits and present) or any(size > count + FRAME_SLACK_BYTES for size in sizes):
            raise DeltaRefused("a delta block says more of itself than a block can hold")
        return cls(count, gap_planes, [_exactly(file, size) for size in sizes])

    def apply(self, target: memoryview, width: int, fast: bool = False) -> Integers:
        """Change the values in `target` in place; the positions, ascending. `target` is spoilt by a `DeltaRefused`."""
        if self.count == 0:
            return np.empty(0, np.int64)
        planes = np.empty((len(self.planes), self.count), np.uint8)
        for plane, packed in zip(planes, self.planes, strict=True):
            try:
                plane[:] = np.frombuffer(inflate_exactly(packed, self.count), np.uint8)
            except CodecError as error:
                raise DeltaRefused(f"a delta block is damaged: {error}") from error
        values, change = np.frombuffer(target, SIGNED[width]), _change_fast if fast else _change
        return change(values, planes[: self.gap_planes], planes[self.gap_planes :])


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise DeltaRefused("a delta ends in the middle of a block")
    return data


def open_delta(file: BinaryIO) -> BinaryIO:
    if file.read(len(MAGIC)) != MAGIC:
        raise DeltaRefused("a delta does not begin as a delta does")
    return file


def _compare(was: Bits, now: Bits) -> tuple[Integers, Integers]:
    where = np.flatnonzero(was != now)
    steps = (_line(now[where]) - _line(was[where])).astype(np.int64)
    return np.diff(where, prepend=-1) - 1, ((steps << 1) ^ (steps >> 63)) - 1  # +1, -1, +2, … as 1, 0, 3, …


def _change(values: Bits, gaps: Planes, codes: Planes) -> Integers:
    where = np.cumsum(_from_planes(gaps) + 1) - 1
    if int(where[-1]) >= values.size:
        raise DeltaRefused(f"a delta block changes value {int(where[-1])} of {values.size}")
    whole = _from_planes(codes) + 1
    moved = _line(values[where]) + ((whole >> 1) ^ -(whole & 1))
    limits = np.iinfo(values.dtype)
    if int(moved.min()) < limits.min or int(moved.max()) > limits.max:
        raise DeltaRefused("a delta block moves a value off the end of the line")
    values[where] = _line(moved.astype(values.dtype))
    return where


def _compare_fast(was: Bits, now: Bits) -> tuple[Integers, Integers]:
    from shoal.shardcast.kernels import compare

    gaps, codes = np.empty(was.size, np.int64), np.empty(was.size, np.int64)
    was, now = (array.view() for array in (was, now))
    was.flags.writeable = now.flags.writeable = False  # a type of its own: one compilation serves all
    whole = was.nbytes // 8 * 8 // was.itemsize
    words = was[:whole].view(np.uint64), now[:whole].view(np.uint64)
    count = compare(was, now, words, np.iinfo(was.dtype).min, gaps, codes)
    return gaps[:count], codes[:count]


def _change_fast(values: Bits, gaps: Planes, codes: Planes) -> Integers:
    from shoal.shardcast.kernels import change

    where = np.empty(gaps.shape[1], np.int64)
    if change(values, gaps, codes, np.iinfo(values.dtype).min, where) != where.size:
        raise DeltaRefused("a delta block changes what is not in it, or moves a value off the end of the line")
    return where


def _line(values: Bits) -> Bits:
    """Sign and magnitude as one line and back: …, -2, -1 (that is -0.0), 0, 1, 2, …"""
    wide = np.int64 if values.itemsize >= 4 else np.int32  # one size up is enough, and half the memory
    return np.where(values < 0, np.iinfo(values.dtype).min - values.astype(wide) - 1, values)


def _planes(values: Integers) -> list[bytes]:
    count = max(1, (int(values.max()).bit_length() + 7) // 8)
    parts = values.astype("<i8").view(np.uint8).reshape(-1, 8)
    return [parts[:, index].tobytes() for index in range(count)]


def _from_planes(planes: Planes) -> Integers:
    values: Integers = planes[0].astype(np.int64)
    for index, plane in enumerate(planes[1:], 1):
        values |= plane.astype(np.int64) << (8 * index)
    return values


def differences(
    base: ChunkFiles, deltas: Sequence[BinaryIO], content: Content, wanted: Collection[int]
) -> Iterator[tuple[int, dict[int, bytes]]]:
    """Deltas to `content` from `base` (number 0) and from the result of each of `deltas` (1, 2, …), for the `wanted`
    numbers: block by block, each with its end in the payload."""
    scratch, readers = threading.local(), [open_delta(delta) for delta in deltas]
    fast = content.size_bytes >= COMPILED_FROM_BYTES

    def encode(job: tuple[Block, list[Change]]) -> tuple[int, dict[int, bytes]]:
        block, changes = job
        if not hasattr(scratch, "old"):
            scratch.old, scratch.new = (memoryview(bytearray(BLOCK_BYTES)) for _ in range(2))
        old = scratch.old[: block.size_bytes]
        base.read_at(block.offset, old)
        new = content.part(block.offset, block.size_bytes, scratch.new)
        if np.frombuffer(new, np.uint8).ctypes.data % 8:  # between tensors of other widths
            scratch.new[: block.size_bytes] = new
            new = scratch.new[: block.size_bytes]
        encoded = {}
        for number in range(len(changes) + 1):
            if number:
                changes[number - 1].apply(old, block.width, fast)
            if number in wanted:
                encoded[number] = encode_block(old, new, block.width, fast)
        return block.end, encoded

    blocks = blocks_of(content.entries)
    return in_order(encode, ((block, [block.read(reader) for reader in readers]) for block in blocks))


# Limits of remembered changes: a share of the payload's size, and a number of bytes.
REMEMBERED_SHARE, REMEMBERED_BYTES = 0.25, 1 << 30


def make_payload(
    target: PolicyManifest, base: Path, deltas: Sequence[Path], output: Path, begin: PolicyRef, remember: bool = True
) -> AppliedDeltas:
    room = min(int(REMEMBERED_SHARE * target.size_bytes), REMEMBERED_BYTES) if remember else -1
    applied = AppliedDeltas(begin, target, room, forgotten=not remember)
    scratch, fast = memoryview(bytearray(BLOCK_BYTES)), target.size_bytes >= COMPILED_FROM_BYTES
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(base.open("rb", buffering=0))
        readers = [open_delta(stack.enter_context(delta.open("rb"))) for delta in deltas]
        verifying = _Verifying(stack.enter_context(output.open("wb", buffering=0)).fileno(), target)
        for block in blocks_of(target.entries):
            part = scratch[: block.size_bytes]
            if not read_fully(source.fileno(), block.offset, part):
                raise DeltaRefused("the payload that a delta starts from is shorter than its manifest says")
            where = [block.read(reader).apply(part, block.width, fast) for reader in readers]
            verifying.write(part)
            applied.note(block, where, part)
        if any(reader.read(1) for reader in readers):
            raise DeltaRefused("a delta continues after its last block")
        verifying.finish()
    return applied


@dataclass
class AppliedDeltas:
    """The payload that deltas were applied to, and the changes, unless they are too many to remember."""

    begin: PolicyRef
    target: PolicyManifest
    room_bytes: int
    forgotten: bool = False
    _changed: list[tuple[Block, npt.NDArray[np.int32], Bits]] = field(default_factory=list)  # positions, bits now

    def note(self, block: Block, where: Sequence[Integers], data: memoryview) -> None:
        for positions in where:
            self.room_bytes -= positions.size * (4 + block.width)
            if self.room_bytes < 0:
                self.forgotten = True
                self._changed.clear()
            if positions.size and not self.forgotten:
                values = np.frombuffer(data, UNSIGNED[block.width])[positions]
                self._changed.append((block, positions.astype(np.int32), values))

    def changes(self) -> Iterator[ChangedValues]:
        tensors = [entry for entry in self.target.entries if entry.type == "tensor"]
        for block, positions, values in self._changed:
            width = block.width
            first = bisect_right(tensors, block.offset, key=lambda entry: entry.offset + entry.size_bytes)
            last = bisect_left(tensors, block.end, key=lambda entry: entry.offset)
            for entry in tensors[first:last]:
                origin = entry.offset - block.offset
                inside = (positions >= origin // width) & (positions < (origin + entry.size_bytes) // width)
                where = positions[inside].astype(np.int64) - origin // width
                if where.size:
                    yield ChangedValues(entry.name, entry.dtype or "", width, where, values[inside])


class _Verifying:
    def __init__(self, descriptor: int, manifest: PolicyManifest) -> None:
        self._descriptor, self._chunks = descriptor, manifest.chunks
        self._what = f"the deltas to policy {manifest.policy.label} give"
        self._hasher, self._index, self._filled = blake3(), 0, 0

    def write(self, data: memoryview) -> None:
        while data.nbytes:
            chunk = self._chunks[self._index]
            piece = data[: chunk.size_bytes - self._filled]
            data = data[piece.nbytes :]
            self._hasher.update(piece)
            self._filled += piece.nbytes
            if self._filled == chunk.size_bytes:
                if self._hasher.hexdigest() != chunk.hash:
                    raise DeltaRefused(f"{self._what} other bytes than were signed, in chunk {self._index}")
                self._hasher, self._index, self._filled = blake3(), self._index + 1, 0
            while piece.nbytes:
                piece = piece[os.write(self._descriptor, piece) :]

    def finish(self) -> None:
        if self._index != len(self._chunks):
            raise DeltaRefused(f"{self._what} too few bytes")
