"""The data set that `shoal filter` writes: the rows of the original, all their columns, and how often each was solved.

    pass rates by row ─┐
    original rows ─────┴─► those within the band ─► Parquet, streamed, in place when it is whole

A task that is always solved, or never, teaches nothing: all rewards of its group are equal. The result is a data set
like any other: it can be trained on, looked at, and filtered again.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.environments import Environment
from shoal.environments.composed import inner_of
from shoal.environments.data.readers import Broken, Table
from shoal.environments.dataset import DatasetEnvironment
from shoal.errors import ConfigError
from shoal.evaluation.plan import Part, tasks_of
from shoal.evaluation.records import METADATA, TaskRecord, difference, whole
from shoal.runtime.files import ensure_folder

GROUP_BYTES = 32 * 2**20
GROUP_ROWS = 4096
BATCH_TASKS = 1024
NEAR = 1e-9
BINS = 10
BAR = 40


@dataclass(frozen=True)
class RateBand:
    """Pass rates to keep, both ends included."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> RateBand:
        low, colon, high = text.partition(":")
        try:
            band = cls(float(low), float(high))
        except ValueError:
            band = cls(math.nan, math.nan)
        if not colon or not 0 <= band.low <= band.high <= 1:
            raise ConfigError(f"--keep {text}: give two rates from 0 to 1, the lower first, for example 0.125:0.5")
        return band

    def holds(self, rate: float) -> bool:
        return self.low - NEAR <= rate <= self.high + NEAR

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"


@dataclass(frozen=True)
class Rate:
    """How often a task was solved, of so many samples that could be scored."""

    passes: int
    samples: int

    @property
    def value(self) -> float:
        return self.passes / self.samples


def rates(records: Iterable[TaskRecord]) -> Iterator[tuple[TaskRecord, Rate]]:
    for record in records:
        samples = len(record.scores)
        if samples:
            yield record, Rate(record.passes, samples)


def histogram_lines(values: Sequence[float], samples: int, band: RateBand) -> Iterator[str]:
    """How many tasks have which rate; those in the band are marked.

    0.125 ▏████████ 312 ◂
    """
    steps = samples if samples <= BINS else BINS
    counts = Counter(min(steps, round(value * steps)) for value in values)
    largest = max(counts.values(), default=1)
    for step in range(steps + 1):
        count = counts.get(step, 0)
        bar = "█" * round(BAR * count / largest)
        marked = " ◂" if band.holds(step / steps) else ""
        yield f"  {step / steps:5.3f} ▏{bar:<{BAR}} {count:,}{marked}"


@dataclass(frozen=True)
class Columns:
    """What the new columns are called: by the model that was asked."""

    model: str

    @property
    def rate(self) -> str:
        return f"solve_rate_{self.model}"

    @property
    def samples(self) -> str:
        return f"samples_{self.model}"

    def refuse_taken(self, columns: Iterable[str]) -> None:
        taken = sorted({self.rate, self.samples} & set(columns))
        if taken:
            raise ConfigError(f"the data has a column {taken[0]} already: give the new ones another name with --name")


@dataclass(frozen=True)
class RowSelection:
    """Which rows stay: by their rates, which are found by row; `everything` keeps those outside the band, too."""

    rates: Mapping[int, Rate]
    band: RateBand
    everything: bool = False

    def keeps(self, row: int) -> bool:
        rate = self.rates.get(row)
        return self.everything if rate is None else self.everything or self.band.holds(rate.value)


def data_of(environment: Environment) -> DatasetEnvironment | None:
    inner = inner_of(environment)
    return inner if isinstance(inner, DatasetEnvironment) else None


def row_of(environment: DatasetEnvironment, part: Part, index: int) -> int:
    splits = environment.splits
    if part == "train":
        return int(splits.train[index])
    before = len(splits.held_out)
    return int(splits.held_out[index] if part == "held_out" or index < before else splits.train[index - before])


def original_rows(table: Table, selection: RowSelection, columns: Columns) -> Iterator[Any]:
    """The rows that stay, as Arrow tables of one schema, with the new columns."""
    import pyarrow as pa

    schema = _schema(table)
    start = 0
    for batch in table.scan(table.columns):
        size = len(next(iter(batch.values())))
        keep = [offset for offset in range(size) if selection.keeps(start + offset)]
        if keep:
            arrays = [_taken(batch[field.name], keep, field) for field in schema]
            rates = [selection.rates.get(start + offset) for offset in keep]
            yield _with_rates(pa.Table.from_arrays(arrays, schema=schema), rates, columns)
        start += size


def _schema(table: Table) -> Any:
    """The types of all columns; where the files say nothing of types, all rows are looked at."""
    import pyarrow as pa

    kinds: dict[str, Any] = {}
    for batch in table.scan(table.columns):
        for name, values in batch.items():
            kind = values.type if isinstance(values, pa.Array | pa.ChunkedArray) else _inferred(values)
            kinds[name] = _joined(kinds[name], kind) if name in kinds else kind
        if all(isinstance(values, pa.Array | pa.ChunkedArray) for values in batch.values()):
            break  # files that say their types say the same ones throughout
    # Parquet has no records without fields, which is what `{}` in a JSON file becomes
    return pa.schema(
        [(name, kinds[name] if "struct<>" not in str(kinds[name]) else pa.string()) for name in table.columns]
    )


def _inferred(values: Sequence[Any]) -> Any:
    import pyarrow as pa

    try:
        return pa.array(_plain(values)).type
    except pa.ArrowException:
        return pa.string()  # of many types: kept as JSON


def _joined(one: Any, other: Any) -> Any:
    import pyarrow as pa

    if one == other:
        return one
    try:
        pair = [pa.schema([("it", kind)]) for kind in (one, other)]
        return pa.unify_schemas(pair, promote_options="permissive").field("it").type
    except pa.ArrowException:
        return pa.string()


def _taken(values: Any, keep: Sequence[int], field: Any) -> Any:
    import pyarrow as pa

    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.take(pa.array(keep)).cast(field.type)
    chosen = _plain([values[offset] for offset in keep])
    if pa.types.is_string(field.type):
        chosen = [value if value is None or isinstance(value, str) else json.dumps(value) for value in chosen]
    return pa.array(chosen, field.type)


def _plain(values: Sequence[Any]) -> list[Any]:
    """Values of a JSON file; a line that could not be read has none."""
    return [None if isinstance(value, Broken) else value for value in values]


def _with_rates(table: Any, found: Sequence[Rate | None], columns: Columns) -> Any:
    import pyarrow as pa

    values = [None if rate is None else rate.value for rate in found]
    samples = [0 if rate is None else rate.samples for rate in found]
    table = table.append_column(columns.rate, pa.array(values, pa.float64()))
    return table.append_column(columns.samples, pa.array(samples, pa.int32()))


def task_rows(environment: Environment, part: Part, selection: RowSelection, columns: Columns) -> Iterator[Any]:
    """The tasks that stay, with prompt and answer as columns; rows are their numbers in the split."""
    import pyarrow as pa

    tasks = tasks_of(environment, part)
    kept = [number for number in sorted(selection.rates) if selection.keeps(number)]
    for start in range(0, len(kept), BATCH_TASKS):
        numbers = kept[start : start + BATCH_TASKS]
        rows = [
            {"problem_id": task.id, "prompt": task.prompt, "answer": task.answer}
            for task in map(tasks.__getitem__, numbers)
        ]
        schema = pa.schema([(name, pa.string()) for name in ("problem_id", "prompt", "answer")])
        table = pa.Table.from_pylist(rows, schema)
        yield _with_rates(table, [selection.rates[number] for number in numbers], columns)


def write_rows(path: Path, tables: Iterable[Any], about: Mapping[str, Any]) -> int:
    """Stream tables of one schema into the file at `path`, whole or not at all; how many rows there are.

    Nothing is written for no rows: a data set without any cannot be trained on.
    """
    import pyarrow.parquet as pq

    ensure_folder(path.absolute().parent)
    writer, rows = None, 0
    with whole(path) as hidden:
        for group in _grouped(tables):
            if writer is None:
                said = {**(group.schema.metadata or {}), METADATA: json.dumps(about, sort_keys=True).encode()}
                writer = pq.ParquetWriter(hidden, group.schema.with_metadata(said), compression="zstd")
            writer.write_table(group.replace_schema_metadata(writer.schema.metadata))
            rows += group.num_rows
        if writer is not None:
            writer.close()
    return rows


def _grouped(tables: Iterable[Any]) -> Iterator[Any]:
    """Tables joined until they are worth a row group; one that is read later must fit into memory."""
    import pyarrow as pa

    held: list[Any] = []
    for table in tables:
        held.append(table)
        if sum(each.num_rows for each in held) >= GROUP_ROWS or sum(each.nbytes for each in held) >= GROUP_BYTES:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def stored_about(path: Path) -> dict[str, Any] | None:
    """What the result at `path` is of; None if nothing is there. A file that is no result is a `ConfigError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        return None
    try:
        stored: dict[str, Any] = json.loads((pq.read_schema(path).metadata or {})[METADATA])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is there and was not written by shoal filter: choose another --out") from error
    return stored


def written_before(path: Path, about: Mapping[str, Any]) -> bool:
    """Whether the file is there and is this very result; another one is a `ConfigError`."""
    stored = stored_about(path)
    if stored is not None and stored != json.loads(json.dumps(about)):
        raise ConfigError(f"{path} is another result: {difference(stored, about, 'that file')}")
    return stored is not None
