"""metrics.jsonl: one JSON line per step. Row *n* tells of version *n* (`held_out`) and of the step trained from it.

A row is on the disk before the checkpoint that follows it. A resume at version *c* drops the rows from *c* on (their
steps are trained again), so that no step is missing and none is counted twice.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from shoal.runtime.files import resource_error, write_atomically

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends rows; reads back what is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        line = json.dumps({"step": step, **metrics}, allow_nan=False) + "\n"
        try:
            with self.path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise resource_error("write", self.path, error) from error

    def rows(self) -> list[dict[str, float]]:
        """All whole rows; a line torn by a crash is left out."""
        if not self.path.exists():
            return []
        rows = [_parse(line) for line in self.path.read_text(errors="replace").splitlines()]
        return [row for row in rows if row is not None]

    def rewind(self, step: int) -> None:
        """Forget what was measured in step `step` and later, and any torn line."""
        if not self.path.exists():
            return
        kept = [json.dumps(row) + "\n" for row in self.rows() if row["step"] < step]
        write_atomically(self.path, "".join(kept).encode())


def _parse(line: str) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except ValueError:
        log.warning("metrics: a torn line is left out: %.60r", line)
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
