"""Held-out scores that validators measure: they reach the metrics whenever they come, and training waits for none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trainer_stubs import SETTINGS, FakeHub, training_run

from shoal.errors import EnvironmentSetupError
from shoal.runtime.clock import ManualClock
from shoal.runtime.stop import StopToken
from shoal.trainer import held_out, loop
from shoal.trainer.held_out import ByValidators
from shoal.trainer.step import Stopped

STEPS = 4
BY_VALIDATORS = SETTINGS.model_copy(update={"evaluate_by": "validators"})


class Killed(BaseException):
    """Stands for kill -9: nothing in the trainer may catch it."""


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "POLL_S", 0.05)
    monkeypatch.setattr(held_out, "LOOK_S", 0.0)


def scores_of(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "trainer" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows))), "one row per step, in order"
    return {row["step"]: row["held_out"] for row in rows if "held_out" in row}


def never() -> float:
    raise AssertionError("the trainer must not evaluate")


def test_scores_go_into_their_rows_early_or_late(tmp_path: Path) -> None:
    hub = FakeHub(STEPS)

    def arrive(step: int) -> None:
        """Version 0 is measured before its row is written, version 2 after, the last while the trainer waits."""
        if step == 0:
            hub.measure(0, 0.1)
        if step == 2:
            hub.measure(2, None, complete=False)
        if step == 3:
            hub.measure(2, 0.3)

    hub.before["batch"] = arrive
    hub.before["announced"] = lambda version: hub.measure(version, 0.5) if version == STEPS else None
    training_run(tmp_path, hub, BY_VALIDATORS, evaluate=never)[0].run()
    assert scores_of(tmp_path) == {0: 0.1, 2: 0.3, 4: 0.5}
    assert {step: row["held_out"] for step, row in hub.reports.items() if "held_out" in row} == scores_of(tmp_path)
    assert "loss" in hub.reports[2], "the report is the whole row"


def test_a_score_of_the_last_version_is_waited_for(tmp_path: Path) -> None:
    hub = FakeHub(STEPS)
    asked: list[int] = []

    def look(since: int) -> None:
        asked.append(since)
        if asked.count(STEPS) == 3:
            hub.measure(STEPS, 0.75)

    hub.before["announced"] = lambda version: hub.measure(version, None, complete=False) if version == STEPS else None
    hub.before["evaluations"] = look
    training_run(tmp_path, hub, BY_VALIDATORS, evaluate=never)[0].run()
    assert scores_of(tmp_path) == {STEPS: 0.75}


def test_a_hub_that_offers_no_evaluation_leaves_the_last_one_to_the_trainer(tmp_path: Path) -> None:
    training_run(tmp_path, FakeHub(STEPS), BY_VALIDATORS)[0].run()
    assert scores_of(tmp_path) == {STEPS: 0.25}


def test_validators_that_never_come_are_not_waited_for_without_end() -> None:
    hub, clock, looks = FakeHub(STEPS), ManualClock(), []
    hub.measure(STEPS, None, complete=False)

    def look(since: int) -> None:
        looks.append(since)
        clock.advance(30)

    hub.before["evaluations"] = look
    assert ByValidators(lambda: 0.25, 2, hub.evaluations, clock, StopToken()).last(STEPS) == 0.25
    assert len(looks) == held_out.LAST_WAIT_S / 30


def test_who_is_told_to_stop_does_not_wait() -> None:
    hub, stop = FakeHub(STEPS), StopToken()
    hub.measure(STEPS, None, complete=False)
    stop.set("enough")
    with pytest.raises(Stopped):
        ByValidators(never, 2, hub.evaluations, ManualClock(), stop).last(STEPS)


def test_a_resume_takes_up_what_came_meanwhile_and_nothing_twice(tmp_path: Path) -> None:
    hub = FakeHub(STEPS)

    def stop_at(step: int) -> None:
        if step == 2:
            raise Killed

    hub.before["batch"] = stop_at
    hub.measure(0, 0.1)
    with pytest.raises(Killed):
        training_run(tmp_path, hub, BY_VALIDATORS, evaluate=never)[0].run()
    assert scores_of(tmp_path) == {0: 0.1}
    hub.before.clear()
    hub.measure(1, 0.2)
    hub.before["announced"] = lambda version: hub.measure(version, 0.5) if version == STEPS else None
    training_run(tmp_path, hub, BY_VALIDATORS, evaluate=never)[0].run()
    assert scores_of(tmp_path) == {0: 0.1, 1: 0.2, 4: 0.5}


def test_the_hub_is_asked_only_for_what_is_not_known_yet(tmp_path: Path) -> None:
    hub, asked = FakeHub(STEPS), []
    hub.before["evaluations"] = asked.append
    hub.measure(0, 0.1)
    measuring = ByValidators(never, 2, hub.evaluations, ManualClock(), StopToken())
    assert measuring.known(0) == {0: 0.1}
    assert measuring.known(1) == {}
    hub.measure(2, None, complete=False)
    assert measuring.known(2) == {}
    hub.measure(2, 0.3)
    assert measuring.known(3) == {2: 0.3}
    assert asked == [0, 1, 1, 2]


def test_what_was_told_is_not_told_again_while_an_older_version_is_awaited() -> None:
    hub = FakeHub(STEPS)
    hub.measure(0, None, complete=False)
    hub.measure(2, 0.3)
    measuring = ByValidators(never, 2, hub.evaluations, ManualClock(), StopToken())
    assert measuring.known(3) == {2: 0.3}
    assert measuring.known(4) == {}
    hub.measure(0, 0.1)
    assert measuring.known(4) == {0: 0.1}


def test_a_replay_tells_scores_that_were_there_before_it_came_to_them() -> None:
    hub = FakeHub(8)
    for version in (0, 2, 4, 6):
        hub.measure(version, version / 10)
    measuring = ByValidators(never, 2, hub.evaluations, ManualClock(), StopToken())
    told = [measuring.known(version) for version in range(7)]
    assert told == [{0: 0.0}, {}, {2: 0.2}, {}, {4: 0.4}, {}, {6: 0.6}]


def test_rows_have_the_same_scores_after_a_replay(tmp_path: Path) -> None:
    hub, settings = FakeHub(STEPS), BY_VALIDATORS.model_copy(update={"checkpoint_every": 10, "keep_best": 0})

    def measure(version: int) -> None:
        hub.measure(version, 0.2 + version / 10)
        if version == 3 and len(hub.reports) == 3:
            raise Killed

    hub.before["announced"] = measure
    with pytest.raises(Killed):
        training_run(tmp_path, hub, settings, evaluate=never)[0].run()
    hub.before["announced"] = lambda version: hub.measure(version, 0.2 + version / 10)
    training_run(tmp_path, hub, settings, evaluate=never)[0].run()
    assert scores_of(tmp_path) == pytest.approx({version: 0.2 + version / 10 for version in range(STEPS + 1)})


def test_a_mean_of_a_part_of_the_tasks_is_no_score() -> None:
    hub = FakeHub(STEPS)
    hub.measure(0, 1.0, partial=True)
    hub.measure(2, 0.5)
    hub.measure(STEPS, 1.0, partial=True)
    measuring = ByValidators(lambda: 0.25, 2, hub.evaluations, ManualClock(), StopToken())
    assert measuring.known(3) == {2: 0.5}
    assert measuring.last(STEPS) == 0.25, "the trainer measures all of it"


def test_the_model_is_there_before_anybody_waits_for_its_score(tmp_path: Path) -> None:
    hub, stop = FakeHub(STEPS), StopToken()
    hub.before["announced"] = lambda version: hub.measure(version, None, complete=False) if version == STEPS else None
    hub.before["evaluations"] = lambda since: stop.set("enough") if since == STEPS else None
    training_run(tmp_path, hub, BY_VALIDATORS, stop, evaluate=never)[0].run()
    card = json.loads((tmp_path / "trainer" / "export" / "shoal.json").read_text())
    assert card["progress"]["version"] == STEPS
    assert "held_out" not in card["metrics"]


@pytest.mark.parametrize("by", ["trainer", "validators"])
@pytest.mark.parametrize("error", [EnvironmentSetupError("row 3 is bad"), RuntimeError("out of memory")])
def test_an_evaluation_that_fails_ends_nothing(
    tmp_path: Path, by: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> float:
        raise error

    settings = SETTINGS.model_copy(update={"evaluate_by": by})
    training_run(tmp_path, FakeHub(STEPS), settings, evaluate=fails)[0].run()
    assert scores_of(tmp_path) == {}
    assert (tmp_path / "trainer" / "export" / "model.safetensors").exists()
    assert f"could not be measured on held-out tasks: {error}" in caplog.text


def test_the_card_of_the_export_has_the_last_score(tmp_path: Path) -> None:
    training_run(tmp_path, FakeHub(STEPS), BY_VALIDATORS)[0].run()
    folder = tmp_path / "trainer" / "export"
    assert json.loads((folder / "shoal.json").read_text())["metrics"]["held_out"] == 0.25
    assert "| held_out | 0.25 |" in (folder / "README.md").read_text()


def test_never_is_never(tmp_path: Path) -> None:
    hub = FakeHub(2)
    hub.before["evaluations"] = lambda _since: never()
    training_run(tmp_path, hub, BY_VALIDATORS.model_copy(update={"evaluate_every": 0}), evaluate=never)[0].run()
    assert scores_of(tmp_path) == {}
