"""A database in this process: for simulations and tests, held to the same contract as SQLite.

Rows are frozen, so a transaction that fails is undone by putting the old dictionaries back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shoal import ledger
from shoal.hub.state.commands import (
    AddBatch,
    AddPolicy,
    AddVerdict,
    Command,
    RaiseAlarm,
    Record,
    SaveLease,
    SaveNode,
    SaveSubmission,
    SaveUnit,
)
from shoal.hub.state.machines import UNDECIDED_SUBMISSIONS, LeaseState, SubmissionState, UnitState
from shoal.hub.state.rows import Filled, Holding, LeaseRow, NodeRow, Progress, SubmissionRow, UnitRow
from shoal.hub.state.units import no_units
from shoal.hub.storage.protocol import Presence, StaleRow
from shoal.protocol import Batch, LedgerEntry, NodeState, PolicyRef, StepReport


@dataclass
class Tables:
    """Every row, by key."""

    settings: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, NodeRow] = field(default_factory=dict)
    presences: dict[str, Presence] = field(default_factory=dict)
    units: dict[int, UnitRow] = field(default_factory=dict)
    leases: dict[str, LeaseRow] = field(default_factory=dict)
    submissions: dict[str, SubmissionRow] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    policies: dict[tuple[int, int], PolicyRef] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    reports: dict[int, StepReport] = field(default_factory=dict)
    alarms: dict[tuple[int, str], RaiseAlarm] = field(default_factory=dict)
    nonces: dict[tuple[str, str], int] = field(default_factory=dict)
    ledger: dict[int, LedgerEntry] = field(default_factory=dict)

    def copy(self) -> Tables:
        return Tables(**{item.name: dict(getattr(self, item.name)) for item in fields(self)})


class MemoryStorage:
    """Implements `protocol.Storage`."""

    def __init__(self) -> None:
        self._tables = Tables()
        self._write_lock = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[MemoryReader]:
        yield MemoryReader(self._tables)

    @contextmanager
    def write(self, durable: bool = True) -> Iterator[MemoryWriter]:  # noqa: ARG002  nothing is durable here
        with self._write_lock:
            changed = self._tables.copy()  # readers keep theirs; an exception leaves it at that
            yield MemoryWriter(changed)
            self._tables = changed

    def close(self) -> None:
        """There is nothing to close."""


class MemoryReader:
    """Implements `protocol.Reader`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def setting(self, key: str) -> str | None:
        return self._tables.settings.get(key)

    def progress(self) -> Progress:
        units = self._tables.units.values()
        next_step = max(self._tables.batches, default=-1) + 1
        lost = [unit for unit in units if unit.lost_step == next_step]
        newest = max(self._tables.policies, default=None)
        return Progress(
            policy=None if newest is None else self._tables.policies[newest],
            next_step=next_step,
            next_unit=max(self._tables.units, default=-1) + 1,
            alive=sum(unit.alive for unit in units),
            dropped=sum(unit.state == UnitState.DROPPED for unit in lost),
            failed=sum(unit.state == UnitState.VOID for unit in lost),
        )

    def policy(self, incarnation: int, version: int) -> PolicyRef | None:
        return self._tables.policies.get((incarnation, version))

    def node(self, node: str) -> NodeRow | None:
        return self._tables.nodes.get(node)

    def nodes(self) -> list[NodeRow]:
        return sorted(self._tables.nodes.values(), key=lambda row: (row.registered_at_ms, row.node))

    def presence(self, node: str) -> Presence | None:
        return self._tables.presences.get(node)

    def presences(self) -> dict[str, Presence]:
        return dict(self._tables.presences)

    def open_units(self, limit: int) -> list[UnitRow]:
        return [unit for unit in self._units() if unit.state == UnitState.OPEN][:limit]

    def alive_units(self) -> list[UnitRow]:
        return [unit for unit in self._units() if unit.alive]

    def batched_units(self) -> list[UnitRow]:
        return [unit for unit in self._units() if unit.state == UnitState.ACCEPTED and unit.step is not None]

    def unit(self, unit: int) -> UnitRow | None:
        return self._tables.units.get(unit)

    def holding(self, lease: str) -> Holding | None:
        row = self._tables.leases.get(lease)
        return None if row is None else Holding(row, self._tables.units[row.unit])

    def holdings(self, node: str | None = None) -> list[Holding]:
        active = [row for row in self._tables.leases.values() if row.state == LeaseState.ACTIVE]
        wanted = [row for row in active if node is None or row.node == node]
        wanted.sort(key=lambda row: (row.issued_at_ms, row.unit))
        return [Holding(row, self._tables.units[row.unit]) for row in wanted]

    def overdue_holdings(self, now_ms: int) -> list[Holding]:
        late = [held for held in self.holdings() if held.lease.deadline_ms <= now_ms]
        return sorted(late, key=lambda held: held.unit.unit)

    def silent_holdings(self, since_ms: int) -> list[Holding]:
        heard = {node for node, presence in self.presences().items() if presence.last_seen_ms >= since_ms}
        old = [held for held in self.holdings() if held.lease.issued_at_ms < since_ms]
        return sorted((held for held in old if held.lease.node not in heard), key=lambda held: held.unit.unit)

    def newcomers_in_hand(self) -> int:
        fresh = {row.node for row in self._tables.nodes.values() if row.on_probation}
        leased = sum(held.lease.node in fresh for held in self.holdings())
        return leased + sum(
            row.node in fresh and row.state in UNDECIDED_SUBMISSIONS for row in self._tables.submissions.values()
        )

    def is_established_here(self, since_ms: int) -> bool:
        heard = {node for node, presence in self.presences().items() if presence.last_seen_ms >= since_ms}
        workers = [row for row in self._tables.nodes.values() if row.role == "worker" and not row.on_probation]
        return any(row.node in heard and row.state == NodeState.ACTIVE for row in workers)

    def requested_leases(self, node: str, request: str) -> list[LeaseRow]:
        rows = [row for row in self._tables.leases.values() if (row.node, row.request) == (node, request)]
        return sorted(rows, key=lambda row: row.unit)

    def submission(self, submission: str) -> SubmissionRow | None:
        return self._tables.submissions.get(submission)

    def submission_of_lease(self, lease: str) -> SubmissionRow | None:
        return next((row for row in self._tables.submissions.values() if row.lease == lease), None)

    def submissions_in(self, states: Iterable[SubmissionState], limit: int) -> list[SubmissionRow]:
        wanted = set(states)
        rows = [row for row in self._tables.submissions.values() if row.state in wanted]
        return sorted(rows, key=lambda row: row.unit)[:limit]

    def waiting_audits(self, on_probation: bool, limit: int) -> list[SubmissionRow]:
        waiting = self.submissions_in([SubmissionState.RECEIVED], len(self._tables.submissions))
        return [row for row in waiting if self._tables.nodes[row.node].on_probation == on_probation][:limit]

    def light_audits(self, node: str) -> list[SubmissionRow]:
        unjudged = self.submissions_in(UNDECIDED_SUBMISSIONS, len(self._tables.submissions))
        return [row for row in unjudged if (row.node, row.depth) == (node, "light")]

    def untrained(self, node: str) -> list[Filled]:
        free = [unit for unit in self._units() if unit.state == UnitState.ACCEPTED and unit.step is None]
        filled = [Filled(unit, self._tables.submissions[unit.submission]) for unit in free if unit.submission]
        return [each for each in filled if each.submission.node == node]

    def pending_credit(self, node: str) -> list[SubmissionRow]:
        rows = [row for row in self._tables.submissions.values() if row.matures_at_ms is not None]
        return sorted((row for row in rows if row.node == node), key=lambda row: row.unit)

    def due_credit(self, now_ms: int, limit: int) -> list[SubmissionRow]:
        rows = [row for row in self._tables.submissions.values() if row.matures_at_ms is not None]
        due = [row for row in rows if (row.matures_at_ms or 0) <= now_ms]
        return sorted(due, key=lambda row: (row.matures_at_ms or 0, row.unit))[:limit]

    def overdue_audits(self, now_ms: int) -> list[SubmissionRow]:
        claimed = self.submissions_in([SubmissionState.AUDITING], len(self._tables.submissions))
        return [row for row in claimed if row.claimed_until_ms is not None and row.claimed_until_ms <= now_ms]

    def claimed_by(self, validator: str) -> list[SubmissionRow]:
        claimed = self.submissions_in([SubmissionState.AUDITING], len(self._tables.submissions))
        return [row for row in claimed if row.validator == validator]

    def decided_submissions(self, limit: int) -> list[SubmissionRow]:
        rows = [row for row in self._tables.submissions.values() if row.decided_at_ms is not None]
        return sorted(rows, key=lambda row: (row.decided_at_ms or 0, row.unit), reverse=True)[:limit]

    def refused_submissions(self, among: int) -> list[SubmissionRow]:
        return [row for row in self.decided_submissions(among) if row.state != SubmissionState.ACCEPTED]

    def submissions_named(self, names: Sequence[str]) -> dict[str, SubmissionRow]:
        return {name: self._tables.submissions[name] for name in names if name in self._tables.submissions}

    def dropped_submissions(self, step: int) -> list[SubmissionRow]:
        lost = [unit for unit in self._units() if unit.lost_step == step and unit.state == UnitState.DROPPED]
        return list(self.submissions_named([unit.submission for unit in lost if unit.submission]).values())

    def batch(self, step: int) -> Batch | None:
        return self._tables.batches.get(step)

    def unit_counts(self) -> dict[str, int]:
        counts = no_units()
        for unit in self._tables.units.values():
            counts[unit.state.value] += 1
            if unit.state == UnitState.VOID:
                counts[f"void_{unit.reason}"] += 1
        return counts

    def submission_counts(self) -> dict[str, int]:
        counts = {state.value: 0 for state in SubmissionState}
        for row in self._tables.submissions.values():
            counts[row.state.value] += 1
        return counts

    def reports(self, limit: int) -> list[StepReport]:
        return [report for _, report in sorted(self._tables.reports.items())][-limit:]

    def alarms(self, limit: int) -> list[str]:
        rows = sorted(self._tables.alarms.values(), key=lambda row: (-row.at_ms, -row.step, row.code))
        return [row.message for row in rows[:limit]]

    def ledger_last(self) -> LedgerEntry | None:
        return self._tables.ledger.get(len(self._tables.ledger) - 1)

    def ledger_after(self, index: int, limit: int) -> list[LedgerEntry]:
        return [entry for entry in self._tables.ledger.values() if entry.index > index][:limit]

    def _units(self) -> list[UnitRow]:
        return sorted(self._tables.units.values(), key=lambda row: row.unit)


class MemoryWriter(MemoryReader):
    """Implements `protocol.Writer`. The constraints are those of `tables.py`, where their reasons are."""

    def apply(self, commands: Iterable[Command]) -> None:
        for command in commands:
            _APPLY[type(command)](self, command)

    def put_setting(self, key: str, value: str) -> None:
        self._tables.settings[key] = value

    def put_presence(self, presence: Presence) -> None:
        self._tables.presences[presence.node] = presence

    def touch_presence(self, node: str, now_ms: int) -> None:
        self.put_presence(replace(self.presence(node) or Presence(node), last_seen_ms=now_ms))

    def put_report(self, report: StepReport, at_ms: int) -> None:  # noqa: ARG002  only the newest counts
        self._tables.reports[report.step] = report

    def take_nonce(self, node: str, nonce: str, expires_at_ms: int) -> bool:
        is_new = (node, nonce) not in self._tables.nonces
        self._tables.nonces.setdefault((node, nonce), expires_at_ms)
        return is_new

    def forget_nonces(self, before_ms: int) -> None:
        self._tables.nonces = {key: until for key, until in self._tables.nonces.items() if until >= before_ms}

    def _save_unit(self, command: SaveUnit) -> None:
        _save(self._tables.units, command.row.unit, command)
        _require_unique(self._tables.units.values(), "submission", command.row)

    def _save_lease(self, command: SaveLease) -> None:
        row = command.row
        _require_known(row.unit in self._tables.units and row.node in self._tables.nodes, command)
        _save(self._tables.leases, row.lease, command)
        _require_unique(self._tables.leases.values(), ("unit", "attempt"), row)
        _require_unique(self._tables.leases.values(), ("node", "request", "unit"), row)

    def _save_submission(self, command: SaveSubmission) -> None:
        _require_known(command.row.lease in self._tables.leases, command)
        _save(self._tables.submissions, command.row.submission, command)
        _require_unique(self._tables.submissions.values(), "lease", command.row)

    def _save_node(self, command: SaveNode) -> None:
        _save(self._tables.nodes, command.row.node, command)

    def _add_policy(self, command: AddPolicy) -> None:
        _add(self._tables.policies, (command.policy.incarnation, command.policy.version), command.policy)

    def _add_batch(self, command: AddBatch) -> None:
        _add(self._tables.batches, command.batch.step, command.batch)

    def _add_verdict(self, command: AddVerdict) -> None:
        _require_known(command.submission in self._tables.submissions, command)
        _add(self._tables.verdicts, command.submission, command.document)

    def _raise_alarm(self, command: RaiseAlarm) -> None:
        self._tables.alarms[(command.step, command.code)] = command

    def _record(self, command: Record) -> None:
        entry = ledger.append(self.ledger_last(), command.kind, command.body, command.at_ms)
        _add(self._tables.ledger, entry.index, entry)


def _add(table: dict[Any, Any], key: Any, row: Any) -> None:
    if key in table:
        raise StaleRow(f"there is a {type(row).__name__} {key} already")
    table[key] = row


def _save(table: dict[Any, Any], key: Any, command: SaveUnit | SaveLease | SaveSubmission | SaveNode) -> None:
    if command.was is None:
        _add(table, key, command.row)
        return
    if key not in table or table[key].state != command.was:
        raise StaleRow(f"{type(command.row).__name__} {key} is no longer {command.was.value}")
    table[key] = command.row


def _require_unique(rows: Iterable[Any], names: str | tuple[str, ...], row: Any) -> None:
    columns = (names,) if isinstance(names, str) else names
    values = [getattr(row, name) for name in columns]
    if None in values:
        return
    if sum(all(getattr(other, name) == getattr(row, name) for name in columns) for other in rows) > 1:
        raise StaleRow(f"two rows of {type(row).__name__} have the same {', '.join(columns)}: {values}")


def _require_known(known: bool, command: Command) -> None:
    if not known:
        raise StaleRow(f"{type(command).__name__} refers to a row that does not exist")


_APPLY: dict[type, Callable[[MemoryWriter, Any], None]] = {
    SaveUnit: MemoryWriter._save_unit,
    SaveLease: MemoryWriter._save_lease,
    SaveSubmission: MemoryWriter._save_submission,
    SaveNode: MemoryWriter._save_node,
    AddPolicy: MemoryWriter._add_policy,
    AddBatch: MemoryWriter._add_batch,
    AddVerdict: MemoryWriter._add_verdict,
    RaiseAlarm: MemoryWriter._raise_alarm,
    Record: MemoryWriter._record,
}
