"""Whether anybody is left to train, to check and to work; if not, who was, what became of them, and what to do.

Told by `/status` and `/ready` at once when the last of a role is banned or suspended, and when it was not heard of for
`HERE_MS`; of a role of which nobody was heard since the hub was started, after `STARTING_MS`. `shoal run` shows it, and
the watchdog repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.hub.service.calibrating import in_force_of
from shoal.hub.service.context import Context, node_label
from shoal.hub.service.owner import orders_of
from shoal.hub.state import calibrations, pacing
from shoal.hub.state.nodes import HERE_MS
from shoal.hub.state.rows import NodeRow
from shoal.hub.storage import Reader
from shoal.protocol import NodeState

STARTING_MS = 60_000
MEASURING_MS = 120_000  # a run's first calibration may take so long, and nothing is wrong
NEWEST = 50
DOING = {"trainer": "train", "validator": "check", "worker": "work"}


def standstill(context: Context, reader: Reader, now_ms: int) -> list[str]:
    """Why the run stands still for want of somebody, a sentence for each role; empty while there is somebody, before
    the first policy, when the run is finished, and when its owner has halted it."""
    progress = reader.progress()
    over = progress.policy is None or pacing.is_finished(context.rules, progress)
    if over or orders_of(reader).halted(now_ms):
        return []
    fleet, since_start = reader.fleet(now_ms - HERE_MS), reader.fleet(context.started_ms)
    found = []
    for role in DOING:
        here = any(crew.role == role and crew.here and crew.state == NodeState.ACTIVE for crew in fleet)
        lost = any(crew.role == role and (crew.here or crew.state != NodeState.ACTIVE) for crew in since_start)
        if not here and (lost or now_ms - context.started_ms >= STARTING_MS):
            found.append(_nobody(context, reader, role, now_ms))
    return found or _unjudgeable(context, reader, now_ms)


def _nobody(context: Context, reader: Reader, role: str, now_ms: int) -> str:
    known = [row for rank in ("sanctioned", "seen") for row in reader.nodes_ranked(rank, NEWEST) if row.role == role]
    start = f"start {'one' if not known else 'another'} with `shoal {role}`"
    if role == "worker":
        start += f" or `shoal join` (the run takes {', '.join(_taken(context, reader))})"
    if not known:
        return f"nobody is here to {DOING[role]}: no {role} has come yet; {start}"
    return f"nobody is left to {DOING[role]}: {_fate(reader, known, now_ms)}; {start}"


def _taken(context: Context, reader: Reader) -> Sequence[str]:
    return calibrations.taken(in_force_of(reader), context.config.profiles, context.config.measurable)


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
        and presences[row.node].last_seen_ms >= now_ms - HERE_MS
    ]
    in_force, profiles = in_force_of(reader), context.config.profiles
    if not in_force.digest and now_ms - context.started_ms < MEASURING_MS:
        return []
    kinds = sorted({row.kind for row in here if row.kind})
    waiting = [calibrations.terms(in_force, kind, profiles).waiting for kind in kinds]
    if not kinds or not all(waiting) or any(not row.kind for row in here):
        return []
    return [f"no worker here is of a kind that can be judged now ({', '.join(kinds)}): {waiting[0]}"]
