"""Reading rows through SQLAlchemy Core, on one connection inside one transaction."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    case,
    exists,
    func,
    not_,
    or_,
    select,
    true,
    tuple_,
    union_all,
)

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
    Pool,
    Progress,
    ShownRow,
    SubmissionRow,
    TaskRow,
    UnitRow,
)
from shoal.hub.state.units import TRUSTED_AFTER, no_units
from shoal.hub.storage import prepared, tables
from shoal.hub.storage.protocol import Outgoing, Presence
from shoal.protocol import Batch, LedgerEntry, NodeState, PolicyRef, StepReport, Tally
from shoal.protocol.branches import GainEvidence

R = TypeVar("R")

_ALIVE = or_(
    tables.units.c.state.in_([state.value for state in UNDECIDED_UNITS]),
    and_(tables.units.c.state == UnitState.ACCEPTED.value, tables.units.c.step.is_(None)),
)

_ALIVE_COUNTS = select(tables.units.c.state, func.count()).where(_ALIVE).group_by(tables.units.c.state)
_NEXT_STEP = select(func.coalesce(func.max(tables.batches.c.step) + 1, 0)).scalar_subquery()
_LOST = {
    state: select(func.count())
    .select_from(tables.units)
    .where(tables.units.c.lost_step == _NEXT_STEP, tables.units.c.state == state.value)
    .scalar_subquery()
    for state in (UnitState.DROPPED, UnitState.VOID)
}
_PROGRESS = select(
    _NEXT_STEP,
    select(func.coalesce(func.max(tables.units.c.unit) + 1, 0)).scalar_subquery(),
    _LOST[UnitState.DROPPED],
    _LOST[UnitState.VOID],
    *(
        select(column)
        .order_by(tables.policies.c.incarnation.desc(), tables.policies.c.version.desc())
        .limit(1)
        .scalar_subquery()
        for column in (tables.policies.c.incarnation, tables.policies.c.version, tables.policies.c.digest)
    ),
)


def _any_of(states: Iterable[SubmissionState]) -> ColumnElement[bool]:
    """Not by IN: its parameters can be prepared only together with all others of the statement."""
    return or_(*(tables.submissions.c.state == state.value for state in sorted(states)))


UNJUDGED = _any_of(UNDECIDED_SUBMISSIONS)
_FILLED = select(tables.units, tables.submissions).join(
    tables.submissions, tables.units.c.submission == tables.submissions.c.submission
)
HOLDINGS = select(tables.leases, tables.units).join(tables.units, tables.leases.c.unit == tables.units.c.unit)
_ACTIVE = HOLDINGS.where(tables.leases.c.state == LeaseState.ACTIVE.value)
_HELD_BY = _ACTIVE.where(tables.leases.c.node == bindparam("key")).order_by(
    tables.leases.c.issued_at_ms, tables.leases.c.unit
)
_OVERDUE = _ACTIVE.where(tables.leases.c.deadline_ms <= bindparam("now_ms")).order_by(tables.leases.c.unit)
HANDS = union_all(
    select(tables.leases.c.node, tables.leases.c.brief).where(tables.leases.c.state == LeaseState.ACTIVE.value),
    select(tables.submissions.c.node, true().label("brief")).where(UNJUDGED),
).subquery()
_IN_HAND: Select[Any] = (
    select(
        tables.nodes.c.network,
        func.count(),
        *(
            func.sum(case((which, 1), else_=0))
            for which in (
                tables.nodes.c.passed == 0,
                and_(tables.nodes.c.passed == 0, HANDS.c.brief.is_(False)),
                tables.nodes.c.node == bindparam("who"),
            )
        ),
    )
    # joined: what is in hand is little, fresh keys may be many
    .select_from(HANDS.join(tables.nodes, tables.nodes.c.node == HANDS.c.node))
    .where(tables.nodes.c.passed < PROBATION_AUDITS, tables.nodes.c.role == "worker")
    .group_by(tables.nodes.c.network)
)
_MOST = bindparam("most", type_=Integer)
_OPEN, _ENTRUSTED = (
    select(tables.units)
    .where(tables.units.c.state == UnitState.OPEN.value, side)
    .order_by(tables.units.c.unit)
    .limit(_MOST)
    for side in (tables.units.c.failures < TRUSTED_AFTER, tables.units.c.failures >= TRUSTED_AFTER)
)
_SETTING = select(tables.meta.c.value).where(tables.meta.c.key == bindparam("key"))
_HOLDING = HOLDINGS.where(tables.leases.c.lease == bindparam("key"))
_ESTABLISHED = (
    select(tables.nodes.c.node)
    .join(tables.presence, tables.presence.c.node == tables.nodes.c.node)
    .where(
        tables.nodes.c.passed >= PROBATION_AUDITS,
        tables.nodes.c.role == "worker",
        tables.nodes.c.state == NodeState.ACTIVE.value,
        tables.presence.c.last_seen_ms >= bindparam("since_ms"),
    )
    .limit(1)
)
_REQUESTED = (
    select(tables.leases)
    .where(tables.leases.c.node == bindparam("who"), tables.leases.c.request == bindparam("request"))
    .order_by(tables.leases.c.unit)
)
_SHOWN = select(tables.shown).where(tables.shown.c.lease == bindparam("key"))
_HOLDERS = tables.leases.alias()
_GONE = select(_HOLDERS.c.node).where(
    _HOLDERS.c.state == LeaseState.ACTIVE.value,
    ~exists().where(tables.presence.c.node == _HOLDERS.c.node, tables.presence.c.last_seen_ms >= bindparam("since_ms")),
)
_SILENT = _ACTIVE.where(tables.leases.c.issued_at_ms < bindparam("since_ms"), tables.leases.c.node.in_(_GONE)).order_by(
    tables.leases.c.unit
)
_SUBMISSIONS = select(tables.submissions).order_by(tables.submissions.c.unit)
_CLAIMED = _SUBMISSIONS.where(tables.submissions.c.state == SubmissionState.AUDITING.value)
_CLAIMED_BY = _CLAIMED.where(tables.submissions.c.validator == bindparam("key"))
_UNJUDGED_IN_TIME = _CLAIMED.where(tables.submissions.c.claimed_until_ms <= bindparam("now_ms"))
_OF_NODE = _SUBMISSIONS.where(tables.submissions.c.node == bindparam("key"))
_LIGHT = _OF_NODE.where(UNJUDGED, tables.submissions.c.depth == "light")
_PENDING = _OF_NODE.where(tables.submissions.c.matures_at_ms.is_not(None))
_NEWCOMER = and_(tables.nodes.c.passed < PROBATION_AUDITS, tables.nodes.c.role == "worker")
_WAITING = _SUBMISSIONS.join(tables.nodes, tables.nodes.c.node == tables.submissions.c.node).where(
    tables.submissions.c.state == SubmissionState.RECEIVED.value
)
_DUE = (
    select(tables.submissions)
    .where(tables.submissions.c.matures_at_ms <= bindparam("now_ms"))
    .order_by(tables.submissions.c.matures_at_ms, tables.submissions.c.unit)
    .limit(_MOST)
)
_COLUMNS = {table.name: tuple(table.columns.keys()) for table in tables.metadata.sorted_tables}
_AT = {f"{table}.{column}": place for table, names in _COLUMNS.items() for place, column in enumerate(names)}
_tally, _gains = lru_cache(4096)(Tally.model_validate_json), lru_cache(4096)(GainEvidence.model_validate_json)
NAMES_PER_QUERY = 500
"""Databases limit how many parameters a statement may have."""


class SqlReader:
    """Implements `protocol.Reader`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._driver = prepared.driver_of(connection)

    def setting(self, key: str) -> str | None:
        row = self._get("setting", lambda: _SETTING, key=key)
        return None if row is None else str(row[0])

    def progress(self, counted: bool = True) -> Progress:
        (found,) = self._run("progress", lambda: _PROGRESS)
        next_step, next_unit, dropped, failed, incarnation, version, digest = found
        newest = None if digest is None else PolicyRef(incarnation=incarnation, version=version, digest=digest)
        alive = sum(self.alive_counts().values()) if counted else 0
        return Progress(newest, int(next_step), int(next_unit), alive, int(dropped), int(failed))

    def policy(self, incarnation: int, version: int) -> PolicyRef | None:
        table = tables.policies
        query = select(table).where(table.c.incarnation == incarnation, table.c.version == version)
        return _policy(self._first(query))

    def node(self, node: str) -> NodeRow | None:
        table = tables.nodes
        row = self._get("node", lambda: self._one(table, table.c.node), key=node)
        return None if row is None else node_of(row)

    def nodes(self) -> list[NodeRow]:
        query = select(tables.nodes).order_by(tables.nodes.c.registered_at_ms, tables.nodes.c.node)
        return [node_of(row) for row in self._connection.execute(query)]

    def presence(self, node: str) -> Presence | None:
        table = tables.presence
        row = self._get("presence", lambda: select(table).where(table.c.node == bindparam("key")), key=node)
        return None if row is None else presence_of(row)

    def presences(self) -> dict[str, Presence]:
        rows = self._connection.execute(select(tables.presence))
        return {row.node: presence_of(row) for row in rows}

    def open_units(self, limit: int, entrusted: bool = False) -> list[UnitRow]:
        name, query = ("entrusted", _ENTRUSTED) if entrusted else ("open", _OPEN)
        rows = self._run(name, lambda: self._locked(query, tables.units, skip=True), most=limit)
        return [_unit(row) for row in rows]

    def kin(self, kind: str, check: str, since_ms: int) -> list[NodeRow]:
        table, presence = tables.nodes, tables.presence
        failed = and_(table.c.failed_check == check, table.c.failed_at_ms >= since_ms)
        query = select(table).join(presence, presence.c.node == table.c.node)
        here = query.where(table.c.kind == kind, table.c.role == "worker", presence.c.last_seen_ms >= since_ms)
        rows = self._connection.execute(here.where(or_(failed, table.c.passed > 0)).order_by(table.c.node))
        return [node_of(row) for row in rows]

    def alive_units(self) -> list[UnitRow]:
        query = select(tables.units).where(_ALIVE).order_by(tables.units.c.unit)
        return [_unit(row) for row in self._connection.execute(query)]

    def alive_counts(self) -> dict[UnitState, int]:
        return {UnitState(state): int(count) for state, count in self._run("alive counts", lambda: _ALIVE_COUNTS)}

    def batched_units(self) -> list[UnitRow]:
        table = tables.units
        query = select(table).where(table.c.state == UnitState.ACCEPTED.value, table.c.step.is_not(None))
        return [_unit(row) for row in self._connection.execute(query.order_by(table.c.unit))]

    def unit(self, unit: int) -> UnitRow | None:
        table = tables.units
        row = self._get("unit", lambda: self._one(table, table.c.unit), key=unit)
        return None if row is None else _unit(row)

    def holding(self, lease: str) -> Holding | None:
        row = self._get("holding", lambda: self._locked(_HOLDING, tables.leases, tables.units), key=lease)
        return None if row is None else holding_of(row)

    def holdings(self, node: str | None = None) -> list[Holding]:
        table = tables.leases
        if node is None:
            everybody = _ACTIVE.order_by(table.c.issued_at_ms, table.c.unit)
            return [holding_of(row) for row in self._connection.execute(everybody)]
        rows = self._run("holdings", lambda: self._locked(_HELD_BY, table, tables.units), key=node)
        return [holding_of(row) for row in rows]

    def overdue_holdings(self, now_ms: int) -> list[Holding]:
        return [holding_of(row) for row in self._run("overdue", lambda: _OVERDUE, now_ms=now_ms)]

    def silent_holdings(self, since_ms: int) -> list[Holding]:
        return [holding_of(row) for row in self._run("silent", lambda: _SILENT, since_ms=since_ms)]

    def newcomers_in_hand(self, node: str) -> InHand:
        rows = self._run("in hand", lambda: _IN_HAND, who=node)
        return InHand(
            own=sum(int(own) for *_, own in rows),
            networks={network: int(units) for network, units, *_ in rows},
            unproven={network: int(units) for network, _, units, *_ in rows},
            long={network: int(units) for network, _, _, units, _ in rows},
        )

    def is_established_here(self, since_ms: int) -> bool:
        return bool(self._run("established", lambda: _ESTABLISHED, since_ms=since_ms))

    def requested_leases(self, node: str, request: str) -> list[LeaseRow]:
        return [lease_of(row) for row in self._run("requested", lambda: _REQUESTED, who=node, request=request)]

    def shown(self, lease: str) -> list[ShownRow]:
        return [shown_of(row) for row in self._run("shown", lambda: _SHOWN.order_by(tables.shown.c.part), key=lease)]

    def last_shown(self, lease: str) -> ShownRow | None:
        row = self._get("last shown", lambda: _SHOWN.order_by(tables.shown.c.part.desc()).limit(1), key=lease)
        return None if row is None else shown_of(row)

    def showing(self) -> list[LeaseRow]:
        table = tables.leases
        shown = select(tables.shown.c.lease).where(tables.shown.c.part == 0)
        query = select(table).where(table.c.state == LeaseState.ACTIVE.value, table.c.lease.in_(shown))
        return [lease_of(row) for row in self._connection.execute(query.order_by(table.c.deadline_ms))]

    def submission(self, submission: str) -> SubmissionRow | None:
        table = tables.submissions
        row = self._get("submission", lambda: self._one(table, table.c.submission), key=submission)
        return None if row is None else submission_of(row)

    def submission_of_lease(self, lease: str) -> SubmissionRow | None:
        table = tables.submissions
        row = self._get("submission of lease", lambda: self._one(table, table.c.lease), key=lease)
        return None if row is None else submission_of(row)

    def submissions_in(self, states: Iterable[SubmissionState], limit: int) -> list[SubmissionRow]:
        wanted = sorted(states)
        return self._submissions(f"in {wanted}", lambda: _SUBMISSIONS.where(_any_of(wanted)).limit(_MOST), most=limit)

    def waiting_audits(self, on_probation: bool, limit: int) -> list[SubmissionRow]:
        name, side = ("newcomers wait", _NEWCOMER) if on_probation else ("others wait", not_(_NEWCOMER))
        return self._submissions(name, lambda: _WAITING.where(side).limit(_MOST), most=limit)

    def light_audits(self, node: str) -> list[SubmissionRow]:
        return self._submissions("light", lambda: _LIGHT, skip=False, key=node)

    def untrained(self, node: str) -> list[Filled]:
        units, table = tables.units, tables.submissions
        query = _FILLED.where(table.c.node == node, table.c.state == SubmissionState.ACCEPTED.value)
        free = query.where(units.c.state == UnitState.ACCEPTED.value, units.c.step.is_(None)).order_by(units.c.unit)
        rows = self._connection.execute(self._locked(free, table, units))
        return [Filled(_unit(row), submission_of(row, len(units.columns))) for row in rows]

    def pending_credit(self, node: str) -> list[SubmissionRow]:
        return self._submissions("pending", lambda: _PENDING, skip=False, key=node)

    def due_credit(self, now_ms: int, limit: int) -> list[SubmissionRow]:
        rows = self._run("due credit", lambda: _DUE, now_ms=now_ms, most=limit)
        return [submission_of(row) for row in rows]

    def overdue_audits(self, now_ms: int) -> list[SubmissionRow]:
        return self._submissions("overdue audits", lambda: _UNJUDGED_IN_TIME, now_ms=now_ms)

    def claimed_by(self, validator: str) -> list[SubmissionRow]:
        return self._submissions("claimed by", lambda: _CLAIMED_BY, key=validator)

    def _submissions(
        self, name: str, build: Callable[[], Select[Any]], skip: bool = True, **values: Any
    ) -> list[SubmissionRow]:
        rows = self._run(name, lambda: self._locked(build(), tables.submissions, skip=skip), **values)
        return [submission_of(row) for row in rows]

    def decided_submissions(self, limit: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.decided_at_ms.is_not(None))
        newest = query.order_by(table.c.decided_at_ms.desc(), table.c.unit.desc()).limit(limit)
        return [submission_of(row) for row in self._connection.execute(newest)]

    def refused_submissions(self, among: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.decided_at_ms.is_not(None))
        newest = query.order_by(table.c.decided_at_ms.desc(), table.c.unit.desc()).limit(among).subquery()
        refused = select(newest).where(newest.c.state != SubmissionState.ACCEPTED.value)
        return [submission_of(row) for row in self._connection.execute(refused)]

    def submissions_named(self, names: Sequence[str]) -> dict[str, SubmissionRow]:
        table = tables.submissions
        rows = (submission_of(row) for row in self._named(table, table.c.submission, names))
        return {row.submission: row for row in rows}

    def verdicts_of(self, submissions: Sequence[str]) -> dict[str, str]:
        table = tables.verdicts
        query = select(table.c.submission, table.c.document).where(table.c.submission.in_(submissions))
        return {row[0]: row[1] for row in self._connection.execute(query)}

    def _named(self, table: Table, column: Column[Any], names: Sequence[Any]) -> Iterator[Row[Any]]:
        """The rows of a table whose `column` is one of these, however many they are."""
        for start in range(0, len(names), NAMES_PER_QUERY):
            part = names[start : start + NAMES_PER_QUERY]
            yield from self._connection.execute(select(table).where(column.in_(part)))

    def dropped_submissions(self, step: int) -> list[SubmissionRow]:
        units, table = tables.units, tables.submissions
        query = select(table).join(units, units.c.submission == table.c.submission)
        dropped = query.where(units.c.lost_step == step, units.c.state == UnitState.DROPPED.value)
        return [submission_of(row) for row in self._connection.execute(dropped.order_by(units.c.unit))]

    def batch(self, step: int) -> Batch | None:
        document = self._scalar(select(tables.batches.c.document).where(tables.batches.c.step == step))
        return None if document is None else Batch.model_validate_json(document)

    def units_named(self, units: Sequence[int]) -> dict[int, UnitRow]:
        rows = (_unit(row) for row in self._named(tables.units, tables.units.c.unit, units))
        return {row.unit: row for row in rows}

    def task_row(self, task: str) -> TaskRow | None:
        table = tables.tasks
        row = self._get("task", lambda: select(table).where(table.c.task == bindparam("key")), key=task)
        return None if row is None else _task(row)

    def task_rows(self, tasks: Sequence[str]) -> dict[str, TaskRow]:
        rows = (_task(row) for row in self._named(tables.tasks, tables.tasks.c.task, tasks))
        return {row.task: row for row in rows}

    def pool_counts(self) -> dict[str, int]:
        table = tables.tasks
        query = select(table.c.pool, func.count()).group_by(table.c.pool)
        return {pool: int(count) for pool, count in self._connection.execute(query)}

    def evaluation(self, incarnation: int, version: int, first: int) -> EvaluationRow | None:
        table = tables.evaluations
        key = (table.c.incarnation == incarnation, table.c.version == version, table.c.first == first)
        row = self._connection.execute(self._locked(select(table).where(*key), table)).first()
        return None if row is None else _evaluation(row)

    def evaluations_under_way(self) -> list[EvaluationRow]:
        table = tables.evaluations
        open_ones = table.c.state.in_([EvaluationState.OPEN.value, EvaluationState.CLAIMED.value])
        versions = select(table.c.incarnation, table.c.version).where(open_ones).distinct()
        query = select(table).where(tuple_(table.c.incarnation, table.c.version).in_(versions))
        rows = self._connection.execute(self._locked(query.order_by(*table.primary_key.columns), table, skip=True))
        return [_evaluation(row) for row in rows]

    def evaluations_since(self, version: int, versions: int) -> list[EvaluationRow]:
        table = tables.evaluations
        numbers = select(table.c.version).where(table.c.version >= version).distinct()
        newest = numbers.order_by(table.c.version.desc()).limit(versions).subquery()
        rows = self._connection.execute(select(table).where(table.c.version.in_(select(newest.c.version))))
        return sorted((_evaluation(row) for row in rows), key=lambda row: row.key)

    def unit_counts(self) -> dict[str, int]:
        table = tables.units
        query = select(table.c.state, table.c.reason, func.count()).group_by(table.c.state, table.c.reason)
        counts = no_units()
        for state, reason, count in self._connection.execute(query):
            counts[state] += count
            if state == UnitState.VOID.value:
                counts[f"void_{reason}"] = count
        return counts

    def submission_counts(self) -> dict[str, int]:
        table = tables.submissions
        counts = {state.value: 0 for state in SubmissionState}
        for state, count in self._connection.execute(select(table.c.state, func.count()).group_by(table.c.state)):
            counts[state] = count
        return counts

    def reports(self, limit: int) -> list[StepReport]:
        table = tables.reports
        rows = self._connection.execute(select(table).order_by(table.c.step.desc()).limit(limit)).all()
        return [StepReport(step=row.step, metrics=json.loads(row.metrics)) for row in reversed(rows)]

    def alarms(self, limit: int) -> list[str]:
        table = tables.alarms
        query = select(table.c.message).order_by(table.c.at_ms.desc(), table.c.step.desc(), table.c.code).limit(limit)
        return [row.message for row in self._connection.execute(query)]

    def alarm_counts(self) -> Counter[tuple[str, ...]]:
        counts: Counter[tuple[str, ...]] = Counter()
        query = select(tables.alarms.c.code, func.count()).group_by(tables.alarms.c.code)
        for code, count in self._connection.execute(query):
            counts[(code.partition(".")[0],)] += count
        return counts

    def ledger_last(self) -> LedgerEntry | None:
        newest = tables.ledger.c.index.desc()
        row = self._get("ledger last", lambda: select(tables.ledger).order_by(newest).limit(1))
        return None if row is None else entry_of(row)

    def ledger_after(self, index: int, limit: int) -> list[LedgerEntry]:
        table = tables.ledger
        query = select(table).where(table.c.index > index).order_by(table.c.index).limit(limit)
        return [entry_of(row) for row in self._connection.execute(query)]

    def outbox(self, limit: int) -> list[Outgoing]:
        query = select(tables.ledger_outbox).order_by(tables.ledger_outbox.c.id).limit(limit)
        return [Outgoing(row.id, row.kind, json.loads(row.body), row.at_ms) for row in self._connection.execute(query)]

    def outbox_length(self) -> int:
        ((length,),) = self._run("outbox length", lambda: select(func.count()).select_from(tables.ledger_outbox))
        return int(length)

    def written_ms(self) -> int:
        last = self.ledger_last()
        newest = (func.max(tables.presence.c.last_seen_ms), func.max(tables.ledger_outbox.c.at_ms))
        return max([last.at_ms if last else 0, *(int(self._scalar(select(time)) or 0) for time in newest)])

    def _locked(self, query: Select[Any], *_rows_of: Table, skip: bool = False) -> Select[Any]:  # noqa: ARG002
        """The query such that nobody else changes these tables' rows of its answer before the transaction ends.

        Nothing to do where writers exclude each other. `skip` leaves out what others have locked: they are at it.
        """
        return query

    def _run(self, name: str, build: Callable[[], Select[Any]], **values: Any) -> list[tuple[Any, ...]]:
        """The rows of a statement that is asked often: built and compiled once for each kind of reader."""
        return prepared.run(self._connection, self._driver, (type(self), name), build, values).rows

    def _get(self, name: str, build: Callable[[], Select[Any]], **values: Any) -> tuple[Any, ...] | None:
        rows = self._run(name, build, **values)
        return rows[0] if rows else None

    def _one(self, table: Table, column: Column[Any]) -> Select[Any]:
        """The row of a table whose `column` is `key`."""
        return self._locked(select(table).where(column == bindparam("key")), table)

    def _first(self, query: Select[Any]) -> Row[Any] | None:
        return self._connection.execute(query.limit(1)).first()

    def _scalar(self, query: Select[Any]) -> Any:
        return self._connection.execute(query).scalar_one_or_none()


def _made(kind: type[R], table: Table, row: Sequence[Any], start: int = 0, **read: Any) -> R:
    """A row of the hub's from a row of the database that has the table's columns from `start` on; `read` are those that
    are kept as text. Not by calling `kind`: with up to 33 frozen fields that takes longer than the query."""
    names = _COLUMNS[table.name]
    made = object.__new__(kind)
    made.__dict__.update(zip(names, row[start : start + len(names)], strict=True), **read)
    return made


def _policy(row: Row[Any] | None) -> PolicyRef | None:
    return None if row is None else PolicyRef(incarnation=row.incarnation, version=row.version, digest=row.digest)


def presence_of(row: Sequence[Any]) -> Presence:
    return _made(Presence, tables.presence, row, counters=json.loads(row[_AT["presence.counters"]]))


def node_of(row: Sequence[Any]) -> NodeRow:
    return _made(
        NodeRow,
        tables.nodes,
        row,
        state=NodeState(row[_AT["nodes.state"]]),
        record=_tally(row[_AT["nodes.record"]]),
        gains=_gains(row[_AT["nodes.gains"]]),
    )


def _unit(row: Sequence[Any], start: int = 0) -> UnitRow:
    return _made(UnitRow, tables.units, row, start, state=UnitState(row[start + _AT["units.state"]]))


def lease_of(row: Sequence[Any]) -> LeaseRow:
    return _made(LeaseRow, tables.leases, row, state=LeaseState(row[_AT["leases.state"]]))


def holding_of(row: Sequence[Any]) -> Holding:
    return Holding(lease_of(row), _unit(row, len(tables.leases.columns)))


def shown_of(row: Sequence[Any]) -> ShownRow:
    lease, part, tokens, body = row
    return ShownRow(lease, part, tuple(json.loads(tokens)), bytes(body))


def submission_of(row: Sequence[Any], start: int = 0) -> SubmissionRow:
    state, rewards = row[start + _AT["submissions.state"]], row[start + _AT["submissions.rewards"]]
    read = {"state": SubmissionState(state), "rewards": tuple(json.loads(rewards))}
    return _made(SubmissionRow, tables.submissions, row, start, **read)


def _task(row: Sequence[Any]) -> TaskRow:
    return _made(TaskRow, tables.tasks, row, pool=Pool(row[_AT["tasks.pool"]]))


def _evaluation(row: Sequence[Any]) -> EvaluationRow:
    state, scores = EvaluationState(row[_AT["evaluations.state"]]), row[_AT["evaluations.scores"]]
    return _made(EvaluationRow, tables.evaluations, row, state=state, scores=tuple(json.loads(scores)))


def entry_of(row: Sequence[Any]) -> LedgerEntry:
    index, kind, body, at_ms, previous, digest = row
    return LedgerEntry(index=index, kind=kind, body=json.loads(body), at_ms=at_ms, previous=previous, hash=digest)
