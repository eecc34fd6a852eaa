"""metrics.jsonl: one JSON line per step. Row *n* describes version *n* (`held_out`) and the step trained from it.

A row is on the disk before the checkpoint that follows it. A resume at version *c* drops the rows from *c* on, whose
steps are trained again. The values in row *c* that describe version *c* itself are kept (`keep`), since a version is
measured once. Later measurements are added (`amend`).
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shoal.runtime.files import resource_error, write_atomically

log = logging.getLogger(__name__)


class MetricsLog:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun: dict[str, float] = {}  # the part of the last row that a rewind kept

    def append(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        if self._begun.get("step") == step:
            row = {**self._begun, **metrics}
            self._rewrite([*(old for old in self.rows() if old["step"] < step), row])
            return row
        row = {"step": step, **metrics}
        try:
            with self.path.open("ab") as file:
                file.write(_line(row))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise resource_error("write", self.path, error) from error
        return row

    def amend(self, step: int, metrics: Mapping[str, float]) -> dict[str, float] | None:
        """Add later numbers to the row of a step; the row, or None if it is missing or has them already."""
        rows = self.rows()
        row = next((row for row in rows if row["step"] == step and not metrics.items() <= row.items()), None)
        if row is not None:
            row.update(metrics)
            self._begun = row if self._begun.get("step") == step else self._begun
            self._rewrite(rows)
        return row

    def rows(self) -> list[dict[str, float]]:
        """All complete rows, for each step the last one; torn lines and non-numeric values are left out."""
        if not self.path.exists():
            return []
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except OSError as error:
            raise resource_error("read", self.path, error) from error
        rows = [_parse(line) for line in lines]
        return list({row["step"]: row for row in rows if row is not None}.values())

    def rewind(self, step: int, keep: Sequence[str] = ()) -> None:
        """Remove the rows from `step` on, except the numbers of row `step` in `keep`."""
        if not self.path.exists():
            return
        rows = self.rows()
        kept = {name: row[name] for row in rows if row["step"] == step for name in keep if name in row}
        self._begun = {"step": step, **kept} if kept else {}
        self._rewrite([*(row for row in rows if row["step"] < step), *([self._begun] if kept else [])])

    def _rewrite(self, rows: Iterable[Mapping[str, float]]) -> None:
        write_atomically(self.path, b"".join(_line(row) for row in rows))


def _line(row: Mapping[str, float]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _parse(line: str) -> dict[str, float] | None:
    try:
        row = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        log.warning("metrics: a torn line is left out: %.60r", line)
        return None
    numbers = {}
    for name, value in row.items() if isinstance(row, dict) else ():
        with contextlib.suppress(OverflowError):  # an integer that no float holds
            if type(value) in (int, float) and math.isfinite(value):
                numbers[name] = value
    return numbers if type(numbers.get("step")) is int else None
