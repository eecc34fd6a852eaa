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

from shoal.hub.state import EvaluationState, LeaseState, SubmissionState, UnitState, rows, units
from shoal.hub.storage import tables as table
from shoal.hub.storage.tables import Presence
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


def _all(mapped: table.Mapped[R], where: str, lock: str = "", skip: bool = False) -> Callable[..., list[R]]:
    """A method of `Reader` that finds rows of one table. Its arguments are the query's parameters, in their order; a
    writer locks the rows, or skips those that others have locked."""
    names = tuple(dict.fromkeys(re.findall(r":(\w+)", where)))

    def find(reader: "Reader", *values: Any) -> list[R]:
        locked = reader._lock(lock, skip=skip) if lock else ""
        return reader._find(mapped, f"{where}{locked}", **dict(zip(names, values, strict=True)))

    return find


def _by_name(mapped: table.Mapped[R]) -> Callable[..., dict[Any, R]]:
    """A method of `Reader` that finds rows by their key."""

    def find(reader: "Reader", names: Iterable[Any]) -> dict[Any, R]:
        return {vars(row)[mapped.keys[0]]: row for row in reader._named(mapped, names)}

    return find


class Reader:
    """Lists of rows of one table first; then in this order: the run, nodes, units, leases, submissions, the ledger."""

    # fmt: off
    nodes = _all(table.NODES, "ORDER BY registered_at_ms, node")
    nodes_named = _by_name(table.NODES)
    leases_named = _by_name(table.LEASES)
    nodes_after = _all(table.NODES, "WHERE node > :node ORDER BY node LIMIT :limit")
    # Workers of one kind heard of since then that have failed this check since then, or passed an audit.
    same_kind = _all(table.NODES, f"""{_SEEN} WHERE kind = :kind AND role <> 'validator'
        AND (passed > 0 OR (failed_check = :check AND failed_at_ms >= :since_ms))
        AND presence.last_seen_ms >= :since_ms ORDER BY nodes.node""")
    presences_named = _by_name(table.PRESENCE)
    # Nodes that wait for something, the longest wait first.
    waiting_presences = _all(table.PRESENCE, """WHERE last_seen_ms >= :since_ms AND waiting_for <> ''
        ORDER BY waiting_since_ms, node LIMIT :limit""")
    units_named = _by_name(table.UNITS)
    alive_units = _all(table.UNITS, f"WHERE {_ALIVE} ORDER BY unit")
    batched_units = _all(table.UNITS, f"WHERE state = '{UnitState.ACCEPTED}' AND step IS NOT NULL ORDER BY unit")
    task_rows = _by_name(table.TASKS)  # without tasks of which no group was ever in a batch or dropped
    leases_held = _all(table.LEASES, f"WHERE {_ACTIVE} AND node = :node", lock="leases")
    leases_of_unit = _all(table.LEASES, f"""WHERE lease IN (SELECT lease FROM leases WHERE unit = :unit
        ORDER BY attempt DESC LIMIT {LEASES_SHOWN}) ORDER BY attempt""")
    leases_of = _all(table.LEASES, "WHERE node = :node ORDER BY issued_at_ms DESC, unit DESC LIMIT :limit")
    shown = _all(table.SHOWN, "WHERE lease = :lease ORDER BY part")
    # Active leases with shown progress, by deadline.
    showing = _all(table.LEASES, f"""WHERE {_ACTIVE}
        AND leases.lease IN (SELECT shown.lease FROM shown WHERE shown.part = 0) ORDER BY deadline_ms""")
    submissions_named = _by_name(table.SUBMISSIONS)
    # Submissions of a node that wait for a light audit, or are in one.
    light_audits = _all(
        table.SUBMISSIONS, f"WHERE node = :node AND {UNJUDGED} AND depth = 'light' ORDER BY unit", lock="submissions")
    pending_credit = _all(
        table.SUBMISSIONS, "WHERE node = :node AND matures_at_ms IS NOT NULL ORDER BY unit", lock="submissions")
    overdue_audits = _all(table.SUBMISSIONS, f"WHERE {_AUDITING} AND claimed_until_ms <= :now_ms ORDER BY unit",
                          lock="submissions", skip=True)
    claimed_by = _all(table.SUBMISSIONS, f"WHERE {_AUDITING} AND validator = :validator ORDER BY unit",
                      lock="submissions", skip=True)
    due_credit = _all(table.SUBMISSIONS, "WHERE matures_at_ms <= :now_ms ORDER BY matures_at_ms, unit LIMIT :limit")
    decided_submissions = _all(table.SUBMISSIONS, f"WHERE {_NEWEST} LIMIT :limit")
    # Those of the newest `among` decisions that are no acceptances.
    refused_submissions = _all(table.SUBMISSIONS, f"""WHERE submission IN
        (SELECT submissions.submission FROM submissions WHERE {_NEWEST} LIMIT :among)
        AND state <> '{SubmissionState.ACCEPTED}' AND {_NEWEST}""")
    # Submissions of the units that were dropped while `step` was the next one.
    dropped_submissions = _all(table.SUBMISSIONS, f"""JOIN units ON units.submission = submissions.submission
        WHERE units.lost_step = :step AND units.state = '{UnitState.DROPPED}' ORDER BY units.unit""")
    submissions_of_unit = _all(table.SUBMISSIONS, "WHERE unit = :unit ORDER BY received_at_ms, submission")
    # All slices of versions that have an open or claimed one.
    evaluations_under_way = _all(table.EVALUATIONS, f"""WHERE (incarnation, version) IN
        (SELECT incarnation, version FROM evaluations WHERE state IN ('{EvaluationState.OPEN}',
        '{EvaluationState.CLAIMED}')) ORDER BY incarnation, version, first""", lock="evaluations", skip=True)
    # All slices of the newest `versions` from version `since` on.
    evaluations_since = _all(table.EVALUATIONS, """WHERE version IN (SELECT version FROM (SELECT DISTINCT version
        FROM evaluations WHERE version >= :since ORDER BY version DESC LIMIT :versions) AS newest)
        ORDER BY incarnation, version, first""")
    outbox = _all(table.OUTBOX, "ORDER BY id LIMIT :limit")
    # fmt: on

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

    def policies(self, limit: int) -> list[tuple[PolicyRef, int]]:
        """The newest ones, and when they were announced."""
        query = """SELECT incarnation, version, digest, announced_at_ms FROM policies
            ORDER BY incarnation DESC, version DESC LIMIT :most"""
        return [
            (PolicyRef(incarnation=incarnation, version=version, digest=digest), int(at_ms))
            for incarnation, version, digest, at_ms in self._rows(query, most=limit)
        ]

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

    def unit(self, unit: int) -> rows.UnitRow | None:
        return self._one(table.UNITS, f"WHERE unit = :unit{self._lock('units')}", unit=unit)

    def open_units(
        self, limit: int, for_validators: bool = False, among: Sequence[int] | None = None
    ) -> list[rows.UnitRow]:
        """`among`, where hubs share a database: those that somebody had before, and these."""
        which = f"state = '{UnitState.OPEN}' AND failures {'>=' if for_validators else '<'} {units.TRUSTED_AFTER}"
        if among is not None:
            which += " AND (attempt > 0 OR unit = ANY(:among))"
        locked = self._lock("units", skip=True)
        return self._find(table.UNITS, f"WHERE {which} ORDER BY unit LIMIT :most{locked}", among=among, most=limit)

    def alive_counts(self) -> dict[UnitState, int]:
        query = f"SELECT state, count(*) FROM units WHERE {_ALIVE} GROUP BY state"
        return {UnitState(state): count for state, count in self._tallied(query).items()}

    def presence(self, node: str) -> Presence | None:
        return self._one(table.PRESENCE, "WHERE node = :node", node=node)

    def unit_counts(self) -> dict[str, int]:
        lost = (f"void_{reason}" for reason in (units.VOID_ATTEMPTS, units.VOID_STALE, units.VOID_INCARNATION))
        counts = dict.fromkeys([*(state.value for state in UnitState), *lost], 0)
        for state, reason, count in self._rows("SELECT state, reason, count(*) FROM units GROUP BY state, reason"):
            counts[state] += count
            if state == UnitState.VOID:
                counts[f"void_{reason}"] = count
        return counts

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

    def last_shown(self, lease: str) -> rows.ShownRow | None:
        return self._one(table.SHOWN, "WHERE lease = :lease ORDER BY part DESC LIMIT 1", lease=lease)

    def submission(self, submission: str) -> rows.SubmissionRow | None:
        lock = self._lock("submissions")
        return self._one(table.SUBMISSIONS, f"WHERE submission = :submission{lock}", submission=submission)

    def submission_of_lease(self, lease: str) -> rows.SubmissionRow | None:
        return self._one(table.SUBMISSIONS, f"WHERE lease = :lease{self._lock('submissions')}", lease=lease)

    def submissions_in(self, states: Iterable[SubmissionState], limit: int) -> list[rows.SubmissionRow]:
        where = f"WHERE {_any_of(states)} ORDER BY submissions.unit LIMIT :limit"
        return self._find(table.SUBMISSIONS, where + self._lock("submissions", skip=True), limit=limit)

    def waiting_audits(self, on_probation: bool, limit: int) -> list[rows.SubmissionRow]:
        where = f"""JOIN nodes ON nodes.node = submissions.node WHERE submissions.state = '{SubmissionState.RECEIVED}'
            AND {"" if on_probation else "NOT "}{NEWCOMER} ORDER BY submissions.unit LIMIT :limit"""
        return self._find(table.SUBMISSIONS, where + self._lock("submissions", skip=True), limit=limit)

    def untrained(self, node: str) -> list[rows.Filled]:
        query = f"""SELECT {table.UNITS.columns}, {table.SUBMISSIONS.columns} FROM units
            JOIN submissions ON units.submission = submissions.submission
            WHERE submissions.node = :node AND submissions.state = '{SubmissionState.ACCEPTED}' AND {_UNBATCHED}
            ORDER BY units.unit{self._lock("submissions", "units")}"""
        size = table.UNITS.size
        found = self._rows(query, node=node)
        return [rows.Filled(table.UNITS.read(row), table.SUBMISSIONS.read(row[size:])) for row in found]

    def decided_after(self, at_ms: int, submission: str, until_ms: int, limit: int) -> list[rows.SubmissionRow]:
        """In the order of their decisions: those after a decision, up to a time."""
        later = "decided_at_ms > :at_ms OR (decided_at_ms = :at_ms AND submission > :submission)"
        where = f"WHERE decided_at_ms <= :until_ms AND decided_at_ms >= :at_ms AND ({later})"
        order = "ORDER BY decided_at_ms, submission LIMIT :most"
        values = {"at_ms": at_ms, "submission": submission, "until_ms": until_ms, "most": limit}
        return self._find(table.SUBMISSIONS, f"{where} {order}", **values)

    def traces_of(self, submissions: Sequence[str]) -> dict[str, bytes]:
        return {row.submission: row.body for row in self._named(table.TRACES, submissions)}

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
