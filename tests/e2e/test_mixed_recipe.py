"""recipes/mixed.toml with its real processes: every kind of task is asked, scored by its own grader, and recorded."""

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from kit.run import ledger, metrics, rows, start_run
from kit.sandbox import needs_bubblewrap
from shoal.environments import Environment, build
from shoal.run.preflight import check_ingredients
from shoal.run.recipe import load_recipe

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
RECIPE = Path(__file__).parents[2] / "recipes" / "mixed.toml"


@pytest.fixture(scope="module")
def environment() -> Environment:
    return build(load_recipe(RECIPE).environment)


@needs_bubblewrap
def test_recipe_fits_its_model() -> None:
    check_ingredients(load_recipe(RECIPE))


def test_tasks_are_of_every_kind_in_proportion(environment: Environment) -> None:
    labels = Counter(task.id.partition(":")[0] for task in environment.tasks("train")[:100])
    assert labels == {"mathematics": 80, "code": 10, "reasoning": 10}
    kinds = {(task.id.partition(":")[0], task.kind) for task in environment.tasks("train")[:160]}
    assert {label for label, _kind in kinds} == {"mathematics", "code", "reasoning"}
    assert ("reasoning", "chain_sum") in kinds
    assert {task.id.partition(":")[0] for task in environment.tasks("held_out")} >= {"mathematics", "reasoning"}


def test_right_answers_score_1_in_every_part(environment: Environment) -> None:
    for task in environment.tasks("train")[:24]:
        label = task.id.partition(":")[0]
        if label == "code":
            continue
        gold = json.loads(task.answer)["ground_truth"] if task.answer.startswith("{") else task.answer
        assert environment.score(task, str(gold)).parts[label] == 1.0, task
        assert environment.score(task, "x").parts[label] == 0.0, task


@needs_bubblewrap
def test_right_program_scores_1(environment: Environment) -> None:
    task = next(task for task in environment.tasks("train") if task.prompt == "Read a number, print its double.")
    assert environment.score(task, "```python\nprint(2 * int(input()))\n```").parts["code"] == 1.0
    assert environment.score(task, "```python\nprint(4)\n```").parts["code"] == 0.0


@pytest.mark.slow
@needs_bubblewrap
def test_it_runs_end_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    with start_run(folder, ["run.steps=2", "trainer.evaluate_every=1"], recipe=RECIPE) as run:
        assert run.wait() == 0, run.said()
    assert [row["step"] for row in metrics(folder)][-1] == 2
    verdicts = [json.loads(text)["document"] for (text,) in rows(folder, "SELECT document FROM verdicts")]
    parts = Counter(name for verdict in verdicts for reward in verdict["rewards"] for name in reward["parts"])
    assert {"mathematics", "code", "reasoning", "task", "length", "target"} <= parts.keys(), parts
    assert {verdict["outcome"] for verdict in verdicts} == {"accepted"}
    assert {verdict["environment"] for verdict in verdicts} == {"mix"}
    assert {reward["parts"]["target"] for verdict in verdicts for reward in verdict["rewards"]} == {2.0, 3.0}
    assert ledger(folder)
