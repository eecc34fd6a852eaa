"""Difficulty: what groups say about their tasks, and which of the tasks that are drawn is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kit.state import moment
from shoal.hub.state import draws
from shoal.hub.state.audits import pass_rate
from shoal.hub.state.commands import RaiseAlarm, SaveTask
from shoal.hub.state.draws import Drawn, Pick, Result
from shoal.hub.state.rows import Pool, PoolRules, TaskRow
from shoal.protocol import RolloutReward

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
    def test_the_first_is_the_units_own_task_of_the_epoch(self) -> None:
        for unit in (0, 1, 999, 1000, 12_345):
            drawn = list(draws.candidates(COUNT, SEED, unit))
            assert drawn[0] == draws.task_index(COUNT, SEED, unit)
            assert len(drawn) == draws.MOST_DRAWN
            assert all(0 <= index < COUNT for index in drawn)

    def test_they_differ_by_unit_epoch_and_seed_and_are_always_the_same(self) -> None:
        drawn = {key: tuple(draws.candidates(COUNT, *key)) for key in ((SEED, 3), (SEED, 4), (SEED, 1003), (8, 3))}
        assert len(set(drawn.values())) == 4
        assert tuple(draws.candidates(COUNT, SEED, 3)) == drawn[SEED, 3]
        assert list(draws.candidates(COUNT, 0, 0))[:4] == [64, 387, 203, 727], "the rule is public: it must not change"

    def test_each_attempt_reaches_every_task(self) -> None:
        drawn = [list(draws.candidates(8, SEED, unit)) for unit in range(8)]
        for attempt in range(4):
            assert sorted(candidates[attempt] for candidates in drawn) == list(range(8))

    def test_one_task_is_drawn_again_and_again(self) -> None:
        assert set(draws.candidates(1, SEED, 5)) == {0}

    def test_shares_are_even(self) -> None:
        drawn = [draws.share(SEED, unit, attempt) for unit in range(200) for attempt in range(5)]
        assert all(0 <= value < 1 for value in drawn)
        assert abs(sum(value < 0.25 for value in drawn) / len(drawn) - 0.25) < 0.05


class TestRows:
    def test_a_task_moves_between_pools_by_its_recent_rate(self) -> None:
        assert history(0.5).pool is Pool.NORMAL
        assert history(0.0).pool is Pool.HARD
        assert history(0.95).pool is Pool.EASY
        assert history(0.0, 0.5, 1.0).rate == 0.625, "the newest group weighs as much as all before it"
        assert history(0.0, 0.5).pool is Pool.NORMAL
        assert history(0.0, 0.5).groups == 2

    def test_wholly_solved_twice_in_a_row_is_retired_and_a_miss_brings_it_back(self) -> None:
        assert history(1.0).pool is Pool.EASY
        assert history(1.0, 1.0).pool is Pool.RETIRED
        assert history(1.0, 0.9, 1.0).pool is not Pool.RETIRED
        assert history(1.0, 1.0, 0.5).pool is Pool.NORMAL
        assert history(1.0, 1.0, 1.0, rules=PoolRules(retire_after=0)).pool is Pool.EASY

    def test_results_are_taken_in_order_of_unit_whatever_came_first(self) -> None:
        results = [Result(3, "a", 0.0), Result(1, "a", 1.0), Result(2, "b", 0.5)]
        forwards, backwards = (draws.fold(RULES, {}, each) for each in (results, results[::-1]))
        assert {command.row.task: command.row for command in forwards if isinstance(command, SaveTask)} == {
            command.row.task: command.row for command in backwards if isinstance(command, SaveTask)
        }
        rows = {command.row.task: command.row for command in forwards if isinstance(command, SaveTask)}
        assert (rows["a"].rate, rows["a"].solved, rows["a"].last_unit) == (0.5, 0, 3)

    def test_what_is_known_goes_on(self) -> None:
        (saved,) = draws.fold(RULES, {"a": TaskRow("a", 1, 1.0, solved=1), "z": row(Pool.EASY)}, [Result(9, "a", 1.0)])
        assert isinstance(saved, SaveTask)
        assert (saved.row.groups, saved.row.pool) == (2, Pool.RETIRED)


class TestPassRate:
    def test_it_is_of_the_tasks_part_within_bounds(self) -> None:
        assert pass_rate([RolloutReward(value=9, parts={"task": part}) for part in (0.5, 0)]) == 0.25
        assert pass_rate([RolloutReward(value=7), RolloutReward(value=-7)]) == 0.5
        assert pass_rate([]) is None

    @given(st.lists(st.floats(-2, 2), min_size=1, max_size=20), st.randoms())
    def test_its_order_does_not_matter(self, values: list[float], random: Any) -> None:
        mixed = list(values)
        random.shuffle(mixed)
        found = [pass_rate([RolloutReward(value=value) for value in each]) for each in (values, mixed)]
        assert found[0] == found[1]
        assert found[0] is not None
        assert 0 <= found[0] <= 1


def pick(rows: dict[str, TaskRow], drawn: Sequence[str | None], rules: PoolRules | None = RULES, unit: int = 0) -> Pick:
    """All that is drawn after these cannot be used."""
    known = [Drawn(task, rows.get(task or ""), usable=True) for task in drawn]
    return draws.pick(rules, SEED, unit, known + [Drawn(None)] * (draws.MOST_DRAWN - len(known)))


class TestPick:
    def test_what_was_never_seen_is_taken_at_once(self) -> None:
        assert pick({}, ["a", "b"]) == Pick("a")

    def test_what_cannot_be_used_is_passed_over(self) -> None:
        assert pick({}, [None, None, "b"]) == Pick("b")
        assert pick({}, [None, "b"], rules=None) == Pick("b")
        assert pick({}, [None] * 5) == Pick(None)

    def test_a_retired_task_is_passed_over(self) -> None:
        assert pick({"a": row(Pool.RETIRED)}, ["a", "b"]) == Pick("b")

    def test_without_pools_nothing_is_looked_up(self) -> None:
        assert pick({"a": row(Pool.RETIRED)}, ["a", "b"], rules=None) == Pick("a")

    def test_easy_and_hard_ones_are_taken_by_their_share(self) -> None:
        for pool, share in ((Pool.EASY, 0.25), (Pool.HARD, 0.5), (Pool.NORMAL, 1.0)):
            taken = sum(pick({"a": row(pool)}, ["a", "b"], unit=unit).task == "a" for unit in range(400))
            assert abs(taken / 400 - share) < 0.08, pool

    def test_if_the_dice_speak_against_all_the_first_that_is_not_retired_is_taken(self) -> None:
        never = PoolRules(easy_share=0, hard_share=0)
        rows = {"a": row(Pool.RETIRED), "b": row(Pool.EASY), "c": row(Pool.HARD)}
        assert pick(rows, ["a", "b", "c"], rules=never) == Pick("b")

    def test_if_all_are_retired_the_units_own_is_taken_and_said(self) -> None:
        rows = {"a": row(Pool.RETIRED), "b": row(Pool.RETIRED)}
        exhausted = pick(rows, [None, "a", "b"])
        assert exhausted == Pick("a", exhausted=True)
        (alarm,) = draws.alarms(moment(), 4, exhausted)
        assert isinstance(alarm, RaiseAlarm)
        assert (alarm.code, "are retired (solved)" in alarm.message) == ("pools.exhausted", True)
        assert draws.alarms(moment(), 5, exhausted) == [alarm], "the same words for every unit of a step"
        (alarm,) = draws.alarms(moment(), 4, Pick(None))
        assert isinstance(alarm, RaiseAlarm)
        assert alarm.code == "tasks.unusable"
        assert draws.alarms(moment(), 4, Pick("a")) == []
