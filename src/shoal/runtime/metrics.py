"""Numbers over time as JSON lines: one object per line, whole or not there.

    {"step": 3, "at_ms": 1700000000000, "reward_mean": 0.61, "loss": 0.02}

JSON has no NaN or infinity; they are written as null, so that any reader can open the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.runtime.files import resource_error


class MetricsWriter:
    """Appends to one file. There is one writer per file; each line reaches the system in a single write.

    A line torn by a crash is cut off when the file is opened again, so that the next one is not glued to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise resource_error("write metrics to", path, error) from error

    def write(self, values: Mapping[str, Any]) -> None:
        finite = {key: _finite(value) for key, value in values.items()}
        line = json.dumps(finite, allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            raise resource_error("write metrics to", self._path, error) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of the file, in order; none if there is no file. A torn last line is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise resource_error("read", path, error) from error
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
