"""The data set that a filter writes, leaks by what is asked, and what a summary says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit.evaluation import one_task, record, sort
from shoal.environments import Environment, EnvironmentSettings, Task, build
from shoal.environments.data.locating import locate
from shoal.environments.data.readers import Table
from shoal.environments.settings import MixPart
from shoal.errors import ConfigError, LeakFound, ResourceError, UnusableTask
from shoal.evaluation import filter as filtering
from shoal.evaluation.filter import Rate, RateBand, original_rows, write_rows, written_before
from shoal.evaluation.plan import Leaks, SamplingPlan, archived_ids, find_leaks, tasks_of, train_digests
from shoal.evaluation.records import UNUSABLE
from shoal.evaluation.statistics import mean_estimate
from shoal.evaluation.summary import MAX_FAILURES, summary_of, table_lines

MIDDLE = RateBand(0.25, 0.5)


def rates(**found: float) -> dict[int, Rate]:
    return {int(row.removeprefix("row")): Rate(rate, 4) for row, rate in found.items()}


def table_of(path: Path) -> Table:
    return Table(locate(path, ""))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_the_rate_is_of_samples_that_could_be_scored() -> None:
    records = [record("a", 1.0, None, 0.5), record("b", None), record("c", problem="too long")]
    assert filtering.rates_by_row(sort(), "train", records) == {0: Rate(0.5, 2)}


@pytest.mark.parametrize("text", ["", "0.5", "a:b", "0.5:0.1", "-0.1:1", "0:1.1", "nan:1", "0:0.5:1"])
def test_what_is_no_band_is_refused_and_its_ends_belong_to_it(text: str) -> None:
    with pytest.raises(ConfigError, match="give two rates from 0 to 1"):
        RateBand.parse(text)
    band = RateBand.parse("0.1:0.3")
    assert [band.holds(value) for value in (0.1, 3 / 10, 0.0999, 0.3001)] == [True, True, False, False]


def test_the_histogram_counts_and_marks() -> None:
    shown = list(filtering.histogram_lines(rates(row0=0.0, row1=0.25, row2=0.25, row3=1.0), 4, MIDDLE))
    assert [line.split()[0] for line in shown] == ["0.000", "0.250", "0.500", "0.750", "1.000"]
    assert [line.endswith("◂") for line in shown] == [False, True, True, False, False]
    assert shown[1].split()[-2] == "2"
    assert len(list(filtering.histogram_lines(rates(row0=0.3), 64, MIDDLE))) == 11


class TestRows:
    def test_json_lines_keep_every_column_and_number_their_rows_as_the_file_does(self, tmp_path: Path) -> None:
        path = lines(
            tmp_path / "d.jsonl",
            {"question": "a", "odd": 1, "none": None, "deep": {"x": [1]}, "nothing": {}},
            "{broken",
            {"question": "b", "odd": "text", "deep": {"x": []}, "nothing": {}},
            {"question": "c", "odd": [2], "deep": {"x": [2], "y": 1.5}, "nothing": {}},
        )
        found, out = rates(row0=0.25, row2=1.0, row3=0.5), tmp_path / "out.parquet"
        assert write_rows(out, original_rows(table_of(path), found, MIDDLE, "m"), {}) == 2
        first, second = pq.read_table(out).to_pylist()
        assert (first["question"], first["solve_rate_m"], first["samples_m"]) == ("a", 0.25, 4)
        assert (second["question"], second["solve_rate_m"], second["samples_m"]) == ("c", 0.5, 4)
        assert (first["odd"], second["odd"]) == ("1", "[2]")  # of many types: JSON
        assert (first["deep"]["x"], second["deep"]["y"], first["none"]) == ([1], 1.5, None)

    def test_types_of_parquet_are_kept(self, tmp_path: Path) -> None:
        table = pa.table(
            {"q": ["a", "b"], "small": pa.array([1, 2], pa.int8()), "l": pa.array([[1], []], pa.list_(pa.int16()))}
        )
        pq.write_table(table, tmp_path / "d.parquet")
        found = original_rows(table_of(tmp_path / "d.parquet"), rates(row1=0.5), MIDDLE, "m")
        assert found.drop_columns(["solve_rate_m", "samples_m"]).equals(table.slice(1))

    def test_rows_are_numbered_through_all_shards(self, tmp_path: Path) -> None:
        for shard in range(3):
            pq.write_table(pa.table({"q": [f"{shard}/{n}" for n in range(4)]}), tmp_path / f"{shard}.parquet")
        found = original_rows(table_of(tmp_path), rates(row2=0.5, row5=0.0, row9=0.5), MIDDLE, "m")
        assert found["q"].to_pylist() == ["0/2", "2/1"]
        whole = original_rows(table_of(tmp_path / "0.parquet"), rates(row1=0.0), None, "m")
        columns = {name: whole[name].to_pylist() for name in ("solve_rate_m", "samples_m")}
        assert columns == {"solve_rate_m": [None, 0.0, None, None], "samples_m": [0, 4, 0, 0]}, "all rows, or none"

    def test_a_task_leads_to_its_row(self, tmp_path: Path) -> None:
        path = lines(tmp_path / "d.jsonl", *({"question": f"{n}?", "answer": f"{n}"} for n in range(20)))
        data = filtering.data_of(build(EnvironmentSettings(name="dataset", data=path, held_out_size=3)))
        assert data is not None
        for part in ("all", "train", "held_out"):
            tasks = tasks_of(data, part)  # type: ignore[arg-type]
            found = [filtering.row_of(data, part, index) for index in range(len(tasks))]  # type: ignore[arg-type]
            assert [task.prompt for task in tasks] == [f"{row}?" for row in found]
        assert filtering.data_of(sort()) is None

    def test_tasks_without_rows_and_columns_that_are_taken(self) -> None:
        (row,) = filtering.task_rows(sort(), "train", rates(row3=0.25, row5=1.0), MIDDLE, "m").to_pylist()
        assert row["problem_id"] == "sort/train/3"
        assert row["answer"] == "".join(sorted(row["prompt"].rstrip("=")))
        assert filtering.task_rows(sort(), "train", rates(row5=1.0), MIDDLE, "m").num_rows == 0
        with pytest.raises(ConfigError, match=r"has a column solve_rate_m already.*--name"):
            filtering.refuse_taken(["question", "solve_rate_m"], "m")
        filtering.refuse_taken(["question", "solve_rate_other"], "m")


class TestTheFile:
    def test_it_is_whole_or_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(_table: Any, hidden: Path, **_how: Any) -> None:
            hidden.write_bytes(b"PAR1")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(pq, "write_table", failing)
        with pytest.raises(ResourceError, match="the disk is full"):
            write_rows(tmp_path / "x.parquet", pa.table({"a": [1]}), {})
        assert not (tmp_path / "x.parquet").exists()
        assert write_rows(tmp_path / "y.parquet", pa.table({"a": []}), {}) == 0
        assert not (tmp_path / "y.parquet").exists()

    def test_what_is_there_is_known(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        assert not written_before(path, {"band": "0:1"})
        write_rows(path, pa.table({"a": [1]}), {"band": "0:1"})
        assert written_before(path, {"band": "0:1"})
        with pytest.raises(ConfigError, match=r"another result: its band is 0:1, here it would be 0:0.5"):
            written_before(path, {"band": "0:0.5"})
        path.write_bytes(b"mine")
        with pytest.raises(ConfigError, match="was not written by shoal filter"):
            written_before(path)


# Leaks are found by what is asked; a summary says by part and kind what was found, and what is missing


def tasks(environment: Environment, split: str, count: int) -> list[Task]:
    return [environment.tasks(split)[index] for index in range(count)]  # type: ignore[arg-type]


class TestLeaks:
    def test_a_leak_is_found_whatever_it_is_called_and_however_it_is_spaced(self) -> None:
        environment = sort(train_size=50)
        evaluated = [Task("mine", f" {environment.tasks('train')[7].prompt}\n", ""), one_task("999=")]
        assert find_leaks(evaluated, environment) == Leaks(known=("mine",))
        assert find_leaks(tasks(environment, "held_out", 64), sort(train_size=2000)) == Leaks()

    def test_what_was_in_batches_is_said_apart(self) -> None:
        environment = sort(train_size=50)
        evaluated = tasks(environment, "train", 3)
        found = find_leaks(evaluated, environment, ["sort/train/1", "sort/train/40"])
        assert found == Leaks(("sort/train/0", "sort/train/1", "sort/train/2"), ("sort/train/1",))
        with pytest.raises(LeakFound, match=r"3 of the evaluated .* 1 of them in batches .*: sort/train/0, .*--allow"):
            found.refuse()
        assert LeakFound.exit_code == 5
        Leaks().refuse()

    def test_rows_that_cannot_be_used_are_not_trained_on(self) -> None:
        class Holed(list[Task]):
            def __getitem__(self, index: object) -> Task:  # type: ignore[override]
                if index == 1:
                    raise UnusableTask("row 1")
                return one_task(str(index))

        class Environment:
            def tasks(self, _split: str) -> Sequence[Task]:
                return Holed([one_task("")] * 3)

        assert len(list(train_digests(Environment()))) == 2  # type: ignore[arg-type]

    def test_a_mixture_has_the_prompts_of_all_its_parts(self) -> None:
        parts = (MixPart(name="sort", train_size=20), MixPart(name="addition", train_size=20, weight=1e-6))
        mixture = build(EnvironmentSettings(mix=parts, train_size=8, held_out_size=4))
        rare = build(EnvironmentSettings(name="addition", train_size=20)).tasks("train")[13]
        assert find_leaks([rare], mixture) == Leaks(known=("addition/train/13",))
        assert find_leaks(tasks(mixture, "held_out", 2), mixture) == Leaks()

    def test_the_archive_of_a_run(self, tmp_path: Path) -> None:
        for step, ids in ((0, ["a", "b", "b"]), (1, ["c"]), (2, [])):
            columns = {"task": pa.array(ids, pa.string()), "step": pa.array([step] * len(ids), pa.int64())}
            pq.write_table(pa.table(columns), tmp_path / f"step-{step:05d}.parquet")
        assert archived_ids(tmp_path) == {"a", "b", "c"}
        assert archived_ids(tmp_path / "none") == set()


class TestSummary:
    def test_the_numbers_by_hand(self) -> None:
        records = [record("a", 1.0, 0.0), record("b", 0.0, 0.0), record("c", 1.0, 1.0)]
        found = summary_of(SamplingPlan(samples=2, temperature=1), records)
        interval = mean_estimate(np.array([0.5, 0.0, 1.0]), 0)
        assert found["avg_at_k"] == {"k": 2, "value": 0.5, "low": interval.low, "high": interval.high}
        assert [found["pass_at_k"][k]["value"] for k in "12"] == [0.5, pytest.approx(2 / 3)]
        assert (found["parts"], found["mean_tokens"]) == ({"exact": 0.5}, 5.0)
        found = summary_of(SamplingPlan(samples=2, temperature=1), [record("a", 1.0, None), record("b", 0.0, 1.0)])
        assert [found["pass_at_k"][k]["value"] for k in "12"] == [0.75, 1.0], "of tasks with as many samples"
        assert found["unscored"] == {"samples": 1, "share": 0.25, "tasks": ["a"]}

    def test_parts_and_kinds_apart(self) -> None:
        given = [("m:a", 1.0, "m", "mathematics"), ("c:b", 0.0, "c", "code"), ("m:c", 0.0, "m", "mathematics")]
        records = [record(task, score, part=part, kind=kind) for task, score, part, kind in given]
        found = summary_of(SamplingPlan(), records)
        assert found["by"]["part"]["m"]["avg_at_k"]["value"] == 0.5
        assert found["by"]["kind"]["code"]["tasks"] == 1
        assert {"part m", "kind code"} <= {line[2:].partition("  ")[0] for line in table_lines(found)}

    def test_nothing_scored_is_no_number(self) -> None:
        found = summary_of(SamplingPlan(), [record("a", None), record("b", problem="too long")])
        assert (found["avg_at_k"], found["pass_at_k"], found["unscored"]["share"]) == (None, {"1": None}, 1.0)
        assert list(table_lines(found))[1:] == [
            "  nothing could be scored",
            "  1 sample unscored, counted in no figure: scoring failed (a)",
            "  1 task left out: too long",
        ]

    def test_one_in_twenty_may_be_missing_and_rows_that_cannot_be_used_are_none_of_them(self) -> None:
        good, lost = [record(f"t{n}", 1.0) for n in range(18)], record("b", None)
        shares = [summary_of(SamplingPlan(), given)["unscored"]["share"]
                  for given in ([*good, record("a", 1.0), lost], [*good, lost])]  # fmt: skip
        assert shares[0] <= MAX_FAILURES < shares[1]
        unusable = record("b", problem=UNUSABLE)
        tally = summary_of(SamplingPlan(), [record("a", 1.0), unusable, record("c", problem="too long")])
        assert tally["unscored"]["share"] == 0.5
        assert "  1 task left out: its row cannot be used" in table_lines(tally)
        assert summary_of(SamplingPlan(), [unusable])["unscored"]["share"] == 1.0
