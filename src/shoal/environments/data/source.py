"""What reads one file of a data set: rows by number, and all rows in batches; only the columns that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

ROW_LIMIT_BYTES = 16 * 2**20
"""Of one row's text: what is larger is no task."""
NOT_TEXT = "a value is not UTF-8"


@dataclass(frozen=True)
class Broken:
    """Stands in a batch for every value of a row that cannot be read at all."""

    reason: str


Batch = Mapping[str, Any]
"""Column → a `pyarrow.Array`, or a list of values. All of one length."""


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
