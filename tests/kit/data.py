"""Small data sets in every kind of file, for the tests of data sets."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit import Patch, TempPaths
from shoal.environments import EnvironmentSettings, Task, build
from shoal.environments.data.scanning import Problems
from shoal.environments.dataset import DatasetEnvironment
from shoal.environments.protocol import SPLITS
from shoal.errors import EnvironmentSetupError

FORMATS = Path(__file__).parents[1] / "data" / "formats"
Rows = Sequence[dict[str, Any]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: TempPaths, monkeypatch: Patch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "shoal" / "data"


def described(count: int, **changes: dict[int, Any]) -> list[dict[str, Any]]:
    """Rows in the described schema; `prompt={3: None}` changes row 3."""
    rows = [
        {
            "problem_id": f"p{number}", "task_type": "verifiable_math", "prompt": f"What is {number} + {number}?",
            "verification_info": json.dumps({"ground_truth": str(2 * number)}), "solve_rate_tiny": (number % 9) / 8,
        }
        for number in range(count)
    ]  # fmt: skip
    for column, values in changes.items():
        for number, value in values.items():
            rows[number][column] = value
    return rows


def open_data(path: Path, held_out_size: int = 2, **options: Any) -> DatasetEnvironment:
    settings = EnvironmentSettings(name="dataset", data=path, held_out_size=held_out_size, options=options)
    environment = build(settings)
    assert isinstance(environment, DatasetEnvironment)
    return environment


def refused(path: Path, **options: Any) -> str:
    """Why a data set is refused."""
    with pytest.raises(EnvironmentSetupError) as raised:
        open_data(path, **options)
    return str(raised.value)


def checked(environment: DatasetEnvironment, progress: Callable[[int, int], None] = lambda *_: None) -> Problems:
    """Everything that is wrong with a data set that has no other beside it."""
    (found,) = environment.check(progress)
    return found.problems


def tasks_of(environment: DatasetEnvironment) -> list[Task]:
    """The tasks of both splits in the order of their rows."""
    found = [task for split in SPLITS for task in environment.tasks(split)]
    return sorted(found, key=lambda task: int(task.id.partition("/")[0]))


def rows_in(name: str) -> list[dict[str, Any]]:
    """The rows of one of the hand-made files."""
    return [json.loads(line) for line in (FORMATS / f"{name}.jsonl").read_text().splitlines()]


def fixture(name: str, folder: Path, packed: bool) -> Path:
    """One of the hand-made files, or the same rows as Parquet."""
    return write_parquet(folder / "a.parquet", rows_in(name)) if packed else FORMATS / f"{name}.jsonl"


both_kinds = pytest.mark.parametrize("packed", [False, True])


def lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def written(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_jsonl(path: Path, rows: Rows) -> Path:
    return written(path, lines(rows))


def write_parquet(path: Path, rows: Rows, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, **how)
    return path


def write_either(path: Path, rows: Rows) -> Path:
    """Parquet or JSON lines, as the name says."""
    return (write_parquet if path.suffix == ".parquet" else write_jsonl)(path, rows)


def _shards(folder: Path, rows: Rows) -> Path:
    half = len(rows) // 2
    write_parquet(folder / "b-1.parquet", rows[half:])
    write_parquet(folder / "a-2.parquet", rows[:half])
    return written(folder / "README.md", "not data").parent


def _repository(folder: Path, rows: Rows) -> Path:
    """A hub repository: one split per name, files that are links."""
    half = len(rows) // 2
    data = folder / "repository" / "data"
    data.mkdir(parents=True)
    parts = {"train-00000-of-00002": rows[:half], "train-00001-of-00002": rows[half:], "test-00000-of-00001": rows}
    for number, (name, part) in enumerate(parts.items()):
        (data / f"{name}.parquet").symlink_to(write_parquet(folder / "blobs" / str(number), part))
    return data.parent


KINDS: dict[str, Callable[[Path, Rows], Path]] = {
    "jsonl": lambda folder, rows: write_jsonl(folder / "data.jsonl", rows),
    "parquet": lambda folder, rows: write_parquet(folder / "data.parquet", rows, row_group_size=3),
    "shards": _shards, "repository": _repository,
}  # fmt: skip
