"""What an evaluation found, task by task, and the Parquet file of it.

Nothing that a grader noted is written down: notes may tell the answers, and results are there to be shown.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ConfigError

METADATA = b"shoal"
ROWS_PER_GROUP = 1024
PASSED = 1.0 - 1e-9
UNUSABLE = "its row cannot be used"
"""The `problem` of a task that no completion was drawn for because its row has no proper answer."""


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
    """One task. `part` is its label in a mixture; `problem` says why it has no samples, empty if it has.

    >>> TaskRecord("a", 0, "", samples=(SampleRecord(1.0, 3, "eos"), SampleRecord(None, 3, "eos"))).scores
    [1.0]
    """

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
    def mean(self) -> float | None:
        """The mean of what could be scored; None where nothing could."""
        scores = self.scores
        return math.fsum(scores) / len(scores) if scores else None


def schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("task", pa.string()),
            ("index", pa.int64()),
            ("prompt_digest", pa.string()),
            ("kind", pa.string()),
            ("part", pa.string()),
            ("problem", pa.string()),
            ("samples", pa.int32()),  # that could be scored
            ("mean", pa.float64()),
            ("passes", pa.int32()),
            ("truncated", pa.int32()),
            ("scores", pa.list_(pa.float64())),  # null: unscored
            ("tokens", pa.list_(pa.int32())),
            ("finish", pa.list_(pa.string())),
            ("parts", pa.list_(pa.map_(pa.string(), pa.float64()))),
            ("prompt", pa.string()),
            ("completions", pa.list_(pa.string())),
        ]
    )


def as_row(record: TaskRecord) -> dict[str, Any]:
    samples = record.samples
    return {
        "task": record.task, "index": record.index, "prompt_digest": record.prompt_digest, "kind": record.kind,
        "part": record.part, "problem": record.problem, "samples": len(record.scores), "mean": record.mean,
        "passes": record.passes, "truncated": sum(sample.finish == "length" for sample in samples),
        "scores": [sample.score for sample in samples], "tokens": [sample.tokens for sample in samples],
        "finish": [sample.finish for sample in samples],
        "parts": [sorted(sample.parts.items()) for sample in samples],
        "prompt": record.prompt, "completions": [sample.text for sample in samples],
    }  # fmt: skip


def write_records(sink: Any, records: Iterable[TaskRecord], about: Mapping[str, Any]) -> None:
    """Stream records into a Parquet file; `about` is what they are results of. The same ones give the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = schema().with_metadata({METADATA: json.dumps(about, sort_keys=True).encode()})
    rows = (as_row(record) for record in records)
    with pq.ParquetWriter(sink, kind, compression="zstd") as writer:
        while group := list(islice(rows, ROWS_PER_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=kind))


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
    named = {name: row[name] for name in ("task", "index", "prompt_digest", "kind", "part", "problem", "prompt")}
    return TaskRecord(**named, samples=samples)


@dataclass(frozen=True)
class TaskResult:
    """What a comparison needs of a task."""

    task: str
    prompt_digest: str
    samples: int
    mean: float
    passes: int


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
    """The results in a folder that `shoal eval` wrote, or in its Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = path / file if path.is_dir() else path
    if not found.is_file():
        hint = " (is it finished?)" if path.is_dir() else ""
        raise ConfigError(f"there are no results of an evaluation at {found}{hint}")
    try:
        table = pq.read_table(found, columns=["task", "prompt_digest", "samples", "mean", "passes"])
        about = json.loads((table.schema.metadata or {})[METADATA])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{found} holds no results of shoal eval: {_first_line(error)}") from error
    return Results(found, about, tuple(_scored(table.to_pylist())))


def _scored(rows: Iterable[Mapping[str, Any]]) -> Iterator[TaskResult]:
    for row in rows:
        if row["mean"] is not None:
            yield TaskResult(row["task"], row["prompt_digest"], row["samples"], row["mean"], row["passes"])


def parquet_bytes(records: Iterable[TaskRecord], about: Mapping[str, Any]) -> bytes:
    """The whole file in memory: for tests and small results."""
    sink = io.BytesIO()
    write_records(sink, records, about)
    return sink.getvalue()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
