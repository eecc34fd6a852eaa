"""Which tasks units get from a real hub: unusable ones are passed over, solved ones retire, whoever is first."""

import hashlib
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.hub import FakeEnvironment, Lazy, make_config
from kit.machine import Play
from shoal.environments import Split, Task
from shoal.errors import ConfigError, UnusableTask
from shoal.hub.service import Hub
from shoal.hub.state import Pool, PoolRules, TaskRow, draws
from shoal.hub.state.draws import Drawn, Pick, Result, task_index
from shoal.hub.storage import SqliteStorage
from shoal.protocol import Batch, Outcome
from shoal.runtime.clock import ManualClock

POOLS = PoolRules(retire_after=2)
RUN = {"steps": 6, "groups_per_step": 3, "group_size": 4}


class RowEnvironment(FakeEnvironment):
    """Tasks of which some rows are bad."""

    def __init__(self, count: int = 12, bad: frozenset[int] = frozenset()) -> None:
        self._count, self._bad = count, bad

    def tasks(self, split: Split) -> Sequence[Task]:
        return Lazy(self._count if split == "train" else 0, self._row)

    def task(self, task_id: str) -> Task:
        return self._row(int(task_id.removeprefix("row-")))

    def _row(self, index: int) -> Task:
        if index in self._bad:
            raise UnusableTask(f"row {index} has no prompt")
        return Task(f"row-{index}", "" if index == 0 else f"{index}=", "")


def begun(folder: Path, run: dict[str, int] = RUN, settings: dict[str, int] | None = None, **changes: Any) -> Play:
    """With policy 0, and a worker whom nobody has to audit often."""
    play = Play(folder, run, settings or {}, **changes)
    play.join(streak=100)
    play.announce(0)
    return play


def solved(salt: int, task: str, unit: int) -> tuple[float, ...]:
    """A group's rewards, by what it is: some tasks are always solved, some never, some now and then."""
    digest = hashlib.sha256(f"{salt}/{task}".encode()).digest()
    if digest[0] % 3 == 0:
        return (1.0,) * 4
    luck = hashlib.sha256(f"{salt}/{task}/{unit}".encode()).digest()
    return tuple(float(byte % 4 > digest[0] % 3) for byte in luck[:4])


def play_to_the_end(folder: Path, salt: int, order: random.Random | None) -> tuple[list[str], dict[str, TaskRow]]:
    """The tasks of all units of a synchronous run. Who leases, who is judged first, and when, is up to `order`."""
    play = Play(folder, RUN, {"refill_cap": 2}, environment=RowEnvironment(), pools=POOLS)
    for _ in range(2):
        play.join(streak=100)
    for step in range(RUN["steps"]):
        play.announce(step)
        for _ in range(200):
            if isinstance(play.batch(step), Batch):
                break
            turn(play, salt, order)
        else:
            raise AssertionError(f"step {step} does not end")
    tasks = [play.stored.unit(number).task for number in range(play.stored.progress().next_unit)]
    return tasks, play.stored.task_rows(sorted(set(tasks)))


def turn(play: Play, salt: int, order: random.Random | None) -> None:
    dice = order or random.Random(0)
    worker = dice.choice(play.workers)
    for lease in play.lease(worker, 8 if order is None else dice.randint(1, 3)):
        play.submit(lease)
    audits = play.claim(64)
    if order is not None:
        order.shuffle(audits)
        audits = audits[: order.randint(1, 3)]
    for audit in audits:
        document = audit.lease.document
        play.judge(audit, Outcome.ACCEPTED, solved(salt, document["task"], document["unit"]))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(salt=st.integers(0, 1000), seed=st.integers(0, 10**6))
def test_the_tasks_of_a_synchronous_run_do_not_depend_on_who_was_first(tmp_path: Path, salt: int, seed: int) -> None:
    straight = play_to_the_end(tmp_path / f"{salt}-{seed}-a", salt, None)
    mixed = play_to_the_end(tmp_path / f"{salt}-{seed}-b", salt, random.Random(seed))
    assert straight == mixed


def test_solved_tasks_retire_and_others_take_their_place(tmp_path: Path) -> None:
    tasks, rows = play_to_the_end(tmp_path, 5, None)
    retired = [task for task, row in rows.items() if row.pool == "retired"]
    assert retired, "some tasks are always solved"
    usual = [f"row-{task_index(12, 0, unit)}" for unit in range(len(tasks))]
    assert tasks != usual
    for task in retired:
        last = max(unit for unit, each in enumerate(tasks) if each == task)
        assert rows[task].groups == tasks.count(task) >= 2
        assert rows[task].last_unit == last


@pytest.mark.parametrize(("pools", "counts"), [(POOLS, {"normal": 3}), (None, {})])
def test_pools_change_with_batches_only_and_without_pools_nothing_is_kept(tmp_path, pools, counts):
    play = begun(tmp_path, environment=RowEnvironment(), pools=pools)
    play.work(play.workers[0], 3, (0.0, 1.0, 1.0, 1.0))
    assert play.stored.pool_counts() == {}
    assert isinstance(play.batch(0), Batch)
    assert play.stored.pool_counts() == counts
    assert play.hub.reporting.status().pools == counts


def test_when_everything_is_solved_the_owner_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    pools = replace(POOLS, retire_after=1)
    play = begun(tmp_path, {**RUN, "steps": 3}, {"refill_cap": 8}, environment=RowEnvironment(count=4), pools=pools)
    for _ in range(8):  # every group is wholly solved: dropped, and refilled
        play.work(play.workers[0], 3, (1.0,) * 4)
    play.work(play.workers[0], 3, (0.0, 1.0, 1.0, 1.0))
    assert isinstance(play.batch(0), Batch)
    with play.storage.write(exclusive=True) as transaction:  # the last three came back: retire them by hand
        rows = transaction.task_rows([f"row-{index}" for index in range(4)])
        assert all(row.groups > 1 for row in rows.values())
        transaction.apply([replace(row, pool=Pool.RETIRED) for row in rows.values()])
    play.announce(1)
    (lease,) = play.lease(play.workers[0], 1)
    assert lease.task == f"row-{task_index(4, 0, lease.unit)}", "its own task of the epoch"
    assert any("are retired (solved)" in alarm for alarm in play.hub.reporting.status().alarms)


class TestUnusable:
    def test_another_task_is_drawn_and_it_is_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        bad = frozenset(range(1, 12, 2))
        play = begun(tmp_path, {**RUN, "groups_per_step": 12}, environment=RowEnvironment(bad=bad))
        with caplog.at_level(logging.WARNING, logger="shoal.hub"):
            leases = play.lease(play.workers[0], 12)
        assert len(leases) == 12
        assert {lease.task for lease in leases} <= {f"row-{index}" for index in (2, 4, 6, 8, 10)}, "0 has no tokens"
        said = [record.getMessage() for record in caplog.records]
        assert sum("row 1 has no prompt" in line for line in said) == 1
        assert play.hub.work.drawing.unusable > len(said) - 1

    def test_if_there_is_none_the_owner_is_told(self, tmp_path: Path) -> None:
        play = begun(tmp_path, environment=RowEnvironment(bad=frozenset(range(12))))
        assert play.lease(play.workers[0], 3) == []
        status = play.hub.reporting.status()
        assert "none of 64 tasks drawn for unit 0 can be used" in status.alarms[0]
        assert any("no task that was drawn for unit 0 can be used" in wait.what for wait in status.waits)

    def test_a_prompt_that_is_too_long_is_passed_over(self, tmp_path: Path) -> None:
        made, size = RowEnvironment(count=8), {"row-7": 3}
        encode = lambda task: [5] * size.get(task.id, 200_000)  # noqa: E731
        play = begun(tmp_path, {**RUN, "groups_per_step": 1}, environment=made, encode=encode)
        (lease,) = play.lease(play.workers[0], 1)
        assert (lease.task, lease.prompt_ids) == ("row-7", (5, 5, 5))


def test_a_run_keeps_its_pools(tmp_path: Path) -> None:
    config, changed = make_config(tmp_path), replace(POOLS, retire_after=3)
    for kept, other in ((POOLS, None), (POOLS, changed), (None, POOLS)):
        storage = SqliteStorage(None)
        Hub(replace(config, pools=kept), ManualClock(), storage)
        Hub(replace(config, pools=kept), ManualClock(), storage)
        with pytest.raises(ConfigError, match="whose pools is"):
            Hub(replace(config, pools=other), ManualClock(), storage)


RULES = PoolRules(retire_after=2, easy=0.9, hard=0.05, easy_share=0.25, hard_share=0.5)
COUNT, SEED = 1000, 7


def row(pool: Pool, task: str = "t") -> TaskRow:
    return TaskRow(task, groups=3, rate=0.5, pool=pool)


def history(*rates: float, rules: PoolRules = RULES) -> TaskRow:
    found: TaskRow | None = None
    for unit, rate in enumerate(rates):
        found = draws.after(rules, found, Result(unit, "t", rate))
    assert found is not None
    return found


class TestCandidates:
    def test_they_differ_by_unit_epoch_and_seed_and_are_always_the_same(self) -> None:
        drawn = {key: tuple(draws.candidates(COUNT, *key)) for key in ((SEED, 3), (SEED, 4), (SEED, 1003), (8, 3))}
        assert len(set(drawn.values())) == 4
        assert tuple(draws.candidates(COUNT, SEED, 3)) == drawn[SEED, 3]
        assert list(draws.candidates(COUNT, 0, 0))[:4] == [64, 387, 203, 727], "the rule is public: it must not change"

    def test_each_attempt_reaches_every_task(self) -> None:
        drawn = [list(draws.candidates(8, SEED, unit)) for unit in range(8)]
        for attempt in range(4):
            assert sorted(candidates[attempt] for candidates in drawn) == list(range(8))

    def test_shares_are_even(self) -> None:
        drawn = [draws.share(SEED, unit, attempt) for unit in range(200) for attempt in range(5)]
        assert all(0 <= value < 1 for value in drawn)
        assert abs(sum(value < 0.25 for value in drawn) / len(drawn) - 0.25) < 0.05


class TestRows:
    def test_a_task_moves_between_pools_by_its_recent_rate_and_wholly_solved_twice_in_a_row_it_is_retired(self) -> None:
        assert history(0.5).pool is Pool.NORMAL
        assert history(0.0).pool is Pool.HARD
        assert history(0.95).pool is Pool.EASY
        assert history(0.0, 0.5, 1.0).rate == 0.625, "the newest group weighs as much as all before it"
        assert history(0.0, 0.5).pool is Pool.NORMAL
        assert history(0.0, 0.5).groups == 2
        assert history(1.0).pool is Pool.EASY
        assert history(1.0, 1.0).pool is Pool.RETIRED
        assert history(1.0, 0.9, 1.0).pool is not Pool.RETIRED
        assert history(1.0, 1.0, 0.5).pool is Pool.NORMAL
        assert history(1.0, 1.0, 1.0, rules=PoolRules(retire_after=0)).pool is Pool.EASY

    def test_results_are_taken_in_order_of_unit_whatever_came_first(self) -> None:
        results = [Result(3, "a", 0.0), Result(1, "a", 1.0), Result(2, "b", 0.5)]
        forwards, backwards = (set(draws.fold(RULES, {}, each)) for each in (results, results[::-1]))
        assert forwards == backwards
        assert TaskRow("a", groups=2, rate=0.5, solved=0, last_unit=3) in forwards


def pick(rows: dict[str, TaskRow], drawn: Sequence[str | None], rules: PoolRules | None = RULES, unit: int = 0) -> Pick:
    """All that is drawn after these cannot be used."""
    known = [Drawn(task, rows.get(task or ""), usable=True) for task in drawn]
    return draws.pick(rules, SEED, unit, known + [Drawn(None)] * (draws.MOST_DRAWN - len(known)))


class TestPick:
    def test_easy_and_hard_ones_are_taken_by_their_share(self) -> None:
        for pool, share in ((Pool.EASY, 0.25), (Pool.HARD, 0.5), (Pool.NORMAL, 1.0)):
            taken = sum(pick({"a": row(pool)}, ["a", "b"], unit=unit).task == "a" for unit in range(400))
            assert abs(taken / 400 - share) < 0.08, pool

    def test_if_the_dice_speak_against_all_the_first_that_is_not_retired_is_taken(self) -> None:
        never = PoolRules(easy_share=0, hard_share=0)
        rows = {"a": row(Pool.RETIRED), "b": row(Pool.EASY), "c": row(Pool.HARD)}
        assert pick(rows, ["a", "b", "c"], rules=never) == Pick("b")
