"""Arrow files: the stream that `save_to_disk` writes, and the file format. A batch is mapped while it is read only."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.environments.data.parquet import unreadable, unrepeated
from shoal.environments.data.source import Batch
from shoal.errors import EnvironmentSetupError

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
