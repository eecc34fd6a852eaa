"""Policies announced by the trainer, and batches: which groups a step consists of.

A new incarnation means that the trainer could not reproduce a published digest: open leases and groups of the old one
that are in no batch are void. A batch is the lowest-numbered accepted groups within the staleness bound, in order of
unit; once written it never changes. With `max_staleness` 0 it is written down only when no lower-numbered unit can
still come in, so it does not depend on who was fast. What is too old for the following step is void, also what is still
being generated or checked: others get its place. Its worker submits it anyway, and its credit stays.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.hub.state import AddBatch, AddPolicy, Command, RaiseAlarm, Record, Refusal, Save, draws, pacing, rows, units
from shoal.hub.state.rows import LeaseRow, LeaseState, Moment, Rules, RunProgress, SubmissionRow, UnitRow, UnitState
from shoal.protocol import Batch, BatchGroup, PolicyRef, canonical_json

NOBODY_ASKS = " (no unit is given out: no worker is asking)"  # not said where the run's owner has ordered that none is


def announce(
    moment: Moment, policy: PolicyRef, known: PolicyRef | None = None, alive: Sequence[UnitRow] = (),
    leases: Sequence[LeaseRow] = (), batched: Sequence[UnitRow] = (),
) -> list[Command]:  # fmt: skip
    """`known` was announced before under this (incarnation, version), `leases` are active, `batched` units are in
    batches and not marked trained yet."""
    newest, now_ms, next_step = moment.progress.policy, moment.now_ms, moment.progress.next_step
    if known is not None:
        if known.digest != policy.digest:
            was = f"policy {policy.label} was announced with digest {known.digest[:16]}…"
            raise Refusal(409, "policy.digest", f"{was}: weights that differ need a new incarnation")
        return []
    if newest is not None and policy.incarnation < newest.incarnation:
        over = f"incarnation {policy.incarnation} is over: the newest policy is {newest.label}"
        raise Refusal(409, "policy.incarnation", over)
    if newest is not None and policy.incarnation == newest.incarnation and policy.version < newest.version:
        raise Refusal(409, "policy.order", f"policy {policy.label} is older than the newest, {newest.label}")
    if policy.version > next_step:
        raise Refusal(409, "policy.order", f"version {policy.version} cannot exist yet: step {next_step} has no batch")
    body = {"incarnation": policy.incarnation, "version": policy.version, "digest": policy.digest}
    commands: list[Command] = [AddPolicy(policy, now_ms), Record("policy", body, now_ms)]
    if newest is not None and policy.incarnation > newest.incarnation:
        commands += [Save(lease.to(LeaseState.VOID, ended_at_ms=now_ms), lease.state) for lease in leases]
        commands += [Save(unit.to(UnitState.VOID, reason=units.VOID_INCARNATION), unit.state) for unit in alive]
    trained = [unit for unit in batched if unit.step is not None and unit.step < policy.version]
    return commands + [Save(unit.to(UnitState.TRAINED), unit.state) for unit in trained]


def choose(moment: Moment, alive: Sequence[UnitRow], step: int) -> tuple[list[UnitRow] | None, str]:
    rules, progress = moment.rules, moment.progress
    _require_next(rules, progress, step)
    accepted = [unit for unit in alive if unit.state == UnitState.ACCEPTED and unit.step is None]
    fresh = (unit for unit in accepted if unit.version is not None and not pacing.is_stale(rules, step, unit.version))
    ready = sorted(fresh, key=lambda unit: unit.unit)
    undecided = [unit for unit in alive if unit.state in rows.UNDECIDED_UNITS]
    chosen = ready[: rules.groups_per_step]
    wanted = pacing.wanted_groups(rules, progress)
    if len(ready) < wanted:
        return None, _waiting(progress, len(ready), wanted, Counter(unit.state for unit in undecided))
    if rules.max_staleness == 0 and any(not chosen or unit.unit < chosen[-1].unit for unit in undecided):
        return None, f"step {step}: a lower-numbered unit can still come in"
    return chosen, ""


def too_few(moment: Moment, alive: Mapping[UnitState, int], step: int) -> str:
    """What the batch of `step` waits for, by counting alone: a waiting trainer asks after every verdict, and `choose`
    looks at every unit that is alive."""
    rules, progress = moment.rules, moment.progress
    _require_next(rules, progress, step)
    accepted, wanted = alive.get(UnitState.ACCEPTED, 0), pacing.wanted_groups(rules, progress)
    return _waiting(progress, accepted, wanted, alive) if accepted < wanted else ""


def _require_next(rules: Rules, progress: RunProgress, step: int) -> None:
    if step >= rules.steps:
        raise Refusal(409, "batch.finished", f"the run has {rules.steps} steps: there is no step {step}")
    if step != progress.next_step:
        raise Refusal(409, "batch.order", f"step {step} comes after step {progress.next_step}, which has no batch yet")


def _waiting(progress: RunProgress, ready: int, wanted: int, alive: Mapping[UnitState, int]) -> str:
    undecided = [state for state in UnitState if state in rows.UNDECIDED_UNITS and alive.get(state)]
    details = [f"{alive[state]} {state.value}" for state in undecided]
    rest = f" ({', '.join(details)})" if details else NOBODY_ASKS
    if progress.policy is None:
        rest = " (no policy has been published yet)"
    return f"step {progress.next_step}: {ready} of {wanted} groups{rest}"


@dataclass(frozen=True)
class Sampled:
    """Submissions of a step's chosen units by name, and those dropped meanwhile; where difficulty counts, the tasks of
    their units and these tasks' rows."""

    chosen: Mapping[str, SubmissionRow]
    dropped: Sequence[SubmissionRow] = ()
    tasks: Mapping[int, str] = field(default_factory=dict)
    known: Mapping[str, rows.TaskRow] = field(default_factory=dict)


def write_down(
    moment: Moment, alive: Sequence[UnitRow], chosen: Sequence[UnitRow], sampled: Sampled,
    leases: Sequence[LeaseRow] = (),
) -> tuple[Batch, list[Command]]:  # fmt: skip
    rules, step, now_ms = moment.rules, moment.progress.next_step, moment.now_ms
    filled = [sampled.chosen[unit.submission or ""] for unit in chosen]
    groups = [
        BatchGroup(
            unit=row.unit, submission=row.submission, node=row.node, policy=row.policy, rewards=row.rewards,
            audit=row.depth,
        )
        for row in filled
    ]  # fmt: skip
    batch = Batch(
        step=step, groups=tuple(groups), dropped_groups=moment.progress.dropped,
        sampled_reward=mean_reward(row.rewards for row in (*filled, *sampled.dropped)), written_at_ms=now_ms,
    )  # fmt: skip
    # The unit stays accepted until the next version is out; what changes is the step it belongs to.
    commands: list[Command] = [AddBatch(batch)]
    commands += [Save(replace(unit, step=step), unit.state) for unit in chosen]
    taken = {unit.unit for unit in chosen}
    stale = [unit for unit in too_old(rules, step + 1, alive, leases) if unit.unit not in taken]
    commands += [Save(unit.to(UnitState.VOID, reason=units.VOID_STALE), unit.state) for unit in stale]
    if len(chosen) < rules.groups_per_step:
        message = f"step {step} was written down with {len(chosen)} of {rules.groups_per_step} groups"
        commands.append(RaiseAlarm(step, "batch.short", message, now_ms))
    body = {"step": step, "units": [unit.unit for unit in chosen], "digest": batch_digest(batch)}
    light = [group.unit for group in groups if group.audit == "light"]
    commands.append(Record("batch", {**body, "unaudited": light} if light else body, now_ms))
    if rules.pools is None:
        return batch, commands
    results = [
        draws.Result(row.unit, sampled.tasks[row.unit], row.pass_rate)
        for row in (*sampled.chosen.values(), *sampled.dropped)
        if row.pass_rate is not None
    ]
    return batch, commands + draws.fold(rules.pools, sampled.known, results)


def mean_reward(groups: Iterable[Sequence[float]]) -> float | None:
    rewards = [reward for group in groups for reward in group]
    return math.fsum(rewards) / len(rewards) if rewards else None


def too_old(rules: Rules, step: int, alive: Sequence[UnitRow], leases: Sequence[LeaseRow]) -> list[UnitRow]:
    leased = {lease.unit: lease.version for lease in leases if lease.state == LeaseState.ACTIVE}
    versions = {unit.unit: leased.get(unit.unit) if unit.state == UnitState.LEASED else unit.version for unit in alive}
    stale = {unit for unit, made in versions.items() if made is not None and pacing.is_stale(rules, step, made)}
    return [unit for unit in alive if unit.unit in stale]


def batch_digest(batch: Batch) -> str:
    return hashlib.sha256(canonical_json([group.model_dump(mode="json") for group in batch.groups])).hexdigest()
