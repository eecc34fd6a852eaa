"""What reads one file of a data set: Parquet, Arrow, CSV and JSON lines."""

from __future__ import annotations

import bisect
import csv
import io
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec

from shoal.environments.data.cache import (
    cache_folder,
    entry_name,
    identity,
    is_kept,
    leave_room,
    load_arrays,
    store_arrays,
    unpack,
    whole,
)
from shoal.errors import EnvironmentSetupError, UnusableTask
from shoal.runtime.files import resource_error

if TYPE_CHECKING:
    import numpy as np

ROW_LIMIT_BYTES = 16 * 2**20
"""Of one row's text: what is larger is no task."""
NOT_TEXT = "a value is not UTF-8"


@dataclass(frozen=True)
class Broken:
    """Stands in a batch for every value of a row that cannot be read at all."""

    reason: str


Batch = Mapping[str, Any]
"""Column → a `pyarrow.Array`, or a list of values. All of one length."""


def rows_of(batch: Batch) -> Iterator[dict[str, Any] | Broken]:
    """The rows of a batch as mappings."""
    names = list(batch)
    lists = [values_of(column) for column in batch.values()]
    for values in zip(*lists, strict=True):
        broken = next((value for value in values if isinstance(value, Broken)), None)
        yield broken if broken is not None else dict(zip(names, values, strict=True))


def values_of(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        return [_value(item) for item in column]
    return values


def _value(item: Any) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError:
        return Broken(NOT_TEXT)


class Source(Protocol):
    """One file. `types` says what a column holds, where the file says so: shards must agree on it."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def types(self) -> Mapping[str, str]: ...

    def scan(self, columns: Sequence[str]) -> Iterator[Batch]:
        """All rows in order, a bounded number at a time."""
        ...

    def row(self, index: int, columns: Sequence[str]) -> dict[str, Any]:
        """One row. Raises `UnusableTask` if it cannot be read, `EnvironmentSetupError` if the file cannot."""
        ...

    def close(self) -> None: ...


log = logging.getLogger("shoal.environments")
KEPT_BYTES = 96 * 2**20
PIECE_BYTES = 80 * 2**20
BATCH_BYTES = 16 * 2**20
LARGEST_BATCH = 8192
LFS = b"version https://git-lfs"


class Pieces:
    """Decoded row groups, the last used ones, of all files together."""

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: tuple[object, ...]) -> Any | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: tuple[object, ...], piece: Any) -> None:
        """Keep a piece; the longest unused ones go until all fit."""
        self._kept[key] = piece
        self.size_bytes += piece.nbytes
        while self.size_bytes > self._limit_bytes and len(self._kept) > 1:
            _key, gone = self._kept.popitem(last=False)
            self.size_bytes -= gone.nbytes


class ParquetSource:
    """Implements `Source`."""

    def __init__(self, path: Path, pieces: Pieces) -> None:
        self._path = path
        self._pieces = pieces
        self._file = self._open()
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = [sum_before for sum_before, _ in _running(sizes)]
        self.rows: int = metadata.num_rows
        schema = self._file.schema_arrow
        self.columns = unrepeated(tuple(schema.names), path)
        self.types: Mapping[str, str] = {name: str(schema.field(name).type) for name in self.columns}
        self._unpacked: dict[tuple[object, ...], tuple[Path, Source]] = {}

    def _open(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self._path, memory_map=False, pre_buffer=False, buffer_size=2**20)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(self._path, "Parquet", error) from None

    def scan(self, columns: Sequence[str]) -> Iterator[Batch]:
        import pyarrow as pa

        try:
            for group in range(len(self._starts)):
                yield from self._batches(group, columns)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(self._path, "Parquet", error) from None

    def _batches(self, group: int, columns: Sequence[str]) -> Iterator[Batch]:
        rows = self._rows_at_once(group, columns)
        for batch in self._file.iter_batches(batch_size=rows, row_groups=[group], columns=list(columns)):
            yield {name: batch.column(name) for name in columns}

    def row(self, index: int, columns: Sequence[str]) -> dict[str, Any]:
        import pyarrow as pa

        group = bisect.bisect_right(self._starts, index) - 1
        offset = index - self._starts[group]
        try:
            if self._size(group, columns) > PIECE_BYTES:
                return self._large(group, tuple(columns)).row(offset, columns)
            row: dict[str, Any] = self._piece(group, tuple(columns)).slice(offset, 1).to_pylist()[0]
        except (pa.ArrowException, OSError) as error:
            raise unreadable(self._path, "Parquet", error) from None
        return row

    def _piece(self, group: int, columns: tuple[str, ...]) -> Any:
        """A row group, decoded."""
        key = (self._path, group, columns)
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._file.read_row_group(group, columns=list(columns), use_threads=False)
            self._pieces.put(key, piece)
        return piece

    def _large(self, group: int, columns: tuple[str, ...]) -> Source:
        """A row group that is too large to be decoded for one row, as an Arrow file in the cache folder."""
        path, source = self._unpacked.get((group, columns), (None, None))
        if path is None or source is None or not is_kept(path):
            name = f"{entry_name('rows', identity(self._path), group, columns)}.arrow"
            path = whole(name) or self._unpack(group, columns, name)
            source = ArrowSource(path)
            self._unpacked[group, columns] = path, source
        return source

    def _unpack(self, group: int, columns: tuple[str, ...], name: str) -> Path:
        folder = cache_folder()
        log.warning(
            "%s has row groups above %d MB: they are unpacked into %s once; row_group_size=1000 avoids it",
            self._path, PIECE_BYTES // 2**20, folder,
        )  # fmt: skip
        try:
            return unpack(name, lambda scratch: self._write(group, columns, scratch))
        except OSError as error:
            raise resource_error("unpack a large row group into", folder, error) from None

    def _write(self, group: int, columns: tuple[str, ...], scratch: Path) -> None:
        import pyarrow as pa

        schema = pa.schema([self._file.schema_arrow.field(name) for name in columns])
        with pa.OSFile(str(scratch), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for batch in self._batches(group, columns):
                leave_room(scratch.parent)
                writer.write_batch(pa.record_batch([batch[name] for name in columns], schema=schema))

    def _rows_at_once(self, group: int, columns: Sequence[str]) -> int:
        rows = self._file.metadata.row_group(group).num_rows
        per_row = max(1, self._size(group, columns) // max(1, rows))
        return int(max(1, min(LARGEST_BATCH, BATCH_BYTES // per_row)))

    def _size(self, group: int, columns: Sequence[str]) -> int:
        """Bytes of these columns of a row group, unpacked."""
        row_group, wanted = self._file.metadata.row_group(group), set(columns)
        chunks = (row_group.column(number) for number in range(row_group.num_columns))
        return sum(
            chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.partition(".")[0] in wanted
        )

    def close(self) -> None:
        self._file.close()


def _running(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(sum of those before, size) for each."""
    before = 0
    for size in sizes:
        yield before, size
        before += size


def unrepeated(columns: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """The columns of a file, unless two of them have one name: nobody could say which is meant."""
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise EnvironmentSetupError(f"{path} has more than one column named {twice[0]!r}: rename or drop one of them")
    return columns


def unreadable(path: Path, kind: str, error: Exception) -> EnvironmentSetupError:
    """What is wrong with a file that is not what its name says."""
    try:
        with path.open("rb") as file:
            begins, size = file.read(64), path.stat().st_size
    except OSError as failure:
        return EnvironmentSetupError(f"cannot read {path}: {failure.strerror or failure}; check environment.data")
    if size == 0:
        return EnvironmentSetupError(f"{path} is empty; fetch it again, or take it out of the folder")
    if begins.startswith(LFS):
        return EnvironmentSetupError(f"{path} is a pointer of git-lfs, not the data: run git lfs pull")
    said = " ".join(str(error).split())[:160]
    return EnvironmentSetupError(f"{path} is no {kind} file, or was cut off or damaged: fetch it again ({said})")


FILE_MAGIC = b"ARROW1"


class ArrowSource:
    """Implements `Source`. Where each batch begins is found once; its columns are touched when they are asked for."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._path = path
        try:
            with path.open("rb") as file:
                self._is_stream = file.read(len(FILE_MAGIC)) != FILE_MAGIC
            self._schema, self._places, sizes = _stream_index(path) if self._is_stream else _file_index(path)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(path, "Arrow", error) from None
        self._starts, self.rows = [], 0
        for size in sizes:
            self._starts.append(self.rows)
            self.rows += size
        self.columns = unrepeated(tuple(self._schema.names), path)
        self.types: Mapping[str, str] = {name: str(self._schema.field(name).type) for name in self.columns}

    def scan(self, columns: Sequence[str]) -> Iterator[Batch]:
        self._refuse_dictionaries(columns)
        for number in range(len(self._places)):
            with self._mapped() as file:
                batch = self._batch(file, number)
                yield {name: batch.column(batch.schema.get_field_index(name)) for name in columns}
                del batch

    def row(self, index: int, columns: Sequence[str]) -> dict[str, Any]:
        self._refuse_dictionaries(columns)
        number = bisect.bisect_right(self._starts, index) - 1
        with self._mapped() as file:
            batch = self._batch(file, number).select(list(columns))
            row: dict[str, Any] = batch.slice(index - self._starts[number], 1).to_pylist()[0]
            del batch
        return row

    def _mapped(self) -> Any:
        import pyarrow as pa

        try:
            return pa.memory_map(str(self._path))
        except OSError as error:
            raise unreadable(self._path, "Arrow", error) from None

    def _batch(self, file: Any, number: int) -> Any:
        import pyarrow as pa

        try:
            if not self._is_stream:
                return pa.ipc.open_file(file).get_batch(self._places[number])
            file.seek(self._places[number])
            return pa.ipc.read_record_batch(pa.ipc.read_message(file), self._schema)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(self._path, "Arrow", error) from None

    def _refuse_dictionaries(self, columns: Sequence[str]) -> None:
        for name in columns:
            if self._is_stream and self.types.get(name, "").startswith("dictionary"):
                raise EnvironmentSetupError(
                    f"column {name} of {self._path} is dictionary-encoded: save it as plain text"
                )

    def close(self) -> None:
        """Nothing is open between calls."""


def _stream_index(path: Path) -> tuple[Any, list[int], list[int]]:
    import pyarrow as pa

    places: list[int] = []
    sizes: list[int] = []
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_stream(file)
        while True:
            place = file.tell()
            try:
                sizes.append(reader.read_next_batch().num_rows)
            except StopIteration:
                return reader.schema, places, sizes
            places.append(place)


def _file_index(path: Path) -> tuple[Any, list[int], list[int]]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
        return reader.schema, list(range(reader.num_record_batches)), sizes


LARGEST_BYTES = 64 * 2**20
BATCH_ROWS = 1024


class CsvSource:
    """Implements `Source`. The first line names the columns; a value may hold line ends, between quotes."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        if size > LARGEST_BYTES:
            raise EnvironmentSetupError(f"{path} is CSV of {size // 2**20} MB: write it as Parquet or JSON lines")
        try:
            text = path.read_text(encoding="utf-8-sig")
            names, *self._rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        except (UnicodeDecodeError, csv.Error, ValueError) as error:
            raise unreadable(path, "CSV", error) from None
        uneven = next((number for number, row in enumerate(self._rows) if len(row) != len(names)), None)
        if uneven is not None:
            raise EnvironmentSetupError(
                f"row {uneven} of {path} has {len(self._rows[uneven])} values, not {len(names)}"
            )
        self.rows = len(self._rows)
        self.columns = unrepeated(tuple(names), path)
        self.types: Mapping[str, str] = dict.fromkeys(names, "string")

    def scan(self, columns: Sequence[str]) -> Iterator[Batch]:
        places = [self.columns.index(name) for name in columns]
        for start in range(0, self.rows, BATCH_ROWS):
            rows = self._rows[start : start + BATCH_ROWS]
            yield {name: [row[place] for row in rows] for name, place in zip(columns, places, strict=True)}

    def row(self, index: int, columns: Sequence[str]) -> dict[str, Any]:
        return {name: self._rows[index][self.columns.index(name)] for name in columns}

    def close(self) -> None:
        """Nothing is open."""


CHUNK_BYTES = 8 * 2**20
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
