"""Results as they come, kept: an evaluation that is stopped, or killed, goes on where it was.

    out/evaluation.json   what is evaluated, written before anything is; another evaluation is refused here
    out/progress.jsonl    one line per batch of tasks, on the disk before the next batch counts; gone when all is done

A line that a crash cut short is cut off, and its batch is drawn again, with the same dice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ConfigError
from shoal.evaluation.records import TaskRecord
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically

IDENTITY = "evaluation.json"
PROGRESS = "progress.jsonl"


class Line(msgspec.Struct, frozen=True):
    batch: int
    tasks: tuple[TaskRecord, ...]


class Journal:
    """The batches that are done, in order: batch 0, 1, 2, … Its one writer holds the lock on the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches = 0
        self._path = folder / PROGRESS
        self._encode = msgspec.json.Encoder().encode
        self._decoder = msgspec.json.Decoder(Line)

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin, or go on with, the evaluation that `identity` names; a folder of another one is a `ConfigError`."""
        ensure_folder(self.folder)
        stored = read_identity(self.folder)
        if stored is None:
            refuse_foreign(self.folder)
            write_atomically(self.folder / IDENTITY, dumped(identity))
        elif stored != json.loads(dumped(identity)):
            raise ConfigError(f"{self.folder} holds another evaluation: {difference(stored, identity)}")
        try:
            self._mend()
        except OSError as error:
            raise resource_error("read", self._path, error) from error

    def append(self, records: Sequence[TaskRecord]) -> None:
        """Write down the next batch; when this returns it survives a crash."""
        data = self._encode(Line(self.batches, tuple(records))) + b"\n"
        try:
            with self._path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if self.batches == 0:
                sync_folder(self.folder)
        except OSError as error:
            raise resource_error("write", self._path, error) from error
        self.batches += 1

    def records(self) -> Iterator[TaskRecord]:
        """Every task so far, in order, a batch in memory at a time."""
        if self._path.exists():
            with self._path.open("rb") as file:
                for raw in file:
                    yield from self._decoder.decode(raw).tasks

    def remove(self) -> None:
        """What was kept is in the results now."""
        self._path.unlink(missing_ok=True)

    def _mend(self) -> None:
        """Count the whole lines, and cut off what comes after the last of them."""
        self.batches, whole = 0, 0
        if not self._path.exists():
            return
        with self._path.open("r+b") as file:
            for raw in file:
                if not self._is_next(raw):
                    break
                self.batches += 1
                whole += len(raw)
            file.truncate(whole)
            os.fsync(file.fileno())

    def _is_next(self, raw: bytes) -> bool:
        try:
            return raw.endswith(b"\n") and self._decoder.decode(raw).batch == self.batches
        except msgspec.DecodeError:
            return False


def read_identity(folder: Path) -> dict[str, Any] | None:
    """What the folder is the evaluation of; None if it is of none yet."""
    path = folder / IDENTITY
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; choose another --out") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is no description of an evaluation; choose another --out")
    return value


def refuse_foreign(folder: Path) -> None:
    """A folder with somebody's files in it is not written to."""
    others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    if others:
        raise ConfigError(f"{folder} holds {sorted(others)[0]} and no evaluation: choose another --out")


def dumped(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def difference(stored: Mapping[str, Any], wanted: Mapping[str, Any], what: str = "that folder") -> str:
    """Where two identities part, in words: the first value that differs.

    >>> difference({"plan": {"seed": 1}}, {"plan": {"seed": 2}})
    'its plan.seed is 1, here it would be 2; choose another --out, or remove that folder'
    """
    before, after = dict(_flat(stored)), dict(_flat(wanted))
    for key in dict.fromkeys((*after, *before)):
        if before.get(key) != after.get(key):
            there, here = before.get(key, "not there"), after.get(key, "not there")
            return f"its {key} is {there}, here it would be {here}; choose another --out, or remove {what}"
    return "they differ"


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(inner) if isinstance(inner, tuple) else inner
