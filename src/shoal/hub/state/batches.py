"""Batches: which groups a step consists of.

The lowest-numbered accepted groups within the staleness bound, in order of unit. With `max_staleness` 0 a batch is
written down only when no lower-numbered unit can still come in, so it does not depend on who was fast. Once written
it never changes. What is left over and too old for the following step is void, and so is what is still being generated
or checked and will be too old: others get its place. Who generates it hands it in all the same, and its credit stays.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.hub.state import pacing, pools
from shoal.hub.state.commands import AddBatch, Command, RaiseAlarm, Record, SaveUnit
from shoal.hub.state.machines import UNDECIDED_UNITS, LeaseState, UnitState
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import LeaseRow, Moment, Progress, Rules, SubmissionRow, TaskRow, UnitRow
from shoal.hub.state.units import VOID_STALE
from shoal.protocol import Batch, BatchGroup, canonical_json

NOBODY_ASKS = " (no unit is given out: no worker is asking)"
"""Not said where the run's owner has ordered that none is."""


@dataclass(frozen=True)
class Choice:
    """The units of the batch in order, or None and what it waits for."""

    units: tuple[UnitRow, ...] | None = None
    waiting: str = ""


def choose(moment: Moment, alive: Sequence[UnitRow], step: int) -> Choice:
    """Which units the batch of `step` consists of, if it is complete."""
    rules, progress = moment.rules, moment.progress
    _require_next(rules, progress, step)
    ready = sorted((unit for unit in alive if _is_usable(rules, step, unit)), key=lambda unit: unit.unit)
    undecided = [unit for unit in alive if unit.state in UNDECIDED_UNITS]
    chosen = ready[: rules.groups_per_step]
    wanted = pacing.wanted_groups(rules, progress)
    if len(ready) < wanted:
        return Choice(waiting=_waiting(progress, len(ready), wanted, Counter(unit.state for unit in undecided)))
    if rules.max_staleness == 0 and any(not chosen or unit.unit < chosen[-1].unit for unit in undecided):
        return Choice(waiting=f"step {step}: a lower-numbered unit can still come in")
    return Choice(units=tuple(chosen))


def too_few(moment: Moment, alive: Mapping[UnitState, int], step: int) -> str:
    """What the batch of `step` waits for, where counting alone tells: fewer groups are accepted than it needs.

    A trainer that waits asks after every verdict; `choose` looks at every unit that is alive.
    """
    rules, progress = moment.rules, moment.progress
    _require_next(rules, progress, step)
    accepted, wanted = alive.get(UnitState.ACCEPTED, 0), pacing.wanted_groups(rules, progress)
    return _waiting(progress, accepted, wanted, alive) if accepted < wanted else ""


@dataclass(frozen=True)
class Sampled:
    """What was accepted for a step: the submissions of its chosen units by name, and those dropped meanwhile.

    `tasks` are the tasks of all their units, `known` the rows that these tasks have; where difficulty counts.
    """

    chosen: Mapping[str, SubmissionRow]
    dropped: Sequence[SubmissionRow] = ()
    tasks: Mapping[int, str] = field(default_factory=dict)
    known: Mapping[str, TaskRow] = field(default_factory=dict)


def write_down(
    moment: Moment,
    alive: Sequence[UnitRow],
    chosen: Sequence[UnitRow],
    sampled: Sampled,
    leases: Sequence[LeaseRow] = (),
) -> tuple[Batch, list[Command]]:
    """The batch of the next step and what writing it down changes. `leases` are the active ones."""
    groups = tuple(_group(unit, sampled.chosen) for unit in chosen)
    batch = Batch(
        step=moment.progress.next_step,
        groups=groups,
        dropped_groups=moment.progress.dropped,
        sampled_reward=mean_reward([*(group.rewards for group in groups), *(row.rewards for row in sampled.dropped)]),
        written_at_ms=moment.now_ms,
    )
    commands = _write(moment.rules, batch, chosen, too_old(moment.rules, batch.step + 1, alive, leases))
    return batch, commands + _learn(moment.rules, sampled)


def _learn(rules: Rules, sampled: Sampled) -> list[Command]:
    """What the groups of this batch, and those dropped before it, say about their tasks."""
    if rules.pools is None:
        return []
    results = [
        pools.Result(row.unit, sampled.tasks[row.unit], row.pass_rate)
        for row in (*sampled.chosen.values(), *sampled.dropped)
        if row.pass_rate is not None
    ]
    return pools.fold(rules.pools, sampled.known, results)


def mean_reward(groups: Iterable[Sequence[float]]) -> float | None:
    """The mean over all rollouts of these groups, the same in whatever order they come; None if there are none.

    >>> mean_reward([(0.0, 1.0), (1.0, 1.0)])
    0.75
    """
    rewards = [reward for group in groups for reward in group]
    return math.fsum(rewards) / len(rewards) if rewards else None


def _require_next(rules: Rules, progress: Progress, step: int) -> None:
    if step >= rules.steps:
        raise Refusal(409, "batch.finished", f"the run has {rules.steps} steps: there is no step {step}")
    if step != progress.next_step:
        raise Refusal(409, "batch.order", f"step {step} comes after step {progress.next_step}, which has no batch yet")


def _is_usable(rules: Rules, step: int, unit: UnitRow) -> bool:
    accepted = unit.state == UnitState.ACCEPTED and unit.step is None
    return accepted and unit.version is not None and not pacing.is_stale(rules, step, unit.version)


def _waiting(progress: Progress, ready: int, wanted: int, alive: Mapping[UnitState, int]) -> str:
    details = [f"{alive[state]} {state.value}" for state in UnitState if state in UNDECIDED_UNITS and alive.get(state)]
    rest = f" ({', '.join(details)})" if details else NOBODY_ASKS
    if progress.policy is None:
        rest = " (no policy has been published yet)"
    return f"step {progress.next_step}: {ready} of {wanted} groups{rest}"


def _group(unit: UnitRow, submissions: Mapping[str, SubmissionRow]) -> BatchGroup:
    submission = submissions[unit.submission or ""]
    return BatchGroup(
        unit=unit.unit,
        submission=submission.submission,
        node=submission.node,
        policy=submission.policy,
        rewards=submission.rewards,
    )


def too_old(rules: Rules, step: int, alive: Sequence[UnitRow], leases: Sequence[LeaseRow]) -> list[UnitRow]:
    """The alive units whose groups are too old for `step`, or will be when they come in: those that are accepted, that
    wait for a verdict, or that are leased under an old policy. A place that they hold is lost to units of use.
    """
    leased = {lease.unit: lease.version for lease in leases if lease.state == LeaseState.ACTIVE}
    versions = {unit.unit: leased.get(unit.unit) if unit.state == UnitState.LEASED else unit.version for unit in alive}
    return [
        unit for unit in alive if (version := versions[unit.unit]) is not None and pacing.is_stale(rules, step, version)
    ]


def _write(rules: Rules, batch: Batch, chosen: Sequence[UnitRow], stale: Sequence[UnitRow]) -> list[Command]:
    # The unit stays accepted until the next version is out; what changes is the step it belongs to.
    commands: list[Command] = [AddBatch(batch)]
    commands += [SaveUnit(replace(unit, step=batch.step), unit.state) for unit in chosen]
    taken = {unit.unit for unit in chosen}
    for unit in stale:
        if unit.unit not in taken:
            commands.append(SaveUnit(unit.to(UnitState.VOID, reason=VOID_STALE), unit.state))
    if len(chosen) < rules.groups_per_step:
        message = f"step {batch.step} was written down with {len(chosen)} of {rules.groups_per_step} groups"
        commands.append(RaiseAlarm(batch.step, "batch.short", message, batch.written_at_ms))
    body = {"step": batch.step, "units": [unit.unit for unit in chosen], "digest": batch_digest(batch)}
    return [*commands, Record("batch", body, batch.written_at_ms)]


def batch_digest(batch: Batch) -> str:
    """Names what a step was trained on: the hash of its groups."""
    return hashlib.sha256(canonical_json([group.model_dump(mode="json") for group in batch.groups])).hexdigest()
