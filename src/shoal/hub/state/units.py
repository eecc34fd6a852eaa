"""What becomes of a unit that could not be judged.

    unsure, by a worker ─► open again: same task, same seeds
    unsure twice ────────► open for validators only: one of them generates the unit (`leases.plan_for_validator`)
    our own attempt came to nothing, `TRUSTED_TRIES` times ─► void, with an alarm

So no worker can void a unit or keep a step from it, with any number of keys: rejections and late leases never count.
"""

from collections.abc import Sequence
from dataclasses import replace

from shoal.hub.state import Command, Moment, RaiseAlarm, Save, UnitRow, UnitState, alarm
from shoal.hub.state.pacing import overdraw

VOID_ATTEMPTS, VOID_STALE, VOID_INCARNATION = "attempts", "stale", "incarnation"

UNJUDGED = {
    "reward.machinery": "could not be scored, so that they are unscored",
    "machinery.policy": "could not be checked, as a validator could not fetch their policy",
    "machinery.profile": "could not be checked, as a validator has no profile for what generated them",
    "machinery.environment": "could not be scored, as a validator has another environment than the hub",
    "machinery.prefill": "could not be checked, as a validator's engine failed",
    "machinery.kind": "of a kind that no trusted machine has measured are outside the limits of their number format. "
    "If such machines are honest, measure one (`shoal doctor --calibrate`) and open its kind (`shoal admin calibrate`)",
    "second.missing": "failed a statistical check that a validator could not confirm in the worker's own number format",
}
"""Reasons of unsure audits that the owner can remove."""

NOT_THE_NODES = frozenset(UNJUDGED) - {"machinery.kind", "second.missing"}
TRUSTED_AFTER = 2  # unsure attempts of workers after which a validator generates the unit
TRUSTED_TRIES = 4  # attempts of validators (not scored, generated or submitted in time) after which it is given up


def is_for_validators(unit: UnitRow) -> bool:
    return unit.failures >= TRUSTED_AFTER


def fail(moment: Moment, units: Sequence[UnitRow], reason: str = "", trusted: bool = False) -> list[Command]:
    """Count a failed attempt on each unit; `reason` is the verdict's. They are open again with the same task and seeds;
    void only after too many attempts of our own (`trusted`)."""
    progress, step = moment.progress, moment.progress.next_step
    commands: list[Command] = []
    if reason in UNJUDGED:  # no unit is named: the same words are kept once a step
        message = f"groups {UNJUDGED[reason]} ({reason}); the validators' logs say why"
        commands.append(alarm(moment, f"unjudged.{reason}", message))
    given_up = 0
    for unit in units:
        failures = unit.failures + 1 if trusted else max(unit.failures, min(unit.failures + 1, TRUSTED_AFTER))
        if trusted and failures >= TRUSTED_AFTER + TRUSTED_TRIES:
            after = unit.to(UnitState.VOID, failures=failures, lost_step=step, reason=VOID_ATTEMPTS)
            given_up += 1
        else:
            after = replace(unit.reopened(), failures=failures)
        commands.append(Save(after, unit.state))
    if given_up:
        message = f"units were given up, each after {TRUSTED_TRIES} attempts of validators: their logs say why"
        commands.append(alarm(moment, "unit.attempts", message))
        commands += refill_alarm(replace(moment, progress=replace(progress, failed=progress.failed + given_up)))
    return commands


def refill_alarm(moment: Moment) -> list[Command]:
    rules, progress = moment.rules, moment.progress
    if overdraw(rules, progress) == 0:
        return []
    why = "were given up: nobody could judge them"
    if progress.dropped >= progress.failed:
        why = "had equal rewards: the tasks are too easy or too hard for the policy"
    budget = rules.refill_cap * rules.groups_per_step
    message = f"step {progress.next_step} lost more groups than the {budget} that are refilled. Most {why}"
    return [RaiseAlarm(progress.next_step, "refill.exhausted", message, moment.now_ms)]
