"""Reads the files of a data set: single rows by number, or all rows in batches, with the wanted columns only.

    Parquet     a row group is decoded in pieces up to the wanted row; recent pieces are kept
    JSON lines  the starts of lines are found once, a line is decoded on demand: row n is line n + 1

`pyarrow.dataset` is not used: it decodes a whole row group for the first batch, and does not name a bad line.
"""

from __future__ import annotations

import bisect
import json
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.environments.data import cache
from shoal.environments.data.locating import kind_of
from shoal.errors import EnvironmentSetupError, UnusableTask

if TYPE_CHECKING:
    import numpy as np

ROW_LIMIT_BYTES = 16 * 2**20  # text of one row
BATCH_ROWS, BATCH_BYTES = 8192, 16 * 2**20
KEPT_BYTES = 96 * 2**20  # of decoded rows
CHUNK_BYTES = 8 * 2**20
LINES_AT_ONCE, LOOKED_AT = 1024, 100  # lines of a batch; lines from which the columns are collected
OPEN_AT_ONCE = 64  # files: a process may open only so many


@dataclass(frozen=True)
class Broken:
    """In a batch, every value of a row that cannot be read."""

    reason: str


Batch = Mapping[str, Any]  # column → a `pyarrow.Array` or a list of values, all of one length


def rows_of(batch: Batch) -> Iterator[dict[str, Any] | Broken]:
    for values in zip(*(values_of(column, name) for name, column in batch.items()), strict=True):
        broken = next((value for value in values if isinstance(value, Broken)), None)
        yield broken or dict(zip(batch, values, strict=True))


def values_of(column: Any, name: str = "a value") -> list[Any]:
    if isinstance(column, list):
        return column
    with suppress(UnicodeDecodeError):
        return list(column.to_pylist())
    found: list[Any] = []
    for item in column:
        try:
            found.append(item.as_py())
        except UnicodeDecodeError:
            found.append(Broken(f"{name} is not UTF-8"))
    return found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from None


def _unreadable(path: Path, kind: str, error: Exception) -> EnvironmentSetupError:
    reason = " ".join(str(error).split())[:160]
    with suppress(OSError), path.open("rb") as file:
        if file.read(64).startswith(b"version https://git-lfs"):
            return EnvironmentSetupError(f"{path} is a pointer of git-lfs, not the data: run git lfs pull")
    return EnvironmentSetupError(f"{path} is no {kind} file, or empty, cut off or damaged: fetch it again ({reason})")


class ParquetSource:
    """One file; not mapped: mapped pages count as this process's memory."""

    def __init__(self, path: Path, kept: Pieces) -> None:
        self.path, self._kept = path, kept
        self._at_once = lru_cache(maxsize=None)(self._rows_at_once)
        with _reading(path):
            self._file = pq.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=2**20)
            schema, found = self._file.schema_arrow, self._file.metadata
        sizes = (found.row_group(group).num_rows for group in range(found.num_row_groups))
        self._starts = list(accumulate(sizes, initial=0))
        self.rows, self.columns = self._starts[-1], tuple(schema.names)
        self.types = dict(zip(schema.names, map(str, schema.types), strict=True))

    def scan(self, columns: Sequence[str]) -> Iterator[Batch]:
        with _reading(self.path):
            for group in range(len(self._starts) - 1):
                for batch in self._batches(group, tuple(columns)):
                    yield {name: batch.column(name) for name in columns}

    def row(self, index: int, columns: tuple[str, ...]) -> dict[str, Any]:
        group = bisect.bisect_right(self._starts, index) - 1
        place, offset = divmod(index - self._starts[group], self._at_once(group, columns))
        with _reading(self.path):
            piece = self._kept.get(self.path, group, columns, place)
            if piece is None:  # a row group is decoded from its start; the pieces before are kept, too
                for number, piece in zip(range(place + 1), self._batches(group, columns), strict=False):
                    self._kept.put(piece, self.path, group, columns, number)
            return dict(piece.slice(offset, 1).to_pylist()[0])

    def _batches(self, group: int, columns: tuple[str, ...]) -> Iterator[Any]:
        at_once = self._at_once(group, columns)
        yield from self._file.iter_batches(batch_size=at_once, row_groups=[group], columns=list(columns))

    def _rows_at_once(self, group: int, columns: tuple[str, ...]) -> int:
        found = self._file.metadata.row_group(group)
        chunks = [found.column(number) for number in range(found.num_columns)]
        read = [one for one in chunks if one.path_in_schema.partition(".")[0] in columns]
        size = sum(int(one.total_uncompressed_size) for one in read)
        return max(1, min(BATCH_ROWS, BATCH_BYTES * int(found.num_rows) // max(1, size)))

    def close(self) -> None:
        self._file.close()


class Pieces:
    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self._limit_bytes, self.size_bytes = limit_bytes, 0
        self._pieces: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    def get(self, *key: object) -> Any:
        if key in self._pieces:
            self._pieces.move_to_end(key)
        return self._pieces.get(key)

    def put(self, piece: Any, *key: object) -> None:
        if self.get(*key) is None:
            self._pieces[key] = piece
            self.size_bytes += piece.nbytes
        while self.size_bytes > self._limit_bytes and len(self._pieces) > 1:
            self.size_bytes -= self._pieces.popitem(last=False)[1].nbytes


class JsonlSource:
    """One file. Each line is a row, also a bad one; `types` is empty: lines have no types."""

    def __init__(self, path: Path) -> None:
        self._file, self._begins = path.open("rb"), _line_starts(path)
        self._decoders: dict[tuple[str, ...], msgspec.json.Decoder[Any]] = {}
        self.rows, self.types = len(self._begins) - 1, dict[str, str]()
        found: dict[str, None] = {}
        for index in range(min(self.rows, LOOKED_AT)):
            value = self._decoded(index, msgspec.json.Decoder())
            if isinstance(value, list) and index == 0:
                raise EnvironmentSetupError(f"{path} is one JSON list: write one object per line instead")
            found |= dict.fromkeys(value) if isinstance(value, dict) else {}
        if not found:
            raise _unreadable(path, "JSON lines", ValueError("none of its first lines is a JSON object"))
        self.columns = tuple(found)

    def scan(self, columns: Sequence[str]) -> Iterator[Batch]:
        for start in range(0, self.rows, LINES_AT_ONCE):
            stop = min(start + LINES_AT_ONCE, self.rows)
            rows = [self._values(index, tuple(columns)) for index in range(start, stop)]
            for_all = [row if isinstance(row, tuple) else (row,) * len(columns) for row in rows]
            yield dict(zip(columns, map(list, zip(*for_all, strict=True)), strict=True))

    def row(self, index: int, columns: tuple[str, ...]) -> dict[str, Any]:
        values = self._values(index, columns)
        if isinstance(values, Broken):
            raise UnusableTask(values.reason)
        return dict(zip(columns, values, strict=True))

    def _values(self, index: int, columns: tuple[str, ...]) -> tuple[Any, ...] | Broken:
        """The columns of one line; None where it has none. Fields are numbered: a column may have any name."""
        if columns not in self._decoders:
            names = {f"column_{number}": name for number, name in enumerate(columns)}
            kind = msgspec.defstruct("Line", [(field, Any, None) for field in names], rename=names)
            self._decoders[columns] = msgspec.json.Decoder(kind)
        found = self._decoded(index, self._decoders[columns])
        return found if isinstance(found, Broken) else msgspec.structs.astuple(found)

    def _decoded(self, index: int, decoder: msgspec.json.Decoder[Any]) -> Any:
        begin, end = int(self._begins[index]), int(self._begins[index + 1])
        if end - begin > ROW_LIMIT_BYTES:
            return Broken(f"the line has more than {ROW_LIMIT_BYTES // 2**20} MB")
        line = os.pread(self._file.fileno(), end - begin, begin)
        line = line.removeprefix(b"\xef\xbb\xbf") if index == 0 else line
        try:
            return decoder.decode(line) if line.strip() else Broken("the line is empty")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            with suppress(ValueError, RecursionError, OverflowError):  # Python writes NaN, which is no JSON: nothing
                if b"NaN" in line or b"Infinity" in line:
                    return decoder.decode(msgspec.json.encode(json.loads(line, parse_constant=lambda _: None)))
            reason = " ".join(str(error).split())[:120]
            is_text = line.decode(errors="ignore").encode() == line
            return Broken(f"the line is no JSON object: {reason}" if is_text else "the line is not UTF-8")

    def close(self) -> None:
        self._file.close()


def _line_starts(path: Path) -> np.ndarray[Any, Any]:
    """The starts of all lines, and the end of the last one; blank lines at the end of the file are ignored."""
    import numpy as np

    name = cache.entry_name("lines", cache.identity(path))
    known = cache.load_arrays(name)
    if known is not None:
        return known[0]["begins"]
    found, size = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + size + 1)
            size += len(chunk)
        begins = np.concatenate(found)
        if begins[-1] != size:  # the last line has no end of line
            begins = np.append(begins, size)
        while len(begins) > 1 and begins[-1] - begins[-2] <= ROW_LIMIT_BYTES:
            if os.pread(file.fileno(), int(begins[-1] - begins[-2]), int(begins[-2])).strip():
                break
            begins = begins[:-1]
    cache.store_arrays(name, {"begins": begins}, None)
    return begins


class DataTable:
    """Rows by number over all files. Thread-safe: one thread reads at a time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._kept, self._lock = Pieces(), threading.RLock()
        self._open: dict[int, ParquetSource | JsonlSource] = {}
        found = []
        for number, path in enumerate(self.paths):
            source = self._source(number)
            name, count = Counter(source.columns).most_common(1)[0]
            if count > 1:
                raise EnvironmentSetupError(f"{path} has more than one column named {name!r}: rename or drop one")
            found.append((source.rows, source.columns, source.types))
        rows, columns, self._types = zip(*found, strict=True)
        self._starts = list(accumulate(rows, initial=0))
        self.rows: int = self._starts[-1]
        self.columns_by_file: tuple[tuple[Path, tuple[str, ...]], ...] = tuple(zip(self.paths, columns, strict=True))
        self.columns: tuple[str, ...] = columns[0]  # `agree` compares the other files
        if not self.rows:
            raise EnvironmentSetupError(f"{self.paths[0]} has no rows; check environment.data")

    def agree(self, columns: Sequence[str]) -> None:
        """Refuse files that lack one of these columns, or hold another type in it. JSON lines have no types."""
        for (path, names), types in zip(self.columns_by_file, self._types, strict=True):
            for name in columns:
                mine, first = (each.get(name, "").removeprefix("large_") for each in (types, self._types[0]))
                if (name not in names and types) or mine != first:
                    has = f"column {name} is {mine}" if mine else f"there is no column {name}"
                    raise EnvironmentSetupError(f"the files differ: {has} in {path}, but {first} in {self.paths[0]}")

    def identities(self) -> list[tuple[object, ...]]:
        return [cache.identity(path) for path in self.paths]

    def scan(self, columns: Sequence[str]) -> Iterator[Batch]:
        for number in range(len(self.paths)):
            with self._lock:
                source = self._source(number)
            yield from source.scan(columns)

    def row(self, number: int, columns: Sequence[str]) -> dict[str, Any]:
        with self._lock:
            file = bisect.bisect_right(self._starts, number) - 1
            try:
                return self._source(file).row(number - self._starts[file], tuple(columns))
            except UnicodeDecodeError:
                raise UnusableTask("a value is not UTF-8") from None

    def where(self, number: int) -> str:
        """The place of a row, for messages: `train.jsonl line 18`, `b.parquet row 3`, `a.parquet`."""
        file = bisect.bisect_right(self._starts, number) - 1
        inside, name = number - self._starts[file], self.paths[file].name
        if kind_of(self.paths[file]) == "jsonl":
            return f"{name} line {inside + 1}"
        return name if inside == number else f"{name} row {inside}"

    def _source(self, number: int) -> ParquetSource | JsonlSource:
        if number not in self._open:
            if len(self._open) >= OPEN_AT_ONCE:
                self._open.pop(next(iter(self._open))).close()
            path = self.paths[number]
            is_parquet = kind_of(path) == "parquet"
            try:
                self._open[number] = ParquetSource(path, self._kept) if is_parquet else JsonlSource(path)
            except OSError as error:
                raise EnvironmentSetupError(f"cannot read {path}: {error.strerror or error}") from None
        return self._open[number]
