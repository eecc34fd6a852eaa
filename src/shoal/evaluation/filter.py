"""The data set that `shoal filter` writes: the rows of the original, all their columns, and how often each was solved.

    pass rates by row ─┐
    original rows ─────┴─► those within the band, in memory ─► Parquet, in place when it is whole

A task that is always solved, or never, teaches nothing: all rewards of its group are equal. The result is a data set
like any other: it can be trained on, looked at, and filtered again.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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

GROUP_ROWS = 1000
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


def original_rows(table: Table, selection: RowSelection, columns: Columns) -> Any:
    """The rows that stay as one Arrow table, with the new columns. Types of Parquet are kept, others are inferred."""
    import pyarrow as pa

    found: dict[str, list[Any]] = {name: [] for name in table.columns}
    rows, start = list[int](), 0
    for batch in table.scan(table.columns):
        size = len(next(iter(batch.values())))
        keep = [offset for offset in range(size) if selection.keeps(start + offset)]
        rows += [start + offset for offset in keep]
        for name, values in batch.items():
            if isinstance(values, list):  # of a JSON file; a line that could not be read has none
                found[name] += [None if isinstance(values[each], Broken) else values[each] for each in keep]
            else:
                found[name].append(values.take(pa.array(keep, pa.int64())))
        start += size
    kept = pa.table({name: _column(values) for name, values in found.items()})
    return _with_rates(kept, [selection.rates.get(row) for row in rows], columns)


def _column(values: list[Any]) -> Any:
    """The values, or the arrays of them, as one array. Values of many types are kept as JSON; so are those that are
    records without fields (`{}`), which Parquet has not."""
    import pyarrow as pa

    if values and isinstance(values[0], pa.Array | pa.ChunkedArray):
        return pa.chunked_array([array.cast(values[0].type) for array in values])
    with suppress(pa.ArrowException):
        array = pa.array(values)
        if "struct<>" not in str(array.type):
            return array
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(texts, pa.string())


def _with_rates(table: Any, found: Sequence[Rate | None], columns: Columns) -> Any:
    import pyarrow as pa

    values = [None if rate is None else rate.value for rate in found]
    samples = [0 if rate is None else rate.samples for rate in found]
    table = table.append_column(columns.rate, pa.array(values, pa.float64()))
    return table.append_column(columns.samples, pa.array(samples, pa.int32()))


def task_rows(environment: Environment, part: Part, selection: RowSelection, columns: Columns) -> Any:
    """The tasks that stay, with prompt and answer as columns; rows are their numbers in the split."""
    import pyarrow as pa

    kept, tasks = [number for number in sorted(selection.rates) if selection.keeps(number)], tasks_of(environment, part)
    rows = [(task.id, task.prompt, task.answer) for task in map(tasks.__getitem__, kept)]
    arrays = [pa.array([row[place] for row in rows], pa.string()) for place in range(3)]
    table = pa.Table.from_arrays(arrays, names=["problem_id", "prompt", "answer"])
    return _with_rates(table, [selection.rates[number] for number in kept], columns)


def write_rows(path: Path, table: Any, about: Mapping[str, Any]) -> int:
    """Write a table to the file at `path`, whole or not at all; how many rows there are.

    Nothing is written for no rows: a data set without any cannot be trained on.
    """
    import pyarrow.parquet as pq

    if table.num_rows:
        ensure_folder(path.absolute().parent)
        said = {**(table.schema.metadata or {}), METADATA: json.dumps(about, sort_keys=True).encode()}
        with whole(path) as hidden:
            pq.write_table(table.replace_schema_metadata(said), hidden, row_group_size=GROUP_ROWS, compression="zstd")
    return int(table.num_rows)


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
