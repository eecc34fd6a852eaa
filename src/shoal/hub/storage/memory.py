"""A database in this process: for simulations and tests, held to the same contract as SQLite.

write:  alone ─► changes in place, noted in a journal ─► forgotten at the end, or undone if it fails
read:   one view: whoever writes while somebody reads works on a copy (tests do; a simulation never does)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from heapq import nsmallest
from typing import Any

from shoal import ledger
from shoal.hub.state.commands import (
    AddBatch,
    AddPolicy,
    AddShown,
    AddVerdict,
    Command,
    RaiseAlarm,
    Record,
    SaveEvaluation,
    SaveLease,
    SaveNode,
    SaveSubmission,
    SaveTask,
    SaveUnit,
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
from shoal.hub.state.units import is_entrusted, no_units
from shoal.hub.storage.indexed import Table
from shoal.hub.storage.memory_tables import Tables
from shoal.hub.storage.protocol import Outgoing, Presence, StaleRow
from shoal.hub.storage.story_memory import MemoryStories
from shoal.protocol import Batch, LedgerEntry, PolicyRef, StepReport


class MemoryStorage:
    """Implements `protocol.Storage`."""

    def __init__(self) -> None:
        self._tables = Tables()
        self._write_lock = threading.Lock()
        self._count_lock = threading.Lock()
        self._reading: Counter[int] = Counter()  # views that are open, by the tables that they show
        self._writer: int | None = None

    @property
    def is_shared(self) -> bool:
        return False

    def now_ms(self) -> int | None:
        return None

    def lead(self, name: str, holder: str, for_s: float) -> bool:  # noqa: ARG002  there is nobody else
        return True

    def resign(self, name: str, holder: str) -> None:
        """There is nobody to leave it to."""

    @contextmanager
    def read(self) -> Iterator[MemoryReader]:
        if self._writer == threading.get_ident():
            raise RuntimeError("a view of what was committed, asked for inside a write: use the transaction instead")
        with self._write_lock, self._count_lock:
            tables = self._tables
            self._reading[id(tables)] += 1
        try:
            yield MemoryReader(tables)
        finally:
            with self._count_lock:
                self._reading[id(tables)] -= 1

    @contextmanager
    def write(self, durable: bool = True, exclusive: bool = False) -> Iterator[MemoryWriter]:  # noqa: ARG002  never durable, always alone
        with self._write_lock:
            self._writer = threading.get_ident()
            try:
                if self._is_read():
                    changed = self._tables.copy()  # readers keep theirs; an exception leaves it at that
                    yield MemoryWriter(changed)
                    self._tables = changed
                else:
                    with self._undoable():
                        yield MemoryWriter(self._tables)
            finally:
                self._writer = None

    def _is_read(self) -> bool:
        with self._count_lock:
            self._reading = +self._reading  # without those that nobody reads any more
            return id(self._tables) in self._reading

    @contextmanager
    def _undoable(self) -> Iterator[None]:
        journal = self._tables.journal
        journal.begin()
        try:
            yield
        except BaseException:
            journal.undo()
            raise
        journal.forget()

    def close(self) -> None:
        """There is nothing to close."""


_UNHEARD = Presence("")
_ALIVE = (*((state, side) for state in UNDECIDED_UNITS for side in (False, True)), (UnitState.ACCEPTED, False))


class MemoryReader(MemoryStories):
    """Implements `protocol.Reader`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def setting(self, key: str) -> str | None:
        return self._tables.settings.get(key)

    def progress(self) -> Progress:
        tables = self._tables
        next_step = max(tables.batches, default=-1) + 1
        newest, last_unit = max(tables.policies, default=None), tables.units.in_order.last()
        return Progress(
            policy=None if newest is None else tables.policies[newest],
            next_step=next_step,
            next_unit=0 if last_unit is None else last_unit + 1,
            alive=sum(len(tables.units.by_state.of(group)) for group in _ALIVE),
            dropped=len(tables.units.lost.of((next_step, UnitState.DROPPED))),
            failed=len(tables.units.lost.of((next_step, UnitState.VOID))),
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

    def open_units(self, limit: int, entrusted: bool = False) -> list[UnitRow]:
        units = self._tables.units
        numbers = (number for number in units.among(UnitState.OPEN) if is_entrusted(units[number]) == entrusted)
        return [units[number] for number in nsmallest(limit, numbers)]

    def kin(self, kind: str, check: str, since_ms: int) -> list[NodeRow]:
        tables = self._tables
        alike = [row for row in tables.nodes.values() if row.kind == kind and row.role == "worker"]
        here = [row for row in alike if tables.presences.get(row.node, _UNHEARD).last_seen_ms >= since_ms]
        found = [row for row in here if row.passed > 0 or (row.failed_check == check and row.failed_at_ms >= since_ms)]
        return sorted(found, key=lambda row: row.node)

    def alive_units(self) -> list[UnitRow]:
        units = self._tables.units
        return [units[number] for number in sorted(number for group in _ALIVE for number in units.by_state.of(group))]

    def alive_counts(self) -> dict[UnitState, int]:
        counts: Counter[UnitState] = Counter()
        for state, batched in _ALIVE:
            counts[state] += len(self._tables.units.by_state.of((state, batched)))
        return dict(+counts)

    def batched_units(self) -> list[UnitRow]:
        units = self._tables.units
        return [units[number] for number in sorted(units.among(UnitState.ACCEPTED, batched=True))]

    def unit(self, unit: int) -> UnitRow | None:
        return self._tables.units.get(unit)

    def holding(self, lease: str) -> Holding | None:
        row = self._tables.leases.get(lease)
        return None if row is None else Holding(row, self._tables.units[row.unit])

    def holdings(self, node: str | None = None) -> list[Holding]:
        leases = self._tables.leases
        nodes = leases.held.groups() if node is None else (node,)
        rows = [leases[name] for each in nodes for name in leases.held.of(each)]
        return [self._held(row) for row in sorted(rows, key=lambda row: (row.issued_at_ms, row.unit))]

    def _held(self, row: LeaseRow) -> Holding:
        return Holding(row, self._tables.units[row.unit])

    def overdue_holdings(self, now_ms: int) -> list[Holding]:
        late = [self._held(self._tables.leases[name]) for name in self._tables.leases.deadlines.until(now_ms)]
        return sorted(late, key=lambda held: held.unit.unit)

    def silent_holdings(self, since_ms: int) -> list[Holding]:
        leases, presences = self._tables.leases, self._tables.presences
        silent = [node for node in leases.held.groups() if presences.get(node, _UNHEARD).last_seen_ms < since_ms]
        rows = [leases[name] for node in silent for name in leases.held.of(node)]
        old = [self._held(row) for row in rows if row.issued_at_ms < since_ms]
        return sorted(old, key=lambda held: held.unit.unit)

    def newcomers_in_hand(self, node: str) -> InHand:
        return self._tables.hands.of(node)

    def is_established_here(self, since_ms: int) -> bool:
        presences = self._tables.presences
        established = self._tables.nodes.established.of(True)
        return any(presences.get(node, _UNHEARD).last_seen_ms >= since_ms for node in established)

    def requested_leases(self, node: str, request: str) -> list[LeaseRow]:
        rows = [self._tables.leases[name] for name in self._tables.leases.requested.of((node, request))]
        return sorted(rows, key=lambda row: row.unit)

    def shown(self, lease: str) -> list[ShownRow]:
        return [self._tables.shown[key] for key in sorted(self._tables.shown.by_lease.of(lease))]

    def last_shown(self, lease: str) -> ShownRow | None:
        return self._tables.shown.get((lease, len(self._tables.shown.by_lease.of(lease)) - 1))

    def showing(self) -> list[LeaseRow]:
        rows = (self._tables.leases[name] for name in self._tables.shown.by_lease.groups())
        return sorted((row for row in rows if row.state == LeaseState.ACTIVE), key=lambda row: row.deadline_ms)

    def submission(self, submission: str) -> SubmissionRow | None:
        return self._tables.submissions.get(submission)

    def submission_of_lease(self, lease: str) -> SubmissionRow | None:
        name = self._tables.submissions.of_lease.find(lease)
        return None if name is None else self._tables.submissions[name]

    def submissions_in(self, states: Iterable[SubmissionState], limit: int) -> list[SubmissionRow]:
        rows = (row for state in set(states) for row in self._submissions(self._tables.submissions.by_state.of(state)))
        return nsmallest(limit, rows, key=lambda row: row.unit)

    def _submissions(self, names: Iterable[str]) -> list[SubmissionRow]:
        return [self._tables.submissions[name] for name in names]

    def waiting_audits(self, on_probation: bool, limit: int) -> list[SubmissionRow]:
        nodes = self._tables.nodes
        waiting = self._submissions(self._tables.submissions.by_state.of(SubmissionState.RECEIVED))
        side = (row for row in waiting if nodes[row.node].on_probation == on_probation)
        return nsmallest(limit, side, key=lambda row: row.unit)

    def light_audits(self, node: str) -> list[SubmissionRow]:
        rows = self._submissions(self._tables.submissions.unjudged.of(node))
        return sorted((row for row in rows if row.depth == "light"), key=lambda row: row.unit)

    def untrained(self, node: str) -> list[Filled]:
        units = self._tables.units
        free = [units[number] for number in sorted(units.among(UnitState.ACCEPTED, batched=False))]
        filled = [Filled(unit, self._tables.submissions[unit.submission]) for unit in free if unit.submission]
        return [each for each in filled if each.submission.node == node]

    def pending_credit(self, node: str) -> list[SubmissionRow]:
        rows = self._submissions(self._tables.submissions.pending.of(node))
        return sorted(rows, key=lambda row: row.unit)

    def due_credit(self, now_ms: int, limit: int) -> list[SubmissionRow]:
        return self._submissions(self._tables.submissions.maturing.until(now_ms)[:limit])

    def overdue_audits(self, now_ms: int) -> list[SubmissionRow]:
        rows = self._submissions(self._tables.submissions.claims.until(now_ms))
        return sorted(rows, key=lambda row: row.unit)

    def claimed_by(self, validator: str) -> list[SubmissionRow]:
        claimed = self._submissions(self._tables.submissions.by_state.of(SubmissionState.AUDITING))
        return sorted((row for row in claimed if row.validator == validator), key=lambda row: row.unit)

    def decided_submissions(self, limit: int) -> list[SubmissionRow]:
        return self._submissions(self._tables.submissions.decided.newest(limit))

    def refused_submissions(self, among: int) -> list[SubmissionRow]:
        return [row for row in self.decided_submissions(among) if row.state != SubmissionState.ACCEPTED]

    def submissions_named(self, names: Sequence[str]) -> dict[str, SubmissionRow]:
        return {name: self._tables.submissions[name] for name in names if name in self._tables.submissions}

    def dropped_submissions(self, step: int) -> list[SubmissionRow]:
        units = self._tables.units
        lost = [units[number] for number in sorted(units.lost.of((step, UnitState.DROPPED)))]
        return list(self.submissions_named([unit.submission for unit in lost if unit.submission]).values())

    def batch(self, step: int) -> Batch | None:
        return self._tables.batches.get(step)

    def units_named(self, units: Sequence[int]) -> dict[int, UnitRow]:
        return {number: self._tables.units[number] for number in units if number in self._tables.units}

    def task_row(self, task: str) -> TaskRow | None:
        return self._tables.tasks.get(task)

    def task_rows(self, tasks: Sequence[str]) -> dict[str, TaskRow]:
        return {task: self._tables.tasks[task] for task in tasks if task in self._tables.tasks}

    def pool_counts(self) -> dict[str, int]:
        return dict(self._tables.tasks.pools.counts)

    def evaluation(self, incarnation: int, version: int, first: int) -> EvaluationRow | None:
        return self._tables.evaluations.get((incarnation, version, first))

    def evaluations_under_way(self) -> list[EvaluationRow]:
        open_ones = (EvaluationState.OPEN, EvaluationState.CLAIMED)
        rows = sorted(self._tables.evaluations.values(), key=lambda row: row.key)
        versions = {row.key[:2] for row in rows if row.state in open_ones}
        return [row for row in rows if row.key[:2] in versions]

    def evaluations_since(self, version: int, versions: int) -> list[EvaluationRow]:
        rows = [row for row in self._tables.evaluations.values() if row.version >= version]
        newest = set(sorted({row.version for row in rows})[-versions:])
        return sorted((row for row in rows if row.version in newest), key=lambda row: row.key)

    def unit_counts(self) -> dict[str, int]:
        counts = no_units()
        for (state, reason), count in self._tables.units.counts.counts.items():
            counts[state.value] += count
            if state == UnitState.VOID:
                counts[f"void_{reason}"] += count
        return counts

    def submission_counts(self) -> dict[str, int]:
        groups = self._tables.submissions.by_state
        return {state.value: len(groups.of(state)) for state in SubmissionState}

    def reports(self, limit: int) -> list[StepReport]:
        return [report for _, report in sorted(self._tables.reports.items())][-limit:]

    def alarms(self, limit: int) -> list[str]:
        rows = sorted(self._tables.alarms.values(), key=lambda row: (-row.at_ms, -row.step, row.code))
        return [row.message for row in rows[:limit]]

    def alarm_counts(self) -> Counter[tuple[str, ...]]:
        return Counter((row.code.partition(".")[0],) for row in self._tables.alarms.values())

    def ledger_last(self) -> LedgerEntry | None:
        return self._tables.ledger.get(len(self._tables.ledger) - 1)

    def ledger_after(self, index: int, limit: int) -> list[LedgerEntry]:
        entries = self._tables.ledger
        return [entries[number] for number in range(index + 1, min(index + 1 + limit, len(entries)))]

    def outbox(self, limit: int) -> list[Outgoing]:
        return sorted(self._tables.outbox.values(), key=lambda row: row.id)[:limit]

    def outbox_length(self) -> int:
        return len(self._tables.outbox)

    def written_ms(self) -> int:
        last = self.ledger_last()
        seen = (presence.last_seen_ms for presence in self._tables.presences.values())
        outgoing = (row.at_ms for row in self._tables.outbox.values())
        return max([last.at_ms if last else 0, *seen, *outgoing])


class MemoryWriter(MemoryReader):
    """Implements `protocol.Writer`. The constraints are those of `tables.py`, where their reasons are."""

    def apply(self, commands: Iterable[Command]) -> None:
        for command in commands:
            _APPLY[type(command)](self, command)

    def lock_nodes(self, nodes: Iterable[str]) -> None:
        """Writers exclude each other."""

    def frontier(self) -> Progress:
        return self.progress()

    def post(self, entries: Sequence[LedgerEntry], up_to: int) -> None:
        for entry in entries:
            _add(self._tables.ledger, entry.index, entry)
            for subject in ledger.subjects(entry):
                self._tables.subjects[subject, entry.index] = subject
        for number in [number for number in self._tables.outbox if number <= up_to]:
            del self._tables.outbox[number]

    def put_setting(self, key: str, value: str) -> None:
        self._tables.settings[key] = value

    def put_presence(self, presence: Presence) -> None:
        said = self._tables.presences.get(presence.node, _UNHEARD)
        seen_ms = max(said.last_seen_ms, presence.last_seen_ms)
        self._tables.presences[presence.node] = replace(presence, last_seen_ms=seen_ms)

    def touch_presence(self, node: str, now_ms: int) -> None:
        said = self._tables.presences.get(node, Presence(node))
        self.put_presence(replace(said, last_seen_ms=now_ms))

    def put_report(self, report: StepReport, at_ms: int) -> None:  # noqa: ARG002  only the newest counts
        self._tables.reports[report.step] = report

    def take_nonce(self, node: str, nonce: str, expires_at_ms: int) -> bool:
        is_new = (node, nonce) not in self._tables.nonces
        self._tables.nonces.setdefault((node, nonce), expires_at_ms)
        return is_new

    def forget_nonces(self, before_ms: int, limit: int) -> int:
        expired = self._tables.nonces.expiring.until(before_ms - 1)[:limit]
        for key in expired:
            del self._tables.nonces[key]
        return len(expired)

    def forget_shown(self, before_ms: int) -> int:
        shown, dropped = self._tables.shown, 0
        for row in [self._tables.leases[name] for name in shown.by_lease.groups()]:
            submitted = self.submission_of_lease(row.lease)
            judged = submitted is None or submitted.state not in UNDECIDED_SUBMISSIONS
            if row.ended_at_ms is not None and row.ended_at_ms < before_ms and judged:
                for key in list(shown.by_lease.of(row.lease)):
                    del shown[key]
                    dropped += 1
        return dropped

    def _save_unit(self, command: SaveUnit) -> None:
        _save(self._tables.units, command.row.unit, command)

    def _save_lease(self, command: SaveLease) -> None:
        row = command.row
        _require_known(row.unit in self._tables.units and row.node in self._tables.nodes, command)
        _save(self._tables.leases, row.lease, command)

    def _save_submission(self, command: SaveSubmission) -> None:
        _require_known(command.row.lease in self._tables.leases, command)
        _save(self._tables.submissions, command.row.submission, command)

    def _save_node(self, command: SaveNode) -> None:
        _save(self._tables.nodes, command.row.node, command)

    def _save_evaluation(self, command: SaveEvaluation) -> None:
        _save(self._tables.evaluations, command.row.key, command)

    def _save_task(self, command: SaveTask) -> None:
        self._tables.tasks[command.row.task] = command.row

    def _add_policy(self, command: AddPolicy) -> None:
        _add(self._tables.policies, (command.policy.incarnation, command.policy.version), command.policy)

    def _add_batch(self, command: AddBatch) -> None:
        _add(self._tables.batches, command.batch.step, command.batch)

    def _add_shown(self, command: AddShown) -> None:
        _require_known(command.row.lease in self._tables.leases, command)
        _add(self._tables.shown, (command.row.lease, command.row.part), command.row)

    def _add_verdict(self, command: AddVerdict) -> None:
        _require_known(command.submission in self._tables.submissions, command)
        _add(self._tables.verdicts, command.submission, command.document)

    def _raise_alarm(self, command: RaiseAlarm) -> None:
        self._tables.alarms[(command.step, command.code)] = command

    def _record(self, command: Record) -> None:
        ledger.append(None, command.kind, command.body, command.at_ms)  # what cannot be chained fails here
        number = self._tables.numbers.get("outbox", 0) + 1
        self._tables.numbers["outbox"] = number
        _add(self._tables.outbox, number, Outgoing(number, command.kind, command.body, command.at_ms))


def _add(table: Table[Any, Any], key: Any, row: Any) -> None:
    if key in table:
        raise StaleRow(f"there is a {type(row).__name__} {key} already")
    table[key] = row


def _save(
    table: Table[Any, Any], key: Any, command: SaveUnit | SaveLease | SaveSubmission | SaveNode | SaveEvaluation
) -> None:
    if command.was is None:
        _add(table, key, command.row)
        return
    if key not in table or table[key].state != command.was:
        raise StaleRow(f"{type(command.row).__name__} {key} is no longer {command.was.value}")
    table[key] = command.row


def _require_known(known: bool, command: Command) -> None:
    if not known:
        raise StaleRow(f"{type(command).__name__} refers to a row that does not exist")


_APPLY: dict[type, Callable[[MemoryWriter, Any], None]] = {
    SaveUnit: MemoryWriter._save_unit,
    SaveLease: MemoryWriter._save_lease,
    SaveSubmission: MemoryWriter._save_submission,
    SaveNode: MemoryWriter._save_node,
    SaveEvaluation: MemoryWriter._save_evaluation,
    SaveTask: MemoryWriter._save_task,
    AddPolicy: MemoryWriter._add_policy,
    AddBatch: MemoryWriter._add_batch,
    AddVerdict: MemoryWriter._add_verdict,
    AddShown: MemoryWriter._add_shown,
    RaiseAlarm: MemoryWriter._raise_alarm,
    Record: MemoryWriter._record,
}
