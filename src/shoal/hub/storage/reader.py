"""Reading rows inside one transaction: one consistent view.

The statements are text that both databases understand. Their drivers are called directly: SQLAlchemy would cost as much
as PostgreSQL's, and ten times what SQLite needs for most of them.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar

from sqlalchemy import Connection

from shoal.hub.state import rows, units
from shoal.hub.state.rows import EvaluationState, LeaseState, SubmissionState, UnitState
from shoal.hub.storage import tables as table
from shoal.hub.storage.tables import Outgoing, Presence
from shoal.protocol import Batch, LedgerEntry, NodeState, PolicyRef, StepReport

R = TypeVar("R")
Rank: TypeAlias = Literal["trusted", "sanctioned", "credit", "seen"]

LEASES_SHOWN = 200  # newest leases of a unit, which may have thousands
NAMES_PER_QUERY = 500  # databases limit how many parameters a statement may have


def _any_of(states: Iterable[UnitState | SubmissionState], of: str = "submissions") -> str:
    return f"({' OR '.join(f'''{of}.state = '{state}' ''' for state in sorted(states)).strip()})"


UNJUDGED = _any_of(rows.UNDECIDED_SUBMISSIONS)
NEWCOMER = f"(nodes.passed < {rows.PROBATION_AUDITS} AND nodes.role = 'worker')"
IN_HAND = f"""SELECT leases.node, leases.brief FROM leases WHERE leases.state = '{LeaseState.ACTIVE}'
    UNION ALL SELECT submissions.node, true AS brief FROM submissions WHERE {UNJUDGED}"""
_UNBATCHED = f"units.state = '{UnitState.ACCEPTED}' AND units.step IS NULL"
_ALIVE = f"({_any_of(rows.UNDECIDED_UNITS, 'units')} OR ({_UNBATCHED}))"
_ACTIVE = f"leases.state = '{LeaseState.ACTIVE}'"
_AUDITING = f"state = '{SubmissionState.AUDITING}'"
_NEWEST = "submissions.decided_at_ms IS NOT NULL ORDER BY submissions.decided_at_ms DESC, submissions.unit DESC"
_SEEN = "LEFT JOIN presence ON presence.node = nodes.node"
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
    role: str
    state: str
    here: bool
    count: int
    credit: int
    pending: int
    lapsed: int


class Reader:
    """In this order: the run, nodes, units and tasks, leases, submissions, evaluations, the ledger."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        execute = driver_of(connection).execute
        self._execute: Callable[[str, dict[str, Any]], Any] = execute
        if connection.dialect.name != "sqlite":
            self._execute = lambda sql, values: execute(with_percent(sql), values)

    def _rows(self, sql: str, **values: Any) -> Sequence[Sequence[Any]]:
        found: Sequence[Sequence[Any]] = self._execute(sql, values).fetchall()
        return found

    def _lock(self, *_tables: str, skip: bool = False) -> str:  # noqa: ARG002
        """The end of a query that locks its rows of these tables; nothing where writers exclude each other. `skip`
        leaves out what others have locked."""
        return ""

    def _find(self, mapped: table.Mapped[R], where: str, **values: Any) -> list[R]:
        read = mapped.read
        return [read(row) for row in self._rows(f"SELECT {mapped.columns} FROM {mapped.name} {where}", **values)]

    def _one(self, mapped: table.Mapped[R], where: str, **values: Any) -> R | None:
        return next(iter(self._find(mapped, where, **values)), None)

    def _pick(self, where: str, skip: bool = True, **values: Any) -> list[rows.SubmissionRow]:
        return self._find(table.SUBMISSIONS, f"{where} {self._lock('submissions', skip=skip)}", **values)

    def _held(self, where: str, lock: bool = False, **values: Any) -> list[rows.Holding]:
        query = f"""SELECT {table.LEASES.columns}, {table.UNITS.columns} FROM leases
            JOIN units ON leases.unit = units.unit WHERE {where}{self._lock("leases", "units") if lock else ""}"""
        lease, unit, size = table.LEASES.read, table.UNITS.read, table.LEASES.size
        return [rows.Holding(lease(row), unit(row[size:])) for row in self._rows(query, **values)]

    def _named(self, mapped: table.Mapped[R], names: Iterable[Any]) -> Iterator[R]:
        wanted = list(names)
        for start in range(0, len(wanted), NAMES_PER_QUERY):
            listed, values = among(wanted[start : start + NAMES_PER_QUERY])
            yield from self._find(mapped, f"WHERE {mapped.keys[0]} IN {listed}", **values)

    def _tallied(self, sql: str) -> dict[str, int]:
        return {str(row[0]): int(row[1]) for row in self._rows(sql)}

    def setting(self, key: str) -> str | None:
        return next((str(row[0]) for row in self._rows("SELECT value FROM meta WHERE key = :key", key=key)), None)

    def progress(self, counted: bool = True) -> rows.RunProgress:
        ((step, unit, dropped, failed, incarnation, version, digest),) = self._rows(_PROGRESS)
        newest = None if digest is None else PolicyRef(incarnation=incarnation, version=version, digest=digest)
        alive = sum(self.alive_counts().values()) if counted else 0
        return rows.RunProgress(newest, int(step), int(unit), alive, int(dropped), int(failed))

    def standing(self) -> rows.RunProgress:
        """The newest policy and the next step; nothing else of it is to be relied on."""
        return self.progress(counted=False)

    def policy(self, incarnation: int, version: int) -> PolicyRef | None:
        where = "WHERE incarnation = :incarnation AND version = :version"
        found = self._rows(f"SELECT digest FROM policies {where}", incarnation=incarnation, version=version)
        return PolicyRef(incarnation=incarnation, version=version, digest=found[0][0]) if found else None

    def batch(self, step: int) -> Batch | None:
        found = self._rows("SELECT document FROM batches WHERE step = :step", step=step)
        return Batch.model_validate_json(found[0][0]) if found else None

    def reports(self, limit: int) -> list[StepReport]:
        found = self._rows("SELECT step, metrics FROM reports ORDER BY step DESC LIMIT :most", most=limit)
        return [StepReport(step=step, metrics=json.loads(metrics)) for step, metrics in reversed(found)]

    def alarms(self, limit: int) -> list[str]:
        query = "SELECT message FROM alarms ORDER BY at_ms DESC, step DESC, code LIMIT :most"
        return [row[0] for row in self._rows(query, most=limit)]

    def alarm_counts(self) -> Counter[tuple[str, ...]]:
        counts = Counter[tuple[str, ...]]()
        for code, count in self._tallied("SELECT code, count(*) FROM alarms GROUP BY code").items():
            counts[(code.partition(".")[0],)] += count
        return counts

    def written_ms(self) -> int:
        last = self.ledger_last()
        query = "SELECT (SELECT max(last_seen_ms) FROM presence), (SELECT max(at_ms) FROM ledger_outbox)"
        return max(last.at_ms if last else 0, *(int(time_ms or 0) for time_ms in self._rows(query)[0]))

    def node(self, node: str) -> rows.NodeRow | None:
        return self._one(table.NODES, f"WHERE node = :node{self._lock('nodes')}", node=node)

    def nodes(self) -> list[rows.NodeRow]:
        return self._find(table.NODES, "ORDER BY registered_at_ms, node")

    def nodes_named(self, nodes: Sequence[str]) -> dict[str, rows.NodeRow]:
        return {row.node: row for row in self._named(table.NODES, nodes)}

    def nodes_after(self, node: str, limit: int) -> list[rows.NodeRow]:
        return self._find(table.NODES, "WHERE node > :node ORDER BY node LIMIT :most", node=node, most=limit)

    def nodes_ranked(self, by: Rank, limit: int) -> list[rows.NodeRow]:
        which, first = _RANKED[by]
        where = f"{_SEEN} WHERE {which} ORDER BY {first} DESC, nodes.node LIMIT :most"
        return self._find(table.NODES, where, most=limit)

    def node_counts(self) -> dict[str, int]:
        return self._tallied("SELECT role || '.' || state, count(*) FROM nodes GROUP BY role, state")

    def fleet(self, since_ms: int) -> list[NodeGroup]:
        query = f"""SELECT role, state, CASE WHEN presence.last_seen_ms >= :since_ms THEN 1 ELSE 0 END AS here,
            count(*), sum(credit), sum(pending), sum(lapsed) FROM nodes {_SEEN}
            GROUP BY role, state, here ORDER BY role, state, here"""
        found = self._rows(query, since_ms=since_ms)
        return [NodeGroup(row[0], row[1], bool(row[2]), *map(int, row[3:])) for row in found]

    def kin(self, kind: str, check: str, since_ms: int) -> list[rows.NodeRow]:
        """Workers of one kind heard of since then that have failed this check since then, or passed an audit."""
        where = f"""{_SEEN} WHERE kind = :kind AND role IN ('worker', 'trusted') AND presence.last_seen_ms >= :since_ms
            AND (passed > 0 OR (failed_check = :failed AND failed_at_ms >= :since_ms)) ORDER BY nodes.node"""
        return self._find(table.NODES, where, kind=kind, failed=check, since_ms=since_ms)

    def is_established_here(self, since_ms: int) -> bool:
        query = f"""SELECT 1 FROM nodes JOIN presence ON presence.node = nodes.node
            WHERE (passed >= {rows.PROBATION_AUDITS} AND role = 'worker' OR role = 'trusted')
            AND state = '{NodeState.ACTIVE}'
            AND presence.last_seen_ms >= :since_ms LIMIT 1"""
        return bool(self._rows(query, since_ms=since_ms))

    def newcomers_in_hand(self, node: str) -> rows.InHand:
        # Not a condition of the join: a planner that takes newcomers for few looks at all that is in hand for each.
        query = f"""SELECT nodes.network, sum(CASE WHEN {NEWCOMER} THEN 1 ELSE 0 END),
            sum(CASE WHEN {NEWCOMER} AND passed = 0 THEN 1 ELSE 0 END),
            sum(CASE WHEN {NEWCOMER} AND passed = 0 AND NOT hands.brief THEN 1 ELSE 0 END),
            sum(CASE WHEN {NEWCOMER} AND nodes.node = :node THEN 1 ELSE 0 END)
            FROM ({IN_HAND}) AS hands JOIN nodes ON nodes.node = hands.node GROUP BY nodes.network"""
        found = [row for row in self._rows(query, node=node) if row[1]]
        by_network = ({row[0]: int(row[place]) for row in found} for place in (1, 2, 3))
        return rows.InHand(sum(int(row[4]) for row in found), *by_network)

    def nonces(self) -> list[tuple[str, str, int]]:
        return [(node, nonce, int(until_ms)) for node, nonce, until_ms in self._rows("SELECT * FROM nonces")]

    def presence(self, node: str) -> Presence | None:
        return self._one(table.PRESENCE, "WHERE node = :node", node=node)

    def presences_named(self, nodes: Sequence[str]) -> dict[str, Presence]:
        return {row.node: row for row in self._named(table.PRESENCE, nodes)}

    def waiting_presences(self, since_ms: int, limit: int) -> list[Presence]:
        """The longest wait first."""
        where = "WHERE last_seen_ms >= :since_ms AND waiting_for <> '' ORDER BY waiting_since_ms, node LIMIT :most"
        return self._find(table.PRESENCE, where, since_ms=since_ms, most=limit)

    def unit(self, unit: int) -> rows.UnitRow | None:
        return self._one(table.UNITS, f"WHERE unit = :unit{self._lock('units')}", unit=unit)

    def units_named(self, units: Sequence[int]) -> dict[int, rows.UnitRow]:
        return {row.unit: row for row in self._named(table.UNITS, units)}

    def open_units(self, limit: int, entrusted: bool = False, among: Sequence[int] | None = None) -> list[rows.UnitRow]:
        """`among`, where hubs share a database: those that somebody had before, and these."""
        which = f"state = '{UnitState.OPEN}' AND failures {'>=' if entrusted else '<'} {units.TRUSTED_AFTER}"
        if among is not None:
            which += " AND (attempt > 0 OR unit = ANY(:among))"
        locked = self._lock("units", skip=True)
        return self._find(table.UNITS, f"WHERE {which} ORDER BY unit LIMIT :most{locked}", among=among, most=limit)

    def alive_units(self) -> list[rows.UnitRow]:
        return self._find(table.UNITS, f"WHERE {_ALIVE} ORDER BY unit")

    def alive_counts(self) -> dict[UnitState, int]:
        query = f"SELECT state, count(*) FROM units WHERE {_ALIVE} GROUP BY state"
        return {UnitState(state): count for state, count in self._tallied(query).items()}

    def batched_units(self) -> list[rows.UnitRow]:
        return self._find(table.UNITS, f"WHERE state = '{UnitState.ACCEPTED}' AND step IS NOT NULL ORDER BY unit")

    def unit_counts(self) -> dict[str, int]:
        lost = (f"void_{reason}" for reason in (units.VOID_ATTEMPTS, units.VOID_STALE, units.VOID_INCARNATION))
        counts = dict.fromkeys([*(state.value for state in UnitState), *lost], 0)
        for state, reason, count in self._rows("SELECT state, reason, count(*) FROM units GROUP BY state, reason"):
            counts[state] += count
            if state == UnitState.VOID:
                counts[f"void_{reason}"] = count
        return counts

    def task_rows(self, tasks: Sequence[str]) -> dict[str, rows.TaskRow]:
        """Without tasks of which no group was ever in a batch or dropped."""
        return {row.task: row for row in self._named(table.TASKS, tasks)}

    def pool_counts(self) -> dict[str, int]:
        return self._tallied("SELECT pool, count(*) FROM tasks GROUP BY pool")

    def holding(self, lease: str) -> rows.Holding | None:
        return next(iter(self._held("leases.lease = :lease", lock=True, lease=lease)), None)

    def holdings(self, node: str | None = None, request: str = "") -> list[rows.Holding]:
        """Active leases, oldest first; of one node, or of all. Of a `request` also those that have ended."""
        order = "ORDER BY leases.issued_at_ms, leases.unit"
        if node is None:
            return self._held(f"{_ACTIVE} {order}")
        which = f"{_ACTIVE} AND leases.node = :node"
        if request:
            which = f"(({which}) OR (leases.node = :node AND leases.request = :request))"
        return self._held(f"{which} {order}", lock=True, node=node, request=request)

    def leases_held(self, node: str) -> list[rows.LeaseRow]:
        return self._find(table.LEASES, f"WHERE {_ACTIVE} AND node = :node{self._lock('leases')}", node=node)

    def oldest_holdings(self, limit: int) -> list[rows.Holding]:
        return self._held(f"{_ACTIVE} ORDER BY leases.issued_at_ms, leases.unit LIMIT :most", most=limit)

    def overdue_holdings(self, now_ms: int) -> list[rows.Holding]:
        return self._held(f"{_ACTIVE} AND leases.deadline_ms <= :now_ms ORDER BY leases.unit", now_ms=now_ms)

    def silent_holdings(self, since_ms: int) -> list[rows.Holding]:
        """Active leases that were issued before `since_ms` to nodes not heard of since then."""
        heard = "SELECT 1 FROM presence WHERE presence.node = held.node AND presence.last_seen_ms >= :since_ms"
        gone = f"SELECT held.node FROM leases AS held WHERE held.state = '{LeaseState.ACTIVE}' AND NOT EXISTS ({heard})"
        which = f"leases.issued_at_ms < :since_ms AND leases.node IN ({gone}) ORDER BY leases.unit"
        return self._held(f"{_ACTIVE} AND {which}", since_ms=since_ms)

    def leases_of_unit(self, unit: int) -> list[rows.LeaseRow]:
        where = f"WHERE unit = :unit ORDER BY attempt DESC LIMIT {LEASES_SHOWN}"
        return self._find(table.LEASES, where, unit=unit)[::-1]

    def leases_of(self, node: str, limit: int) -> list[rows.LeaseRow]:
        where = "WHERE node = :node ORDER BY issued_at_ms DESC, unit DESC LIMIT :most"
        return self._find(table.LEASES, where, node=node, most=limit)

    def shown(self, lease: str) -> list[rows.ShownRow]:
        return self._find(table.SHOWN, "WHERE lease = :lease ORDER BY part", lease=lease)

    def last_shown(self, lease: str) -> rows.ShownRow | None:
        return self._one(table.SHOWN, "WHERE lease = :lease ORDER BY part DESC LIMIT 1", lease=lease)

    def showing(self) -> list[rows.LeaseRow]:
        """Active leases with shown progress, by deadline."""
        shown = "SELECT shown.lease FROM shown WHERE shown.part = 0"
        return self._find(table.LEASES, f"WHERE {_ACTIVE} AND leases.lease IN ({shown}) ORDER BY deadline_ms")

    def submission(self, submission: str) -> rows.SubmissionRow | None:
        lock = self._lock("submissions")
        return self._one(table.SUBMISSIONS, f"WHERE submission = :submission{lock}", submission=submission)

    def submission_of_lease(self, lease: str) -> rows.SubmissionRow | None:
        return self._one(table.SUBMISSIONS, f"WHERE lease = :lease{self._lock('submissions')}", lease=lease)

    def submissions_named(self, names: Sequence[str]) -> dict[str, rows.SubmissionRow]:
        return {row.submission: row for row in self._named(table.SUBMISSIONS, names)}

    def submissions_in(self, states: Iterable[SubmissionState], limit: int) -> list[rows.SubmissionRow]:
        return self._pick(f"WHERE {_any_of(states)} ORDER BY submissions.unit LIMIT :most", most=limit)

    def waiting_audits(self, on_probation: bool, limit: int) -> list[rows.SubmissionRow]:
        received = f"submissions.state = '{SubmissionState.RECEIVED}' AND {'' if on_probation else 'NOT '}{NEWCOMER}"
        joined = "JOIN nodes ON nodes.node = submissions.node"
        return self._pick(f"{joined} WHERE {received} ORDER BY submissions.unit LIMIT :most", most=limit)

    def light_audits(self, node: str) -> list[rows.SubmissionRow]:
        """Waiting for a light audit, or in one."""
        which = f"node = :node AND {UNJUDGED} AND depth = 'light'"
        return self._pick(f"WHERE {which} ORDER BY unit", skip=False, node=node)

    def pending_credit(self, node: str) -> list[rows.SubmissionRow]:
        return self._pick("WHERE node = :node AND matures_at_ms IS NOT NULL ORDER BY unit", skip=False, node=node)

    def overdue_audits(self, now_ms: int) -> list[rows.SubmissionRow]:
        return self._pick(f"WHERE {_AUDITING} AND claimed_until_ms <= :now_ms ORDER BY unit", now_ms=now_ms)

    def claimed_by(self, validator: str) -> list[rows.SubmissionRow]:
        return self._pick(f"WHERE {_AUDITING} AND validator = :validator ORDER BY unit", validator=validator)

    def untrained(self, node: str) -> list[rows.Filled]:
        query = f"""SELECT {table.UNITS.columns}, {table.SUBMISSIONS.columns} FROM units
            JOIN submissions ON units.submission = submissions.submission
            WHERE submissions.node = :node AND submissions.state = '{SubmissionState.ACCEPTED}' AND {_UNBATCHED}
            ORDER BY units.unit{self._lock("submissions", "units")}"""
        size = table.UNITS.size
        found = self._rows(query, node=node)
        return [rows.Filled(table.UNITS.read(row), table.SUBMISSIONS.read(row[size:])) for row in found]

    def due_credit(self, now_ms: int, limit: int) -> list[rows.SubmissionRow]:
        where = "WHERE matures_at_ms <= :now_ms ORDER BY matures_at_ms, unit LIMIT :most"
        return self._find(table.SUBMISSIONS, where, now_ms=now_ms, most=limit)

    def decided_submissions(self, limit: int) -> list[rows.SubmissionRow]:
        return self._find(table.SUBMISSIONS, f"WHERE {_NEWEST} LIMIT :most", most=limit)

    def refused_submissions(self, among: int) -> list[rows.SubmissionRow]:
        """Those of the newest `among` decisions that are no acceptances."""
        newest = f"SELECT submissions.submission FROM submissions WHERE {_NEWEST} LIMIT :most"
        where = f"submission IN ({newest}) AND state <> '{SubmissionState.ACCEPTED}' AND {_NEWEST}"
        return self._find(table.SUBMISSIONS, f"WHERE {where}", most=among)

    def dropped_submissions(self, step: int) -> list[rows.SubmissionRow]:
        """Submissions of the units that were dropped while `step` was the next one."""
        joined = "JOIN units ON units.submission = submissions.submission"
        dropped = f"units.lost_step = :step AND units.state = '{UnitState.DROPPED}'"
        return self._find(table.SUBMISSIONS, f"{joined} WHERE {dropped} ORDER BY units.unit", step=step)

    def submissions_of_unit(self, unit: int) -> list[rows.SubmissionRow]:
        return self._find(table.SUBMISSIONS, "WHERE unit = :unit ORDER BY received_at_ms, submission", unit=unit)

    def submissions_of(self, node: str, refused: bool, limit: int) -> list[rows.SubmissionRow]:
        ends = (SubmissionState.REJECTED, SubmissionState.UNSURE, SubmissionState.PULLED)
        which = f"node = :node AND {_any_of(ends)}" if refused else "node = :node"
        order = "ORDER BY received_at_ms DESC, unit DESC LIMIT :most"
        return self._find(table.SUBMISSIONS, f"WHERE {which} {order}", node=node, most=limit)

    def submission_counts(self) -> dict[str, int]:
        none = {state.value: 0 for state in SubmissionState}
        return none | self._tallied("SELECT state, count(*) FROM submissions GROUP BY state")

    def verdicts_of(self, submissions: Sequence[str]) -> dict[str, str]:
        return {row.submission: row.document for row in self._named(table.VERDICTS, submissions)}

    def evaluation(self, incarnation: int, version: int, first: int) -> rows.EvaluationRow | None:
        where = f"WHERE {table.EVALUATIONS.is_named}{self._lock('evaluations')}"
        return self._one(table.EVALUATIONS, where, incarnation=incarnation, version=version, first=first)

    def evaluations_under_way(self) -> list[rows.EvaluationRow]:
        """All slices of versions that have an open or claimed one."""
        under_way = f"state = '{EvaluationState.OPEN}' OR state = '{EvaluationState.CLAIMED}'"
        versions = f"SELECT incarnation, version FROM evaluations WHERE {under_way}"
        where = f"WHERE (incarnation, version) IN ({versions}) ORDER BY incarnation, version, first"
        return self._find(table.EVALUATIONS, f"{where}{self._lock('evaluations', skip=True)}")

    def evaluations_since(self, version: int, versions: int) -> list[rows.EvaluationRow]:
        """All slices of the newest `versions` from that version on."""
        newest = "SELECT DISTINCT version FROM evaluations WHERE version >= :since ORDER BY version DESC LIMIT :most"
        where = f"WHERE version IN (SELECT version FROM ({newest}) AS newest) ORDER BY incarnation, version, first"
        return self._find(table.EVALUATIONS, where, since=version, most=versions)

    def ledger_last(self) -> LedgerEntry | None:
        return next(iter(self._entries('FROM ledger ORDER BY ledger."index" DESC LIMIT 1')), None)

    def ledger_after(self, index: int, limit: int) -> list[LedgerEntry]:
        where = 'WHERE ledger."index" > :after ORDER BY ledger."index" LIMIT :most'
        return self._entries(f"FROM ledger {where}", after=index, most=limit)

    def ledger_about(self, subject: str, but: Sequence[str], limit: int) -> list[LedgerEntry]:
        """The newest entries of no kind in `but`, oldest first."""
        listed, values = among(but)
        where = f"""FROM ledger JOIN ledger_subjects AS about ON about."index" = ledger."index"
            WHERE about.subject = :subject AND ledger.kind NOT IN {listed} ORDER BY ledger."index" DESC LIMIT :most"""
        return self._entries(where, subject=subject, most=limit, **values)[::-1]

    def ledger_of_kind(self, kind: str, subjects: Sequence[str]) -> list[LedgerEntry]:
        listed, values = among(subjects)
        about = f'SELECT about."index" FROM ledger_subjects AS about WHERE about.subject IN {listed}'
        where = f'FROM ledger WHERE ledger."index" IN ({about}) AND ledger.kind = :kind ORDER BY ledger."index"'
        return self._entries(where, kind=kind, **values)

    def _entries(self, where: str, **values: Any) -> list[LedgerEntry]:
        names = tuple(LedgerEntry.model_fields)
        found = (dict(zip(names, row, strict=True)) for row in self._rows(f"SELECT {_ENTRY} {where}", **values))
        return [LedgerEntry(**{**row, "body": json.loads(row["body"])}) for row in found]

    def outbox(self, limit: int) -> list[Outgoing]:
        return self._find(table.OUTBOX, "ORDER BY id LIMIT :most", most=limit)

    def outbox_length(self) -> int:
        return int(self._rows("SELECT count(*) FROM ledger_outbox")[0][0])


def driver_of(connection: Connection) -> Any:
    return connection.connection.driver_connection


def among(values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """The right side of IN, and its values by name."""
    named = {f"among_{place}": value for place, value in enumerate(values)}
    listed = ", ".join(f":{name}" for name in named)
    return f"({listed})" if named else "('')", named


@lru_cache(1024)
def with_percent(sql: str) -> str:
    return re.sub(r"(?<!:):(\w+)", r"%(\1)s", sql)
