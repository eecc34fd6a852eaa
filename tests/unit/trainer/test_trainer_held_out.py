"""Held-out scores that validators measure: they reach the metrics whenever they come, and training waits for none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer_stubs import FakeHub, Killed, killing, rows_of, training_run

from shoal.runtime.clock import ManualClock
from shoal.runtime.stop import StopToken
from shoal.trainer import loop
from shoal.trainer.loop import HeldOut
from shoal.trainer.step import Stopped

STEPS = 4


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


def scores_of(folder: Path) -> dict[int, float]:
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(len(rows))), "one row per step, in order"
    return {int(row["step"]): row["held_out"] for row in rows if "held_out" in row}


def test_scores_go_into_their_rows_early_or_late(tmp_path: Path, hub: FakeHub) -> None:
    """Version 0 is measured before its row is written, version 2 after, the last while the trainer waits."""
    measured = {0: (0, 0.1), 2: (2, None, False), 3: (2, 0.3)}
    hub.before["batch"] = lambda step: hub.measure(*measured[step]) if step in measured else None
    hub.before["announced"] = at_the_end(hub, 0.5)
    training_run(tmp_path, hub)[0].run()
    assert scores_of(tmp_path) == {0: 0.1, 2: 0.3, 4: 0.5}
    assert {step: row["held_out"] for step, row in hub.reports.items() if "held_out" in row} == scores_of(tmp_path)
    assert "loss" in hub.reports[2], "the report is the whole row"


def test_a_score_of_the_last_version_is_waited_for_and_is_on_the_card(tmp_path: Path, hub: FakeHub) -> None:
    asked: list[int] = []

    def look(since: int) -> None:
        asked.append(since)
        if asked.count(STEPS) == 3:
            hub.measure(STEPS, 0.75)

    hub.before |= {"announced": at_the_end(hub, None), "evaluations": look}
    training_run(tmp_path, hub)[0].run()
    assert scores_of(tmp_path) == {STEPS: 0.75}
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
    assert scores_of(tmp_path) == {0: 0.1}
    hub.before.clear()
    hub.measure(1, 0.2)
    hub.before["announced"] = at_the_end(hub, 0.5)
    training_run(tmp_path, hub)[0].run()
    assert scores_of(tmp_path) == {0: 0.1, 1: 0.2, 4: 0.5}


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


def test_a_replay_tells_scores_that_were_there_before_it_came_to_them(hub: FakeHub) -> None:
    for version in (0, 2, 4, 6):
        hub.measure(version, version / 10)
    looking = measuring(hub)
    told = [looking.known(version) for version in range(7)]
    assert told == [{0: 0.0}, {}, {2: 0.2}, {}, {4: 0.4}, {}, {6: 0.6}]


def test_the_model_is_there_before_anybody_waits_for_its_score(tmp_path: Path, hub: FakeHub) -> None:
    stop = StopToken()
    hub.before["announced"] = at_the_end(hub, None)
    hub.before["evaluations"] = lambda since: stop.set("enough") if since == STEPS else None
    training_run(tmp_path, hub, stop=stop)[0].run()
    card = json.loads((tmp_path / "trainer" / "export" / "shoal.json").read_text())
    assert card["progress"]["version"] == STEPS
    assert "held_out" not in card["metrics"]
