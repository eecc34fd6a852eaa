"""Whether the run can go on by itself: every role is here, audits can be relied on, and the disk takes what comes.

A standstill, who is missing to train, check or work, what became of them and what to do, is told by `/status` and
`/ready` at once when the last of a role is banned or suspended, and when it was not heard of for `nodes.HERE_MS`; of a
role of which nobody was heard since the hub was started, after `STARTING_MS`. The watchdog repeats it.

A validator gives itself submissions that are known to be bad (canaries) among the real ones, and counts in its
heartbeats how many it caught and missed. One that missed any, or that never meets one, says nothing about real work.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from shoal.errors import DiskError, ResourceError, ShoalError
from shoal.hub.service.calibrating import in_force_of
from shoal.hub.service.context import Context, node_label, orders_of
from shoal.hub.state import calibrations, nodes, pacing
from shoal.hub.state.rows import NodeRow
from shoal.hub.storage import Presence, Reader
from shoal.protocol import Conduct, Message, NodeState

HERE_MS = 60_000
MAX_TRUSTED = 500
"""Those heard of last: no run has so many. Workers, of which there may be any number, are not looked at."""
CANARY_WITHIN = 256
PROBE_EVERY_MS = 5_000
CAUGHT, MISSED = "canaries_caught", "canaries_missed"
NO_SAMPLE, ABSTAINED = "no_sample", "abstained"
MANY_UNSCORED, UNSCORED_SHARE = 8, 0.05
log = logging.getLogger("shoal.hub")

STARTING_MS = 60_000
MEASURING_MS = 120_000  # a run's first calibration may take so long, and nothing is wrong
NEWEST = 50
DOING = {"trainer": "train", "validator": "check", "worker": "work"}
AUDITED = ("accepted", "rejected", "unsure")


class Readiness(Message):
    """The answer of `GET /ready`: what is wrong, a sentence each; ready if nothing is. A run that its owner has paused,
    or lets drain, is ready: `conduct` says so, and `halted` since when and why. So is one that nobody works for:
    workers must reach it to join. `standstill` says that, and whoever else is missing."""

    ready: bool
    problems: tuple[str, ...] = ()
    conduct: Conduct = "running"
    halted: str = ""
    standstill: tuple[str, ...] = ()


class Ready:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._probed_ms: int | None = None
        self._probe = ""

    def check(self) -> Readiness:
        context = self._context
        now_ms = context.clock.now_ms()
        with context.storage.read() as reader:
            problems, orders = self._of_roles(reader, now_ms), orders_of(reader)
            nobody = tuple(standstill(context, reader, now_ms))
        disk = self._of_disk(now_ms)
        found = (*problems, disk) if disk else tuple(problems)
        halted = orders.halted(now_ms)
        return Readiness(ready=not found, problems=found, conduct=orders.conduct, halted=halted, standstill=nobody)

    def _of_roles(self, reader: Reader, now_ms: int) -> list[str]:
        trusted = reader.nodes_ranked("trusted", MAX_TRUSTED)
        presences = reader.presences_named([node.node for node in trusted])
        here = [
            (node, presences[node.node])
            for node in trusted
            if node.node in presences and now_ms - presences[node.node].last_seen_ms <= HERE_MS
        ]
        filled = {node.role for node, _ in here if node.state is NodeState.ACTIVE}
        finished = pacing.is_finished(self._context.rules, reader.progress())
        missing = [
            f"no {role} was heard of for {HERE_MS // 1000} s: start one with `shoal {role}`"
            for role in ("trainer", "validator")
            if role not in filled and not finished
        ]
        checks = [
            problem(node, presence)
            for node, presence in here
            if node.role == "validator"
            for problem in (canary_problem, scoring_problem)
        ]
        return [*missing, *(problem for problem in checks if problem)]

    def _of_disk(self, now_ms: int) -> str:
        """Whether something can be written. Asked by anyone, so it is tried once in a while only."""
        if self._context.failure is not None:
            return outage(self._context.failure)
        if self._probed_ms is None or now_ms - self._probed_ms >= PROBE_EVERY_MS:
            self._probed_ms, self._probe = now_ms, ""
            try:
                with self._context.storage.write(durable=False) as transaction:
                    transaction.put_setting("probed_at_ms", str(now_ms))
            except ResourceError as error:
                log.error("/ready: %s", error)
                self._probe = outage(error)
        return self._probe


def outage(error: ShoalError) -> str:
    """What keeps the hub from working, for anyone who asks; where, on this machine or another, is in its log."""
    if isinstance(error, DiskError):
        return "the hub's disk takes nothing more (full, read-only or failing): its log says which, and what to do"
    if isinstance(error, ResourceError):
        return "the hub cannot write to its database: its log says why, and what to do"
    return "the hub cannot go on, and ends: its log says why, and what to do"


def canary_problem(node: NodeRow, presence: Presence) -> str:
    """What a validator's counters say about its audits, if it is bad."""
    counters, who = presence.counters, node_label(node)
    missed, caught = counters.get(MISSED, 0), counters.get(CAUGHT, 0)
    if missed > 0:
        return (
            f"{who} let {missed:.0f} known-bad submissions pass: stop it, look at its profiles (is a tolerance too "
            "wide?), and do not rely on what it accepted since it was started"
        )
    audited = sum(counters.get(name, 0) for name in AUDITED)
    if audited >= CANARY_WITHIN and caught <= 0:
        return f"{who} made {audited:.0f} audits and met no known-bad submission among them: its audits are untested"
    return ""


def scoring_problem(node: NodeRow, presence: Presence) -> str:
    """What a validator's counters say about its scoring, if it is bad."""
    counters, who = presence.counters, node_label(node)
    if counters.get(ABSTAINED, 0) > 0:
        return (
            f"{who} has another environment, or other data, than the run and abstains from what it cannot score: start "
            "it with the run's recipe and data"
        )
    audited, failed = sum(counters.get(name, 0) for name in AUDITED), counters.get(NO_SAMPLE, 0)
    if failed >= MANY_UNSCORED and failed > UNSCORED_SHARE * audited:
        return f"{who} could not score {failed:.0f} of {audited:.0f} groups, which are no samples: its log says why"
    return ""


def no_sample(nodes: Sequence[NodeRow], presences: Mapping[str, Presence]) -> int:
    """Groups that validators could not score, by their heartbeats: since each of them was started."""
    validators = [presences[node.node] for node in nodes if node.role == "validator" and node.node in presences]
    return round(sum(presence.counters.get(NO_SAMPLE, 0) for presence in validators))


def standstill(context: Context, reader: Reader, now_ms: int) -> list[str]:
    """Why the run stands still for want of somebody, a sentence for each role; empty while there is somebody, before
    the first policy, when the run is finished, and when its owner has halted it."""
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
    return f"nobody is left to {DOING[role]}: {_fate(reader, known, now_ms)}; {start}"


def _fate(reader: Reader, known: Sequence[NodeRow], now_ms: int) -> str:
    """What became of the one that was heard of last, a sanctioned one before others."""
    presences = reader.presences_named([row.node for row in known])
    heard = {
        row.node: presences[row.node].last_seen_ms if row.node in presences else row.registered_at_ms for row in known
    }
    row = max(known, key=lambda each: (heard[each.node], each.state is not NodeState.ACTIVE))
    who, see = node_label(row), f"`shoal why {row.node[:8]}` says more"
    if row.state is NodeState.BANNED:
        return f"{who} was banned for {row.reason} ({see}, `shoal admin pardon` takes it back)"
    if row.state is NodeState.SUSPENDED:
        left = "" if row.until_ms is None else f" for {max(0, -(-(row.until_ms - now_ms) // 1000))} s more"
        return f"{who} is suspended{left}: {row.reason} ({see})"
    return f"{who} was heard of {(now_ms - heard[row.node]) // 1000} s ago for the last time"


def _unjudgeable(context: Context, reader: Reader, now_ms: int) -> list[str]:
    """That all workers here are of kinds that no validator can judge yet."""
    rows = [row for row in reader.nodes_ranked("seen", NEWEST) if row.role == "worker"]
    presences = reader.presences_named([row.node for row in rows])
    here = [
        row
        for row in rows
        if row.state is NodeState.ACTIVE
        and row.node in presences
        and presences[row.node].last_seen_ms >= now_ms - nodes.HERE_MS
    ]
    in_force, profiles = in_force_of(reader), context.config.profiles
    if not in_force.digest and now_ms - context.started_ms < MEASURING_MS:
        return []
    kinds = sorted({row.kind for row in here if row.kind})
    waiting = [calibrations.terms(in_force, kind, profiles).waiting for kind in kinds]
    if not kinds or not all(waiting) or any(not row.kind for row in here):
        return []
    return [f"no worker here is of a kind that can be judged now ({', '.join(kinds)}): {waiting[0]}"]
