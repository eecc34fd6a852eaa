"""Results as they come, kept: an evaluation that is stopped, or killed, continues where it was.

    out/evaluation.json   what is evaluated, written before anything is; another evaluation is refused here
    out/progress.jsonl    two lines per batch of tasks: its completions, before they are scored; then their scores.
                          Each is on the disk before anything else counts; the file is gone when all is done

A line that a crash cut short is cut off. Completions without scores are scored, not drawn again.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ConfigError
from shoal.evaluation.records import TaskRecord
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically

IDENTITY = "evaluation.json"
PROGRESS = "progress.jsonl"


Worth = tuple[float | None, dict[str, float]]
"""The score of a sample, and its parts."""


class JournalLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was drawn for a batch, or how it was scored: sample by sample of each task."""

    batch: int
    drawn: tuple[TaskRecord, ...] = ()
    scored: tuple[tuple[Worth, ...], ...] = ()


class EvaluationJournal:
    """The batches so far, in order: 0, 1, 2, … `drawn` of them have completions, `batches` of these have scores.

    Its one writer holds the lock on the folder.
    """

    def __init__(self, folder: Path, name: str = PROGRESS) -> None:
        self.folder = folder
        self.batches = 0
        self.drawn = 0
        self.path = folder / name
        self._waiting: deque[tuple[TaskRecord, ...]] = deque()
        self._encode = msgspec.json.Encoder().encode
        self._decoder = msgspec.json.Decoder(JournalLine)

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin, or continue, the evaluation that `identity` names; a folder of another one is a `ConfigError`."""
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
            raise resource_error("read", self.path, error) from error

    def waiting(self, number: int) -> tuple[TaskRecord, ...]:
        """The completions of a batch that has no scores yet."""
        return self._waiting[number - self.batches]

    def append_drawn(self, records: Sequence[TaskRecord]) -> None:
        """Keep the next batch's completions; when this returns they survive a crash."""
        self._append(JournalLine(self.drawn, drawn=tuple(records)))

    def append_scored(self, records: Sequence[TaskRecord]) -> None:
        """Keep the scores of the first batch that waits for them."""
        scored = tuple(tuple((sample.score, sample.parts) for sample in record.samples) for record in records)
        self._append(JournalLine(self.batches, scored=scored))

    def records(self) -> Iterator[TaskRecord]:
        """Every task that was scored, in order, a few batches in memory at a time."""
        waiting: deque[tuple[TaskRecord, ...]] = deque()
        for line in self._lines():
            if line.drawn:
                waiting.append(line.drawn)
            else:
                yield from map(_scored, waiting.popleft(), line.scored)

    def kept(self) -> Iterator[tuple[TaskRecord, ...]]:
        """Every batch as it was drawn, scored or not."""
        return (line.drawn for line in self._lines() if line.drawn)

    def replace(self, other: EvaluationJournal) -> None:
        """Take the lines of another one of this folder, which is no more then."""
        try:
            other.path.replace(self.path)
            sync_folder(self.folder)
        except OSError as error:
            raise resource_error("write", self.path, error) from error
        self.batches, self.drawn, self._waiting = other.batches, other.drawn, other._waiting

    def remove(self) -> None:
        """What was kept is in the results now."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: JournalLine) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(self._encode(line) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            if self.drawn == 0:
                sync_folder(self.folder)
        except OSError as error:
            raise resource_error("write", self.path, error) from error
        self._count(line)

    def _lines(self) -> Iterator[JournalLine]:
        if self.path.exists():
            with self.path.open("rb") as file:
                yield from map(self._decoder.decode, file)

    def _mend(self) -> None:
        """Count the whole lines, and cut off what comes after the last of them."""
        self.batches, self.drawn, whole = 0, 0, 0
        self._waiting.clear()
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            for raw in file:
                line = self._next(raw)
                if line is None:
                    break
                self._count(line)
                whole += len(raw)
            file.truncate(whole)
            os.fsync(file.fileno())

    def _count(self, line: JournalLine) -> None:
        if line.drawn:
            self.drawn += 1
            self._waiting.append(line.drawn)
        else:
            self.batches += 1
            self._waiting.popleft()

    def _next(self, raw: bytes) -> JournalLine | None:
        """The line, if it is whole and may come next."""
        try:
            line = self._decoder.decode(raw)
        except msgspec.DecodeError:
            return None
        is_next = line.batch == (self.drawn if line.drawn else self.batches)
        fits = bool(line.drawn) or (bool(line.scored) and self.batches < self.drawn)
        return line if raw.endswith(b"\n") and is_next and fits else None


def _scored(record: TaskRecord, scored: Sequence[Worth]) -> TaskRecord:
    pairs = zip(record.samples, scored, strict=True)
    samples = tuple(msgspec.structs.replace(sample, score=worth[0], parts=worth[1]) for sample, worth in pairs)
    return msgspec.structs.replace(record, samples=samples)


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
