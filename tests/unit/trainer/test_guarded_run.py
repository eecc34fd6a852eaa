"""Guards in a run with real steps: what diverges ends as a failure and leaves a good checkpoint."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_stubs as stubs
from trainer_stubs import FakeHub, changed, learner, rows_of, same, tiny_model, training_run, weights

from shoal.errors import TrainingDiverged
from shoal.run.launch import Launched, conclusion
from shoal.runtime.supervise import Ending
from shoal.trainer import guards
from shoal.trainer.checkpoint import CheckpointStore, restore
from shoal.trainer.guards import GuardMonitor, GuardSettings
from shoal.trainer.record import open_alarms
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.step import StepWork, check_policy, train_step


def test_healthy_steps_are_not_touched_by_guards(tmp_path: Path) -> None:
    """All guards at their most severe, and weights as of a plain loop: hub, publisher and files add nothing to them."""
    names = ("gradient_spike", "clip_fraction", "mismatch_kl", "reward_collapse")
    severe = {name: {"action": "stop"} for name in names}
    run, made = training_run(tmp_path, FakeHub(4), changed(guards=severe))
    run.run()
    plain, hub = learner(), FakeHub(4)
    for step in range(4):
        train_step(plain, StepWork(step, hub.rollouts(step).groups, temperature=1.0, max_staleness=0))
    assert same(weights(made), weights(plain))
    assert not [name for row in rows_of(tmp_path) for name in row if name.startswith("alarm_")]


def quiet(**values: Any) -> TrainerSettings:
    return changed(**{"evaluate_every": 0, **values})


def diverges(folder: Path, hub: FakeHub, settings: TrainerSettings) -> str:
    with pytest.raises(TrainingDiverged) as caught:
        training_run(folder, hub, settings)[0].run()
    assert caught.value.exit_code == 5
    assert not (folder / "trainer" / "export").exists()
    return str(caught.value)


def test_a_learning_rate_of_ten_ends_as_a_failure_with_a_good_checkpoint(tmp_path: Path) -> None:
    hub = FakeHub(6)
    message = diverges(tmp_path, hub, changed(learning_rate=10.0))
    assert re.search(r"nats per token away.*last good checkpoint.*is version 0", message)
    assert max(version for _, version in hub.policies) == 1, "what step 1 made of it was never published"
    assert "guard.divergence" in hub.alarms[1], "the hub heard why"
    good = learner(seed=5)
    restore(good, CheckpointStore(tmp_path / "trainer" / "checkpoints", 2).at((0, 0)).folder)
    assert same(weights(good), weights(learner()))
    metrics = train_step(good, StepWork(0, hub.rollouts(0).groups, temperature=1.0, max_staleness=0))
    assert metrics["mismatch"] < 1e-5, "it gives the recorded tokens their probabilities"


def test_skip_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    """Every update moves too far for this limit, so none is made; warnings reach the hub once."""
    hub = FakeHub(3)
    skipping = {"effective_samples": {"action": "skip", "limit": 0.999999999}}
    run, made = training_run(tmp_path, hub, changed(guards=skipping, minibatches=1))
    with torch.no_grad():  # another model than the one that drew the tokens
        made.model.model.norm.weight.mul_(0.9)
    before = weights(made)
    run.run()
    assert same(weights(made), before)
    assert [row["skipped_updates"] for row in rows_of(tmp_path)[:-1]] == [1.0, 1.0, 1.0]
    assert all("alarm_effective_samples" in row for row in rows_of(tmp_path)[:-1])
    assert list(hub.alarms) == [0]


@pytest.mark.parametrize("settings", [quiet(learning_rate=10.0), quiet(learning_rate=1e30, minibatches=1)])
def test_a_last_step_that_destroys_the_policy_is_no_success(tmp_path: Path, settings: TrainerSettings) -> None:
    hub = FakeHub(1)
    message = diverges(tmp_path, hub, settings)
    assert message.startswith("after step 0, the last: ")
    assert "nothing newer was saved or published" in message
    assert f"shoal export {tmp_path} OUT --version 0" in message
    assert max(hub.policies) == (0, 0), "it was not published"
    assert CheckpointStore(tmp_path / "trainer" / "checkpoints", 2).places() == [(0, 0)]
    assert any(name.startswith("alarm_") for name in hub.reports[0]), "the hub heard of it"
    assert diverges(tmp_path, hub, settings) == message, "and so it is when it is started again"


def test_the_look_changes_nothing_and_sees_what_a_next_step_would() -> None:
    made, hub = learner(), FakeHub(1)
    work = StepWork(0, hub.rollouts(0).groups, temperature=1.0, max_staleness=0)
    before = weights(made)
    fresh = check_policy(made, work)
    assert fresh["mismatch"] < 1e-5, "it drew these tokens itself"
    assert same(weights(made), before)
    train_step(made, work)
    moved, again = check_policy(made, work), train_step(made, work)
    assert moved["mismatch"] > 10 * fresh["mismatch"]
    assert moved["mismatch"] == pytest.approx(again["mismatch"], rel=0.5), "the first minibatch of the next one"
    with torch.no_grad():
        made.model.model.norm.weight[0] = torch.inf
    seen = check_policy(made, StepWork(0, [], temperature=1.0, max_staleness=0))
    assert GuardMonitor(GuardSettings()).check_last_version(0, seen).numbers == {"alarm_not_finite": 1.0}, (
        "without any batch"
    )


def test_a_resume_at_the_last_version_looks_as_well(tmp_path: Path) -> None:
    """Its batch is asked for again: a version that was saved before it could be judged is not exported either."""
    hub = FakeHub(1)
    lenient = quiet(learning_rate=10.0, guards={"divergence": {"action": "warn"}})
    training_run(tmp_path, hub, lenient)[0].run()
    assert (tmp_path / "trainer" / "export").exists(), "a guard that only warns lets it out"
    assert rows_of(tmp_path)[0]["alarm_divergence"] > 3
    shutil.rmtree(tmp_path / "trainer" / "export")
    message = diverges(tmp_path, hub, quiet(learning_rate=10.0))
    assert "--version 0" in message
    assert "nothing newer" not in message, "version 1 was saved by then"
    assert "alarm_divergence" in hub.reports[0]


@pytest.mark.slow
def test_two_processes_look_together(tmp_path: Path) -> None:
    (_, first), (_, second) = stubs.run_ranks(tmp_path, 2, 1, quiet(learning_rate=10.0))
    assert "TrainingDiverged: after step 0, the last: " in first, second
    assert "TrainingDiverged" not in second, "the other one was told that it is over"
    assert not (tmp_path / "trainer" / "export").exists()


@pytest.mark.parametrize(("name", "number"), [("divergence", "mismatch"), ("mismatch_kl", "mismatch_kl")])
def test_guard_of_the_starting_policy_refuses_every_update(tmp_path: Path, name: str, number: str) -> None:
    watch = GuardMonitor(GuardSettings.model_validate({name: {"action": "skip"}}))
    watch.begin(0)
    healthy = {"loss": 0.1, "grad_norm": 1.0}
    assert watch.veto({**healthy, number: 50.0}) is not None
    assert watch.veto(healthy) is not None, "the same step, in which nobody measures it again"
    watch.begin(1)
    assert watch.veto(healthy) is None
    if name == "divergence":  # a destroyed policy is left as it is
        settings = quiet(learning_rate=10.0, guards={name: {"action": "skip"}})
        training_run(tmp_path, FakeHub(3), settings)[0].run()
        assert [row["skipped_updates"] for row in rows_of(tmp_path)] == [0.0, 2.0, 2.0]


def test_an_alarm_stands_until_enough_calm_rows_have_followed() -> None:
    rows: list[dict[str, float]] = [{"step": step} for step in range(20)]
    for step in (1, 10, 13):
        rows[step]["alarm_no_signal"] = float(step)
    stands = {"no_signal": (10, "13 steps in a row had no token to train on in step 13")}
    assert [open_alarms(rows), open_alarms(rows[: 13 + guards.CALM])] == [{}, stands]


def test_the_end_of_a_run_says_which_alarms_stand(tmp_path: Path) -> None:
    trainer, ended = tmp_path / "trainer", Launched(Ending(0, ""), None, 1.0)
    trainer.mkdir()

    def said(**alarm: float) -> list[str]:
        same = {"groups": 4, "loss": 0.1, "held_out": 0.5}
        rows = [{"step": step, **same, **(alarm if step else {})} for step in range(3)]
        (trainer / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return conclusion(tmp_path, ended)

    assert said()[-1] == f"the trained model is in {trainer}/export"
    *_, alarm, where = said(alarm_divergence=2300.0)
    assert alarm.startswith("ALARM divergence, since step 1: the trainer's log-probabilities are 2.3e+03 nats")
    assert where.startswith(f"the trained model is in {trainer}/export, BUT ALARMS STAND")
    assert f"export {tmp_path} OUT --best" in where


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_rewards_beyond_all_bounds_end_in_words(tmp_path: Path, action: str, caplog: pytest.LogCaptureFixture) -> None:
    hub = FakeHub(1)
    hub._groups = [[stubs.make_group(0, 0, tiny_model(), [1e200, 0.0, 0.0, 0.0])]]
    settings = quiet(guards={"not_finite": {"action": action}})
    if action == "stop":
        assert "NaN or infinite" in diverges(tmp_path, hub, settings)
    else:
        training_run(tmp_path, hub, settings)[0].run()
    assert "reward_std" not in rows_of(tmp_path)[0]
    assert "not in its row: reward_std" in caplog.text


def test_a_resume_without_its_rows_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = FakeHub(2)
    training_run(tmp_path, hub, quiet())[0].run()
    with caplog.at_level(logging.WARNING):
        training_run(tmp_path, hub, quiet())[0].run()
        assert "of the 2 steps" not in caplog.text
        (tmp_path / "trainer" / "metrics.jsonl").unlink()
        training_run(tmp_path, hub, quiet())[0].run()
    assert "has 0 of the 2 steps that were done" in caplog.text
