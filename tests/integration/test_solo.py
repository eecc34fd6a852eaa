"""`shoal run --solo`: what it trains on, what a kill costs, how it stops and what it refuses."""

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kit.cli import told
from kit.crash import dies_of
from kit.run import start_run
from kit.solo import live, solo_batches, solo_digests, solo_folder, solo_twin
from shoal.environments import build
from shoal.errors import ConfigError, ScoringFailure
from shoal.hub.state.draws import task_index
from shoal.protocol import Batch
from shoal.records import Wanted, open_records
from shoal.run.folder import SOLO, RunFolder
from shoal.run.recipe import Recipe
from shoal.run.solo import solo_recipe
from shoal.runtime.metrics import MetricsLog

REWARD = """
import zlib

tasks = [(f"{number:04d}=", "") for number in range(500)]


def score(prompt: str, completion: str, answer: str) -> float:
    kind = int(prompt[:4]) % 5
    if kind in FAILING:
        raise ValueError("no opinion")
    return 1.0 if kind == 1 else float(zlib.crc32(completion.encode()) % 1000)
"""
SMALL = {"steps": 2, "groups_per_step": 6, "group_size": 4, "max_new_tokens": 8}
POINTS = ("trainer.publish.before_announce", "hub.records.after_write:2", "trainer.step.recorded:2")


def own_reward(folder: Path, failing: str, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (folder / "reward.py").write_text(f"FAILING = {failing}\n{REWARD}")
    sections: dict[str, dict[str, Any]] = {
        "run": {**SMALL, "temperature": 10.0}, "environment": {"name": "function", "file": folder / "reward.py"},
        "trainer": {"evaluate_every": 0, "learning_rate": 1e-4},
    }  # fmt: skip
    return {name: {**sections.get(name, {}), **changes.get(name, {})} for name in {*sections, *changes}}


@pytest.mark.parametrize("refill_cap", [4, 0])
def test_equal_and_unscored_groups_are_refilled_up_to_the_cap_and_never_trained_on(
    tmp_path: Path, refill_cap: int
) -> None:
    folder = solo_folder(tmp_path / "run", own_reward(tmp_path, "(0,)", hub={"refill_cap": refill_cap}))
    live(str(folder.path))
    tasks, unit, expected = build(folder.recipe.environment).tasks("train"), 0, list[tuple[list[int], int, int]]()
    for _step in range(2):  # counted by hand: what a step takes, from its first unit on
        taken, equal, most = list[int](), 0, unit + 6 + refill_cap * 6
        while len(taken) < 6 and unit < most:
            kind = int(tasks[task_index(len(tasks), 0, unit)].prompt[:4]) % 5
            taken, equal, unit = taken + [unit] * (kind > 1), equal + (kind == 1), unit + 1
        expected.append((taken, equal, unit))
    batches = [(Batch.model_validate_json(each.batch), each) for each in solo_batches(folder)]
    assert [([one.unit for one in b.groups], b.dropped_groups, file.next_unit) for b, file in batches] == expected
    records = open_records(folder.path)
    accepted = {each.unit for each in records.find(Wanted(outcome="accepted", limit=999))}
    assert accepted == {unit for taken, _, _ in expected for unit in taken}
    failed = records.find(Wanted(outcome="unsure", limit=999))
    assert failed
    assert all(each.reward is None and "no opinion" in each.message for each in failed)


def test_a_step_whose_groups_cannot_be_scored_ends_the_run(tmp_path: Path) -> None:
    folder = solo_folder(tmp_path / "run", own_reward(tmp_path, "range(5)"))
    with pytest.raises(ScoringFailure, match="no group of step 0 could be scored"):
        live(str(folder.path))
    assert not MetricsLog(folder.path / "trainer" / "metrics.jsonl").rows()


def test_killed_and_resumed_it_has_the_same_weights_batches_and_scores(tmp_path: Path) -> None:
    settings = {"trainer": {"learning_rate": 1e-4, "evaluate_every": 1, "evaluate_tasks": 8}}
    first = solo_folder(tmp_path / "killed", {"run": SMALL, **settings})
    (first.path / "hub").mkdir()
    (first.path / "hub" / "secret").write_text("ab" * 32)
    whole = solo_twin(first, tmp_path / "whole")
    assert [dies_of(point, live, str(first.path)) for point in POINTS] == [True] * len(POINTS)
    for folder in (first, whole):
        live(str(folder.path))
    assert len(set(solo_digests(whole))) == 3, "it did not train: the comparison would be vacuous"
    assert solo_digests(first) == solo_digests(whole)
    assert [each.rollouts for each in solo_batches(first)] == [each.rollouts for each in solo_batches(whole)]
    for name in ("reward_mean", "held_out", "loss"):
        rows = [MetricsLog(each.path / "trainer" / "metrics.jsonl").rows() for each in (first, whole)]
        assert [row.get(name) for row in rows[0]] == [row.get(name) for row in rows[1]]
    kept = [open_records(each.path).table().select(["unit", "sample", "reward"]) for each in (first, whole)]
    assert kept[0].equals(kept[1])


def test_stopped_it_says_how_to_resume_and_a_finished_one_is_exported(tmp_path: Path) -> None:
    path, few = tmp_path / "run", [f"run.{name}={value}" for name, value in {**SMALL, "steps": 40}.items()]
    with start_run(path, [*few, "trainer.evaluate_every=0"], ["--solo"]) as run:
        run.wait_until("a step", lambda: "step 2/40" in run.said())
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 130
        assert "to resume: " in run.said()
        assert f"run {path}" in run.said()
    with start_run(path, ["run.steps=40"], recipe=None) as run:  # a solo run is resumed as one
        assert run.wait() == 0
        assert "the trained model is in" in run.said()
    digests = solo_digests(RunFolder.open(path))
    assert len(digests) == 41
    assert pq.read_table(path / "trainer" / "rollouts")["step"].unique().to_pylist() == list(range(40))


@pytest.mark.parametrize("command", [("status",), ("why", "0"), ("ledger", "verify")])
def test_a_command_for_a_hub_says_that_a_solo_run_has_none(
    tmp_path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = solo_folder(tmp_path / "run", {"run": SMALL})
    (folder.path / SOLO).mkdir(parents=True)
    said = told(capsys, 2, *command, folder.path).err
    assert said.count("\n") == 1
    assert f"{folder.path} is a solo run: it has no hub, no nodes and no ledger" in said


def test_a_run_with_a_hub_is_not_resumed_solo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.prepare(tmp_path / "run", Recipe.model_validate({"run": SMALL}))
    (folder.path / "hub").mkdir()
    (folder.path / "hub" / "hub.db").touch()
    assert "has a hub: resume it without --solo" in told(capsys, 2, "run", folder.path, "--solo").err


@pytest.mark.parametrize(
    ("section", "setting", "value"),
    [
        ("trainer", "processes", 2), ("worker", "engine", "vllm"), ("hub", "database", "postgresql://x/y"),
        ("hub", "storage", "s3://x/y"), ("hub", "audit", "reputation"), ("environment", "retire_after", 3),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_with_the_cure(tmp_path: Path, section: str, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{section}.{setting} is not for a solo run: .*; (set|leave) {section}"):
        solo_recipe(Recipe.model_validate({section: {setting: value}}), tmp_path)
