"""JSON lines: where each line begins is found once, and a line is decoded when it is asked for.

A row is a line, so that row n is line n + 1 of its file, also after a bad one. Packed files are unpacked into the
cache folder: there is no other way to reach a row in the middle of one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from shoal.environments.data.cache import cache_folder, entry_name, identity, load_arrays, store_arrays
from shoal.environments.data.parquet import unreadable
from shoal.environments.data.source import ROW_LIMIT_BYTES, Batch, Broken
from shoal.environments.data.unpacking import leave_room, unpack, whole
from shoal.errors import EnvironmentSetupError, UnusableTask

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("shoal.environments")
CHUNK_BYTES = 8 * 2**20
BATCH_ROWS = 1024
LOOKED_AT = 100  # lines that tell which columns there are
BOM = b"\xef\xbb\xbf"
UNPACKS_TO, UNPACKS_TO_BYTES = 200, 2**30
"""A packed file may become this many times as large, or this large: what becomes more is no text of people."""


class JsonlSource:
    """Implements `Source`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begins = _line_starts(path)
        self.rows = len(self._begins) - 1
        self._file = path.open("rb")
        self.columns = self._look()
        self.types: Mapping[str, str] = {}
        self._decoders: dict[tuple[str, ...], msgspec.json.Decoder[Any]] = {}

    def scan(self, columns: Sequence[str]) -> Iterator[Batch]:
        decoder = self._decoder(tuple(columns))
        for start in range(0, self.rows, BATCH_ROWS):
            values = [self._values(decoder, index) for index in range(start, min(start + BATCH_ROWS, self.rows))]
            yield {
                name: [row if isinstance(row, Broken) else row[number] for row in values]
                for number, name in enumerate(columns)
            }

    def row(self, index: int, columns: Sequence[str]) -> dict[str, Any]:
        values = self._values(self._decoder(tuple(columns)), index)
        if isinstance(values, Broken):
            raise UnusableTask(values.reason)
        return dict(zip(columns, values, strict=True))

    def _values(self, decoder: msgspec.json.Decoder[Any], index: int) -> tuple[Any, ...] | Broken:
        """The columns of one line; null where it has none."""
        line = self._line(index)
        if isinstance(line, Broken):
            return line
        try:
            return msgspec.structs.astuple(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return Broken(_said(line, error))

    def _line(self, index: int) -> bytes | Broken:
        begin, end = int(self._begins[index]), int(self._begins[index + 1])
        if end - begin > ROW_LIMIT_BYTES:
            return Broken(f"the line has more than {ROW_LIMIT_BYTES // 2**20} MB")
        line = os.pread(self._file.fileno(), end - begin, begin)
        line = line.removeprefix(BOM) if index == 0 else line
        return line if line.strip() else Broken("the line is empty")

    def _decoder(self, columns: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
        """Decodes these columns and skips the others. Fields are numbered: a column may have any name."""
        if columns not in self._decoders:
            names = {f"column_{number}": name for number, name in enumerate(columns)}
            kind = msgspec.defstruct("Line", [(field, Any, None) for field in names], rename=names)
            self._decoders[columns] = msgspec.json.Decoder(kind)
        return self._decoders[columns]

    def _look(self) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for index in range(min(self.rows, LOOKED_AT)):
            line = self._line(index)
            try:
                value = None if isinstance(line, Broken) else msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            if isinstance(value, list) and index == 0:
                raise EnvironmentSetupError(f"{self._path} is one JSON list: write one object per line instead")
            found |= dict.fromkeys(value) if isinstance(value, dict) else {}
        if not found:
            raise unreadable(self._path, "JSON lines", ValueError("none of its first lines is a JSON object"))
        return tuple(found)

    def close(self) -> None:
        self._file.close()


def _said(line: bytes, error: Exception) -> str:
    try:
        line.decode()
    except UnicodeDecodeError:
        return "the line is not UTF-8"
    return f"the line is no JSON object: {' '.join(str(error).split())[:120]}"


def _line_starts(path: Path) -> np.ndarray[Any, Any]:
    """Where lines begin, and where the last one ends; blank lines at the end of the file are none."""
    name = entry_name("lines", identity(path))
    known = load_arrays(name)
    if known is not None:
        return known[0]["begins"]
    with path.open("rb") as file:
        begins = _find_lines(file)
    store_arrays(name, {"begins": begins}, None)
    return begins


def _find_lines(file: BinaryIO) -> np.ndarray[Any, Any]:
    import numpy as np

    found, base = [np.zeros(1, np.int64)], 0
    while chunk := file.read(CHUNK_BYTES):
        found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + base + 1)
        base += len(chunk)
    begins = np.concatenate(found)
    if begins[-1] != base:  # the last line has no end of line
        begins = np.append(begins, base)
    while len(begins) > 1 and begins[-1] - begins[-2] <= ROW_LIMIT_BYTES:
        file.seek(int(begins[-2]))
        if file.read(int(begins[-1] - begins[-2])).strip():
            break
        begins = begins[:-1]
    return begins


def unpacked(path: Path, digest: str) -> Path:
    """The unpacked file in the cache folder, named by the digest of the packed one."""
    import pyarrow as pa

    name = f"unpacked-{digest[:32]}.jsonl"
    known = whole(name)
    if known is not None:
        return known
    try:
        target = unpack(name, lambda scratch: _unpack(path, scratch))
    except (pa.ArrowException, OSError) as error:
        said = " ".join(str(error).split())[:160]
        raise EnvironmentSetupError(f"cannot unpack {path} into {cache_folder()}: {said}; unpack it yourself") from None
    log.info("unpacked %s to %s", path, target)
    return target


def _unpack(path: Path, scratch: Path) -> None:
    import pyarrow as pa

    kind = {".gz": "gzip", ".zst": "zstd"}[path.suffix]
    most_bytes = max(UNPACKS_TO_BYTES, UNPACKS_TO * path.stat().st_size)
    with pa.CompressedInputStream(pa.OSFile(str(path)), kind) as packed, scratch.open("wb") as out:
        while chunk := packed.read(CHUNK_BYTES):
            leave_room(scratch.parent)
            if out.tell() + len(chunk) > most_bytes:
                raise OSError(f"it unpacks to more than {most_bytes // 2**20:,} MB")
            out.write(chunk)
