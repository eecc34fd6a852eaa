"""`shoal filter` with the real tiny model: rates, the rows that stay with all their columns, and what they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kit import Capture
from shoal.cli.main import main
from shoal.environments import EnvironmentSettings, build

EXACT = ["--set", "environment.options.grader=exact"]
SAMPLING = ["--max-new-tokens", "16", "--device", "cpu"]


def rows(count: int) -> list[dict[str, object]]:
    """Digits to be sorted, three to eight of them: from what the tiny model always solves to what it never does."""
    found: list[dict[str, object]] = []
    for number in range(count):
        digits = str(7_919 * (number + 3) ** 5)[: 3 + number % 6]
        answer = "".join(sorted(digits))
        found.append(
            {"id": f"p{number}", "question": f"{digits}=", "answer": answer, "meta": {"n": number}, "empty": {}}
        )
    return found


def test_rows_of_a_data_set(tmp_path: Path, capsys: Capture) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "kept.parquet"
    lines = [json.dumps(row) for row in rows(40)]
    data.write_text("\n".join([*lines[:20], "{nonsense", *lines[20:]]) + "\n")
    command = ["filter", "tiny", str(data), "--out", str(out), *EXACT, *SAMPLING]
    assert main([*command, "--keep", "0.99:0.999"]) == 2
    said = capsys.readouterr()
    assert "no task is within --keep 0.99:0.999: nothing was written" in said.err
    assert "pass rates of 40 tasks, 8 samples each" in said.out
    assert not out.exists()
    assert main([*command, "--keep", "0.125:0.875"]) == 0  # another band of what was measured
    said = capsys.readouterr()
    assert "filtering: continues: 40 of 40 tasks are done" in said.err
    kept = pq.read_table(out)
    assert kept.column_names == ["id", "question", "answer", "meta", "empty", "solve_rate_tiny", "samples_tiny"]
    rates = kept.column("solve_rate_tiny").to_pylist()
    assert rates
    assert all(0.125 <= rate <= 0.875 for rate in rates)
    by_id = {row["id"]: row for row in rows(40)}
    for row in kept.to_pylist():
        assert row["samples_tiny"] == 8
        assert {name: row[name] for name in ("id", "question", "answer", "meta")} == {
            name: by_id[row["id"]][name] for name in ("id", "question", "answer", "meta")
        }
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["data.jsonl", "kept.parquet"]
    band = (min(rates), max(rates))
    trained = build(
        EnvironmentSettings(name="dataset", data=out, options={"grader": "exact", "keep_solve_rate": list(band)})
    )
    assert sum(len(trained.tasks(split)) for split in ("train", "held_out")) == kept.num_rows
    assert main([*command, "--keep", "0.125:0.875"]) == 0
    assert "this is done already" in capsys.readouterr().err
    assert main([*command, "--keep", "0:1"]) == 2
    assert "band is 0.125:0.875, here it would be 0:1" in capsys.readouterr().err


def test_all_rows_of_parquet_shards_and_of_an_environment(tmp_path: Path, capsys: Capture) -> None:
    shards, out = tmp_path / "shards", tmp_path / "all.parquet"
    shards.mkdir()
    table = pa.Table.from_pylist([{key: row[key] for key in ("question", "answer")} for row in rows(12)])
    table = table.append_column("difficulty", pa.array([1] * 12, pa.int8()))
    pq.write_table(table.slice(0, 5), shards / "a.parquet")
    pq.write_table(table.slice(5), shards / "b.parquet")
    command = ["filter", "tiny", str(shards), "--out", str(out), "--all", "--samples", "2", *EXACT, *SAMPLING]
    assert main([*command, "--name", "small one"]) == 0
    found = pq.read_table(out)
    assert found.drop_columns(["solve_rate_small-one", "samples_small-one"]).cast(table.schema).equals(table)
    again = ["filter", "tiny", str(out), "--out", str(tmp_path / "x.parquet"), *EXACT, *SAMPLING]
    assert main([*again, "--name", "small-one"]) == 2
    assert "has a column samples_small-one already" in capsys.readouterr().err
    made = tmp_path / "made.parquet"
    some = ["--tasks", "6", "--samples", "2", "--keep", "0:1"]
    assert main(["filter", "tiny", "sort", "--out", str(made), *some, *SAMPLING]) == 0
    assert pq.read_table(made).column_names == ["problem_id", "prompt", "answer", "solve_rate_tiny", "samples_tiny"]
    assert all(name.startswith("sort/train/") for name in pq.read_table(made).column("problem_id").to_pylist())
