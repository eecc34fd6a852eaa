"""The results of an evaluation by task: in a journal while it runs, in a Parquet file at the end.

`job` lists the files. A journal has a line for each batch of tasks, synced to disk; a line that a crash cut short is
removed. Notes of graders are not stored: they may contain answers.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from shoal.errors import ConfigError
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically

METADATA = b"shoal"
ROWS_PER_GROUP = 1024
PASSED = 1.0 - 1e-9
UNUSABLE = "its row cannot be used"  # the `problem` of a task whose row has no proper answer
IDENTITY, COMPLETIONS, PROGRESS = "evaluation.json", "completions.jsonl", "progress.jsonl"


class SampleRecord(msgspec.Struct, frozen=True):
    """One completion. `score` is the task's own score; None: unscored. `parts` are the grader's; with a length budget
    they contain `reward`, the reward in training."""

    score: float | None
    tokens: int
    finish: str
    parts: dict[str, float] = {}
    text: str = ""
    token_ids: tuple[int, ...] | None = None  # those of the text, if the environment reads them


class TaskRecord(msgspec.Struct, frozen=True):
    """`part` is the task's label in a mixture; `problem`: why it was not sampled."""

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
        return sum(score >= PASSED for score in self.scores)

    @property
    def truncated(self) -> int:
        return sum(sample.finish == "length" for sample in self.samples)

    @property
    def mean(self) -> float | None:
        scores = self.scores
        return math.fsum(scores) / len(scores) if scores else None


@dataclass
class BatchFile:
    """A line for each batch, in order. `kind` is the type of a line; the one writer holds the lock on the folder."""

    path: Path
    kind: Any
    batches: int = field(init=False, default=0)

    def open(self, most: int) -> None:
        """Count the lines; remove everything after the last whole one, or after `most`."""
        self.batches = size = 0
        try:
            with self.path.open("a+b") as file:
                file.seek(0)
                for raw in islice(file, most):
                    try:
                        if not (msgspec.json.decode(raw, type=self.kind) and raw.endswith(b"\n")):
                            break
                    except msgspec.DecodeError:
                        break
                    self.batches, size = self.batches + 1, size + len(raw)
                file.truncate(size)
                os.fsync(file.fileno())
            sync_folder(self.path.parent)
        except OSError as error:
            raise resource_error("read", self.path, error) from error

    def append(self, batch: Sequence[Any]) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(batch) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise resource_error("write", self.path, error) from error
        self.batches += 1

    def __iter__(self) -> Iterator[Any]:
        with self.path.open("rb") as file:
            yield from map(msgspec.json.Decoder(self.kind).decode, file)


class EvaluationJournal:
    """The completions drawn so far, and the scores of these batches or the first of them."""

    def __init__(self, folder: Path, scores: str = PROGRESS) -> None:
        self.folder = folder
        self.completions = BatchFile(folder / COMPLETIONS, list[TaskRecord])
        self.scores = BatchFile(folder / scores, list[list[tuple[float | None, dict[str, float]]]])

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin or continue the evaluation that `identity` names; a folder of another one is a `ConfigError`."""
        folder = ensure_folder(self.folder)
        if not is_kept(folder, identity):
            write_atomically(folder / IDENTITY, dumped(identity))
        self.completions.open(sys.maxsize)
        self.scores.open(self.completions.batches)

    def keep_scores(self, records: Sequence[TaskRecord]) -> None:
        self.scores.append([[(sample.score, sample.parts) for sample in record.samples] for record in records])

    def records(self) -> Iterator[TaskRecord]:
        for drawn, scored in zip(self.completions, self.scores, strict=False):
            for record, found in zip(drawn, scored, strict=True):
                pairs = zip(record.samples, found, strict=True)
                samples = tuple(replace(sample, score=score, parts=parts) for sample, (score, parts) in pairs)
                yield replace(record, samples=samples)


def read_identity(folder: Path) -> Any:
    try:
        return json.loads((folder / IDENTITY).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / IDENTITY} cannot be read: {error}; choose the folder of an evaluation") from error


def refuse_unusable(folder: Path) -> None:
    """Refuse a place where results cannot be stored. Nothing is created."""
    place = folder.absolute()
    ensure_folder(next(path for path in (place, *place.parents) if os.path.lexists(path)))
    entries = place.iterdir() if place.is_dir() and not (place / IDENTITY).exists() else ()
    if others := sorted(entry.name for entry in entries if not entry.name.startswith(".")):
        raise ConfigError(f"{folder} holds {others[0]} and no evaluation: choose another --out")


def is_kept(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the folder has this evaluation; `ConfigError` for another one, or for other files."""
    refuse_unusable(folder)
    if not (folder / IDENTITY).exists():
        return False
    if (stored := read_identity(folder)) != json.loads(dumped(identity)):
        raise ConfigError(f"{folder} holds another evaluation: {difference(stored, identity)}")
    return True


def dumped(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def difference(stored: Any, wanted: Mapping[str, Any], what: str = "that folder") -> str:
    def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, inner in value.items() if isinstance(value, Mapping) else ():
            if isinstance(inner, Mapping):
                yield from flat(inner, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", list(inner) if isinstance(inner, tuple) else inner

    before, after = dict(flat(stored)), dict(flat(wanted))
    for key in dict.fromkeys((*after, *before)):
        there, here = before.get(key, "not there"), after.get(key, "not there")
        if there != here:
            return f"its {key} is {there}, here it would be {here}; choose another --out, or remove {what}"
    return "they differ"


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a hidden path; a file that was written there replaces `path` at the end, synced to disk."""
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


def write_records(sink: Any, records: Iterable[TaskRecord], about: Mapping[str, Any]) -> None:
    """Stream records into a Parquet file; `about` identifies the evaluation. Equal records give equal bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, small, real = pa.string(), pa.int32(), pa.float64()
    columns = {
        "task": text, "index": pa.int64(), "prompt_digest": text, "kind": text, "part": text, "problem": text,
        "samples": small,  # that could be scored
        "mean": real, "passes": small, "truncated": small,
        "scores": pa.list_(real),  # null: unscored
        "tokens": pa.list_(small), "finish": pa.list_(text), "parts": pa.list_(pa.map_(text, real)),
        "prompt": text, "completions": pa.list_(text),
    }  # fmt: skip

    def row(record: TaskRecord) -> dict[str, Any]:
        found = {name: getattr(record, name, None) for name in columns}
        for column, name in (("scores", "score"), ("tokens", "tokens"), ("finish", "finish"), ("completions", "text")):
            found[column] = [getattr(sample, name) for sample in record.samples]
        found["parts"] = [sorted(sample.parts.items()) for sample in record.samples]
        return found | {"samples": len(record.scores)}

    schema = pa.schema(list(columns.items()), {METADATA: json.dumps(about, sort_keys=True).encode()})
    rows = map(row, records)
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        while group := list(islice(rows, ROWS_PER_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


@dataclass(frozen=True)
class Results:
    """A finished evaluation: its identity, and (prompt digest, mean, samples) of each scored task."""

    path: Path
    about: Mapping[str, Any]
    tasks: Mapping[str, tuple[str, float, int]]

    @property
    def missing_share(self) -> float:
        wanted = self.about.get("chosen", {}).get("tasks", 0) * self.about.get("plan", {}).get("samples", 0)
        return (wanted - sum(samples for *_, samples in self.tasks.values())) / wanted if wanted else 0.0


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
        raise ConfigError(f"{found} holds no results of shoal eval: {str(error).partition(chr(10))[0]}") from error
    rows = [row for row in table.to_pylist() if row["mean"] is not None]
    return Results(found, about, {row["task"]: (row["prompt_digest"], row["mean"], row["samples"]) for row in rows})
