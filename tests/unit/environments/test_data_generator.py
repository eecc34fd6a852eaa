"""The script that makes synthetic data sets: its tasks are right, its bad rows bad, and one seed gives one data set."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from kit.data import checked, open_data

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_dataset.py"


@pytest.fixture
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_its_tasks_are_right(script: SimpleNamespace, tmp_path: Path) -> None:
    plan = script.Plan(tmp_path, tasks=60, shard_gb=0.001, code_share=0.2, tasks_per_shard=20)
    paths = script.make(plan)
    assert [pq.read_metadata(path).num_rows for path in paths] == [20, 20, 8, 12]
    environment = open_data(tmp_path)
    assert environment.problems.count == checked(environment).count == 0
    task = environment.task("0/math_0")
    numbers = [int(word) for word in task.prompt.replace("?", " ").replace(".", " ").split() if word.isdecimal()][1:4]
    right = sum(numbers[0] + numbers[1] * place for place in range(numbers[2]))
    assert environment.score(task, f"\\boxed{{{right}}}").value == 1.0
    assert environment.score(task, f"\\boxed{{{right + 1}}}").value == 0.0
    info = json.loads(environment.task("59/code_59").answer)
    assert 0.5e6 / 12 < len(json.dumps(info)) < 2e6 / 12
    for case in info["test_cases"]:
        (length, every), given = ([*map(int, line.split())] for line in case["input"].splitlines())
        assert (len(given), str(sum(given[::every]))) == (length, case["output"])


def test_the_same_seed_gives_the_same_rows_and_as_many_bad_ones_as_asked_for(
    script: SimpleNamespace, tmp_path: Path
) -> None:
    made = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        script.make(script.Plan(tmp_path / name, tasks=50, shard_gb=0.0001, seed=seed, bad=15))
        made.append(pq.read_table(tmp_path / name).to_pylist())
    assert made[0] == made[1] != made[2]
    assert checked(open_data(tmp_path / "a")).count == 15
