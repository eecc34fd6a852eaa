"""`story_queries` for the database in this process: scans, for nobody asks why in a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import nlargest, nsmallest

from shoal.hub.state.rows import Holding, LeaseRow, NodeRow, SubmissionRow
from shoal.hub.storage.memory_tables import Tables
from shoal.hub.storage.protocol import Crew, Presence, Rank
from shoal.hub.storage.story_queries import LEASES_TOLD, REFUSED
from shoal.protocol import LedgerEntry, NodeState


class MemoryStories:
    """The questions of `protocol.StoryReader` that are no `Reader`'s."""

    _tables: Tables

    def leases_of_unit(self, unit: int) -> list[LeaseRow]:
        rows = [row for row in self._tables.leases.values() if row.unit == unit]
        return sorted(rows, key=lambda row: row.attempt)[-LEASES_TOLD:]

    def leases_of(self, node: str, limit: int) -> list[LeaseRow]:
        rows = (row for row in self._tables.leases.values() if row.node == node)
        return nlargest(limit, rows, key=lambda row: (row.issued_at_ms, row.unit))

    def submissions_of_unit(self, unit: int) -> list[SubmissionRow]:
        rows = [row for row in self._tables.submissions.values() if row.unit == unit]
        return sorted(rows, key=lambda row: (row.received_at_ms, row.submission))

    def submissions_of(self, node: str, refused: bool, limit: int) -> list[SubmissionRow]:
        rows = (
            row
            for row in self._tables.submissions.values()
            if row.node == node and (not refused or row.state in REFUSED)
        )
        return nlargest(limit, rows, key=lambda row: (row.received_at_ms, row.unit))

    def verdicts_of(self, submissions: Sequence[str]) -> dict[str, str]:
        known = self._tables.verdicts
        return {name: known[name] for name in submissions if name in known}

    def ledger_about(self, subject: str, but: Sequence[str], limit: int) -> list[LedgerEntry]:
        entries = (self._tables.ledger[index] for _, index in self._tables.subjects.by_subject.of(subject))
        newest = nlargest(limit, (entry for entry in entries if entry.kind not in but), key=lambda entry: entry.index)
        return newest[::-1]

    def ledger_of_kind(self, kind: str, subjects: Sequence[str]) -> list[LedgerEntry]:
        tables = self._tables
        found = {index for subject in subjects for _, index in tables.subjects.by_subject.of(subject)}
        return [entry for entry in (tables.ledger[index] for index in sorted(found)) if entry.kind == kind]

    def nodes_after(self, node: str, limit: int) -> list[NodeRow]:
        return nsmallest(
            limit, (row for row in self._tables.nodes.values() if row.node > node), key=lambda row: row.node
        )

    def nodes_ranked(self, by: Rank, limit: int) -> list[NodeRow]:
        rows = list(self._tables.nodes.values())
        if by == "trusted":
            rows = [row for row in rows if row.role != "worker"]
        elif by == "sanctioned":
            rows = [row for row in rows if row.state != NodeState.ACTIVE]
        elif by == "credit":
            return nsmallest(limit, rows, key=lambda row: (-row.credit - row.pending, row.node))
        return nsmallest(limit, rows, key=lambda row: (-self._seen_ms(row.node), row.node))

    def _seen_ms(self, node: str) -> int:
        presence = self._tables.presences.get(node)
        return 0 if presence is None else presence.last_seen_ms

    def nodes_named(self, nodes: Sequence[str]) -> dict[str, NodeRow]:
        known = self._tables.nodes
        return {name: known[name] for name in nodes if name in known}

    def presences_named(self, nodes: Sequence[str]) -> dict[str, Presence]:
        known = self._tables.presences
        return {name: known[name] for name in nodes if name in known}

    def waiting_presences(self, since_ms: int, limit: int) -> list[Presence]:
        rows = (row for row in self._tables.presences.values() if row.waiting_for and row.last_seen_ms >= since_ms)
        return nsmallest(limit, rows, key=lambda row: (row.waiting_since_ms, row.node))

    def oldest_holdings(self, limit: int) -> list[Holding]:
        tables = self._tables
        active = [tables.leases[name] for name in tables.leases.deadlines.until(2**63)]
        oldest = nsmallest(limit, active, key=lambda row: (row.issued_at_ms, row.unit))
        return [Holding(row, tables.units[row.unit]) for row in oldest]

    def node_counts(self) -> dict[str, int]:
        return dict(Counter(f"{row.role}.{row.state.value}" for row in self._tables.nodes.values()))

    def fleet(self, since_ms: int) -> list[Crew]:
        groups: dict[tuple[str, str, bool], list[NodeRow]] = {}
        for row in self._tables.nodes.values():
            presence = self._tables.presences.get(row.node)
            here = presence is not None and presence.last_seen_ms >= since_ms
            groups.setdefault((row.role, row.state.value, here), []).append(row)
        return [
            Crew(
                *key,
                count=len(rows),
                credit=sum(row.credit for row in rows),
                pending=sum(row.pending for row in rows),
                lapsed=sum(row.lapsed for row in rows),
            )
            for key, rows in sorted(groups.items())
        ]
