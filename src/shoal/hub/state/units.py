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

UNJUDGED = {
    "reward.machinery": "could not be scored, so that they are no samples",
    "machinery.policy": "could not be checked, as a validator could not fetch their policy",
    "machinery.profile": "could not be checked, as a validator has no profile for what generated them",
    "machinery.environment": "could not be scored, as a validator has another environment than the hub",
    "machinery.prefill": "could not be checked, as a validator's engine failed",
}
"""Reasons of unsure audits that their owner can mend. An accident of rounding is none."""

NOT_COUNTED = frozenset({"machinery.profile"})
"""Worker and validator do not match: not the unit's fault, and any worker could do that to any unit."""


def no_units() -> dict[str, int]:
    """Counts of units by state, all zero; `void_<reason>` says how many of the void ones were wasted, and why."""
    reasons = (VOID_ATTEMPTS, VOID_STALE, VOID_INCARNATION)
    return {**{state.value: 0 for state in UnitState}, **{f"void_{reason}": 0 for reason in reasons}}


def after_failure(moment: Moment, unit: UnitRow, reason: str = "") -> UnitRow:
    """Open again with the same task and seeds, or void after `max_attempts` failures that count."""
    failures = unit.failures + (reason not in NOT_COUNTED)
    if failures >= moment.rules.max_attempts:
        step = moment.progress.next_step
        return unit.to(UnitState.VOID, failures=failures, lost_step=step, reason=VOID_ATTEMPTS)
    return replace(unit.reopened(), failures=failures)


def fail(moment: Moment, units: Sequence[UnitRow], reason: str = "") -> list[Command]:
    """Count a failed attempt on each of `units`; `reason` is that of the verdict."""
    rules, progress = moment.rules, moment.progress
    commands: list[Command] = unjudged_alarm(moment, reason)
    given_up, step = 0, progress.next_step
    for unit in units:
        after = after_failure(moment, unit, reason)
        commands.append(SaveUnit(after, unit.state))
        given_up += after.state == UnitState.VOID
    if given_up:
        tries = f"{rules.max_attempts} unsure audits"  # no unit's number: the same words are said once
        message = f"step {step}: units were given up, each after {tries}; look at the last verdicts"
        commands.append(RaiseAlarm(step, "unit.attempts", message, moment.now_ms))
        lost = replace(progress, failed=progress.failed + given_up)
        commands += refill_alarm(replace(moment, progress=lost))
    return commands


def unjudged_alarm(moment: Moment, reason: str) -> list[Command]:
    """An alarm at the first audit of a step that our own machinery failed; always the same words: it is said once."""
    if reason not in UNJUDGED:
        return []
    step = moment.progress.next_step
    message = f"step {step}: groups {UNJUDGED[reason]} ({reason}); the validators' logs say why"
    return [RaiseAlarm(step, f"unjudged.{reason}", message, moment.now_ms)]


def refill_alarm(moment: Moment) -> list[Command]:
    """An alarm once the next step has lost more groups than are refilled, in words that further losses keep."""
    rules, progress = moment.rules, moment.progress
    if overdraw(rules, progress) == 0:
        return []
    budget, why = rules.refill_cap * rules.groups_per_step, "were given up: nobody could judge them"
    if progress.dropped >= progress.failed:
        why = "had equal task rewards: the tasks are too easy or too hard for the policy"
    message = (
        f"step {progress.next_step} lost more groups than the {budget} that are refilled, so it takes what there is. "
        f"Most {why}"
    )
    return [RaiseAlarm(progress.next_step, "refill.exhausted", message, moment.now_ms)]
