"""Reading for those who ask why: all leases and submissions of a unit or a node, its verdicts, its ledger entries.

Apart from `queries`, because no decision needs any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import case, func, select

from shoal.hub.state.machines import LeaseState, SubmissionState
from shoal.hub.state.rows import Holding, LeaseRow, NodeRow, SubmissionRow
from shoal.hub.storage import tables
from shoal.hub.storage.protocol import Crew, Presence, Rank
from shoal.hub.storage.queries import (
    HOLDINGS,
    SqlReader,
    entry_of,
    holding_of,
    lease_of,
    node_of,
    presence_of,
    submission_of,
)
from shoal.protocol import LedgerEntry, NodeState

LEASES_TOLD = 200
"""The newest leases of a unit: one that nobody could do, or that was passed around, may have thousands."""
REFUSED = (SubmissionState.REJECTED, SubmissionState.UNSURE, SubmissionState.PULLED)


class SqlStoryReader(SqlReader):
    """Implements `protocol.StoryReader`."""

    def leases_of_unit(self, unit: int) -> list[LeaseRow]:
        query = select(tables.leases).where(tables.leases.c.unit == unit).order_by(tables.leases.c.attempt.desc())
        return [lease_of(row) for row in self._connection.execute(query.limit(LEASES_TOLD))][::-1]

    def leases_of(self, node: str, limit: int) -> list[LeaseRow]:
        table = tables.leases
        query = select(table).where(table.c.node == node).order_by(table.c.issued_at_ms.desc(), table.c.unit.desc())
        return [lease_of(row) for row in self._connection.execute(query.limit(limit))]

    def submissions_of_unit(self, unit: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.unit == unit).order_by(table.c.received_at_ms, table.c.submission)
        return [submission_of(row) for row in self._connection.execute(query)]

    def submissions_of(self, node: str, refused: bool, limit: int) -> list[SubmissionRow]:
        table = tables.submissions
        query = select(table).where(table.c.node == node)
        if refused:
            query = query.where(table.c.state.in_([state.value for state in REFUSED]))
        newest = query.order_by(table.c.received_at_ms.desc(), table.c.unit.desc()).limit(limit)
        return [submission_of(row) for row in self._connection.execute(newest)]

    def ledger_about(self, subject: str, but: Sequence[str], limit: int) -> list[LedgerEntry]:
        about, table = tables.ledger_subjects, tables.ledger
        query = select(table).join(about, about.c.index == table.c.index).where(about.c.subject == subject)
        newest = query.where(table.c.kind.not_in(but)).order_by(table.c.index.desc()).limit(limit)
        return [entry_of(row) for row in self._connection.execute(newest)][::-1]

    def ledger_of_kind(self, kind: str, subjects: Sequence[str]) -> list[LedgerEntry]:
        about, table = tables.ledger_subjects, tables.ledger
        indices = select(about.c.index).where(about.c.subject.in_(subjects))
        query = select(table).where(table.c.index.in_(indices), table.c.kind == kind).order_by(table.c.index)
        return [entry_of(row) for row in self._connection.execute(query)]

    def nodes_after(self, node: str, limit: int) -> list[NodeRow]:
        table = tables.nodes
        query = select(table).where(table.c.node > node).order_by(table.c.node).limit(limit)
        return [node_of(row) for row in self._connection.execute(query)]

    def nodes_ranked(self, by: Rank, limit: int) -> list[NodeRow]:
        table, presence = tables.nodes, tables.presence
        query: Any = select(table).outerjoin(presence, presence.c.node == table.c.node)
        seen = func.coalesce(presence.c.last_seen_ms, 0).desc()
        if by == "trusted":
            query = query.where(table.c.role != "worker").order_by(seen, table.c.node)
        elif by == "sanctioned":
            query = query.where(table.c.state != NodeState.ACTIVE.value).order_by(seen, table.c.node)
        elif by == "credit":
            query = query.order_by((table.c.credit + table.c.pending).desc(), table.c.node)
        else:
            query = query.order_by(seen, table.c.node)
        return [node_of(row) for row in self._connection.execute(query.limit(limit))]

    def nodes_named(self, nodes: Sequence[str]) -> dict[str, NodeRow]:
        rows = self._connection.execute(select(tables.nodes).where(tables.nodes.c.node.in_(nodes)))
        return {found.node: found for found in map(node_of, rows)}

    def presences_named(self, nodes: Sequence[str]) -> dict[str, Presence]:
        rows = self._connection.execute(select(tables.presence).where(tables.presence.c.node.in_(nodes)))
        return {found.node: found for found in map(presence_of, rows)}

    def waiting_presences(self, since_ms: int, limit: int) -> list[Presence]:
        table = tables.presence
        query = select(table).where(table.c.last_seen_ms >= since_ms, table.c.waiting_for != "")
        longest = query.order_by(table.c.waiting_since_ms, table.c.node).limit(limit)
        return [presence_of(row) for row in self._connection.execute(longest)]

    def oldest_holdings(self, limit: int) -> list[Holding]:
        table = tables.leases
        query = HOLDINGS.where(table.c.state == LeaseState.ACTIVE.value)
        rows = self._connection.execute(query.order_by(table.c.issued_at_ms, table.c.unit).limit(limit))
        return [holding_of(row) for row in rows]

    def node_counts(self) -> dict[str, int]:
        table = tables.nodes
        query = select(table.c.role, table.c.state, func.count()).group_by(table.c.role, table.c.state)
        return {f"{role}.{state}": count for role, state, count in self._connection.execute(query)}

    def fleet(self, since_ms: int) -> list[Crew]:
        table, presence = tables.nodes, tables.presence
        here = case((presence.c.last_seen_ms >= since_ms, 1), else_=0).label("here")
        sums = [func.sum(column) for column in (table.c.credit, table.c.pending, table.c.lapsed)]
        joined = table.outerjoin(presence, presence.c.node == table.c.node)
        query = select(table.c.role, table.c.state, here, func.count(), *sums).select_from(joined)
        groups = (table.c.role, table.c.state, here)
        rows = self._connection.execute(query.group_by(*groups).order_by(*groups))
        return [Crew(row[0], row[1], bool(row[2]), *(int(value) for value in row[3:])) for row in rows]
