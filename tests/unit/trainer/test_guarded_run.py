"""Guards in a run with real training steps: what diverges ends as a failure, and leaves a good checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_stubs import SETTINGS, FakeHub, learner, same, training_run, weights

from shoal.errors import TrainingDiverged
from shoal.trainer import loop
from shoal.trainer.checkpoint import CheckpointStore, restore
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.step import StepWork, train_step


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "POLL_S", 0.05)


def changed(**values: Any) -> TrainerSettings:
    return TrainerSettings.model_validate({**SETTINGS.model_dump(), **values})


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "trainer" / "metrics.jsonl").read_text().splitlines()]


class Alarming(FakeHub):
    """Remembers the alarms that came with reports."""

    def __init__(self, *given: int) -> None:
        super().__init__(*given)
        self.alarms: dict[int, dict[str, str]] = {}

    def report(self, report: Any) -> None:
        super().report(report)
        if report.alarms:
            self.alarms[report.step] = report.alarms


def test_a_learning_rate_of_ten_ends_as_a_failure_with_a_good_checkpoint(tmp_path: Path) -> None:
    hub = Alarming(6)
    run, _ = training_run(tmp_path, hub, changed(learning_rate=10.0))
    with pytest.raises(TrainingDiverged, match=r"nats per token away.*last good checkpoint.*is version 0") as caught:
        run.run()
    assert caught.value.exit_code == 5
    assert not (tmp_path / "trainer" / "export").exists()
    assert max(version for _, version in hub.policies) == 1, "what step 1 made of it was never published"
    assert "guard.divergence" in hub.alarms[1], "the hub heard why"
    store = CheckpointStore(tmp_path / "trainer" / "checkpoints", 2)
    good = learner(seed=5)
    restore(good, store.at((0, 0)))
    assert same(weights(good), weights(learner()))
    metrics = train_step(good, StepWork(0, hub.rollouts(0).groups, temperature=1.0, max_staleness=0))
    assert metrics["mismatch"] < 1e-5, "it gives the recorded tokens their probabilities"


def test_a_run_that_diverged_diverges_again_when_it_is_started_again(tmp_path: Path) -> None:
    hub, settings = Alarming(6), changed(learning_rate=10.0)
    messages = []
    for _ in range(2):
        run, _ = training_run(tmp_path, hub, settings)
        with pytest.raises(TrainingDiverged) as caught:
            run.run()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert CheckpointStore(tmp_path / "trainer" / "checkpoints", 2).at((0, 0)).progress.version == 0


def test_healthy_steps_are_not_touched_by_guards(tmp_path: Path) -> None:
    """All guards at their most severe, and weights as without any."""
    severe = {name: {"react": "stop"} for name in ("gradient_spike", "clip_fraction", "mismatch_kl", "reward_fall")}
    run, made = training_run(tmp_path, FakeHub(4), changed(guards=severe))
    run.run()
    plain, hub = learner(), FakeHub(4)
    for step in range(4):
        train_step(plain, StepWork(step, hub.rollouts(step).groups, temperature=1.0, max_staleness=0))
    assert same(weights(made), weights(plain))
    rows = rows_of(tmp_path)
    assert [row["rate_factor"] for row in rows[:-1]] == [1.0] * 4
    assert not [name for row in rows for name in row if name.startswith("alarm_")]
    assert rows[0]["staleness_0"] == 1.0


def test_skip_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    """Every update moves too far for this limit, so none is made; warnings reach the hub once."""
    hub = Alarming(3)
    run, made = training_run(
        tmp_path, hub, changed(guards={"effective_samples": {"react": "skip", "limit": 0.999999999}}, minibatches=1)
    )
    with torch.no_grad():  # another model than the one that drew the tokens
        made.model.model.norm.weight.mul_(0.9)
    before = weights(made)
    run.run()
    assert same(weights(made), before)
    assert [row["skipped_updates"] for row in rows_of(tmp_path)[:-1]] == [1.0, 1.0, 1.0]
    assert all("alarm_effective_samples" in row for row in rows_of(tmp_path)[:-1])
    assert list(hub.alarms) == [0]


SLOWED = changed(guards={"clip_fraction": {"react": "slow", "limit": 1e-9}}, clip_epsilon=1e-6)


def test_slow_is_the_same_after_a_kill(tmp_path: Path) -> None:
    """The rate of every step follows from the rows: a resume in the middle ends at the same weights, bit for bit."""
    whole, made = training_run(tmp_path / "whole", Alarming(4), SLOWED)
    whole.run()
    rates = [row["learning_rate"] for row in rows_of(tmp_path / "whole")[:-1]]
    assert rates == pytest.approx([1e-3, 5e-4, 5e-4, 5e-4])

    class Killed(BaseException):
        pass

    def kill(step: int) -> None:
        if step == 2:
            raise Killed

    hub = Alarming(4)
    hub.before["batch"] = kill
    with pytest.raises(Killed):
        training_run(tmp_path / "killed", hub, SLOWED)[0].run()
    hub.before.clear()
    resumed, again = training_run(tmp_path / "killed", hub, SLOWED)
    resumed.run()
    assert same(weights(again), weights(made))
    names = ("step", "rate_factor", "learning_rate", "alarm_clip_fraction")
    written = [rows_of(tmp_path / folder) for folder in ("whole", "killed")]
    kept = [[{name: row.get(name) for name in names} for row in rows] for rows in written]
    assert kept[0] == kept[1]
