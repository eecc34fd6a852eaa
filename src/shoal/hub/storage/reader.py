"""Reading rows on one connection, inside one transaction: one consistent view.

The statements are text that both databases understand, with their values by name. SQLite's driver is called directly:
SQLAlchemy would cost ten times what SQLite needs for most of them, and the hub would do little else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar

from sqlalchemy import Connection

from shoal.hub.state.machines import (
    UNDECIDED_SUBMISSIONS,
    UNDECIDED_UNITS,
    EvaluationState,
    LeaseState,
    SubmissionState,
    UnitState,
)
from shoal.hub.state.rows import (
    PROBATION_AUDITS,
    EvaluationRow,
    Filled,
    Holding,
    InHand,
    LeaseRow,
    NodeRow,
    Progress,
    ShownRow,
    SubmissionRow,
    TaskRow,
    UnitRow,
)
from shoal.hub.state.units import TRUSTED_AFTER, no_units
from shoal.hub.storage.mapping import (
    EVALUATIONS,
    LEASES,
    NODES,
    OUTBOX,
    PRESENCE,
    SHOWN,
    SUBMISSIONS,
    TASKS,
    UNITS,
    VERDICTS,
    Mapped,
)
from shoal.hub.storage.tables import Outgoing, Presence
from shoal.protocol import Batch, LedgerEntry, NodeState, PolicyRef, StepReport

R = TypeVar("R")
Rank: TypeAlias = Literal["trusted", "sanctioned", "credit", "seen"]

LEASES_TOLD = 200
"""The newest leases of a unit: one that nobody could do, or that was passed around, may have thousands."""
NAMES_PER_QUERY = 500
"""Databases limit how many parameters a statement may have."""


def _any_of(states: Iterable[UnitState | SubmissionState], table: str = "submissions") -> str:
    return f"({' OR '.join(f'''{table}.state = '{state}' ''' for state in sorted(states)).strip()})"


UNJUDGED = _any_of(UNDECIDED_SUBMISSIONS)
NEWCOMER = f"(nodes.passed < {PROBATION_AUDITS} AND nodes.role = 'worker')"
IN_HAND = f"""SELECT leases.node, leases.brief FROM leases WHERE leases.state = '{LeaseState.ACTIVE}'
    UNION ALL SELECT submissions.node, true AS brief FROM submissions WHERE {UNJUDGED}"""
_UNBATCHED = f"units.state = '{UnitState.ACCEPTED}' AND units.step IS NULL"
_ALIVE = f"({_any_of(UNDECIDED_UNITS, 'units')} OR ({_UNBATCHED}))"
_HELD = "leases JOIN units ON leases.unit = units.unit"
_ACTIVE = f"leases.state = '{LeaseState.ACTIVE}'"
_NEWEST = "submissions.decided_at_ms IS NOT NULL ORDER BY submissions.decided_at_ms DESC, submissions.unit DESC"
_ENTRY = ", ".join(f'ledger."{name}"' for name in LedgerEntry.model_fields)
_PROGRESS = f"""
SELECT next.step, (SELECT COALESCE(max(unit) + 1, 0) FROM units),
    (SELECT count(*) FROM units WHERE lost_step = next.step AND state = '{UnitState.DROPPED}'),
    (SELECT count(*) FROM units WHERE lost_step = next.step AND state = '{UnitState.VOID}'),
    newest.incarnation, newest.version, newest.digest
FROM (SELECT COALESCE(max(step) + 1, 0) AS step FROM batches) AS next
LEFT JOIN (SELECT * FROM policies ORDER BY incarnation DESC, version DESC LIMIT 1) AS newest ON true"""
_RANKED: dict[Rank, tuple[str, str]] = {
    "trusted": ("nodes.role <> 'worker'", "COALESCE(presence.last_seen_ms, 0)"),
    "sanctioned": (f"nodes.state <> '{NodeState.ACTIVE}'", "COALESCE(presence.last_seen_ms, 0)"),
    "credit": ("true", "nodes.credit + nodes.pending"),
    "seen": ("true", "COALESCE(presence.last_seen_ms, 0)"),
}


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one role and state that are here, or away: how many, and what they have in sum."""

    role: str
    state: str
    here: bool
    count: int
    credit: int
    pending: int
    lapsed: int


class Reader:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        if connection.dialect.name == "sqlite":
            self._execute: Callable[[str, dict[str, Any]], Any] = driver_of(connection).execute
        else:
            self._execute = self._on_server

    def _on_server(self, sql: str, values: dict[str, Any]) -> Any:
        return self._connection.exec_driver_sql(_with_percent(sql), values)

    def _rows(self, sql: str, **values: Any) -> Sequence[Sequence[Any]]:
        found: Sequence[Sequence[Any]] = self._execute(sql, values).fetchall()
        return found

    def _lock(self, *_tables: str, skip: bool = False) -> str:  # noqa: ARG002
        """The end of a query after which nobody else changes these tables' rows of its answer before the transaction
        ends. Nothing to do where writers exclude each other. `skip` leaves out what others have locked."""
        return ""

    def _find(self, mapped: Mapped[R], where: str, **values: Any) -> list[R]:
        read = mapped.read
        return [read(row) for row in self._rows(f"SELECT {mapped.columns} FROM {mapped.name} {where}", **values)]

    def _one(self, mapped: Mapped[R], where: str, **values: Any) -> R | None:
        found = self._find(mapped, where, **values)
        return found[0] if found else None

    def _pick(self, where: str, skip: bool = True, **values: Any) -> list[SubmissionRow]:
        """Submissions to decide about."""
        return self._find(SUBMISSIONS, f"{where} {self._lock('submissions', skip=skip)}", **values)

    def _held(self, where: str, lock: str = "", **values: Any) -> list[Holding]:
        query = f"SELECT {LEASES.columns}, {UNITS.columns} FROM {_HELD} WHERE {where}{lock}"
        size = LEASES.size
        return [Holding(LEASES.read(row), UNITS.read(row[size:])) for row in self._rows(query, **values)]

    def _named(self, mapped: Mapped[R], names: Iterable[Any]) -> Iterator[R]:
        """The rows with these keys, however many they are."""
        wanted = list(names)
        for start in range(0, len(wanted), NAMES_PER_QUERY):
            listed, values = among(wanted[start : start + NAMES_PER_QUERY])
            yield from self._find(mapped, f"WHERE {mapped.keys[0]} IN {listed}", **values)

    def _tallied(self, sql: str) -> dict[str, int]:
        return {str(row[0]): int(row[1]) for row in self._rows(sql)}

    # The run

    def setting(self, key: str) -> str | None:
        rows = self._rows("SELECT value FROM meta WHERE key = :key", key=key)
        return str(rows[0][0]) if rows else None

    def progress(self, counted: bool = True) -> Progress:
        """Where the run stands; `alive` is 0 unless it is to be `counted`."""
        ((step, unit, dropped, failed, incarnation, version, digest),) = self._rows(_PROGRESS)
        newest = None if digest is None else PolicyRef(incarnation=incarnation, version=version, digest=digest)
        alive = sum(self.alive_counts().values()) if counted else 0
        return Progress(newest, int(step), int(unit), alive, int(dropped), int(failed))

    def policy(self, incarnation: int, version: int) -> PolicyRef | None:
        query = "SELECT digest FROM policies WHERE incarnation = :incarnation AND version = :version"
        rows = self._rows(query, incarnation=incarnation, version=version)
        return PolicyRef(incarnation=incarnation, version=version, digest=rows[0][0]) if rows else None

    def batch(self, step: int) -> Batch | None:
        rows = self._rows("SELECT document FROM batches WHERE step = :step", step=step)
        return Batch.model_validate_json(rows[0][0]) if rows else None

    def reports(self, limit: int) -> list[StepReport]:
        """The newest step reports, oldest first."""
        rows = self._rows("SELECT step, metrics FROM reports ORDER BY step DESC LIMIT :most", most=limit)
        return [StepReport(step=step, metrics=json.loads(metrics)) for step, metrics in reversed(rows)]

    def alarms(self, limit: int) -> list[str]:
        """The newest alarms, newest first."""
        query = "SELECT message FROM alarms ORDER BY at_ms DESC, step DESC, code LIMIT :most"
        return [row[0] for row in self._rows(query, most=limit)]

    def alarm_counts(self) -> Counter[tuple[str, ...]]:
        """All alarms, by the first word of their code."""
        counts: Counter[tuple[str, ...]] = Counter()
        for code, count in self._tallied("SELECT code, count(*) FROM alarms GROUP BY code").items():
            counts[(code.partition(".")[0],)] += count
        return counts

    def written_ms(self) -> int:
        """The newest time that is written down anywhere that matters: in the ledger, its outbox, or of a node."""
        last = self.ledger_last()
        query = "SELECT (SELECT max(last_seen_ms) FROM presence), (SELECT max(at_ms) FROM ledger_outbox)"
        return max(last.at_ms if last else 0, *(int(time_ms or 0) for time_ms in self._rows(query)[0]))

    # Nodes

    def node(self, node: str) -> NodeRow | None:
        return self._one(NODES, f"WHERE node = :node{self._lock('nodes')}", node=node)

    def nodes(self) -> list[NodeRow]:
        return self._find(NODES, "ORDER BY registered_at_ms, node")

    def nodes_named(self, nodes: Sequence[str]) -> dict[str, NodeRow]:
        return {row.node: row for row in self._named(NODES, nodes)}

    def nodes_after(self, node: str, limit: int) -> list[NodeRow]:
        """Nodes in order of their ids, from the one after `node` on."""
        return self._find(NODES, "WHERE node > :node ORDER BY node LIMIT :most", node=node, most=limit)

    def nodes_ranked(self, by: Rank, limit: int) -> list[NodeRow]:
        """Those of a trusted role, those under a sanction, those with most credit, or any: last seen first."""
        which, first = _RANKED[by]
        joined = "LEFT JOIN presence ON presence.node = nodes.node"
        return self._find(NODES, f"{joined} WHERE {which} ORDER BY {first} DESC, nodes.node LIMIT :most", most=limit)

    def node_counts(self) -> dict[str, int]:
        """How many nodes there are, by `role.state`."""
        return self._tallied("SELECT role || '.' || state, count(*) FROM nodes GROUP BY role, state")

    def fleet(self, since_ms: int) -> list[NodeGroup]:
        """All nodes, summed up by role, state and whether they were heard of since then; in that order."""
        rows = self._rows(
            """SELECT role, state, CASE WHEN presence.last_seen_ms >= :since_ms THEN 1 ELSE 0 END AS here, count(*),
            sum(credit), sum(pending), sum(lapsed) FROM nodes LEFT JOIN presence ON presence.node = nodes.node
            GROUP BY role, state, here ORDER BY role, state, here""",
            since_ms=since_ms,
        )
        return [NodeGroup(row[0], row[1], bool(row[2]), *(int(value) for value in row[3:])) for row in rows]

    def kin(self, kind: str, check: str, since_ms: int) -> list[NodeRow]:
        """Workers of one kind that were heard of since then, and have failed this statistical check since then, or
        have passed an audit."""
        return self._find(
            NODES,
            """JOIN presence ON presence.node = nodes.node
            WHERE kind = :kind AND role = 'worker' AND presence.last_seen_ms >= :since_ms
            AND (passed > 0 OR (failed_check = :failed AND failed_at_ms >= :since_ms)) ORDER BY nodes.node""",
            kind=kind,
            failed=check,
            since_ms=since_ms,
        )

    def is_established_here(self, since_ms: int) -> bool:
        """Whether an active worker that is past probation was heard of since then."""
        query = f"""SELECT 1 FROM nodes JOIN presence ON presence.node = nodes.node
            WHERE passed >= {PROBATION_AUDITS} AND role = 'worker' AND state = '{NodeState.ACTIVE}'
            AND presence.last_seen_ms >= :since_ms LIMIT 1"""
        return bool(self._rows(query, since_ms=since_ms))

    def newcomers_in_hand(self, node: str) -> InHand:
        """What nodes on probation have in hand, and this one of them; networks without anything may be left out."""
        # joined from what is in hand: that is little, fresh keys may be many
        query = f"""SELECT nodes.network, count(*), sum(CASE WHEN passed = 0 THEN 1 ELSE 0 END),
            sum(CASE WHEN passed = 0 AND NOT hands.brief THEN 1 ELSE 0 END),
            sum(CASE WHEN nodes.node = :node THEN 1 ELSE 0 END)
            FROM ({IN_HAND}) AS hands JOIN nodes ON nodes.node = hands.node WHERE {NEWCOMER} GROUP BY nodes.network"""
        rows = self._rows(query, node=node)
        return InHand(
            sum(int(row[4]) for row in rows), *({row[0]: int(row[place]) for row in rows} for place in (1, 2, 3))
        )

    def presence(self, node: str) -> Presence | None:
        return self._one(PRESENCE, "WHERE node = :node", node=node)

    def presences_named(self, nodes: Sequence[str]) -> dict[str, Presence]:
        return {row.node: row for row in self._named(PRESENCE, nodes)}

    def waiting_presences(self, since_ms: int, limit: int) -> list[Presence]:
        """Nodes heard of since then that say they wait, the longest wait first."""
        where = "WHERE last_seen_ms >= :since_ms AND waiting_for <> '' ORDER BY waiting_since_ms, node LIMIT :most"
        return self._find(PRESENCE, where, since_ms=since_ms, most=limit)

    # Units and tasks

    def unit(self, unit: int) -> UnitRow | None:
        return self._one(UNITS, f"WHERE unit = :unit{self._lock('units')}", unit=unit)

    def units_named(self, units: Sequence[int]) -> dict[int, UnitRow]:
        return {row.unit: row for row in self._named(UNITS, units)}

    def open_units(self, limit: int, entrusted: bool = False) -> list[UnitRow]:
        """The lowest-numbered open units that workers may have, or those that are `entrusted` to validators."""
        side = f"failures {'>=' if entrusted else '<'} {TRUSTED_AFTER}"
        query = f"WHERE state = '{UnitState.OPEN}' AND {side} ORDER BY unit LIMIT :most"
        return self._find(UNITS, f"{query}{self._lock('units', skip=True)}", most=limit)

    def alive_units(self) -> list[UnitRow]:
        """Units that are undecided, or accepted and in no batch, by number."""
        return self._find(UNITS, f"WHERE {_ALIVE} ORDER BY unit")

    def alive_counts(self) -> dict[UnitState, int]:
        """How many units are alive, by state; accepted ones are those in no batch."""
        found = self._tallied(f"SELECT state, count(*) FROM units WHERE {_ALIVE} GROUP BY state")
        return {UnitState(state): count for state, count in found.items()}

    def batched_units(self) -> list[UnitRow]:
        """Units in a batch that are not marked trained yet."""
        return self._find(UNITS, f"WHERE state = '{UnitState.ACCEPTED}' AND step IS NOT NULL ORDER BY unit")

    def unit_counts(self) -> dict[str, int]:
        """Units by state, and `void_<reason>` for the void ones."""
        counts = no_units()
        for state, reason, count in self._rows("SELECT state, reason, count(*) FROM units GROUP BY state, reason"):
            counts[state] += count
            if state == UnitState.VOID:
                counts[f"void_{reason}"] = count
        return counts

    def task_rows(self, tasks: Sequence[str]) -> dict[str, TaskRow]:
        """How tasks did recently; without those of which no group was ever in a batch or dropped."""
        return {row.task: row for row in self._named(TASKS, tasks)}

    def pool_counts(self) -> dict[str, int]:
        """How many of the tasks that were seen are in each pool; pools without any are left out."""
        return self._tallied("SELECT pool, count(*) FROM tasks GROUP BY pool")

    # Leases

    def holding(self, lease: str) -> Holding | None:
        found = self._held("leases.lease = :lease", self._lock("leases", "units"), lease=lease)
        return found[0] if found else None

    def holdings(self, node: str | None = None) -> list[Holding]:
        """Active leases with their units, oldest first; of one node, or of all."""
        order = "ORDER BY leases.issued_at_ms, leases.unit"
        if node is None:
            return self._held(f"{_ACTIVE} {order}")
        return self._held(f"{_ACTIVE} AND leases.node = :node {order}", self._lock("leases", "units"), node=node)

    def oldest_holdings(self, limit: int) -> list[Holding]:
        """Active leases with their units, the oldest first."""
        return self._held(f"{_ACTIVE} ORDER BY leases.issued_at_ms, leases.unit LIMIT :most", most=limit)

    def overdue_holdings(self, now_ms: int) -> list[Holding]:
        """Active leases past their deadline, by unit."""
        return self._held(f"{_ACTIVE} AND leases.deadline_ms <= :now_ms ORDER BY leases.unit", now_ms=now_ms)

    def silent_holdings(self, since_ms: int) -> list[Holding]:
        """Active leases that were issued before `since_ms` to nodes not heard of since then, by unit."""
        heard = "SELECT 1 FROM presence WHERE presence.node = held.node AND presence.last_seen_ms >= :since_ms"
        gone = f"SELECT held.node FROM leases AS held WHERE held.state = '{LeaseState.ACTIVE}' AND NOT EXISTS ({heard})"
        which = f"{_ACTIVE} AND leases.issued_at_ms < :since_ms AND leases.node IN ({gone})"
        return self._held(f"{which} ORDER BY leases.unit", since_ms=since_ms)

    def requested_leases(self, node: str, request: str) -> list[LeaseRow]:
        """The leases that this request got, in order of unit."""
        return self._find(LEASES, "WHERE node = :node AND request = :request ORDER BY unit", node=node, request=request)

    def leases_of_unit(self, unit: int) -> list[LeaseRow]:
        """The newest leases of a unit (`LEASES_TOLD`), in order of attempt."""
        return self._find(LEASES, f"WHERE unit = :unit ORDER BY attempt DESC LIMIT {LEASES_TOLD}", unit=unit)[::-1]

    def leases_of(self, node: str, limit: int) -> list[LeaseRow]:
        """The newest leases of a node, newest first."""
        where = "WHERE node = :node ORDER BY issued_at_ms DESC, unit DESC LIMIT :most"
        return self._find(LEASES, where, node=node, most=limit)

    def shown(self, lease: str) -> list[ShownRow]:
        """What was shown of a lease, part by part."""
        return self._find(SHOWN, "WHERE lease = :lease ORDER BY part", lease=lease)

    def last_shown(self, lease: str) -> ShownRow | None:
        """The last part of what was shown of a lease."""
        return self._one(SHOWN, "WHERE lease = :lease ORDER BY part DESC LIMIT 1", lease=lease)

    def showing(self) -> list[LeaseRow]:
        """Active leases of which something was shown, by their deadline."""
        shown = "SELECT shown.lease FROM shown WHERE shown.part = 0"
        return self._find(LEASES, f"WHERE {_ACTIVE} AND leases.lease IN ({shown}) ORDER BY deadline_ms")

    # Submissions

    def submission(self, submission: str) -> SubmissionRow | None:
        lock = self._lock("submissions")
        return self._one(SUBMISSIONS, f"WHERE submission = :submission{lock}", submission=submission)

    def submission_of_lease(self, lease: str) -> SubmissionRow | None:
        return self._one(SUBMISSIONS, f"WHERE lease = :lease{self._lock('submissions')}", lease=lease)

    def submissions_named(self, names: Sequence[str]) -> dict[str, SubmissionRow]:
        return {row.submission: row for row in self._named(SUBMISSIONS, names)}

    def submissions_in(self, states: Iterable[SubmissionState], limit: int) -> list[SubmissionRow]:
        """Submissions in one of these states, lowest unit first."""
        return self._pick(f"WHERE {_any_of(states)} ORDER BY submissions.unit LIMIT :most", most=limit)

    def waiting_audits(self, on_probation: bool, limit: int) -> list[SubmissionRow]:
        """Received submissions of nodes that are, or are not, on probation, lowest unit first."""
        side = NEWCOMER if on_probation else f"NOT {NEWCOMER}"
        received = f"submissions.state = '{SubmissionState.RECEIVED}'"
        joined = "JOIN nodes ON nodes.node = submissions.node"
        return self._pick(f"{joined} WHERE {received} AND {side} ORDER BY submissions.unit LIMIT :most", most=limit)

    def light_audits(self, node: str) -> list[SubmissionRow]:
        """What a node submitted that waits for a light audit or is in one, by unit."""
        which = f"node = :node AND {UNJUDGED} AND depth = 'light'"
        return self._pick(f"WHERE {which} ORDER BY unit", skip=False, node=node)

    def pending_credit(self, node: str) -> list[SubmissionRow]:
        """What a node has pending credit for, by unit."""
        return self._pick("WHERE node = :node AND matures_at_ms IS NOT NULL ORDER BY unit", skip=False, node=node)

    def overdue_audits(self, now_ms: int) -> list[SubmissionRow]:
        """Submissions whose validator has let its claim run out."""
        claimed = f"state = '{SubmissionState.AUDITING}'"
        return self._pick(f"WHERE {claimed} AND claimed_until_ms <= :now_ms ORDER BY unit", now_ms=now_ms)

    def claimed_by(self, validator: str) -> list[SubmissionRow]:
        """What a validator has claimed and not judged yet, by unit."""
        claimed = f"state = '{SubmissionState.AUDITING}'"
        return self._pick(f"WHERE {claimed} AND validator = :validator ORDER BY unit", validator=validator)

    def untrained(self, node: str) -> list[Filled]:
        """A node's accepted groups that are in no batch, by unit."""
        query = f"""SELECT {UNITS.columns}, {SUBMISSIONS.columns} FROM units
            JOIN submissions ON units.submission = submissions.submission
            WHERE submissions.node = :node AND submissions.state = '{SubmissionState.ACCEPTED}' AND {_UNBATCHED}
            ORDER BY units.unit{self._lock("submissions", "units")}"""
        rows = self._rows(query, node=node)
        return [Filled(UNITS.read(row), SUBMISSIONS.read(row[UNITS.size :])) for row in rows]

    def due_credit(self, now_ms: int, limit: int) -> list[SubmissionRow]:
        """Submissions whose pending credit is due, longest due first."""
        where = "WHERE matures_at_ms <= :now_ms ORDER BY matures_at_ms, unit LIMIT :most"
        return self._find(SUBMISSIONS, where, now_ms=now_ms, most=limit)

    def decided_submissions(self, limit: int) -> list[SubmissionRow]:
        """The newest decisions, newest first."""
        return self._find(SUBMISSIONS, f"WHERE {_NEWEST} LIMIT :most", most=limit)

    def refused_submissions(self, among: int) -> list[SubmissionRow]:
        """Those of the newest `among` decisions that are no acceptances, newest first."""
        newest = f"SELECT submissions.submission FROM submissions WHERE {_NEWEST} LIMIT :most"
        where = f"submission IN ({newest}) AND state <> '{SubmissionState.ACCEPTED}' AND {_NEWEST}"
        return self._find(SUBMISSIONS, f"WHERE {where}", most=among)

    def dropped_submissions(self, step: int) -> list[SubmissionRow]:
        """What fills the units that were dropped (equal rewards) while `step` was the next one, by unit."""
        joined = "JOIN units ON units.submission = submissions.submission"
        dropped = f"units.lost_step = :step AND units.state = '{UnitState.DROPPED}'"
        return self._find(SUBMISSIONS, f"{joined} WHERE {dropped} ORDER BY units.unit", step=step)

    def submissions_of_unit(self, unit: int) -> list[SubmissionRow]:
        """All that was ever submitted for a unit, oldest first."""
        return self._find(SUBMISSIONS, "WHERE unit = :unit ORDER BY received_at_ms, submission", unit=unit)

    def submissions_of(self, node: str, refused: bool, limit: int) -> list[SubmissionRow]:
        """What a node submitted, newest first; `refused`: only what was rejected, unsure or pulled."""
        ends = (SubmissionState.REJECTED, SubmissionState.UNSURE, SubmissionState.PULLED)
        which = f"node = :node AND {_any_of(ends)}" if refused else "node = :node"
        order = "ORDER BY received_at_ms DESC, unit DESC LIMIT :most"
        return self._find(SUBMISSIONS, f"WHERE {which} {order}", node=node, most=limit)

    def submission_counts(self) -> dict[str, int]:
        counts = self._tallied("SELECT state, count(*) FROM submissions GROUP BY state")
        return {state.value: 0 for state in SubmissionState} | counts

    def verdicts_of(self, submissions: Sequence[str]) -> dict[str, str]:
        """Signed verdicts as they came, by submission."""
        return {row.submission: row.document for row in self._named(VERDICTS, submissions)}

    # Evaluations

    def evaluation(self, incarnation: int, version: int, first: int) -> EvaluationRow | None:
        where = f"WHERE {EVALUATIONS.is_named}{self._lock('evaluations')}"
        return self._one(EVALUATIONS, where, incarnation=incarnation, version=version, first=first)

    def evaluations_under_way(self) -> list[EvaluationRow]:
        """All slices of the versions of which one is open or claimed, in order."""
        under_way = f"state = '{EvaluationState.OPEN}' OR state = '{EvaluationState.CLAIMED}'"
        versions = f"SELECT incarnation, version FROM evaluations WHERE {under_way}"
        where = f"WHERE (incarnation, version) IN ({versions}) ORDER BY incarnation, version, first"
        return self._find(EVALUATIONS, f"{where}{self._lock('evaluations', skip=True)}")

    def evaluations_since(self, version: int, versions: int) -> list[EvaluationRow]:
        """All slices from that version on, in order; those of the newest `versions` at most, and of these all."""
        newest = "SELECT DISTINCT version FROM evaluations WHERE version >= :since ORDER BY version DESC LIMIT :most"
        where = f"WHERE version IN (SELECT version FROM ({newest}) AS newest) ORDER BY incarnation, version, first"
        return self._find(EVALUATIONS, where, since=version, most=versions)

    # The ledger

    def ledger_last(self) -> LedgerEntry | None:
        found = self._entries('FROM ledger ORDER BY ledger."index" DESC LIMIT 1')
        return found[0] if found else None

    def ledger_after(self, index: int, limit: int) -> list[LedgerEntry]:
        where = 'WHERE ledger."index" > :after ORDER BY ledger."index" LIMIT :most'
        return self._entries(f"FROM ledger {where}", after=index, most=limit)

    def ledger_about(self, subject: str, but: Sequence[str], limit: int) -> list[LedgerEntry]:
        """The newest entries about a subject that are of no kind in `but`, oldest first."""
        listed, values = among(but)
        where = f"""FROM ledger JOIN ledger_subjects AS about ON about."index" = ledger."index"
            WHERE about.subject = :subject AND ledger.kind NOT IN {listed} ORDER BY ledger."index" DESC LIMIT :most"""
        return self._entries(where, subject=subject, most=limit, **values)[::-1]

    def ledger_of_kind(self, kind: str, subjects: Sequence[str]) -> list[LedgerEntry]:
        """All entries of a kind about any of these subjects, oldest first."""
        listed, values = among(subjects)
        about = f'SELECT about."index" FROM ledger_subjects AS about WHERE about.subject IN {listed}'
        where = f'FROM ledger WHERE ledger."index" IN ({about}) AND ledger.kind = :kind ORDER BY ledger."index"'
        return self._entries(where, kind=kind, **values)

    def _entries(self, where: str, **values: Any) -> list[LedgerEntry]:
        names = tuple(LedgerEntry.model_fields)
        rows = (dict(zip(names, row, strict=True)) for row in self._rows(f"SELECT {_ENTRY} {where}", **values))
        return [LedgerEntry(**{**row, "body": json.loads(row["body"])}) for row in rows]

    def outbox(self, limit: int) -> list[Outgoing]:
        """What waits to be moved into the ledger, oldest first."""
        return self._find(OUTBOX, "ORDER BY id LIMIT :most", most=limit)

    def outbox_length(self) -> int:
        return int(self._rows("SELECT count(*) FROM ledger_outbox")[0][0])


def driver_of(connection: Connection) -> Any:
    return connection.connection.driver_connection


def among(values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """The right side of IN, and its values by name; of none, what nothing is in."""
    named = {f"among_{place}": value for place, value in enumerate(values)}
    listed = ", ".join(f":{name}" for name in named)
    return f"({listed})" if named else "('')", named


@lru_cache(1024)
def _with_percent(sql: str) -> str:
    """The statement as PostgreSQL's driver wants it."""
    return re.sub(r":(\w+)", r"%(\1)s", sql)
