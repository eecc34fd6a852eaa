"""recipes/intellect2-tiny.toml with its real processes: the described recipe at the size of a laptop, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kit.run import metrics, rows, start_run
from kit.sandbox import needs_bubblewrap
from shoal.environments import build
from shoal.run.recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "intellect2-tiny.toml"


@pytest.mark.slow
@needs_bubblewrap
def test_the_twin_of_the_described_recipe_runs_end_to_end(tmp_path: Path) -> None:
    folder, recipe = tmp_path / "run", load_recipe(RECIPE)
    environment = build(recipe.environment)
    with start_run(folder, recipe=RECIPE) as run:
        assert run.wait() == 0, run.said()

    trained = [row for row in metrics(folder) if "loss" in row]
    assert [row["step"] for row in trained] == list(range(recipe.run.steps))
    assert sum(row["no_sample"] for row in trained) == 0
    assert max(row["staleness_max"] for row in trained) <= 2
    # 8 optimizer steps a training step, 25 of warm-up: 8/25, 16/25, 24/25 and all of the rate at the steps' ends
    rates = [row["learning_rate"] / recipe.trainer.learning_rate for row in trained]
    assert rates == pytest.approx([0.32, 0.64, 0.96, 1.0])

    verdicts = [json.loads(text)["document"] for (text,) in rows(folder, "SELECT document FROM verdicts")]
    assert {verdict["outcome"] for verdict in verdicts} == {"accepted"}
    rewards = [reward["parts"] for verdict in verdicts for reward in verdict["rewards"]]
    assert {parts["target"] for parts in rewards} == {2.0, 4.0, 8.0}
    assert {parts["task"] for parts in rewards} == {0.0, 1.0}

    table = pq.read_table(folder / "trainer" / "rollouts").to_pylist()
    tasks = {row["task"] for row in table}
    assert {task.partition(":")[0] for task in tasks} == {"sums", "described", "programs"}
    assert {environment.task(task).kind for task in tasks} == {"mathematics", "code"}
