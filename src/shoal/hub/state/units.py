"""What becomes of a unit that could not be checked, and what the run's owner is told about it.

Only our own machinery counts against a unit. A worker that fails (late, rejected, banned) costs itself: no number of
throwaway keys can void work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.hub.state.commands import Command, RaiseAlarm, SaveUnit
from shoal.hub.state.machines import UnitState
from shoal.hub.state.pacing import overdraw
from shoal.hub.state.rows import Moment, UnitRow

VOID_ATTEMPTS = "attempts"
VOID_STALE = "stale"
VOID_INCARNATION = "incarnation"


def no_units() -> dict[str, int]:
    """Counts of units by state, all zero; `void_<reason>` says how many of the void ones were wasted, and why."""
    reasons = (VOID_ATTEMPTS, VOID_STALE, VOID_INCARNATION)
    return {**{state.value: 0 for state in UnitState}, **{f"void_{reason}": 0 for reason in reasons}}


def after_failure(moment: Moment, unit: UnitRow) -> UnitRow:
    """Open again with the same task and seeds, or void after `max_attempts` failures."""
    failures = unit.failures + 1
    if failures >= moment.rules.max_attempts:
        step = moment.progress.next_step
        return unit.to(UnitState.VOID, failures=failures, lost_step=step, reason=VOID_ATTEMPTS)
    return replace(unit.reopened(), failures=failures)


def fail(moment: Moment, units: Sequence[UnitRow]) -> list[Command]:
    """Count a failed attempt on each of `units`."""
    rules, progress = moment.rules, moment.progress
    commands: list[Command] = []
    given_up = []
    for unit in units:
        after = after_failure(moment, unit)
        commands.append(SaveUnit(after, unit.state))
        if after.state == UnitState.VOID:
            given_up.append(unit.unit)
    if given_up:
        numbers = ", ".join(str(number) for number in given_up[:5])
        message = f"unit {numbers}: given up after {rules.max_attempts} inconclusive audits; look at the last verdicts"
        commands.append(RaiseAlarm(progress.next_step, "unit.attempts", message, moment.now_ms))
        lost = replace(progress, failed=progress.failed + len(given_up))
        commands += refill_alarm(replace(moment, progress=lost))
    return commands


def refill_alarm(moment: Moment) -> list[Command]:
    """An alarm once the next step has lost more groups than are refilled."""
    rules, progress = moment.rules, moment.progress
    if overdraw(rules, progress) == 0:
        return []
    lost, budget = progress.dropped + progress.failed, rules.refill_cap * rules.groups_per_step
    message = (
        f"step {progress.next_step} lost {lost} groups ({progress.dropped} with equal rewards, {progress.failed} given "
        f"up), more than the {budget} that are refilled: it takes what there is. If most rewards are equal, the tasks "
        "are too easy or too hard for the policy"
    )
    return [RaiseAlarm(progress.next_step, "refill.exhausted", message, moment.now_ms)]
