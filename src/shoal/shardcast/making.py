"""Making a payload out of another by deltas, in one pass: every block through all of them, hashed on the way out.

base, a block at a time ─► delta ─► delta ─► … ─► hashed by chunk ─► file
                             └── what changed is remembered, for an engine that holds the base
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shoal.errors import DeltaRefused
from shoal.protocol import Chunk, Entry, PolicyManifest, PolicyRef
from shoal.shardcast.delta import (
    BLOCK_BYTES,
    UNSIGNED,
    Bits,
    Block,
    DeltaReader,
    Integers,
    apply_block,
    blocks_of,
)
from shoal.shardcast.payload import ChangedValues, read_fully

# What may be remembered of how a payload differs from the one before: a share of its size, and no more than this.
REMEMBERED_SHARE, REMEMBERED_BYTES = 0.25, 1 << 30


def make_payload(
    target: PolicyManifest, base: Path, deltas: Sequence[Path], output: Path, begin: PolicyRef, remember: bool = True
) -> Made:
    """Write the payload of `target` into `output`; `DeltaRefused` if that would not be what was signed."""
    room = min(int(REMEMBERED_SHARE * target.size_bytes), REMEMBERED_BYTES) if remember else -1
    made = Made(begin, target, room, forgotten=not remember)
    scratch = memoryview(bytearray(BLOCK_BYTES))
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(base.open("rb", buffering=0))
        readers = [DeltaReader(stack.enter_context(delta.open("rb"))) for delta in deltas]
        verifying = _Verifying(stack.enter_context(output.open("wb", buffering=0)).fileno(), target)
        for block in blocks_of(target.entries):
            part = scratch[: block.size_bytes]
            if not read_fully(source.fileno(), block.offset, part):
                raise DeltaRefused("the payload that a delta starts from is shorter than its manifest says")
            where = [apply_block(part, reader.next(block), block.width) for reader in readers]
            verifying.write(part)
            made.note(block, where, part)
        for reader in readers:
            reader.finish()
        verifying.finish()
    return made


@dataclass(frozen=True, eq=False)
class _BlockChanges:
    """What changed in one block: positions, and the bits there now."""

    block: Block
    where: npt.NDArray[np.int32]
    values: Bits


@dataclass
class Made:
    """How a payload was made: from which one, and what changed, unless that is too much to remember."""

    begin: PolicyRef
    target: PolicyManifest
    room_bytes: int
    forgotten: bool = False
    _changed: list[_BlockChanges] = field(default_factory=list)

    def note(self, block: Block, where: Sequence[Integers], data: memoryview) -> None:
        for positions in where:
            self.room_bytes -= positions.size * (4 + block.width)
            if self.room_bytes < 0:
                self.forgotten = True
                self._changed.clear()
            if positions.size and not self.forgotten:
                values = np.frombuffer(data, UNSIGNED[block.width])[positions]
                self._changed.append(_BlockChanges(block, positions.astype(np.int32), values))

    def changes(self) -> Iterator[ChangedValues]:
        """Tensor by tensor, positions from the start of each."""
        tensors = [entry for entry in self.target.entries if entry.type == "tensor"]
        for part in self._changed:
            for entry in _in_block(tensors, part.block):
                origin, width = entry.offset - part.block.offset, part.block.width
                inside = (part.where >= origin // width) & (part.where < (origin + entry.size_bytes) // width)
                where = part.where[inside].astype(np.int64) - origin // width
                if where.size:
                    yield ChangedValues(entry.name, entry.dtype or "", width, where, part.values[inside])


def _in_block(tensors: Sequence[Entry], block: Block) -> Sequence[Entry]:
    first = bisect_right(tensors, block.offset, key=lambda entry: entry.offset + entry.size_bytes)
    last = bisect_left(tensors, block.end, key=lambda entry: entry.offset)
    return tensors[first:last]


class _Verifying:
    """Writes a payload in order and hashes it chunk by chunk on the way."""

    def __init__(self, descriptor: int, manifest: PolicyManifest) -> None:
        self._descriptor = descriptor
        self._manifest = manifest
        self._hasher = blake3()
        self._index = 0
        self._filled = 0

    def write(self, data: memoryview) -> None:
        while data.nbytes:
            chunk = self._manifest.chunks[self._index]
            piece = data[: chunk.size_bytes - self._filled]
            self._hasher.update(piece)
            self._filled += piece.nbytes
            if self._filled == chunk.size_bytes:
                self._close_chunk(chunk)
            data = data[piece.nbytes :]
            while piece.nbytes:
                piece = piece[os.write(self._descriptor, piece) :]

    def finish(self) -> None:
        if self._index != len(self._manifest.chunks):
            raise DeltaRefused(f"the deltas to policy {self._manifest.policy.label} give too few bytes")

    def _close_chunk(self, chunk: Chunk) -> None:
        if self._hasher.hexdigest() != chunk.hash:
            raise DeltaRefused(
                f"the deltas to policy {self._manifest.policy.label} give other bytes than were signed, "
                f"in chunk {self._index}"
            )
        self._hasher = blake3()
        self._index, self._filled = self._index + 1, 0
