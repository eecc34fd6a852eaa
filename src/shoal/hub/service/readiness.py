"""Whether the run can continue by itself: every role is here, and audits can be relied on.

A standstill, who is missing to train, check or work, what became of them and what to do, is told by `/status` at once
when the last of a role is banned or suspended, and when it was not heard of for `nodes.HERE_MS`; of a role of which
nobody was heard since the hub was started, after `STARTING_MS`. The watchdog repeats it.

A validator gives itself submissions that are known to be bad (canaries) among the real ones, and counts in its
heartbeats how many it caught and missed. One that missed any, or that never meets one, says nothing about real work:
that is an alarm, and so is one that cannot score (`validator_alarms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.hub.service.calibrating import in_force_of
from shoal.hub.service.context import Context, node_label, orders_of
from shoal.hub.state import calibrations, nodes, pacing
from shoal.hub.state.commands import RaiseAlarm
from shoal.hub.state.rows import NodeRow
from shoal.hub.storage import Presence, Reader
from shoal.protocol import NodeState

MAX_TRUSTED = 500
"""Those heard of last: no run has so many. Workers, of which there may be any number, are not looked at."""
CANARY_WITHIN = 256
CAUGHT, MISSED = "canaries_caught", "canaries_missed"
NO_SAMPLE, ABSTAINED = "no_sample", "abstained"
MANY_UNSCORED, UNSCORED_SHARE = 8, 0.05

STARTING_MS = 60_000
MEASURING_MS = 120_000  # a run's first calibration may take so long, and nothing is wrong
NEWEST = 50
DOING = {"trainer": "train", "validator": "check", "worker": "work"}
AUDITED = ("accepted", "rejected", "unsure")


def canary_problem(node: NodeRow, presence: Presence) -> str:
    """What a validator's counters say about its audits, if it is bad."""
    counters, who = presence.counters, node_label(node)
    if (missed := counters.get(MISSED, 0)) > 0:
        return f"{who} let {missed:.0f} known-bad submissions pass: stop it, and do not rely on what it accepted"
    audited = sum(counters.get(name, 0) for name in AUDITED)
    if audited >= CANARY_WITHIN and counters.get(CAUGHT, 0) <= 0:
        return f"{who} made {audited:.0f} audits and met no known-bad submission among them: its audits are untested"
    return ""


def scoring_problem(node: NodeRow, presence: Presence) -> str:
    counters, who = presence.counters, node_label(node)
    if counters.get(ABSTAINED, 0) > 0:
        return f"{who} has another environment, or other data, than the run: start it with the run's recipe and data"
    audited, failed = sum(counters.get(name, 0) for name in AUDITED), counters.get(NO_SAMPLE, 0)
    if failed >= MANY_UNSCORED and failed > UNSCORED_SHARE * audited:
        return f"{who} could not score {failed:.0f} of {audited:.0f} groups: its log says why"
    return ""


def validator_alarms(node: NodeRow, before: Presence | None, now: Presence, step: int) -> list[RaiseAlarm]:
    """An alarm for each known-bad submission that a validator says it let pass, and once when another problem
    begins."""
    earlier = before or Presence(node.node)
    missed_more = now.counters.get(MISSED, 0) > earlier.counters.get(MISSED, 0)
    alarms = []
    for code, problem, again in (("canary", canary_problem, missed_more), ("scoring", scoring_problem, False)):
        if (said := problem(node, now)) and (again or not problem(node, earlier)):
            alarms.append(RaiseAlarm(step, f"{code}.{node.node[:8]}", said, now.last_seen_ms))
    return alarms


def no_sample(nodes: Sequence[NodeRow], presences: Mapping[str, Presence]) -> int:
    validators = [presences[node.node] for node in nodes if node.role == "validator" and node.node in presences]
    return round(sum(presence.counters.get(NO_SAMPLE, 0) for presence in validators))


def standstill(context: Context, reader: Reader, now_ms: int) -> list[str]:
    """Why the run stands still for want of somebody, a sentence for each role; none before the first policy, when the
    run is finished, and while its owner has halted it."""
    progress = reader.progress()
    over = progress.policy is None or pacing.is_finished(context.rules, progress)
    if over or orders_of(reader).halted(now_ms):
        return []
    fleet, since_start = reader.fleet(now_ms - nodes.HERE_MS), reader.fleet(context.started_ms)
    found = []
    for role in DOING:
        here = any(group.role == role and group.here and group.state == NodeState.ACTIVE for group in fleet)
        lost = any(group.role == role and (group.here or group.state != NodeState.ACTIVE) for group in since_start)
        if not here and (lost or now_ms - context.started_ms >= STARTING_MS):
            found.append(_nobody(context, reader, role, now_ms))
    return found or _unjudgeable(context, reader, now_ms)


def _nobody(context: Context, reader: Reader, role: str, now_ms: int) -> str:
    known = [row for rank in ("sanctioned", "seen") for row in reader.nodes_ranked(rank, NEWEST) if row.role == role]
    start = f"start {'one' if not known else 'another'} with `shoal {'join' if role == 'worker' else role}`"
    if role == "worker":
        taken = calibrations.taken(in_force_of(reader), context.config.profiles, context.config.measurable)
        start += f" (the run takes {', '.join(taken)})"
    if not known:
        return f"nobody is here to {DOING[role]}: no {role} has come yet; {start}"
    presences = reader.presences_named([row.node for row in known])
    heard = {row.node: row.registered_at_ms for row in known} | {k: each.last_seen_ms for k, each in presences.items()}
    row = max(known, key=lambda each: (heard[each.node], each.state is not NodeState.ACTIVE))
    who, see = node_label(row), f"`shoal why {row.node[:8]}` says more"
    fate = f"{who} was heard of {(now_ms - heard[row.node]) // 1000} s ago for the last time"
    if row.state is NodeState.BANNED:
        fate = f"{who} was banned for {row.reason} ({see}, `shoal admin pardon` takes it back)"
    elif row.state is NodeState.SUSPENDED:
        left = "" if row.until_ms is None else f" for {max(0, -(-(row.until_ms - now_ms) // 1000))} s more"
        fate = f"{who} is suspended{left}: {row.reason} ({see})"
    return f"nobody is left to {DOING[role]}: {fate}; {start}"


def _unjudgeable(context: Context, reader: Reader, now_ms: int) -> list[str]:
    in_force = in_force_of(reader)
    if not in_force.digest and now_ms - context.started_ms < MEASURING_MS:
        return []
    rows = [row for row in reader.nodes_ranked("seen", NEWEST) if row.role == "worker"]
    seen = {each.node: each.last_seen_ms for each in reader.presences_named([row.node for row in rows]).values()}
    since_ms = now_ms - nodes.HERE_MS
    here = [row for row in rows if row.state is NodeState.ACTIVE and seen.get(row.node, since_ms - 1) >= since_ms]
    kinds = sorted({row.kind for row in here})
    waiting = [calibrations.terms(in_force, kind, context.config.profiles).waiting for kind in kinds if kind]
    if not waiting or not all(waiting) or "" in kinds:
        return []
    return [f"no worker here is of a kind that can be judged now ({', '.join(kinds)}): {waiting[0]}"]
