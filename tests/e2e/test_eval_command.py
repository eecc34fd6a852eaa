"""`shoal eval` and `shoal filter` with the real tiny model: numbers, files, stopped and resumed, leaks, kept rows."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit import Capture, eventually
from kit.cli import told
from shoal.cli.main import main
from shoal.environments import EnvironmentSettings, build
from shoal.evaluation.job import SUMMARY, TASKS
from shoal.evaluation.records import PROGRESS
from shoal.models import model_folder
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe

SAMPLING = ["--max-new-tokens", "16", "--device", "cpu"]
EVAL = ["eval", "tiny", *SAMPLING]
DEADLINE_S = 280.0


def summary_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / SUMMARY).read_bytes())
    return found


def test_the_same_command_gives_the_same_results(tmp_path: Path, capsys: Capture) -> None:
    command = [*EVAL, "--env", "sort", "--tasks", "24", "--samples", "4", "--batch-rows", "32"]
    first = told(capsys, 0, *command, "--out", tmp_path / "a")
    said = first.out
    assert f"evaluating, in {tmp_path / 'a'}\n" in first.err, "before the first batch ends"
    assert "avg@4" in said
    assert "pass@2" in said
    found = summary_of(tmp_path / "a")
    assert (found["scored_tasks"], found["samples"], found["unscored"]["samples"]) == (24, 96, 0)
    average = found["avg_at_k"]
    assert average["low"] < average["value"] < average["high"]
    assert average["value"] <= found["pass_at_k"]["2"]["value"] <= found["pass_at_k"]["4"]["value"]
    assert pq.read_schema(tmp_path / "a" / TASKS).metadata[b"shoal"]
    assert main([*command, "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / TASKS).read_bytes() == (tmp_path / "b" / TASKS).read_bytes()
    capsys.readouterr()
    again = told(capsys, 0, *command, "--out", tmp_path / "a")
    assert "is done already" in again.err
    assert [*again.out.splitlines(), f"wrote {tmp_path / 'a'}"] == said.splitlines()
    assert "plan.seed is 0, here it would be 1" in told(capsys, 2, *command, "--seed", "1", "--out", tmp_path / "a").err


FLAKY = """
tasks = [{"prompt": f"{n}1=", "answer": f"1{n}", "split": "train" if n < 2 else "held_out"} for n in range(9)]

def score(prompt, completion, answer):
    if prompt == "5 1=".replace(" ", ""):
        raise OSError("the server is away")
    return float(completion == answer)
"""


def test_too_many_unscored_samples_are_an_error(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    out = tmp_path / "out"
    said = told(capsys, 1, *EVAL, "--env", tmp_path / "flaky.py", "--out", out)
    assert "14.3% of the samples have no score, more than 5%" in said.err
    assert f"fix what the lines above name, then score them again: shoal eval --rescore {out}" in said.err
    assert "1 sample unscored, counted in no figure: scoring failed (flaky/5)" in said.out
    assert summary_of(out)["unscored"] == {"samples": 1, "share": pytest.approx(1 / 7), "tasks": ["flaky/5"]}
    assert (summary_of(out)["scored_tasks"], "server" in (out / TASKS).read_bytes().decode("latin-1")) == (6, False)
    (tmp_path / "flaky.py").write_text(FLAKY.replace('raise OSError("the server is away")', "return 0.0"))
    assert main(["eval", "--rescore", str(out)]) == 0
    assert (summary_of(out)["scored_tasks"], summary_of(out)["unscored"]["samples"]) == (7, 0)


def test_unusable_rows_are_skipped_on_request(tmp_path: Path, capsys: Capture) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    rows = [{"question": f"{n}1=", "answer": None if n < 3 else f"1{n}"} for n in range(9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [*EVAL, "--env", str(data), "--set", "environment.options.grader=exact", "--out", str(out)]
    assert main(command) == 1
    told = "3 of 9 rows cannot be used, more than 5%: shoal data check lists them; to leave them out: --set"
    assert f"{told} environment.options.bad_rows=skip" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--set", "environment.options.bad_rows=skip"]) == 0
    assert "  3 tasks left out: its row cannot be used\n" in capsys.readouterr().out
    assert (summary_of(out)["scored_tasks"], summary_of(out)["unscored"]["share"]) == (6, 0.0)


def a_run(path: Path) -> RunFolder:
    """The folder of a run that has trained on two tasks of `sort`, with its export."""
    environment = EnvironmentSettings(name="sort", train_size=40, held_out_size=16)
    folder = RunFolder.prepare(path, Recipe(environment=environment))
    export = path / "trainer" / "export"
    shutil.copytree(model_folder("tiny"), export)
    (export / "shoal.json").write_text(json.dumps({"progress": {"run": "x", "version": 3, "incarnation": 0}}))
    rollouts = path / "trainer" / "rollouts"
    rollouts.mkdir()
    pq.write_table(pa.table({"task": ["sort/train/1", "sort/train/7"]}), rollouts / "step-00000.parquet")
    return folder


def test_tasks_that_a_run_trained_on_are_leaks(tmp_path: Path, capsys: Capture) -> None:
    run, leaky = a_run(tmp_path / "run"), tmp_path / "leaky.py"
    command = ["eval", str(run.path), "--device", "cpu", "--max-new-tokens", "16"]
    assert main([*command, "--env", str(run.path), "--out", str(tmp_path / "clean")]) == 0
    assert summary_of(tmp_path / "clean")["tasks"] == 16
    said = capsys.readouterr().out
    assert "held_out" in said
    assert "leaks were not looked for" not in said
    exported = ["eval", str(run.path / "trainer" / "export"), *command[2:], "--env", "sort", "--tasks", "2"]
    assert main([*exported, "--out", str(tmp_path / "export")]) == 0
    assert "leaks were not looked for: --trained-on names the run" in capsys.readouterr().out
    assert "leaks were not looked for by scoring again" in told(capsys, 0, "eval", "--rescore", tmp_path / "export").out
    known = build(run.recipe.environment).tasks("train")[7]
    tasks = [{"prompt": prompt, "split": "held_out"} for prompt in ("21=", f" {known.prompt} ", "978=")]
    tasks.append({"prompt": "0=", "split": "train"})
    leaky.write_text(f"tasks = {tasks!r}\ndef score(prompt, completion, answer):\n    return 0.0\n")
    assert main([*command, "--env", str(leaky), "--out", str(tmp_path / "leaky")]) == 5
    assert "1 of the evaluated tasks are in the training set, 1 of them in batches" in capsys.readouterr().err
    assert not (tmp_path / "leaky").exists()
    assert main([*command, "--env", str(leaky), "--out", str(tmp_path / "leaky"), "--allow-leaks"]) == 0
    assert (summary_of(tmp_path / "leaky")["tasks"], summary_of(tmp_path / "leaky")["left_out"]) == (2, ["leaky/1"])
    left_out = "left out: 1 of the evaluated tasks are in the training set: leaky/1"
    assert left_out in told(capsys, 0, "eval", "--rescore", tmp_path / "leaky").out


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shoal.cli", *EVAL, "--env", "sort", "--out", str(out), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_interrupted_and_resumed_gives_the_same_files(tmp_path: Path) -> None:
    more = ("--tasks", "40", "--samples", "4", "--batch-rows", "8")
    with start(tmp_path / "whole", *more) as whole:
        assert whole.wait(DEADLINE_S) == 0
    with start(tmp_path / "halves", *more) as first:
        progress = tmp_path / "halves" / PROGRESS
        eventually(lambda: progress.exists() and progress.read_bytes().count(b"\n") >= 3, DEADLINE_S)
        first.send_signal(signal.SIGINT)
        _, error = first.communicate(timeout=DEADLINE_S)
        assert first.returncode == 130, error
        assert "the same command continues" in error
    assert not (tmp_path / "halves" / TASKS).exists()
    with start(tmp_path / "halves", *more) as second:
        _, error = second.communicate(timeout=DEADLINE_S)
        assert second.returncode == 0, error
        assert "continues:" in error
    for name in (TASKS, SUMMARY):
        assert (tmp_path / "halves" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


EXACT = ["--set", "environment.options.grader=exact"]


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


def test_filter_without_measurable_tasks_is_refused(tmp_path: Path, capsys: Capture) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "kept.parquet"
    data.write_text("".join(json.dumps({"question": f"Ж{number}", "answer": "1"}) + "\n" for number in range(5)))
    assert main(["filter", "tiny", str(data), "--out", str(out), "--all", *SAMPLING]) == 2
    assert not out.exists()
    said = capsys.readouterr()
    assert "5 tasks left out: the prompt has characters that" in said.out
    assert said.err.strip().endswith("no task could be measured: nothing was written; fix what the lines above name")


def test_rows_of_a_data_set_are_filtered(tmp_path: Path, capsys: Capture) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "kept.parquet"
    lines = [json.dumps(row) for row in rows(40)]
    data.write_text("\n".join([*lines[:20], "{nonsense", *lines[20:]]) + "\n")
    command = ["filter", "tiny", str(data), "--out", str(out), *EXACT, *SAMPLING]
    said = told(capsys, 2, *command, "--pass-rate", "0.99:0.999")
    assert "no task is within --pass-rate 0.99:0.999: nothing was written" in said.err
    assert "pass rates of 40 tasks, 8 samples each" in said.out
    assert not out.exists()
    assert main([*command, "--pass-rate", "0.125:0.875"]) == 0  # another band of what was measured
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
    assert "this is done already" in told(capsys, 0, *command, "--pass-rate", "0.125:0.875").err
    assert "band is 0.125:0.875, here it would be 0:1" in told(capsys, 2, *command, "--pass-rate", "0:1").err


def test_parquet_shards_and_environments_are_rated(tmp_path: Path, capsys: Capture) -> None:
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
    assert "has a column samples_small-one already" in told(capsys, 2, *again, "--name", "small-one").err
    made = tmp_path / "made.parquet"
    some = ["--tasks", "6", "--samples", "2", "--pass-rate", "0:1"]
    assert main(["filter", "tiny", "sort", "--out", str(made), *some, *SAMPLING]) == 0
    assert pq.read_table(made).column_names == ["problem_id", "prompt", "answer", "solve_rate_tiny", "samples_tiny"]
    assert all(name.startswith("sort/train/") for name in pq.read_table(made).column("problem_id").to_pylist())
