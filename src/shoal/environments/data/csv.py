"""CSV: some test sets come as such. Read whole, every value as text, so only small ones; others should be Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.environments.data.parquet import unreadable, unrepeated
from shoal.environments.data.source import Batch
from shoal.errors import EnvironmentSetupError

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
