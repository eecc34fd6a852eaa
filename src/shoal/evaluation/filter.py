"""The data set that `shoal filter` writes: rows of the original with all columns, and the solve rate of each.

A task that is always or never solved gives no gradient: all rewards of its group are equal.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shoal.environments import Environment
from shoal.environments.data.readers import Broken, DataTable
from shoal.environments.dataset import DatasetEnvironment
from shoal.environments.settings import inner_of
from shoal.errors import ConfigError
from shoal.evaluation.plan import Part, tasks_of
from shoal.evaluation.records import METADATA, TaskRecord, difference, whole
from shoal.runtime.files import ensure_folder

GROUP_ROWS = 1000
NEAR = 1e-9
BINS, BAR = 10, 40


@dataclass(frozen=True)
class RateBand:
    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> RateBand:
        try:
            low, high = map(float, text.split(":"))
        except ValueError:
            low = high = math.nan
        if not 0 <= low <= high <= 1:
            raise ConfigError(f"--pass-rate {text}: give two rates from 0 to 1, the lower first, for example 0.125:0.5")
        return cls(low, high)

    def holds(self, rate: float) -> bool:
        return self.low - NEAR <= rate <= self.high + NEAR

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"


class Rate(NamedTuple):
    """The share of scored samples that solved a task, and their number."""

    value: float
    samples: int


def rates_by_row(environment: Environment, part: Part, records: Iterable[TaskRecord]) -> dict[int, Rate]:
    """Rates by row of the data set, or by number in the split if tasks are no rows; only of tasks with a score."""
    scored = ((record.index, record.passes, len(record.scores)) for record in records if record.scores)
    return {row_of(environment, part, index): Rate(passes / samples, samples) for index, passes, samples in scored}


def data_of(environment: Environment) -> DatasetEnvironment | None:
    inner = inner_of(environment)
    return inner if isinstance(inner, DatasetEnvironment) else None


def row_of(environment: Environment, part: Part, index: int) -> int:
    if (data := data_of(environment)) is None:
        return index
    train, held_out = data.splits.train, data.splits.held_out
    if part == "train":
        return int(train[index])
    return int(held_out[index] if part == "held_out" or index < len(held_out) else train[index - len(held_out)])


def histogram_lines(rates: Mapping[int, Rate], samples: int, band: RateBand) -> Iterator[str]:
    """`0.125 ▏████████ 312 ◂`: the number of tasks by rate; rates in the band are marked."""
    steps = min(samples, BINS)
    counts = Counter(min(steps, round(rate.value * steps)) for rate in rates.values())
    largest = max(counts.values(), default=1)
    for step in range(steps + 1):
        bar = "█" * round(BAR * counts[step] / largest)
        marked = " ◂" if band.holds(step / steps) else ""
        yield f"  {step / steps:5.3f} ▏{bar:<{BAR}} {counts[step]:,}{marked}"


def rate_columns(model: str) -> tuple[str, str]:
    return f"solve_rate_{model}", f"samples_{model}"


def refuse_taken(columns: Iterable[str], model: str) -> None:
    if taken := sorted({*rate_columns(model)} & set(columns)):
        raise ConfigError(f"the data has a column {taken[0]} already: give the new ones another name with --name")


def original_rows(table: DataTable, rates: Mapping[int, Rate], band: RateBand | None, model: str) -> Any:
    """The rows in the band; without a band all rows, measured or not. Parquet keeps its types, others are inferred."""
    import pyarrow as pa

    found: dict[str, list[Any]] = {name: [] for name in table.columns}
    rows, start = list[int](), 0
    for batch in table.scan(table.columns):
        numbers = range(start, start + len(next(iter(batch.values()))))
        keep = [row - start for row in numbers if band is None or (row in rates and band.holds(rates[row].value))]
        rows += [start + offset for offset in keep]
        for name, values in batch.items():
            if isinstance(values, list):  # of a JSON file; a line that could not be read has none
                found[name] += [None if isinstance(values[each], Broken) else values[each] for each in keep]
            else:
                found[name].append(values.take(pa.array(keep, pa.int64())))
        start = numbers.stop
    kept = pa.table({name: _column(values) for name, values in found.items()})
    return _with_rates(kept, [rates.get(row) for row in rows], model)


def _column(values: list[Any]) -> Any:
    """The values, or arrays of them, as one array; mixed types, and records without fields, as JSON."""
    import pyarrow as pa

    if values and isinstance(values[0], pa.Array | pa.ChunkedArray):
        return pa.chunked_array([array.cast(values[0].type) for array in values])
    with suppress(pa.ArrowException):
        array = pa.array(values)
        if "struct<>" not in str(array.type):
            return array
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(texts, pa.string())


def task_rows(
    environment: Environment, part: Part, rates: Mapping[int, Rate], band: RateBand | None, model: str
) -> Any:
    import pyarrow as pa

    kept, tasks = [n for n in sorted(rates) if band is None or band.holds(rates[n].value)], tasks_of(environment, part)
    rows = [(task.id, task.prompt, task.answer) for task in map(tasks.__getitem__, kept)]
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    names = ["problem_id", "prompt", "answer"]
    table = pa.Table.from_arrays([pa.array(column, pa.string()) for column in columns], names=names)
    return _with_rates(table, [rates[number] for number in kept], model)


def _with_rates(table: Any, found: Sequence[Rate | None], model: str) -> Any:
    import pyarrow as pa

    rate, samples = rate_columns(model)
    table = table.append_column(rate, pa.array([each and each.value for each in found], pa.float64()))
    return table.append_column(samples, pa.array([each.samples if each else 0 for each in found], pa.int32()))


def write_rows(path: Path, table: Any, about: Mapping[str, Any]) -> int:
    """Write a table atomically, unless it is empty; the number of its rows."""
    import pyarrow.parquet as pq

    if table.num_rows:
        ensure_folder(path.absolute().parent)
        stored = {**(table.schema.metadata or {}), METADATA: json.dumps(about, sort_keys=True).encode()}
        with whole(path) as hidden:
            pq.write_table(table.replace_schema_metadata(stored), hidden, row_group_size=GROUP_ROWS, compression="zstd")
    return int(table.num_rows)


def written_before(path: Path, about: Mapping[str, Any] | None = None) -> bool:
    """Whether the file exists and is the result of `about` (None: of any filter); another file is a `ConfigError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        return False
    try:
        stored: dict[str, Any] = json.loads((pq.read_schema(path).metadata or {})[METADATA])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is there and was not written by shoal filter: choose another --out") from error
    if about is not None and stored != json.loads(json.dumps(about)):
        raise ConfigError(f"{path} is another result: {difference(stored, about, 'that file')}")
    return True
