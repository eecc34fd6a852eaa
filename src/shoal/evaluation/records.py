"""What an evaluation found, task by task: in a journal while it runs, in a Parquet file when it is done.

    out/evaluation.json   what is evaluated, written before anything is; another evaluation is refused here
    out/progress.jsonl    two lines per batch of tasks: its completions, before they are scored; then their scores.
                          Each is on the disk before anything else counts; the file is gone when all is done

A line that a crash cut short is cut off. Completions without scores are scored, not drawn again. Nothing that a grader
noted is written down: notes may tell the answers, and results are there to be shown.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ConfigError
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically

METADATA = b"shoal"
ROWS_PER_GROUP = 1024
PASSED = 1.0 - 1e-9
UNUSABLE = "its row cannot be used"
"""The `problem` of a task that no completion was drawn for because its row has no proper answer."""
IDENTITY = "evaluation.json"
PROGRESS = "progress.jsonl"


class SampleRecord(msgspec.Struct, frozen=True):
    """One completion. `score` is what the task itself is worth, None where scoring failed: unscored, never 0.

    `parts` are the grader's; with a length budget `reward` is among them, what training would have given.
    """

    score: float | None
    tokens: int
    finish: str
    parts: dict[str, float] = {}
    text: str = ""

    @property
    def passed(self) -> bool:
        return self.score is not None and self.score >= PASSED


class TaskRecord(msgspec.Struct, frozen=True):
    """One task. `part` is its label in a mixture; `problem` says why it has no samples, empty if it has."""

    task: str
    index: int
    prompt_digest: str
    kind: str = ""
    part: str = ""
    problem: str = ""
    samples: tuple[SampleRecord, ...] = ()
    prompt: str = ""

    @property
    def scores(self) -> list[float]:
        return [sample.score for sample in self.samples if sample.score is not None]

    @property
    def passes(self) -> int:
        return sum(sample.passed for sample in self.samples)

    @property
    def truncated(self) -> int:
        return sum(sample.finish == "length" for sample in self.samples)

    @property
    def mean(self) -> float | None:
        scores = self.scores
        return math.fsum(scores) / len(scores) if scores else None


# The journal

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
        self.folder, self.path = folder, folder / name
        self.batches = self.drawn = 0
        self._waiting: deque[tuple[TaskRecord, ...]] = deque()
        self._decoder = msgspec.json.Decoder(JournalLine)

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin, or continue, the evaluation that `identity` names; a folder of another one is a `ConfigError`."""
        ensure_folder(self.folder)
        if not is_kept(self.folder, identity):
            write_atomically(self.folder / IDENTITY, dumped(identity))
        try:
            self._mend()
        except OSError as error:
            raise resource_error("read", self.path, error) from error

    def waiting(self, number: int) -> tuple[TaskRecord, ...]:
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
                for record, scored in zip(waiting.popleft(), line.scored, strict=True):
                    pairs = zip(record.samples, scored, strict=True)
                    samples = tuple(msgspec.structs.replace(one, score=said[0], parts=said[1]) for one, said in pairs)
                    yield msgspec.structs.replace(record, samples=samples)

    def kept(self) -> Iterator[tuple[TaskRecord, ...]]:
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
                file.write(msgspec.json.encode(line) + b"\n")
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
                try:
                    line = self._decoder.decode(raw)
                except msgspec.DecodeError:
                    break
                is_next = line.batch == (self.drawn if line.drawn else self.batches)
                fits = bool(line.drawn) or (bool(line.scored) and self.batches < self.drawn)
                if not (raw.endswith(b"\n") and is_next and fits):
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


def is_kept(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the folder holds this very evaluation; another one, or somebody's files, are a `ConfigError`."""
    stored = read_identity(folder)
    if stored is None:
        others = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        if others:
            raise ConfigError(f"{folder} holds {others[0]} and no evaluation: choose another --out")
    elif stored != json.loads(dumped(identity)):
        raise ConfigError(f"{folder} holds another evaluation: {difference(stored, identity)}")
    return stored is not None


def dumped(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def difference(stored: Mapping[str, Any], wanted: Mapping[str, Any], what: str = "that folder") -> str:
    """Where two identities part, in words: the first value that differs."""
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


# The Parquet file


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file: it is in its place when it is whole and on the disk, if there is one."""
    hidden = path.with_name(f".{path.name}.writing")
    try:
        hidden.unlink(missing_ok=True)
        yield hidden
        if hidden.exists():
            with hidden.open("rb") as file:
                os.fsync(file.fileno())
            hidden.replace(path)
            sync_folder(path.absolute().parent)
    except OSError as error:
        raise resource_error("write", path, error) from error


SAME = ("task", "index", "prompt_digest", "kind", "part", "problem", "prompt")


def _as_row(record: TaskRecord) -> dict[str, Any]:
    samples = record.samples
    return {
        **{name: getattr(record, name) for name in SAME}, "samples": len(record.scores), "mean": record.mean,
        "passes": record.passes, "truncated": record.truncated,
        "scores": [sample.score for sample in samples], "tokens": [sample.tokens for sample in samples],
        "finish": [sample.finish for sample in samples], "completions": [sample.text for sample in samples],
        "parts": [sorted(sample.parts.items()) for sample in samples],
    }  # fmt: skip


def write_records(sink: Any, records: Iterable[TaskRecord], about: Mapping[str, Any]) -> None:
    """Stream records into a Parquet file; `about` is what they are results of. The same ones give the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, whole, real = pa.string(), pa.int32(), pa.float64()
    columns = {
        "task": text, "index": pa.int64(), "prompt_digest": text, "kind": text, "part": text, "problem": text,
        "samples": whole,  # that could be scored
        "mean": real, "passes": whole, "truncated": whole,
        "scores": pa.list_(real),  # null: unscored
        "tokens": pa.list_(whole), "finish": pa.list_(text), "parts": pa.list_(pa.map_(text, real)),
        "prompt": text, "completions": pa.list_(text),
    }  # fmt: skip
    schema = pa.schema(list(columns.items()), {METADATA: json.dumps(about, sort_keys=True).encode()})
    rows = map(_as_row, records)
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        while group := list(islice(rows, ROWS_PER_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def read_records(path: Path) -> Iterator[TaskRecord]:
    """The records that `write_records` wrote, in order, some in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_PER_GROUP):
                yield from map(_from_row, batch.to_pylist())
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ConfigError(f"{path} holds no completions of shoal eval: {_first_line(error)}") from error


def _from_row(row: Mapping[str, Any]) -> TaskRecord:
    columns = zip(*(row[name] for name in ("scores", "tokens", "finish", "parts", "completions")), strict=True)
    samples = tuple(SampleRecord(score, tokens, how, dict(parts), text) for score, tokens, how, parts, text in columns)
    return TaskRecord(**{name: row[name] for name in SAME}, samples=samples)


@dataclass(frozen=True)
class TaskResult:
    task: str
    prompt_digest: str
    samples: int
    mean: float


@dataclass(frozen=True)
class Results:
    """A finished evaluation, read back: what it is of, and the tasks that could be scored."""

    path: Path
    about: Mapping[str, Any]
    tasks: Sequence[TaskResult]

    @property
    def missing_share(self) -> float:
        """Of the samples that were asked for, how many have no score."""
        wanted = self.about.get("chosen", {}).get("tasks", 0) * self.about.get("plan", {}).get("samples", 0)
        return (wanted - sum(task.samples for task in self.tasks)) / wanted if wanted else 0.0


def read_results(path: Path, file: str) -> Results:
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = path / file if path.is_dir() else path
    if not found.is_file():
        hint = " (is it finished?)" if path.is_dir() else ""
        raise ConfigError(f"there are no results of an evaluation at {found}{hint}")
    try:
        table = pq.read_table(found, columns=["task", "prompt_digest", "samples", "mean"])
        about = json.loads((table.schema.metadata or {})[METADATA])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{found} holds no results of shoal eval: {_first_line(error)}") from error
    return Results(found, about, tuple(TaskResult(**row) for row in table.to_pylist() if row["mean"] is not None))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
