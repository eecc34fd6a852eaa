"""All files of a data set as one table: rows are numbered through, in the order of the files."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.environments.data import readers
from shoal.environments.data.cache import identity
from shoal.environments.data.locating import DataFile
from shoal.errors import EnvironmentSetupError, UnusableTask

OPEN_AT_ONCE = 64
"""Files whose handles are kept; a data set of a thousand shards must not use up what a process may open."""


class Table:
    """Rows by number over all files. Threads may share it: one reads at a time."""

    def __init__(self, files: Sequence[DataFile]) -> None:
        self.files = tuple(files)
        self.paths = tuple(file.path for file in files)
        self._pieces = readers.Pieces()
        self._open: dict[int, readers.Source] = {}
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._types: list[dict[str, str]] = []
        columns: list[tuple[str, ...]] = []
        self.rows = 0
        for number in range(len(self.files)):
            source = self._source(number)
            self._starts.append(self.rows)
            columns.append(source.columns)
            self._types.append(source.types)
            self.rows += source.rows
        self.columns_by_file = tuple(zip(self.paths, columns, strict=True))
        if not self.rows:
            raise EnvironmentSetupError(f"{self.paths[0]} has no rows; check environment.data")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the first file; `agree` says whether the others have those that matter."""
        return self.columns_by_file[0][1]

    def agree(self, columns: Sequence[str]) -> None:
        """Refuse files that lack one of these columns, or hold another type in it. JSON lines have no types."""
        for (path, names), types in zip(self.columns_by_file, self._types, strict=True):
            for name in columns:
                if name not in names and types:
                    raise EnvironmentSetupError(
                        f"the files differ: {path} has no column {name}, which {self.paths[0]} has; it has"
                        f" {', '.join(names)}"
                    )
                mine, first = types.get(name, ""), self._types[0].get(name, "")
                if mine.removeprefix("large_") != first.removeprefix("large_"):
                    raise EnvironmentSetupError(
                        f"the files differ: column {name} is {mine} in {path} and {first} in {self.paths[0]}"
                    )

    def identities(self) -> list[tuple[object, ...]]:
        return [identity(path) for path in self.paths]

    def scan(self, columns: Sequence[str]) -> Iterator[readers.Batch]:
        """All rows in order."""
        for number in range(len(self.files)):
            with self._lock:
                source = self._source(number)
            yield from source.scan(columns)

    def row(self, number: int, columns: Sequence[str]) -> dict[str, Any]:
        """One row, of these columns; `UnusableTask` if it cannot be read."""
        with self._lock:
            file = bisect.bisect_right(self._starts, number) - 1
            try:
                return self._source(file).row(number - self._starts[file], columns)
            except UnicodeDecodeError:
                raise UnusableTask("a value is not UTF-8") from None

    def where(self, number: int) -> str:
        """Where a row is, for a person who knows its number: `train.jsonl line 18`, `b.parquet row 3`, `a.parquet`."""
        file = bisect.bisect_right(self._starts, number) - 1
        inside, name = number - self._starts[file], self.paths[file].name
        if self.files[file].kind == "jsonl":
            return f"{name} line {inside + 1}"
        return name if inside == number else f"{name} row {inside}"

    def _source(self, number: int) -> readers.Source:
        if number not in self._open:
            if len(self._open) >= OPEN_AT_ONCE:
                self._open.pop(next(iter(self._open))).close()
            self._open[number] = _opened(self.files[number].path, self.files[number].kind, self._pieces)
        return self._open[number]


def _opened(path: Path, kind: str, pieces: readers.Pieces) -> readers.Source:
    try:
        if kind == "parquet":
            return readers.ParquetSource(path, pieces)
        kinds = {"arrow": readers.ArrowSource, "csv": readers.CsvSource, "jsonl": readers.JsonlSource}
        return kinds[kind](path)
    except OSError as error:
        raise EnvironmentSetupError(f"cannot read {path}: {error.strerror or error}") from None
