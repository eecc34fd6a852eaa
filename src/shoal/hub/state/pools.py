"""Difficulty while training: tasks are drawn by how often they were solved of late, and retired once they are solved.

    batch n is written ─► its groups, and those dropped since the batch before ─ in order of unit ─► rows of their tasks
    a new unit ─► candidates (`draws`), by the rows as of the last batch ─► the first that is not retired and is among
                  the share of its pool that is taken

            pass rate ≥ easy ─► easy        ≤ hard ─► hard        wholly solved so many times in a row ─► retired

Rows change in the transaction that writes a batch and in no other one. So with `max_staleness` 0, where a batch is
written when all its units are decided and units of the next step are made only after it, the tasks of all units follow
from the verdicts alone, in whatever order those came. Only tasks that were seen have a row.

Should all candidates of a unit be retired, its own task of the epoch is taken; if that is not solved now, it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.hub.state import draws
from shoal.hub.state.commands import Command, RaiseAlarm, SaveTask
from shoal.hub.state.rows import Moment, Pool, PoolRules, TaskRow

RECENT = 0.5
"""What the newest group weighs in the recent pass rate; the rest is the rate before it."""
NO_TASK, EXHAUSTED = "tasks.unusable", "pools.exhausted"


@dataclass(frozen=True)
class Result:
    """What the group of a unit came to: the part of its task that it solved."""

    unit: int
    task: str
    rate: float


def fold(rules: PoolRules, known: Mapping[str, TaskRow], results: Sequence[Result]) -> list[Command]:
    """The rows of the tasks that were seen, after these results in order of unit. `known` are their rows before."""
    rows = dict(known)
    for result in sorted(results, key=lambda each: each.unit):
        rows[result.task] = after(rules, rows.get(result.task), result)
    return [SaveTask(row) for task, row in rows.items() if row != known.get(task)]


def after(rules: PoolRules, row: TaskRow | None, result: Result) -> TaskRow:
    """A task's row after one more group."""
    before = row or TaskRow(result.task)
    rate = result.rate if before.groups == 0 else RECENT * result.rate + (1 - RECENT) * before.rate
    solved = before.solved + 1 if result.rate >= 1 else 0
    counted = replace(before, groups=before.groups + 1, rate=rate, solved=solved, last_unit=result.unit)
    return replace(counted, pool=_pool(rules, counted))


def _pool(rules: PoolRules, row: TaskRow) -> Pool:
    if rules.retire_after and row.solved >= rules.retire_after:
        return Pool.RETIRED
    if row.rate >= rules.easy:
        return Pool.EASY
    return Pool.HARD if row.rate <= rules.hard else Pool.NORMAL


@dataclass(frozen=True)
class Pick:
    """The task of a unit. None: none that was drawn can be used. `exhausted`: all that can be are retired."""

    task: str | None
    exhausted: bool = False


def pick(
    rules: PoolRules | None,
    dice: tuple[int, int],
    drawn: Iterable[str | None],
    row_of: Callable[[str], TaskRow | None],
    usable: Callable[[str], bool] = lambda _task: True,
) -> Pick:
    """The first of the `drawn` tasks that may be taken; those that cannot be used are None. `dice` are seed and unit.

    If the dice speak against all that are not retired, the first of these is taken. Whether a task is `usable` is
    asked only of one that would be taken: to find out takes longer than anything else here.
    """
    spare: list[str] = []
    retired: list[str] = []
    for attempt, task in enumerate(drawn):
        if task is None:
            continue
        row = None if rules is None else row_of(task)
        if rules is None or row is None or _is_taken(rules, row, draws.share(*dice, attempt)):
            if usable(task):
                return Pick(task)
        else:
            (retired if row.pool is Pool.RETIRED else spare).append(task)
    found = next((task for task in spare if usable(task)), None)
    if found is not None:
        return Pick(found)
    found = next((task for task in retired if usable(task)), None)
    return Pick(found, exhausted=found is not None)


def _is_taken(rules: PoolRules, row: TaskRow, share: float) -> bool:
    return row.pool is not Pool.RETIRED and share < _share(rules, row.pool)


def _share(rules: PoolRules, pool: Pool) -> float:
    return {Pool.EASY: rules.easy_share, Pool.HARD: rules.hard_share}.get(pool, 1.0)


def alarms(moment: Moment, unit: int, picked: Pick) -> list[Command]:
    """What the run's owner should know about how this unit got its task, if anything."""
    step, now_ms = moment.progress.next_step, moment.now_ms
    if picked.task is None:
        message = (
            f"unit {unit}: none of the {draws.MOST_DRAWN} tasks drawn for it can be used, so no unit is made any more; "
            "look for unusable tasks in the hub's log, and mend the data"
        )
        return [RaiseAlarm(step, NO_TASK, message, now_ms)]
    if picked.exhausted:
        message = (
            f"step {step}: all of the {draws.MOST_DRAWN} tasks drawn for a unit are retired (solved), so that it is "
            "one of these again: the policy has outgrown the tasks; harder ones would teach it more"
        )
        return [RaiseAlarm(step, EXHAUSTED, message, now_ms)]
    return []
