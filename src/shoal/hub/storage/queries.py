"""Reading rows through SQLAlchemy Core, on one connection inside one transaction."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    CursorResult,
    Integer,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    case,
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
    select(func.count()).select_from(tables.units).where(_ALIVE).scalar_subquery(),
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
UNJUDGED = or_(*(tables.submissions.c.state == state.value for state in sorted(UNDECIDED_SUBMISSIONS)))
_FILLED = select(tables.units, tables.submissions).join(
    tables.submissions, tables.units.c.submission == tables.submissions.c.submission
)
HOLDINGS = select(tables.leases, tables.units).join(tables.units, tables.leases.c.unit == tables.units.c.unit)
_ACTIVE = HOLDINGS.where(tables.leases.c.state == LeaseState.ACTIVE.value)
_HELD_BY = _ACTIVE.where(tables.leases.c.node == bindparam("key")).order_by(
    tables.leases.c.issued_at_ms, tables.leases.c.unit
)
_OVERDUE = _ACTIVE.where(tables.leases.c.deadline_ms <= bindparam("now_ms")).order_by(tables.leases.c.unit)
_HANDS = union_all(
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
                and_(tables.nodes.c.passed == 0, _HANDS.c.brief.is_(False)),
                tables.nodes.c.node == bindparam("who"),
            )
        ),
    )
    # joined: what is in hand is little, fresh keys may be many
    .select_from(_HANDS.join(tables.nodes, tables.nodes.c.node == _HANDS.c.node))
    .where(tables.nodes.c.passed < PROBATION_AUDITS, tables.nodes.c.role == "worker")
    .group_by(tables.nodes.c.network)
)
_OPEN, _ENTRUSTED = (
    select(tables.units)
    .where(tables.units.c.state == UnitState.OPEN.value, side)
    .order_by(tables.units.c.unit)
    .limit(bindparam("most", type_=Integer))
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
NAMES_PER_QUERY = 500
"""Databases limit how many parameters a statement may have."""


class SqlReader:
    """Implements `protocol.Reader`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def setting(self, key: str) -> str | None:
        row = self._run("setting", lambda: _SETTING, key=key).first()
        return None if row is None else str(row[0])

    def progress(self) -> Progress:
        found: tuple[Any, ...] = tuple(self._run("progress", lambda: _PROGRESS).one())
        next_step, next_unit, alive, dropped, failed, incarnation, version, digest = found
        newest = None if digest is None else PolicyRef(incarnation=incarnation, version=version, digest=digest)
        return Progress(newest, int(next_step), int(next_unit), int(alive), int(dropped), int(failed))

    def policy(self, incarnation: int, version: int) -> PolicyRef | None:
        table = tables.policies
        query = select(table).where(table.c.incarnation == incarnation, table.c.version == version)
        return _policy(self._first(query))

    def node(self, node: str) -> NodeRow | None:
        table = tables.nodes
        row = self._run("node", lambda: self._one(table, table.c.node), key=node).first()
        return None if row is None else node_of(row)

    def nodes(self) -> list[NodeRow]:
        query = select(tables.nodes).order_by(tables.nodes.c.registered_at_ms, tables.nodes.c.node)
        return [node_of(row) for row in self._connection.execute(query)]

    def presence(self, node: str) -> Presence | None:
        table = tables.presence
        row = self._run("presence", lambda: select(table).where(table.c.node == bindparam("key")), key=node).first()
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
        rows: list[tuple[Any, ...]] = [tuple(row) for row in self._run("alive counts", lambda: _ALIVE_COUNTS)]
        return {UnitState(state): int(count) for state, count in rows}

    def batched_units(self) -> list[UnitRow]:
        table = tables.units
        query = select(table).where(table.c.state == UnitState.ACCEPTED.value, table.c.step.is_not(None))
        return [_unit(row) for row in self._connection.execute(query.order_by(table.c.unit))]

    def unit(self, unit: int) -> UnitRow | None:
        table = tables.units
        row = self._run("unit", lambda: self._one(table, table.c.unit), key=unit).first()
        return None if row is None else _unit(row)

    def holding(self, lease: str) -> Holding | None:
        row = self._run("holding", lambda: self._locked(_HOLDING, tables.leases, tables.units), key=lease).first()
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
        table, presence = tables.leases, tables.presence
        heard = select(presence.c.node).where(presence.c.last_seen_ms >= since_ms)
        old = HOLDINGS.where(table.c.state == LeaseState.ACTIVE.value, table.c.issued_at_ms < since_ms)
        query = old.where(table.c.node.not_in(heard)).order_by(table.c.unit)
        return [holding_of(row) for row in self._connection.execute(query)]

    def newcomers_in_hand(self, node: str) -> InHand:
        rows: list[tuple[Any, ...]] = [tuple(row) for row in self._run("in hand", lambda: _IN_HAND, who=node)]
        return InHand(
            own=sum(int(own) for *_, own in rows),
            networks={network: int(units) for network, units, *_ in rows},
            unproven={network: int(units) for network, _, units, *_ in rows},
            long={network: int(units) for network, _, _, units, _ in rows},
        )

    def is_established_here(self, since_ms: int) -> bool:
        return self._run("established", lambda: _ESTABLISHED, since_ms=since_ms).first() is not None

    def requested_leases(self, node: str, request: str) -> list[LeaseRow]:
        return [lease_of(row) for row in self._run("requested", lambda: _REQUESTED, who=node, request=request)]

    def shown(self, lease: str) -> list[ShownRow]:
        table = tables.shown
        rows = self._connection.execute(select(table).where(table.c.lease == lease).order_by(table.c.part))
        return [shown_of(row) for row in rows]

    def last_shown(self, lease: str) -> ShownRow | None:
        table = tables.shown
        last = select(table).where(table.c.lease == lease).order_by(table.c.part.desc()).limit(1)
        row = self._connection.execute(last).first()
        return None if row is None else shown_of(row)

    def showing(self) -> list[LeaseRow]:
        table = tables.leases
        shown = select(tables.shown.c.lease).where(tables.shown.c.part == 0)
        query = select(table).where(table.c.state == LeaseState.ACTIVE.value, table.c.lease.in_(shown))
        return [lease_of(row) for row in self._connection.execute(query.order_by(table.c.deadline_ms))]

    def submission(self, submission: str) -> SubmissionRow | None:
        table = tables.submissions
        row = self._run("submission", lambda: self._one(table, table.c.submission), key=submission).first()
        return None if row is None else submission_of(row)

    def submission_of_lease(self, lease: str) -> SubmissionRow | None:
        table = tables.submissions
        row = self._run("submission of lease", lambda: self._one(table, table.c.lease), key=lease).first()
        return None if row is None else submission_of(row)

    def submissions_in(self, states: Iterable[SubmissionState], limit: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.state.in_([state.value for state in states])).order_by(table.c.unit)
        picked = self._locked(query.limit(limit), table, skip=True)
        return [submission_of(row) for row in self._connection.execute(picked)]

    def waiting_audits(self, on_probation: bool, limit: int) -> list[SubmissionRow]:
        table, nodes = tables.submissions, tables.nodes
        newcomer = and_(nodes.c.passed < PROBATION_AUDITS, nodes.c.role == "worker")
        side = newcomer if on_probation else not_(newcomer)
        query = select(table).join(nodes, nodes.c.node == table.c.node)
        waiting = query.where(table.c.state == SubmissionState.RECEIVED.value, side).order_by(table.c.unit)
        picked = self._locked(waiting.limit(limit), table, skip=True)
        return [submission_of(row) for row in self._connection.execute(picked)]

    def light_audits(self, node: str) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.node == node, UNJUDGED, table.c.depth == "light").order_by(table.c.unit)
        return [submission_of(row) for row in self._connection.execute(self._locked(query, table))]

    def untrained(self, node: str) -> list[Filled]:
        units, table = tables.units, tables.submissions
        query = _FILLED.where(table.c.node == node, table.c.state == SubmissionState.ACCEPTED.value)
        free = query.where(units.c.state == UnitState.ACCEPTED.value, units.c.step.is_(None)).order_by(units.c.unit)
        rows = self._connection.execute(self._locked(free, table, units))
        return [Filled(_unit(row), submission_of(row, len(units.columns))) for row in rows]

    def pending_credit(self, node: str) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.node == node, table.c.matures_at_ms.is_not(None)).order_by(table.c.unit)
        return [submission_of(row) for row in self._connection.execute(self._locked(query, table))]

    def due_credit(self, now_ms: int, limit: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.matures_at_ms <= now_ms).order_by(table.c.matures_at_ms, table.c.unit)
        return [submission_of(row) for row in self._connection.execute(query.limit(limit))]

    def overdue_audits(self, now_ms: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.state == SubmissionState.AUDITING.value, table.c.claimed_until_ms <= now_ms)
        picked = self._locked(query.order_by(table.c.unit), table, skip=True)
        return [submission_of(row) for row in self._connection.execute(picked)]

    def claimed_by(self, validator: str) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.state == SubmissionState.AUDITING.value, table.c.validator == validator)
        picked = self._locked(query.order_by(table.c.unit), table, skip=True)
        return [submission_of(row) for row in self._connection.execute(picked)]

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
        row = self._run("task", lambda: select(table).where(table.c.task == bindparam("key")), key=task).first()
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
        row = self._first(select(tables.ledger).order_by(tables.ledger.c.index.desc()))
        return None if row is None else entry_of(row)

    def ledger_after(self, index: int, limit: int) -> list[LedgerEntry]:
        table = tables.ledger
        query = select(table).where(table.c.index > index).order_by(table.c.index).limit(limit)
        return [entry_of(row) for row in self._connection.execute(query)]

    def outbox(self, limit: int) -> list[Outgoing]:
        query = select(tables.ledger_outbox).order_by(tables.ledger_outbox.c.id).limit(limit)
        return [Outgoing(row.id, row.kind, json.loads(row.body), row.at_ms) for row in self._connection.execute(query)]

    def outbox_length(self) -> int:
        return int(self._scalar(select(func.count()).select_from(tables.ledger_outbox)))

    def written_ms(self) -> int:
        last = self.ledger_last()
        newest = (func.max(tables.presence.c.last_seen_ms), func.max(tables.ledger_outbox.c.at_ms))
        return max([last.at_ms if last else 0, *(int(self._scalar(select(time)) or 0) for time in newest)])

    def _locked(self, query: Select[Any], *_rows_of: Table, skip: bool = False) -> Select[Any]:  # noqa: ARG002
        """The query such that nobody else changes these tables' rows of its answer before the transaction ends.

        Nothing to do where writers exclude each other. `skip` leaves out what others have locked: they are at it.
        """
        return query

    def _run(self, name: str, build: Callable[[], Select[Any]], **values: Any) -> CursorResult[Any]:
        """A statement that is asked often: built and compiled once for each kind of reader."""
        return prepared.run(self._connection, type(self).__name__, name, build, values)

    def _one(self, table: Table, column: Column[Any]) -> Select[Any]:
        """The row of a table whose `column` is `key`."""
        return self._locked(select(table).where(column == bindparam("key")), table)

    def _first(self, query: Select[Any]) -> Row[Any] | None:
        return self._connection.execute(query.limit(1)).first()

    def _scalar(self, query: Select[Any]) -> Any:
        return self._connection.execute(query).scalar_one_or_none()


def columns_of(table: Table, row: Row[Any], start: int = 0) -> dict[str, Any]:
    """A table's columns by name, where the row has them from position `start` on (looking them up is slow)."""
    return dict(zip(table.columns.keys(), row[start : start + len(table.columns)], strict=True))


def _policy(row: Row[Any] | None) -> PolicyRef | None:
    return None if row is None else PolicyRef(incarnation=row.incarnation, version=row.version, digest=row.digest)


def presence_of(row: Row[Any]) -> Presence:
    values = columns_of(tables.presence, row)
    return Presence(**{**values, "counters": json.loads(values["counters"])})


def node_of(row: Row[Any]) -> NodeRow:
    values = columns_of(tables.nodes, row)
    record, gains = Tally.model_validate_json(values["record"]), GainEvidence.model_validate_json(values["gains"])
    return NodeRow(**{**values, "state": NodeState(values["state"]), "record": record, "gains": gains})


def _unit(row: Row[Any], start: int = 0) -> UnitRow:
    values = columns_of(tables.units, row, start)
    return UnitRow(**{**values, "state": UnitState(values["state"])})


def lease_of(row: Row[Any]) -> LeaseRow:
    values = columns_of(tables.leases, row)
    return LeaseRow(**{**values, "state": LeaseState(values["state"])})


def holding_of(row: Row[Any]) -> Holding:
    return Holding(lease_of(row), _unit(row, len(tables.leases.columns)))


def shown_of(row: Row[Any]) -> ShownRow:
    return ShownRow(row.lease, row.part, tuple(json.loads(row.tokens)), bytes(row.body))


def submission_of(row: Row[Any], start: int = 0) -> SubmissionRow:
    values = columns_of(tables.submissions, row, start)
    rewards = tuple(json.loads(values["rewards"]))
    return SubmissionRow(**{**values, "state": SubmissionState(values["state"]), "rewards": rewards})


def _task(row: Row[Any]) -> TaskRow:
    values = columns_of(tables.tasks, row)
    return TaskRow(**{**values, "pool": Pool(values["pool"])})


def _evaluation(row: Row[Any]) -> EvaluationRow:
    values = columns_of(tables.evaluations, row)
    scores = tuple(json.loads(values["scores"]))
    return EvaluationRow(**{**values, "state": EvaluationState(values["state"]), "scores": scores})


def entry_of(row: Row[Any]) -> LedgerEntry:
    values = columns_of(tables.ledger, row)
    return LedgerEntry(**{**values, "body": json.loads(values["body"])})
