"""Reading rows through SQLAlchemy Core, on one connection inside one transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, Table, and_, func, or_, select

from shoal.hub.state.machines import UNDECIDED_SUBMISSIONS, UNDECIDED_UNITS, LeaseState, SubmissionState, UnitState
from shoal.hub.state.rows import (
    PROBATION_AUDITS,
    Filled,
    Holding,
    LeaseRow,
    NodeRow,
    Progress,
    SubmissionRow,
    UnitRow,
)
from shoal.hub.state.units import no_units
from shoal.hub.storage import tables
from shoal.hub.storage.protocol import Presence
from shoal.protocol import Batch, LedgerEntry, NodeState, PolicyRef, StepReport, Tally

_ALIVE = or_(
    tables.units.c.state.in_([state.value for state in UNDECIDED_UNITS]),
    and_(tables.units.c.state == UnitState.ACCEPTED.value, tables.units.c.step.is_(None)),
)

_UNJUDGED = tables.submissions.c.state.in_([state.value for state in UNDECIDED_SUBMISSIONS])
_FILLED = select(tables.units, tables.submissions).join(
    tables.submissions, tables.units.c.submission == tables.submissions.c.submission
)
_HOLDINGS = select(tables.leases, tables.units).join(tables.units, tables.leases.c.unit == tables.units.c.unit)
NAMES_PER_QUERY = 500
"""Databases limit how many parameters a statement may have."""


class SqlReader:
    """Implements `protocol.Reader`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def setting(self, key: str) -> str | None:
        value: str | None = self._scalar(select(tables.meta.c.value).where(tables.meta.c.key == key))
        return value

    def progress(self) -> Progress:
        units = tables.units
        next_step = int(self._scalar(select(func.coalesce(func.max(tables.batches.c.step) + 1, 0))))
        lost = self._connection.execute(
            select(units.c.state, func.count()).where(units.c.lost_step == next_step).group_by(units.c.state)
        )
        lost_by_state: dict[str, int] = {row[0]: row[1] for row in lost}
        return Progress(
            policy=self._newest_policy(),
            next_step=next_step,
            next_unit=int(self._scalar(select(func.coalesce(func.max(units.c.unit) + 1, 0)))),
            alive=int(self._scalar(select(func.count()).select_from(units).where(_ALIVE))),
            dropped=lost_by_state.get(UnitState.DROPPED.value, 0),
            failed=lost_by_state.get(UnitState.VOID.value, 0),
        )

    def policy(self, incarnation: int, version: int) -> PolicyRef | None:
        table = tables.policies
        query = select(table).where(table.c.incarnation == incarnation, table.c.version == version)
        return _policy(self._first(query))

    def _newest_policy(self) -> PolicyRef | None:
        table = tables.policies
        return _policy(self._first(select(table).order_by(table.c.incarnation.desc(), table.c.version.desc())))

    def node(self, node: str) -> NodeRow | None:
        row = self._first(select(tables.nodes).where(tables.nodes.c.node == node))
        return None if row is None else _node(row)

    def nodes(self) -> list[NodeRow]:
        query = select(tables.nodes).order_by(tables.nodes.c.registered_at_ms, tables.nodes.c.node)
        return [_node(row) for row in self._connection.execute(query)]

    def presence(self, node: str) -> Presence | None:
        row = self._first(select(tables.presence).where(tables.presence.c.node == node))
        return None if row is None else _presence(row)

    def presences(self) -> dict[str, Presence]:
        rows = self._connection.execute(select(tables.presence))
        return {row.node: _presence(row) for row in rows}

    def open_units(self, limit: int) -> list[UnitRow]:
        table = tables.units
        query = select(table).where(table.c.state == UnitState.OPEN.value).order_by(table.c.unit).limit(limit)
        return [_unit(row) for row in self._connection.execute(query)]

    def alive_units(self) -> list[UnitRow]:
        query = select(tables.units).where(_ALIVE).order_by(tables.units.c.unit)
        return [_unit(row) for row in self._connection.execute(query)]

    def batched_units(self) -> list[UnitRow]:
        table = tables.units
        query = select(table).where(table.c.state == UnitState.ACCEPTED.value, table.c.step.is_not(None))
        return [_unit(row) for row in self._connection.execute(query.order_by(table.c.unit))]

    def unit(self, unit: int) -> UnitRow | None:
        row = self._first(select(tables.units).where(tables.units.c.unit == unit))
        return None if row is None else _unit(row)

    def holding(self, lease: str) -> Holding | None:
        row = self._first(_HOLDINGS.where(tables.leases.c.lease == lease))
        return None if row is None else _holding(row)

    def holdings(self, node: str | None = None) -> list[Holding]:
        table = tables.leases
        query = _HOLDINGS.where(table.c.state == LeaseState.ACTIVE.value)
        if node is not None:
            query = query.where(table.c.node == node)
        rows = self._connection.execute(query.order_by(table.c.issued_at_ms, table.c.unit))
        return [_holding(row) for row in rows]

    def overdue_holdings(self, now_ms: int) -> list[Holding]:
        table = tables.leases
        query = _HOLDINGS.where(table.c.state == LeaseState.ACTIVE.value, table.c.deadline_ms <= now_ms)
        return [_holding(row) for row in self._connection.execute(query.order_by(table.c.unit))]

    def silent_holdings(self, since_ms: int) -> list[Holding]:
        table, presence = tables.leases, tables.presence
        heard = select(presence.c.node).where(presence.c.last_seen_ms >= since_ms)
        old = _HOLDINGS.where(table.c.state == LeaseState.ACTIVE.value, table.c.issued_at_ms < since_ms)
        query = old.where(table.c.node.not_in(heard)).order_by(table.c.unit)
        return [_holding(row) for row in self._connection.execute(query)]

    def newcomers_in_hand(self) -> int:
        nodes = tables.nodes  # joined: what is in hand is little, fresh keys may be many
        in_hand = ((tables.leases, tables.leases.c.state == LeaseState.ACTIVE.value), (tables.submissions, _UNJUDGED))
        counts = [
            select(func.count())
            .select_from(table.join(nodes, nodes.c.node == table.c.node))
            .where(state, nodes.c.passed < PROBATION_AUDITS)
            for table, state in in_hand
        ]
        return sum(int(self._scalar(count)) for count in counts)

    def is_established_here(self, since_ms: int) -> bool:
        nodes, presence = tables.nodes, tables.presence
        query = select(nodes.c.node).join(presence, presence.c.node == nodes.c.node)
        here = query.where(
            nodes.c.passed >= PROBATION_AUDITS,
            nodes.c.role == "worker",
            nodes.c.state == NodeState.ACTIVE.value,
            presence.c.last_seen_ms >= since_ms,
        )
        return self._first(here) is not None

    def requested_leases(self, node: str, request: str) -> list[LeaseRow]:
        table = tables.leases
        query = select(table).where(table.c.node == node, table.c.request == request).order_by(table.c.unit)
        return [_lease(row) for row in self._connection.execute(query)]

    def submission(self, submission: str) -> SubmissionRow | None:
        row = self._first(select(tables.submissions).where(tables.submissions.c.submission == submission))
        return None if row is None else _submission(row)

    def submission_of_lease(self, lease: str) -> SubmissionRow | None:
        row = self._first(select(tables.submissions).where(tables.submissions.c.lease == lease))
        return None if row is None else _submission(row)

    def submissions_in(self, states: Iterable[SubmissionState], limit: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.state.in_([state.value for state in states])).order_by(table.c.unit)
        return [_submission(row) for row in self._connection.execute(query.limit(limit))]

    def waiting_audits(self, on_probation: bool, limit: int) -> list[SubmissionRow]:
        table, nodes = tables.submissions, tables.nodes
        side = nodes.c.passed < PROBATION_AUDITS if on_probation else nodes.c.passed >= PROBATION_AUDITS
        query = select(table).join(nodes, nodes.c.node == table.c.node)
        waiting = query.where(table.c.state == SubmissionState.RECEIVED.value, side).order_by(table.c.unit)
        return [_submission(row) for row in self._connection.execute(waiting.limit(limit))]

    def light_audits(self, node: str) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.node == node, _UNJUDGED, table.c.depth == "light")
        return [_submission(row) for row in self._connection.execute(query.order_by(table.c.unit))]

    def untrained(self, node: str) -> list[Filled]:
        units, table = tables.units, tables.submissions
        query = _FILLED.where(table.c.node == node, table.c.state == SubmissionState.ACCEPTED.value)
        free = query.where(units.c.state == UnitState.ACCEPTED.value, units.c.step.is_(None)).order_by(units.c.unit)
        rows = self._connection.execute(free)
        return [Filled(_unit(row), _submission(row, len(units.columns))) for row in rows]

    def pending_credit(self, node: str) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.node == node, table.c.matures_at_ms.is_not(None))
        return [_submission(row) for row in self._connection.execute(query.order_by(table.c.unit))]

    def due_credit(self, now_ms: int, limit: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.matures_at_ms <= now_ms).order_by(table.c.matures_at_ms, table.c.unit)
        return [_submission(row) for row in self._connection.execute(query.limit(limit))]

    def overdue_audits(self, now_ms: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.state == SubmissionState.AUDITING.value, table.c.claimed_until_ms <= now_ms)
        return [_submission(row) for row in self._connection.execute(query.order_by(table.c.unit))]

    def claimed_by(self, validator: str) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.state == SubmissionState.AUDITING.value, table.c.validator == validator)
        return [_submission(row) for row in self._connection.execute(query.order_by(table.c.unit))]

    def decided_submissions(self, limit: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.decided_at_ms.is_not(None))
        newest = query.order_by(table.c.decided_at_ms.desc(), table.c.unit.desc()).limit(limit)
        return [_submission(row) for row in self._connection.execute(newest)]

    def refused_submissions(self, among: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.decided_at_ms.is_not(None))
        newest = query.order_by(table.c.decided_at_ms.desc(), table.c.unit.desc()).limit(among).subquery()
        refused = select(newest).where(newest.c.state != SubmissionState.ACCEPTED.value)
        return [_submission(row) for row in self._connection.execute(refused)]

    def submissions_named(self, names: Sequence[str]) -> dict[str, SubmissionRow]:
        table, found = tables.submissions, []
        for start in range(0, len(names), NAMES_PER_QUERY):
            part = names[start : start + NAMES_PER_QUERY]
            found += [
                _submission(row) for row in self._connection.execute(select(table).where(table.c.submission.in_(part)))
            ]
        return {row.submission: row for row in found}

    def dropped_submissions(self, step: int) -> list[SubmissionRow]:
        units, table = tables.units, tables.submissions
        query = select(table).join(units, units.c.submission == table.c.submission)
        dropped = query.where(units.c.lost_step == step, units.c.state == UnitState.DROPPED.value)
        return [_submission(row) for row in self._connection.execute(dropped.order_by(units.c.unit))]

    def batch(self, step: int) -> Batch | None:
        document = self._scalar(select(tables.batches.c.document).where(tables.batches.c.step == step))
        return None if document is None else Batch.model_validate_json(document)

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

    def ledger_last(self) -> LedgerEntry | None:
        row = self._first(select(tables.ledger).order_by(tables.ledger.c.index.desc()))
        return None if row is None else _entry(row)

    def ledger_after(self, index: int, limit: int) -> list[LedgerEntry]:
        table = tables.ledger
        query = select(table).where(table.c.index > index).order_by(table.c.index).limit(limit)
        return [_entry(row) for row in self._connection.execute(query)]

    def _first(self, query: Select[Any]) -> Row[Any] | None:
        return self._connection.execute(query.limit(1)).first()

    def _scalar(self, query: Select[Any]) -> Any:
        return self._connection.execute(query).scalar_one_or_none()


def columns_of(table: Table, row: Row[Any], start: int = 0) -> dict[str, Any]:
    """A table's columns by name, where the row has them from position `start` on (looking them up is slow)."""
    return dict(zip(table.columns.keys(), row[start : start + len(table.columns)], strict=True))


def _policy(row: Row[Any] | None) -> PolicyRef | None:
    return None if row is None else PolicyRef(incarnation=row.incarnation, version=row.version, digest=row.digest)


def _presence(row: Row[Any]) -> Presence:
    values = columns_of(tables.presence, row)
    return Presence(**{**values, "counters": json.loads(values["counters"])})


def _node(row: Row[Any]) -> NodeRow:
    values = columns_of(tables.nodes, row)
    record = Tally.model_validate_json(values["record"])
    return NodeRow(**{**values, "state": NodeState(values["state"]), "record": record})


def _unit(row: Row[Any], start: int = 0) -> UnitRow:
    values = columns_of(tables.units, row, start)
    return UnitRow(**{**values, "state": UnitState(values["state"])})


def _lease(row: Row[Any]) -> LeaseRow:
    values = columns_of(tables.leases, row)
    return LeaseRow(**{**values, "state": LeaseState(values["state"])})


def _holding(row: Row[Any]) -> Holding:
    return Holding(_lease(row), _unit(row, len(tables.leases.columns)))


def _submission(row: Row[Any], start: int = 0) -> SubmissionRow:
    values = columns_of(tables.submissions, row, start)
    rewards = tuple(json.loads(values["rewards"]))
    return SubmissionRow(**{**values, "state": SubmissionState(values["state"]), "rewards": rewards})


def _entry(row: Row[Any]) -> LedgerEntry:
    values = columns_of(tables.ledger, row)
    return LedgerEntry(**{**values, "body": json.loads(values["body"])})
