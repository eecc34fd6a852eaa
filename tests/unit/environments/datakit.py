"""Small data sets in every kind of file, for the tests of data sets."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zstandard

from shoal.environments import EnvironmentSettings, build
from shoal.environments.data.checking import Problems
from shoal.environments.dataset import DatasetEnvironment

FORMATS = Path(__file__).parents[2] / "data" / "formats"
Rows = Sequence[dict[str, Any]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def checked(environment: DatasetEnvironment, progress: Callable[[int, int], None] = lambda *_: None) -> Problems:
    """Everything that is wrong with a data set that has no other beside it."""
    (found,) = environment.check(progress)
    return found.problems


# ── one file of each kind ────────────────────────────────────────────────────────────────────────────────────────


def lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_jsonl(path: Path, rows: Rows) -> Path:
    path.write_bytes(lines(rows))
    return path


def write_parquet(path: Path, rows: Rows, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, **how)
    return path


def write_stream(path: Path, rows: Rows, batch_rows: int = 3) -> Path:
    table = pa.Table.from_pylist(list(rows))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def _plain(folder: Path, rows: Rows) -> Path:
    return write_jsonl(folder / "data.jsonl", rows)


def _gzip(folder: Path, rows: Rows) -> Path:
    (folder / "data.jsonl.gz").write_bytes(gzip.compress(lines(rows)))
    return folder / "data.jsonl.gz"


def _zstd(folder: Path, rows: Rows) -> Path:
    (folder / "data.jsonl.zst").write_bytes(zstandard.compress(lines(rows)))
    return folder / "data.jsonl.zst"


def _parquet(folder: Path, rows: Rows) -> Path:
    return write_parquet(folder / "data.parquet", rows, row_group_size=3)


def _stream(folder: Path, rows: Rows) -> Path:
    return write_stream(folder / "data.arrow", rows)


def _arrow_file(folder: Path, rows: Rows) -> Path:
    table = pa.Table.from_pylist(list(rows))
    with pa.OSFile(str(folder / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return folder / "file.arrow"


def _csv(folder: Path, rows: Rows) -> Path:
    pyarrow.csv.write_csv(pa.Table.from_pylist(list(rows)), folder / "data.csv")
    return folder / "data.csv"


def _shards(folder: Path, rows: Rows) -> Path:
    half = len(rows) // 2
    write_parquet(folder / "b-1.parquet", rows[half:])
    write_parquet(folder / "a-2.parquet", rows[:half])
    (folder / "README.md").write_text("not data")
    return folder


def _saved(folder: Path, rows: Rows) -> Path:
    """As `save_to_disk` leaves it."""
    half = len(rows) // 2
    write_stream(folder / "data-00000-of-00002.arrow", rows[:half])
    write_stream(folder / "data-00001-of-00002.arrow", rows[half:])
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in (0, 1)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def _saved_splits(folder: Path, rows: Rows) -> Path:
    for name in ("train", "test"):
        (folder / name).mkdir()
        _saved(folder / name, rows if name == "train" else rows[:1])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return folder


def _repository(folder: Path, rows: Rows) -> Path:
    """A hub repository in the hub's cache: snapshots are links to blobs, one split per name."""
    half = len(rows) // 2
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    data = folder / "snapshots" / "abc" / "data"
    data.mkdir(parents=True)
    named = (
        ("train-00000-of-00002", rows[:half]),
        ("train-00001-of-00002", rows[half:]),
        ("test-00000-of-00001", rows),
    )
    for number, (name, part) in enumerate(named):
        write_parquet(folder / "blobs" / str(number), part)
        (data / f"{name}.parquet").symlink_to(folder / "blobs" / str(number))
    return folder


KINDS: dict[str, Callable[[Path, Rows], Path]] = {
    "jsonl": _plain, "gzip": _gzip, "zstd": _zstd, "parquet": _parquet, "stream": _stream, "arrow": _arrow_file,
    "csv": _csv, "shards": _shards, "saved": _saved, "splits": _saved_splits, "repository": _repository,
}  # fmt: skip
