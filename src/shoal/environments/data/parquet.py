"""Parquet: row groups are decoded when one of their rows is asked for, and kept within a bound in bytes.

    row ─► its row group ─► small enough: decoded once, kept among the last used ones (`Pieces`)
                        └─► too large:   its columns are unpacked into the cache folder once, and read from there

Files are read, not mapped: mapped pages would count as this process's memory.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.environments.data.cache import cache_folder, entry_name, identity
from shoal.environments.data.source import Batch, Source
from shoal.environments.data.unpacking import is_kept, leave_room, unpack, whole
from shoal.errors import EnvironmentSetupError
from shoal.runtime.files import resource_error

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
        from shoal.environments.data.arrow import ArrowSource

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
