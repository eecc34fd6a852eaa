"""The data set that a filter writes: bands, rows with all their columns, files that are whole or not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit.evaluation import record, sort
from shoal.environments import EnvironmentSettings, build
from shoal.environments.data.locating import locate
from shoal.environments.data.readers import Table
from shoal.errors import ConfigError, ResourceError
from shoal.evaluation import filter as filtering
from shoal.evaluation.filter import (
    Columns,
    Rate,
    RateBand,
    RowSelection,
    data_of,
    histogram_lines,
    original_rows,
    rates,
    row_of,
    stored_about,
    task_rows,
    write_rows,
    written_before,
)
from shoal.evaluation.plan import tasks_of

COLUMNS = Columns("m")
MIDDLE = RateBand(0.25, 0.5)


def selection(found: dict[int, tuple[int, int]], everything: bool = False) -> RowSelection:
    return RowSelection({row: Rate(*rate) for row, rate in found.items()}, MIDDLE, everything)


def table_of(path: Path) -> Table:
    return Table(locate(path, ""))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


class TestRates:
    def test_the_rate_is_of_samples_that_could_be_scored(self) -> None:
        found = list(rates([record("a", 1.0, None, 0.5), record("b", None), record("c", problem="too long")]))
        assert [(each.task, rate) for each, rate in found] == [("a", Rate(1, 2))]

    @pytest.mark.parametrize("text", ["", "0.5", "a:b", "0.5:0.1", "-0.1:1", "0:1.1", "nan:1"])
    def test_what_is_no_band(self, text: str) -> None:
        with pytest.raises(ConfigError, match="give two rates from 0 to 1"):
            RateBand.parse(text)

    def test_ends_belong_to_the_band(self) -> None:
        band = RateBand.parse("0.1:0.3")
        assert [band.holds(value) for value in (0.1, 3 / 10, 0.0999, 0.3001)] == [True, True, False, False]

    def test_the_histogram_counts_and_marks(self) -> None:
        shown = list(histogram_lines([0.0, 0.25, 0.25, 1.0], 4, MIDDLE))
        assert [line.split()[0] for line in shown] == ["0.000", "0.250", "0.500", "0.750", "1.000"]
        assert [line.endswith("◂") for line in shown] == [False, True, True, False, False]
        assert shown[1].split()[-2] == "2"
        assert len(list(histogram_lines([0.3], 64, MIDDLE))) == 11


class TestRows:
    def test_json_lines_keep_every_column_and_number_their_rows_as_the_file_does(self, tmp_path: Path) -> None:
        path = lines(
            tmp_path / "d.jsonl",
            {"question": "a", "odd": 1, "none": None, "deep": {"x": [1]}, "nothing": {}},
            "{broken",
            {"question": "b", "odd": "text", "deep": {"x": []}, "nothing": {}},
            {"question": "c", "odd": [2], "deep": {"x": [2], "y": 1.5}, "nothing": {}},
        )
        found = selection({0: (1, 4), 2: (4, 4), 3: (1, 2)})
        out = tmp_path / "out.parquet"
        assert write_rows(out, original_rows(table_of(path), found, COLUMNS), {}) == 2
        first, second = pq.read_table(out).to_pylist()
        assert (first["question"], first["solve_rate_m"], first["samples_m"]) == ("a", 0.25, 4)
        assert (second["question"], second["solve_rate_m"], second["samples_m"]) == ("c", 0.5, 2)
        assert (first["odd"], second["odd"]) == ("1", "[2]")  # of many types: JSON
        assert (first["deep"]["x"], second["deep"]["y"], first["none"]) == ([1], 1.5, None)

    def test_all_rows_have_a_rate_or_none(self, tmp_path: Path) -> None:
        path = lines(tmp_path / "d.jsonl", *({"question": str(n)} for n in range(3)))
        tables = list(original_rows(table_of(path), selection({1: (4, 4)}, everything=True), COLUMNS))
        assert [row["solve_rate_m"] for table in tables for row in table.to_pylist()] == [None, 1.0, None]

    def test_types_of_parquet_are_kept(self, tmp_path: Path) -> None:
        table = pa.table(
            {"q": ["a", "b"], "small": pa.array([1, 2], pa.int8()), "l": pa.array([[1], []], pa.list_(pa.int16()))}
        )
        pq.write_table(table, tmp_path / "d.parquet")
        (found,) = original_rows(table_of(tmp_path / "d.parquet"), selection({1: (2, 4)}), COLUMNS)
        assert found.drop_columns(["solve_rate_m", "samples_m"]).equals(table.slice(1))

    def test_rows_are_numbered_through_all_shards(self, tmp_path: Path) -> None:
        for shard in range(3):
            pq.write_table(pa.table({"q": [f"{shard}/{n}" for n in range(4)]}), tmp_path / f"{shard}.parquet")
        found = original_rows(table_of(tmp_path), selection({2: (1, 2), 5: (0, 2), 9: (1, 2)}), COLUMNS)
        assert [row["q"] for table in found for row in table.to_pylist()] == ["0/2", "2/1"]

    def test_a_task_leads_to_its_row(self, tmp_path: Path) -> None:
        path = lines(tmp_path / "d.jsonl", *({"question": f"{n}?", "answer": f"{n}"} for n in range(20)))
        data = data_of(build(EnvironmentSettings(name="dataset", data=path, held_out_size=3)))
        assert data is not None
        for part in ("all", "train", "held_out"):
            tasks = tasks_of(data, part)  # type: ignore[arg-type]
            found = [row_of(data, part, index) for index in range(len(tasks))]  # type: ignore[arg-type]
            assert [task.prompt for task in tasks] == [f"{row}?" for row in found]
        assert data_of(sort()) is None

    def test_tasks_without_rows(self) -> None:
        (table,) = task_rows(sort(), "train", selection({3: (1, 4), 5: (4, 4)}), COLUMNS)
        (row,) = table.to_pylist()
        assert row["problem_id"] == "sort/train/3"
        assert row["answer"] == "".join(sorted(row["prompt"].rstrip("=")))

    def test_columns_that_are_taken(self) -> None:
        with pytest.raises(ConfigError, match=r"has a column solve_rate_m already.*--name"):
            COLUMNS.refuse_taken(["question", "solve_rate_m"])
        COLUMNS.refuse_taken(["solve_rate_other"])


class TestTheFile:
    def test_it_is_whole_or_not_there(self, tmp_path: Path) -> None:
        def failing() -> Iterator[Any]:
            yield pa.table({"a": [1]})
            raise OSError(28, "No space left on device")

        with pytest.raises(ResourceError, match="the disk is full"):
            write_rows(tmp_path / "x.parquet", failing(), {})
        assert not (tmp_path / "x.parquet").exists()

    def test_nothing_to_write_writes_nothing(self, tmp_path: Path) -> None:
        assert write_rows(tmp_path / "x.parquet", [], {}) == 0
        assert list(tmp_path.iterdir()) == []

    def test_small_tables_share_a_row_group_and_large_ones_do_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(filtering, "GROUP_ROWS", 4)
        assert write_rows(tmp_path / "x.parquet", [pa.table({"a": [1, 2]})] * 5, {"k": 1}) == 10
        metadata = pq.ParquetFile(tmp_path / "x.parquet").metadata
        assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [4, 4, 2]

    def test_what_is_there_is_known(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        assert stored_about(path) is None
        assert not written_before(path, {"band": "0:1"})
        write_rows(path, [pa.table({"a": [1]})], {"band": "0:1"})
        assert written_before(path, {"band": "0:1"})
        with pytest.raises(ConfigError, match=r"another result: its band is 0:1, here it would be 0:0.5"):
            written_before(path, {"band": "0:0.5"})
        path.write_bytes(b"mine")
        with pytest.raises(ConfigError, match="was not written by shoal filter"):
            stored_about(path)
