"""The trainer's story against a hub in memory: complete, killed anywhere, resumed, refused, stopped; held-out scores
that come whenever they come."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import trainer_stubs as stubs
from trainer_stubs import KEY, RUN, SETTINGS, FakeHub, Killed, killing, learner, rows_of, same, training_run, weights
from transformers import AutoModelForCausalLM

from shoal.errors import CheckpointError, ConfigError, DeadlineExceeded, ProtocolError
from shoal.protocol import BatchReply, TrainingBatch
from shoal.runtime import ManualClock, StopToken, crash
from shoal.shardcast import Origin, origin
from shoal.trainer import checkpoint, loop, publisher
from shoal.trainer.checkpoint import CheckpointStore
from shoal.trainer.folder import TrainerProgress
from shoal.trainer.loop import HeldOut, run_trainer
from shoal.trainer.settings import TrainerConfig, TrainerSettings
from shoal.trainer.step import Stopped

STEPS = 4
POINTS = [name for name in crash.POINTS if name.startswith("trainer.")]
SPARSE = SETTINGS.model_copy(update={"checkpoint_every": 3, "keep_best": 0})


Whole = tuple[dict[str, torch.Tensor], FakeHub, Path]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> list[Whole]:
    """Runs that nothing happened to, by their staleness: their last weights, hubs and folders."""
    found = []
    for max_staleness in (0, 1):
        folder, hub = tmp_path_factory.mktemp("whole"), FakeHub(STEPS, max_staleness)
        run, made = training_run(folder, hub)
        run.run()
        found.append((weights(made), hub, folder))
    return found


@pytest.fixture
def whole(wholes: list[Whole]) -> Whole:
    return wholes[0]


def test_a_run_publishes_every_version_and_reports_every_step(whole) -> None:
    _, hub, folder = whole
    assert sorted(hub.policies) == [(0, version) for version in range(STEPS + 1)]
    assert len(set(hub.policies.values())) == STEPS + 1  # every step changed the policy
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert {step: {"step": step, **metrics} for step, metrics in hub.reports.items()} == {r["step"]: r for r in rows}
    assert [row["step"] for row in rows if "held_out" in row] == [0, 2, 4]  # every two steps, and the last version
    assert sorted(archived(folder)) == [f"step-{step:05d}.parquet" for step in range(STEPS)]
    row, promised = rows[0], {
        "reward_mean", "reward_std", "loss", "grad_norm", "clip_fraction", "ratio_mean", "ratio_max", "mismatch",
        "entropy", "staleness_mean", "staleness_max", "tokens", "tokens_per_s", "dropped_groups",
        "truncated_fraction", "train_s", "wait_s", "idle_fraction", "step_s", "at_ms", "sampled_reward",
    }  # fmt: skip
    assert promised <= row.keys()
    assert row["sampled_reward"] == 0.625  # as the batch has it, not the mean of what is trained on
    assert row["reward_mean"] != row["sampled_reward"]
    assert row["dropped_groups"] == 2  # the hub's count, and none of the trainer's own
    assert 0 <= row["idle_fraction"] <= 1


def killed_at(folder: Path, hub: FakeHub, where: str, number: int, settings: TrainerSettings = SETTINGS) -> None:
    """A trainer that was killed at that call of the hub, or when it reached that point for so many times; the hub is
    well again."""
    reached: list[str] = []

    def point(name: str) -> None:
        reached.append(name)
        if name == where and reached.count(name) == number:
            raise Killed

    hub.before[where] = killing(number)
    with pytest.MonkeyPatch.context() as patched:
        for module in (checkpoint, publisher, origin):
            patched.setattr(module, "point", point)
        with pytest.raises(Killed):
            training_run(folder, hub, settings)[0].run()
    hub.before.clear()


def archived(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "trainer" / "rollouts").iterdir()}


@pytest.mark.parametrize(("where", "number", "settings"), [
    ("announce", 0, SETTINGS), ("batch", 2, SETTINGS), ("report", 0, SETTINGS), ("announced", 2, SETTINGS),
    ("announce", 4, SETTINGS), ("rollouts", 1, SPARSE), ("report", 2, SPARSE), ("announce", 2, SPARSE),
    ("report", 4, SPARSE), *((name, 2, SETTINGS) for name in POINTS),
])  # fmt: skip
def test_killed_anywhere_and_resumed_gives_the_same_weights_and_files(tmp_path, wholes, where, number, settings):
    """At points of the publisher while the next step is trained: with staleness."""
    max_staleness = int(where in POINTS)
    hub, whole = FakeHub(STEPS, max_staleness), wholes[max_staleness]
    folder, torn = tmp_path / "trainer", tmp_path / "trainer" / "rollouts" / "step-00000.parquet"
    killed_at(tmp_path, hub, where, number, settings)
    out = max((version for _, version in hub.policies), default=-1)
    newest = max((version for version, _ in CheckpointStore(folder / "checkpoints", 2).places()), default=-1)
    assert settings is SPARSE or newest - 1 <= out <= newest, "what is out is saved, and one version more at most"
    if settings is SPARSE and torn.exists() and number < 3:
        torn.write_bytes(b"torn")  # checkpoints are far apart: a replay writes it again
    asked: list[int] = []
    hub.before["rollouts"] = asked.append
    resumed, made = training_run(tmp_path, hub, settings)
    resumed.run()
    assert settings is SETTINGS or number > 2 or asked == [0, 1, 2, 3], "all since the last checkpoint, once"
    assert same(weights(made), whole[0])
    assert hub.policies == whole[1].policies  # every digest reproduced: still incarnation 0
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3, 4]  # none missing, none twice
    assert sorted(hub.reports) == [0, 1, 2, 3, 4]
    assert archived(tmp_path) == archived(whole[2])


def test_lost_checkpoints_cost_only_a_replay(tmp_path, whole):
    hub = FakeHub(STEPS)
    killed_at(tmp_path, hub, "batch", 3)
    shutil.rmtree(tmp_path / "trainer")
    run, made = training_run(tmp_path, hub)
    run.run()
    assert same(weights(made), whole[0])
    assert hub.policies == whole[1].policies


@pytest.mark.parametrize(("where", "origin_lost", "before"), [
    ("batch", False, [(0, 0), (0, 1), (0, 2)]), ("batch", True, [(0, 0), (0, 1), (0, 2)]),
    ("announce", False, [(0, 0), (0, 1)]),
])  # fmt: skip
def test_a_digest_that_cannot_be_reproduced_begins_a_new_incarnation(tmp_path, where, origin_lost, before, caplog):
    hub, made = FakeHub(STEPS), learner()
    killed_at(tmp_path, hub, where, 2)
    with torch.no_grad():
        made.model.lm_head.weight.add_(1e-3)  # as if a GPU had rounded otherwise
    CheckpointStore(tmp_path / "trainer" / "checkpoints", 2).save(made, TrainerProgress(RUN, 2), {})
    if origin_lost:
        shutil.rmtree(tmp_path / "origin")
    with caplog.at_level(logging.WARNING):
        training_run(tmp_path, hub)[0].run()
    assert sorted(hub.policies) == [*before, (1, 2), (1, 3), (1, 4)]
    assert "incarnation 1" in caplog.text
    assert stubs.stored_in(tmp_path / "trainer" / "checkpoints").progress == TrainerProgress(RUN, STEPS, 1)
    # and once more: the new incarnation is continued, not left
    training_run(tmp_path, hub)[0].run()
    assert max(hub.policies) == (1, 4)


def test_a_finished_run_started_again_changes_nothing_also_with_staleness(tmp_path: Path) -> None:
    hub = FakeHub(STEPS, max_staleness=2)
    training_run(tmp_path, hub)[0].run()
    before, rows = dict(hub.policies), rows_of(tmp_path)
    training_run(tmp_path, hub)[0].run()
    assert hub.policies == before
    assert sorted(before) == [(0, version) for version in range(STEPS + 1)]
    assert [row["step"] for row in rows_of(tmp_path)] == [row["step"] for row in rows]
    assert max(row.get("staleness_max", 0) for row in rows) == 2, "it did not wait for its own announcement"


def test_every_row_says_when_it_was_written(tmp_path: Path) -> None:
    hub, clock = FakeHub(2), ManualClock(start_ms=5_000)
    hub.before["rollouts"] = lambda _step: clock.advance(1.5)
    training_run(tmp_path, hub, clock=clock)[0].run()
    seen = [(row["step"], row["at_ms"], row.get("step_s")) for row in rows_of(tmp_path)]
    assert seen == [(0, 6_500.0, 1.5), (1, 8_000.0, 1.5), (2, 8_000.0, None)]
    assert "at_ms" not in (tmp_path / "trainer" / "export" / "README.md").read_text()


def test_a_run_that_is_extended_keeps_the_score_of_its_former_end(tmp_path: Path) -> None:
    """Version 3 is measured because the run ends there; a run that goes on past it would not measure it."""
    first, longer = FakeHub(3), FakeHub(4)
    first.score = longer.score = {0: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}.get
    training_run(tmp_path, first)[0].run()
    longer.policies = dict(first.policies)
    killed_at(tmp_path, longer, "rollouts", 3)
    assert rows_of(tmp_path)[-1] == {"step": 3, "held_out": 0.3}
    training_run(tmp_path, longer)[0].run()
    rows = rows_of(tmp_path)
    assert [(row["step"], row.get("held_out")) for row in rows] == [(0, 0.1), (1, None), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert "loss" in rows[3]
    assert longer.reports[3]["held_out"] == 0.3


def test_no_batch_before_the_deadline_names_what_the_hub_waits_for(tmp_path: Path) -> None:
    hub, clock = FakeHub(STEPS), ManualClock()
    began_s = clock.monotonic_s()

    def nothing(step: int, wait_s: float) -> BatchReply:
        accepted = int(clock.monotonic_s() - began_s >= 10)
        clock.advance(wait_s)
        return BatchReply(waiting="0 of 16 groups (no unit is given out: no worker is asking)", accepted=accepted)

    hub.batch = nothing  # type: ignore[method-assign]
    run, _ = training_run(tmp_path, hub, clock=clock)
    why = r"no batch for step 0, and no further group accepted within 20 s.*no worker is asking"
    with pytest.raises(DeadlineExceeded, match=why):
        run.run()
    assert clock.monotonic_s() - began_s >= 10 + 20, "from the last accepted group"


@pytest.mark.parametrize("where", ["batch", "rollouts"])
def test_a_stopped_trainer_ends_quietly_and_is_resumable(tmp_path: Path, whole, where: str) -> None:
    hub, stop = FakeHub(STEPS), StopToken()
    hub.before[where] = lambda step: stop.set("SIGTERM") if step == 2 else None
    run, _ = training_run(tmp_path, hub, stop=stop)
    run.run()  # returns: stopping is no error
    assert run.version == 2
    hub.before.clear()
    resumed, made = training_run(tmp_path, hub)
    resumed.run()
    assert same(weights(made), whole[0])


@pytest.mark.parametrize(("progress", "said"), [
    (TrainerProgress("other-run", 0),
     r"version 0 of run other-run, but the hub has seen at most version -1 of run test-"),
    (TrainerProgress(RUN, 3), r"version 3 of run test-.*, but the hub has seen at most version -1 of run "),
])  # fmt: skip
def test_checkpoints_that_the_hub_cannot_know_are_refused(tmp_path: Path, progress: TrainerProgress, said: str) -> None:
    CheckpointStore(tmp_path / "trainer" / "checkpoints", 2).save(learner(), progress, {})
    with pytest.raises(CheckpointError, match=said):
        training_run(tmp_path, FakeHub(STEPS))[0].run()


def test_rollouts_that_are_not_the_batch_are_refused(tmp_path: Path) -> None:
    hub = FakeHub(STEPS)
    groups = hub.rollouts(1).groups
    hub.rollouts = lambda step: TrainingBatch(step=step, groups=groups)  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match=r"wrote down units \[0, 1, 2\] for step 0"):
        training_run(tmp_path, hub)[0].run()


def test_an_export_folder_of_somebody_else_is_noticed_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "trainer" / "export").mkdir(parents=True)
    (tmp_path / "trainer" / "export" / "thesis.txt").write_text("years of work")
    hub = FakeHub(STEPS)
    with pytest.raises(ConfigError, match="not an export of shoal"):
        training_run(tmp_path, hub)[0].run()
    assert hub.policies == {}


def test_the_policy_is_published_and_exported_in_the_type_asked_for(tmp_path: Path) -> None:
    hub = FakeHub(1)
    training_run(tmp_path, hub, SETTINGS.model_copy(update={"publish_dtype": "bfloat16"}))[0].run()
    head = Origin(tmp_path / "origin", RUN, KEY).head()
    assert head.policy == hub.policy
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trainer" / "export").lm_head.weight
    exact = stubs.stored_in(tmp_path / "trainer" / "checkpoints").tensors()["lm_head.weight"]
    assert (loaded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)  # the master copy keeps its precision
    assert torch.equal(loaded, exact.to(torch.bfloat16))
    card = (tmp_path / "trainer" / "export" / "README.md").read_text()
    assert all(fact in card for fact in (head.policy.digest, RUN, "held_out"))


def test_a_stop_while_the_hub_is_away_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, hub = StopToken(), Mock()
    hub.register.side_effect = lambda *_: stop.set("SIGTERM") or Mock(side_effect=DeadlineExceeded("stopped"))()
    monkeypatch.setattr(loop, "HubClient", lambda *_arguments, **_options: hub)
    run_trainer(TrainerConfig(tmp_path, SETTINGS, "", tmp_path, "http://hub", None, KEY, Mock()), stop)
    assert hub.close.called


@pytest.fixture
def hub() -> FakeHub:
    """Its validators measure when a test says so."""
    made = FakeHub(STEPS)
    made.score = lambda _version: None
    return made


def measuring(hub: FakeHub, clock: ManualClock | None = None, stop: StopToken | None = None) -> HeldOut:
    return HeldOut(2, hub.evaluations, clock or ManualClock(), stop or StopToken())


def at_the_end(hub: FakeHub, mean: float | None) -> Callable[[int], None]:
    return lambda version: hub.measure(version, mean, complete=mean is not None) if version == STEPS else None


def held_out_of(folder: Path) -> dict[int, float]:
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(len(rows))), "one row per step, in order"
    return {int(row["step"]): row["held_out"] for row in rows if "held_out" in row}


def test_scores_go_into_their_rows_early_or_late(tmp_path: Path, hub: FakeHub) -> None:
    """Version 0 is measured before its row is written, version 2 after, the last while the trainer waits."""
    measured = {0: (0, 0.1), 2: (2, None, False), 3: (2, 0.3)}
    hub.before["batch"] = lambda step: hub.measure(*measured[step]) if step in measured else None
    hub.before["announced"] = at_the_end(hub, 0.5)
    training_run(tmp_path, hub)[0].run()
    assert held_out_of(tmp_path) == {0: 0.1, 2: 0.3, 4: 0.5}
    assert {step: row["held_out"] for step, row in hub.reports.items() if "held_out" in row} == held_out_of(tmp_path)
    assert "loss" in hub.reports[2], "the report is the whole row"


def test_a_score_of_the_last_version_is_waited_for_and_is_on_the_card(tmp_path: Path, hub: FakeHub) -> None:
    asked: list[int] = []

    def look(since: int) -> None:
        asked.append(since)
        if asked.count(STEPS) == 3:
            hub.measure(STEPS, 0.75)

    hub.before |= {"announced": at_the_end(hub, None), "evaluations": look}
    training_run(tmp_path, hub)[0].run()
    assert held_out_of(tmp_path) == {STEPS: 0.75}
    folder = tmp_path / "trainer" / "export"
    assert json.loads((folder / "shoal.json").read_text())["metrics"]["held_out"] == 0.75
    assert "| held_out | 0.75 |" in (folder / "README.md").read_text()


def test_validators_that_never_come_are_not_waited_for_without_end(hub: FakeHub) -> None:
    clock, looks, stop = ManualClock(), [], StopToken()
    hub.measure(STEPS, None, complete=False)
    hub.before["evaluations"] = lambda since: looks.append(since) or clock.advance(30)
    assert measuring(hub, clock).last(STEPS) is None
    assert len(looks) == loop.LAST_WAIT_S / 30
    stop.set("enough")
    with pytest.raises(Stopped):
        measuring(hub, stop=stop).last(STEPS)


def test_a_resume_takes_up_what_came_meanwhile_and_nothing_twice(tmp_path: Path, hub: FakeHub) -> None:
    hub.before["batch"] = killing(2)
    hub.measure(0, 0.1)
    with pytest.raises(Killed):
        training_run(tmp_path, hub)[0].run()
    assert held_out_of(tmp_path) == {0: 0.1}
    hub.before.clear()
    hub.measure(1, 0.2)
    hub.before["announced"] = at_the_end(hub, 0.5)
    training_run(tmp_path, hub)[0].run()
    assert held_out_of(tmp_path) == {0: 0.1, 1: 0.2, 4: 0.5}


def test_the_hub_is_asked_only_for_what_is_not_known_yet_and_tells_nothing_twice(hub: FakeHub) -> None:
    asked: list[int] = []
    hub.before["evaluations"] = asked.append
    hub.measure(0, 0.1)
    looking = measuring(hub)
    assert [looking.known(version) for version in (0, 1)] == [{0: 0.1}, {}]
    hub.measure(2, None, complete=False)
    hub.measure(3, 0.2)
    assert [looking.known(version) for version in (2, 3, 3)] == [{}, {3: 0.2}, {}], "an older version is awaited"
    hub.measure(2, 0.3)
    hub.measure(4, 1.0, partial=True)
    assert looking.known(4) == {2: 0.3}, "a mean of a part of the tasks is no score"
    assert looking.last(4) is None
    assert asked == [0, 1, 1, 2, 2, 2, 4]
    replaying = measuring(hub)
    told = [replaying.known(version) for version in range(5)]
    assert told == [{0: 0.1}, {}, {2: 0.3}, {3: 0.2}, {}], "a replay is told each score with its version"


def test_the_model_is_there_before_anybody_waits_for_its_score(tmp_path: Path, hub: FakeHub) -> None:
    stop = StopToken()
    hub.before["announced"] = at_the_end(hub, None)
    hub.before["evaluations"] = lambda since: stop.set("enough") if since == STEPS else None
    training_run(tmp_path, hub, stop=stop)[0].run()
    card = json.loads((tmp_path / "trainer" / "export" / "shoal.json").read_text())
    assert card["progress"]["version"] == STEPS
    assert "held_out" not in card["metrics"]
