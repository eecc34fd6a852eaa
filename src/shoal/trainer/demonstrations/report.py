"""What became of every row: counted by filter for people, and row by row in a Parquet file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.runtime.files import ensure_folder, write_atomically
from shoal.trainer.demonstrations.filters import Candidate

READABLE = "readable"
"""The name under which rows count that are no demonstrations at all."""
MEASURED = ("tokens", "learnt", "reward", "rank")
SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("where", pa.string()),
        ("kept", pa.bool_()),
        ("filter", pa.string()),  # which one left it out; empty if it is kept
        ("reason", pa.string()),
        ("tokens", pa.int64()),
        ("learnt", pa.int64()),
        ("reward", pa.float64()),
        ("rank", pa.float64()),
    ]
)


@dataclass
class Outcome:
    """Rows that were left out, by filter and reason, and the numbers of those that stay."""

    filters: tuple[str, ...]
    left_out: dict[int, tuple[str, str]] = field(default_factory=dict)
    _columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in ("row", *MEASURED)})

    def saw(self, candidate: Candidate) -> None:
        """Remember what was measured of a row, whatever becomes of it."""
        values = (candidate.row, candidate.tokens, candidate.tokens_learnt, candidate.reward, candidate.rank)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def leave_out(self, row: int, by: str, reason: str) -> None:
        self.left_out[row] = (by, reason)

    @property
    def kept(self) -> list[int]:
        """Rows that stay, ascending."""
        return [row for row in self._columns["row"] if row not in self.left_out]

    @property
    def counts(self) -> dict[str, int]:
        """How many each filter left out, in the order in which they were asked."""
        found = Counter(by for by, _reason in self.left_out.values())
        return {name: found[name] for name in self.filters}

    def lines(self, rows: int, where: Callable[[int], str]) -> list[str]:
        """For people: rows, what each filter left out with an example, and what is kept."""
        counts = {"read": rows, **{f"- {name}": count for name, count in self.counts.items()}, "kept": len(self.kept)}
        width = max(map(len, counts))
        examples = {f"- {name}": self._example(name, where) for name in self.filters}
        return [f"  {name:<{width}}  {count:>9,}{examples.get(name, '')}" for name, count in counts.items()]

    def _example(self, name: str, where: Callable[[int], str]) -> str:
        found = ((row, reason) for row, (by, reason) in sorted(self.left_out.items()) if by == name)
        row, reason = next(found, (-1, ""))
        return f"   e.g. row {row} ({where(row)}): {reason}" if row >= 0 else ""

    def write(self, path: Path, rows: int, where: Callable[[int], str]) -> None:
        """The Parquet file, one row for each row of the data, in order."""
        measured: Mapping[int, int] = {row: place for place, row in enumerate(self._columns["row"])}
        columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        for row in range(rows):
            by, reason = self.left_out.get(row, ("", ""))
            place = measured.get(row)
            values = [None if place is None else self._columns[name][place] for name in MEASURED]
            for column, value in zip(columns.values(), (row, where(row), not by, by, reason, *values), strict=True):
                column.append(value)
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns, schema=SCHEMA), sink, compression="zstd")
        ensure_folder(path.absolute().parent)
        write_atomically(path, sink.getvalue().to_pybytes())
