"""Leases: who gets which unit, for how long, and how a lease ends.

worker asks ─► open units, lowest number first ─► then new ones, while pacing leaves room ─► leases
worker generates ─► more tokens than before (on probation: shown) ─► `lease_s` from now, `lease_hard_s` in all
deadline passes, the worker gives up or is gone ─► the unit is open again, task and seeds unchanged; a smaller window
validator asks for audits ─► units that nobody could judge twice (`units`) ─► leases of its own, by the same deadlines
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from shoal.hub.state import Command, Save, newcomers, nodes, pacing
from shoal.hub.state.rows import Holding, LeaseRow, LeaseState, Moment, NodeRow, Rules, UnitRow, UnitState
from shoal.hub.state.units import fail
from shoal.protocol import NodeState, PolicyRef

FIRST_LEASE = 4  # an unproven worker's longest lease, in `lease_s`: enough for a slow machine's first group
PACE_MARGIN = 2
LONG_TRIES = 2  # an unproven node that let fewer leases lapse in a row may get a long one: it may have been restarted


@dataclass(frozen=True)
class Absence:
    """The hub could not be reached between these times. A lease from before whose deadline is in this time, or in the
    grace after it, lasts until the grace ends, and its lapse does not count against its node."""

    from_ms: int
    until_ms: int
    grace_ms: int

    def explains(self, lease: LeaseRow) -> bool:
        return lease.issued_at_ms < self.until_ms and self.from_ms < lease.deadline_ms < self.until_ms + self.grace_ms

    def still_excuses(self, lease: LeaseRow, now_ms: int) -> bool:
        return now_ms < self.until_ms + self.grace_ms and self.explains(lease)


@dataclass(frozen=True)
class Demand:
    """`held` leases are active already. `policy` is the one that the worker has loaded (None: the newest); `behind` if
    it asks for leases under it though a newer one is out."""

    node: NodeRow
    request: str
    max_units: int
    held: int
    crowd: newcomers.Crowd = field(default_factory=newcomers.Crowd)
    tempo: pacing.Tempo | None = None
    policy: PolicyRef | None = None
    behind: bool = False


@dataclass(frozen=True)
class LeasePlan:
    """What a request gets: these open units `again` and so many `fresh` ones, under a policy. If nothing, why:
    `held_back` if the reason is about this node; `short` if it only lacks a free unit ("inside": because of others of
    its own network); `deferred` if others go first."""

    waiting: str = ""
    held_back: bool = False
    short: Literal["", "everywhere", "inside"] = ""
    deferred: bool = False
    again: tuple[UnitRow, ...] = ()
    fresh: int = 0
    policy: PolicyRef | None = None


_wait = partial(LeasePlan, held_back=True)


def plan(moment: Moment, open_units: Sequence[UnitRow], ask: Demand) -> LeasePlan:
    node, rules, progress, crowd = ask.node, moment.rules, moment.progress, ask.crowd
    nodes.require_welcome(node, moment.now_ms)
    if node.state is NodeState.SUSPENDED:
        how_long = "until the run's owner pardons it"
        if node.until_ms is not None:
            how_long = f"for {-(-(node.until_ms - moment.now_ms) // 1000)} s more"
        return _wait(f"this node is suspended {how_long}: {node.reason}")
    policy = progress.policy
    if policy is None or pacing.is_finished(rules, progress):
        return LeasePlan("the run is finished" if policy else "no policy has been published yet")
    if ask.policy is not None and ask.policy != policy:
        if not (ask.behind and pacing.serves(rules, progress, ask.policy)):
            waiting = f"policy {ask.policy.label} is not the newest: load policy {policy.label}, then ask again"
            return _wait(waiting)
        policy = ask.policy
        moment = replace(moment, progress=replace(progress, policy=policy))  # so are room and time left
    most = nodes.window(rules, node)
    if ask.held >= most:
        return _wait(f"this node holds {ask.held} leases, the most that it may hold now: submit or release some")
    count = pacing.lease_size(moment, ask.tempo, node.pace_ms, ask.held, min(ask.max_units, most - ask.held))
    if count <= 0:
        pace = f"a group takes this node {node.pace_ms / 1000:.1f} s and it holds {ask.held}"
        return _wait(f"{pace}: more would be back when policy {policy.label} is too old to train on")
    allowed = newcomers.room_for(moment, node, crowd)
    if allowed is not None and allowed < 1:
        return _crowded(moment, ask)
    # newcomers get no unit that somebody had before while established nodes ask
    again = open_units
    if newcomers.is_bounded(moment, node, crowd) and crowd.asking:
        again = [unit for unit in open_units if unit.attempt == 0]
    room = pacing.room(rules, moment.progress)
    free = len(again) + room
    left = newcomers.left_by_turns(moment, node, crowd, free)
    if left < 1 <= free:
        return _wait("newcomers of other networks are first: they had fewer units", short="everywhere", deferred=True)
    left = min(left, newcomers.left_inside(moment, node, crowd, left))
    if left < 1 <= free:
        return _wait("other newcomers of this network are first: they had fewer units", short="inside", deferred=True)
    if node.lapses and newcomers.is_brief(moment, node, crowd):
        waiting = "this node's last lease came to nothing: it gets another when other new keys have finished theirs"
        return _wait(waiting, short="everywhere")
    count = min(count, left, count if allowed is None else allowed)
    chosen = tuple(sorted(again, key=lambda unit: unit.unit)[:count])
    held_back, fresh = len(again) < len(open_units), min(count - len(chosen), room)
    return LeasePlan(why_no_unit(moment), held_back, "everywhere", again=chosen, fresh=fresh, policy=policy)


def _crowded(moment: Moment, ask: Demand) -> LeasePlan:
    own, in_hand = newcomers.own_room(moment, ask.node, ask.crowd), ask.crowd.in_hand
    if own is not None and own < 1 and in_hand.own:
        return _wait("this node has one unit in hand, the most that it may have until its first group is accepted")
    if own is not None and own < 1:
        units = in_hand.unproven[ask.node.network]
        waiting = f"other new keys of this network have {units} units in hand, their most until a group is accepted"
        return _wait(waiting, short="inside")
    counted, most = newcomers.counted(moment, ask.node, ask.crowd), newcomers.most_in_hand(moment)
    waiting = f"nodes on probation have {counted} units in hand, and may have {most} while established ones are here"
    return _wait(waiting, short="everywhere")


def why_no_unit(moment: Moment) -> str:
    rules, progress = moment.rules, moment.progress
    label = progress.policy.label if progress.policy else "?"
    if pacing.room(rules, progress) > 0:
        return f"no task that was drawn for unit {progress.next_unit} can be used: the alarms say more"
    if progress.next_step >= rules.steps:
        return "the run needs no more groups: its last step is being trained"
    if pacing.cap(rules, progress) == 0:
        return f"all groups for policy {label} are generated: waiting for the trainer to publish the next one"
    return f"all {progress.alive} units of step {progress.next_step} (policy {label}) are given out or being checked"


def plan_for_validator(moment: Moment, units: Sequence[UnitRow]) -> LeasePlan:
    if moment.progress.policy is None or pacing.is_finished(moment.rules, moment.progress):
        return LeasePlan()
    return LeasePlan(again=tuple(units), policy=moment.progress.policy)


def issue(
    moment: Moment, ask: Demand, planned: LeasePlan, fresh: Sequence[UnitRow] = ()
) -> list[tuple[LeaseRow, UnitRow]]:
    units, policy, now_ms = [*planned.again, *fresh], planned.policy, moment.now_ms
    if policy is None:
        return []
    under = replace(moment, progress=replace(moment.progress, policy=policy))
    brief = newcomers.is_brief(under, ask.node, ask.crowd)
    deadline_ms = now_ms + at_first_ms(moment.rules, ask.node, ask.held + len(units), brief)
    hard_ms = now_ms + longest_ms(moment.rules, ask.node, brief)
    return [
        (
            LeaseRow(  # its name is unique, because every lease of a unit has its own attempt
                f"u{unit.unit}a{unit.attempt}", unit.unit, ask.node.node, unit.attempt, ask.request,
                policy.incarnation, policy.version, policy.digest, now_ms, deadline_ms, hard_deadline_ms=hard_ms,
                granted=len(units), brief=brief,
            ),
            unit,
        )
        for unit in units
    ]  # fmt: skip


def issued(leases: Sequence[tuple[LeaseRow, UnitRow]], fresh: Container[UnitRow] = ()) -> list[Command]:
    commands: list[Command] = []
    for lease, unit in leases:
        after = unit.to(UnitState.LEASED, attempt=unit.attempt + 1)
        commands += [Save(after, None if unit in fresh else unit.state), Save(lease, None)]
    return commands


def longest_ms(rules: Rules, node: NodeRow, brief: bool = False) -> int:
    if brief:
        return rules.lease_ms
    most_ms = max(rules.lease_ms, rules.lease_hard_ms)
    return min(most_ms, FIRST_LEASE * rules.lease_ms) if node.unproven else most_ms


def at_first_ms(rules: Rules, node: NodeRow, units: int, brief: bool = False) -> int:
    """How long a lease lasts without progress, for a node with so many units: `PACE_MARGIN` times what it has needed so
    far. An unproven node shows progress in chunks of `proof_rows` tokens. Where a completion has too few chunks to
    renew the lease in time, the first lease has its longest duration from the start."""
    most_ms = longest_ms(rules, node, brief)
    if node.unproven and node.lapses < LONG_TRIES and rules.max_new_tokens < FIRST_LEASE * rules.proof_rows:
        return most_ms
    return min(most_ms, max(rules.lease_ms, PACE_MARGIN * node.pace_ms * units))


def renew(moment: Moment, held: Sequence[LeaseRow], progress: Mapping[str, int]) -> list[Save[LeaseRow]]:
    """`lease_s` from now for leases with progress, at most to the hard deadline. More tokens than a group can have are
    not believed."""
    most = moment.rules.group_size * moment.rules.max_new_tokens
    renewed = []
    for lease in held:
        tokens = min(progress.get(lease.lease, 0), most)
        if tokens > lease.progress:
            later_ms = min(moment.now_ms + moment.rules.lease_ms, lease.hard_deadline_ms)
            row = replace(lease, progress=tokens, deadline_ms=max(lease.deadline_ms, later_ms))
            renewed.append(Save(row, lease.state))
    return renewed


def abandon(
    moment: Moment, node: NodeRow, holdings: Sequence[Holding], request: str, held: Container[str]
) -> list[Command]:
    """Expire the leases that their node no longer knows, except those of this `request`. A late submission for one is
    still taken while its unit is free."""
    lost = [each for each in holdings if each.lease.request != request and each.lease.lease not in held]
    return end(moment, lost, {node.node: node})


def end(
    moment: Moment, holdings: Sequence[Holding], holders: Mapping[str, NodeRow], absence: Absence | None = None
) -> list[Command]:
    """Expire leases and reopen their units. It is no failed attempt of a worker's unit: hoarding leases must not void
    work. Each of the `holders` is penalised once for all leases that lapse now, unless the hub's `absence` explains it.
    A validator's lease counts as a failed attempt on its unit, so that no step waits for ever for such a unit."""
    ours = [held for held in holdings if holders[held.lease.node].is_ours]
    theirs = [held for held in holdings if not holders[held.lease.node].is_ours]
    lapsed = [held.lease.node for held in theirs if absence is None or not absence.explains(held.lease)]
    commands = fail(moment, _still_leased(ours), trusted=True)
    for name, count in sorted(Counter(lapsed).items()):
        commands += nodes.lapse(moment.rules, holders[name], count, moment.now_ms)
    return commands + _ended(holdings, LeaseState.EXPIRED, moment.now_ms) + reopened(theirs)


def _ended(holdings: Sequence[Holding], state: LeaseState, now_ms: int) -> list[Command]:
    return [Save(held.lease.to(state, ended_at_ms=now_ms), held.lease.state) for held in holdings]


def reopened(holdings: Sequence[Holding]) -> list[Command]:
    """Without units that became too old to train on meanwhile."""
    return [Save(unit.reopened(), unit.state) for unit in _still_leased(holdings)]


def _still_leased(holdings: Sequence[Holding]) -> list[UnitRow]:
    return [held.unit for held in holdings if held.unit.state is UnitState.LEASED]


def release(moment: Moment, node: NodeRow, holdings: Sequence[Holding]) -> list[Command]:
    """Halves the node's window, and is no failure of the unit: no number of stopping workers can void it."""
    if not holdings:
        return []
    paid = nodes.give_back(moment.rules, node, len(holdings), moment.now_ms)
    return paid + _ended(holdings, LeaseState.RELEASED, moment.now_ms) + reopened(holdings)


def give_up(moment: Moment, holdings: Sequence[Holding], left: Container[str]) -> list[Command]:
    given = [held for held in holdings if held.lease.lease in left]
    return _ended(given, LeaseState.RELEASED, moment.now_ms) + fail(moment, _still_leased(given), trusted=True)
