"""Tensors of which each process writes its own rows, read again by any number of processes.

    model-00001-of-00002.safetensors      rows 0…4 of every weight, written by rank 0
    model-00002-of-00002.safetensors      rows 5…9, written by rank 1
      └ metadata "shoal.rows": {name: {"shape": [10, 64], "start": 5}, …}: the whole shape, and the first row here

A tensor without such an entry is whole in its file (a count of updates, the state of a generator). Rows that are in no
file are an error, never zeros. No pickle: nothing in these files can run code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.models.state import TORCH_TYPES

ROWS = "shoal.rows"


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor: those from `start` on. `shape` is that of the whole."""

    values: Tensor
    shape: tuple[int, ...]
    start: int


def part_name(name: str, rank: int, world: int) -> str:
    """The file of one rank.

    >>> part_name("model.safetensors", 0, 2)
    'model-00001-of-00002.safetensors'
    """
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{rank + 1:05d}-of-{world:05d}.{suffix}"


def part_files(folder: Path, name: str) -> list[Path]:
    """The files that together are `name`: itself if it is there whole, else one for each rank that wrote it."""
    if (folder / name).is_file():
        return [folder / name]
    stem, _, suffix = name.rpartition(".")
    pattern = re.compile(rf"{re.escape(stem)}-(\d{{5}})-of-(\d{{5}})\.{re.escape(suffix)}", re.ASCII)
    found = {match[0]: int(match[2]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    worlds = set(found.values())
    if len(worlds) != 1 or len(found) != next(iter(worlds)):
        raise CheckpointError(f"the checkpoint {folder} is damaged: of {name} there are the parts {sorted(found)}")
    return [folder / part for part in sorted(found)]


def write_part(path: Path, tensors: Mapping[str, Tensor | Rows]) -> None:
    """Write one rank's file. The caller makes it durable."""
    shares = {name: value for name, value in tensors.items() if isinstance(value, Rows)}
    entries = {name: {"shape": list(rows.shape), "start": rows.start} for name, rows in shares.items()}
    values = {name: value.values if isinstance(value, Rows) else value for name, value in tensors.items()}
    metadata = {"format": "pt", ROWS: json.dumps(entries)}
    save_file({name: value.contiguous() for name, value in values.items()}, path, metadata=metadata)


def read_full(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors, whole, whoever wrote them."""
    with Parts(part_files(folder, name)) as parts:
        return {tensor: parts.read(tensor) for tensor in parts.names}


class Parts:
    """The parts of one file, open for reading: whole tensors, or only the rows that somebody needs."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = list(files)
        self._open = ExitStack()
        self._where: dict[str, list[_Span]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> Parts:
        try:
            for path in self._files:
                self._index(self._open.enter_context(safe_open(path, framework="pt")))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            self._open.close()
            raise CheckpointError(f"{path} is not a part of a checkpoint: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole."""
        return self._shapes[name]

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows, put together from the parts that hold them."""
        spans, shape = self._where[name], self._shapes[name]
        if not shape:
            number: Tensor = spans[0].file.get_tensor(name)
            return number
        wanted = rows or slice(0, shape[0])
        values = torch.empty((wanted.stop - wanted.start, *shape[1:]), dtype=spans[0].dtype)
        filled = wanted.start
        for span in sorted(spans, key=lambda span: span.start):
            first, last = max(filled, span.start), min(wanted.stop, span.stop)
            if span.start <= filled and first < last:
                values[first - wanted.start : last - wanted.start] = span.read(name, first, last)
                filled = last
        if filled != wanted.stop:
            raise CheckpointError(f"rows {filled}…{wanted.stop - 1} of {name} are in none of {self._named()}")
        return values

    def _index(self, file: Any) -> None:
        entries = json.loads((file.metadata() or {}).get(ROWS, "{}"))
        for name in file.keys():  # noqa: SIM118 - no dictionary
            part = file.get_slice(name)
            local = tuple(part.get_shape())
            entry = entries.get(name, {"shape": local, "start": 0})
            start, shape = int(entry["start"]), tuple(map(int, entry["shape"]))
            if self._shapes.setdefault(name, shape) != shape or local[1:] != shape[1:]:
                raise ValueError(f"{name} has another shape here than in another part")
            stop = start + (local[0] if local else 0)
            self._where.setdefault(name, []).append(_Span(file, start, stop, TORCH_TYPES[part.get_dtype()]))

    def _named(self) -> str:
        return ", ".join(path.name for path in self._files)


@dataclass(frozen=True)
class _Span:
    """Rows `start` to `stop` of a tensor lie in this open file."""

    file: Any
    start: int
    stop: int
    dtype: torch.dtype

    def read(self, name: str, first: int, last: int) -> Tensor:
        values: Tensor = self.file.get_slice(name)[first - self.start : last - self.start]
        return values
