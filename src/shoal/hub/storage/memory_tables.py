"""The tables of a database in this process, with the indexes that its questions need. Constraints as in `tables`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from shoal.hub.state.commands import RaiseAlarm
from shoal.hub.state.machines import UNDECIDED_SUBMISSIONS, LeaseState, SubmissionState, UnitState
from shoal.hub.state.rows import EvaluationRow, InHand, LeaseRow, NodeRow, ShownRow, SubmissionRow, TaskRow, UnitRow
from shoal.hub.storage.indexed import Counted, Grouped, Index, Journal, Ordered, Table, Told, Unique
from shoal.hub.storage.protocol import Outgoing, Presence
from shoal.protocol import Batch, LedgerEntry, NodeState, PolicyRef, StepReport


class Units(Table[int, UnitRow]):
    def __init__(self) -> None:
        self.by_state: Grouped[int, UnitRow] = Grouped(lambda row: (row.state, row.step is not None))
        self.lost: Grouped[int, UnitRow] = Grouped(
            lambda row: None if row.lost_step is None else (row.lost_step, row.state)
        )
        self.counts: Counted[int, UnitRow] = Counted(lambda row: (row.state, row.reason))
        self.in_order: Ordered[int, UnitRow] = Ordered(lambda row: (row.unit,))
        filled: Unique[int, UnitRow] = Unique("submission", lambda row: row.submission)
        super().__init__(self.by_state, self.lost, self.counts, self.in_order, filled)

    def among(self, *states: UnitState, batched: bool | None = None) -> list[int]:
        """The numbers of units in these states; in a batch, in none, or whichever."""
        sides = (False, True) if batched is None else (batched,)
        return [number for state in states for side in sides for number in self.by_state.of((state, side))]


class Leases(Table[str, LeaseRow]):
    def __init__(self, also: Index[str, LeaseRow]) -> None:
        self.held: Grouped[str, LeaseRow] = Grouped(lambda row: row.node if _is_active(row) else None)
        self.deadlines: Ordered[str, LeaseRow] = Ordered(
            lambda row: (row.deadline_ms, row.unit) if _is_active(row) else None
        )
        self.requested: Grouped[str, LeaseRow] = Grouped(lambda row: (row.node, row.request))
        attempts: Unique[str, LeaseRow] = Unique("unit, attempt", lambda row: (row.unit, row.attempt))
        requests: Unique[str, LeaseRow] = Unique("node, request, unit", lambda row: (row.node, row.request, row.unit))
        super().__init__(self.held, self.deadlines, self.requested, attempts, requests, also)


class Submissions(Table[str, SubmissionRow]):
    def __init__(self, also: Index[str, SubmissionRow]) -> None:
        self.of_lease: Unique[str, SubmissionRow] = Unique("lease", lambda row: row.lease)
        self.by_state: Grouped[str, SubmissionRow] = Grouped(lambda row: row.state)
        self.unjudged: Grouped[str, SubmissionRow] = Grouped(lambda row: row.node if _is_unjudged(row) else None)
        self.pending: Grouped[str, SubmissionRow] = Grouped(lambda row: None if row.matures_at_ms is None else row.node)
        self.maturing: Ordered[str, SubmissionRow] = Ordered(
            lambda row: None if row.matures_at_ms is None else (row.matures_at_ms, row.unit)
        )
        self.claims: Ordered[str, SubmissionRow] = Ordered(_claim_of)
        self.decided: Ordered[str, SubmissionRow] = Ordered(
            lambda row: None if row.decided_at_ms is None else (row.decided_at_ms, row.unit)
        )
        super().__init__(
            self.of_lease, self.by_state, self.unjudged, self.pending, self.maturing, self.claims, self.decided, also
        )


class Nodes(Table[str, NodeRow]):
    def __init__(self, also: Index[str, NodeRow]) -> None:
        self.established: Grouped[str, NodeRow] = Grouped(lambda row: True if _is_established(row) else None)
        keys: Unique[str, NodeRow] = Unique("public key", lambda row: row.public_key)
        super().__init__(self.established, keys, also)


class Nonces(Table[tuple[str, str], int]):
    def __init__(self) -> None:
        self.expiring: Ordered[tuple[str, str], int] = Ordered(lambda until: (until,))
        super().__init__(self.expiring)


class Shown(Table[tuple[str, int], ShownRow]):
    def __init__(self) -> None:
        self.by_lease: Grouped[tuple[str, int], ShownRow] = Grouped(lambda row: row.lease)
        super().__init__(self.by_lease)


class Tasks(Table[str, TaskRow]):
    def __init__(self) -> None:
        self.pools: Counted[str, TaskRow] = Counted(lambda row: row.pool.value)
        super().__init__(self.pools)


class Subjects(Table[tuple[str, int], str]):
    def __init__(self) -> None:
        self.by_subject: Grouped[tuple[str, int], str] = Grouped(lambda subject: subject)
        super().__init__(self.by_subject)


class Hands:
    """How many units are in the hands of nodes on probation: leased, or handed in and not judged yet."""

    def __init__(self) -> None:
        self.networks: Counter[str] = Counter()
        self.unproven: Counter[str] = Counter()
        self.long: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._held_long: Counter[str] = Counter()
        self._newcomers: dict[str, NodeRow] = {}
        self.nodes: Told[str, NodeRow] = Told(lambda row: self._node(row, 1), lambda row: self._node(row, -1))
        self.leases: Told[str, LeaseRow] = Told(
            lambda row: self._unit(row.node, _is_active(row), _is_active(row) and not row.brief),
            lambda row: self._unit(row.node, -_is_active(row), -(_is_active(row) and not row.brief)),
        )
        self.submissions: Told[str, SubmissionRow] = Told(
            lambda row: self._unit(row.node, _is_unjudged(row)), lambda row: self._unit(row.node, -_is_unjudged(row))
        )

    def _node(self, row: NodeRow, sign: int) -> None:
        if row.on_probation:
            self._count(row, sign * self._held[row.node], sign * self._held_long[row.node])
            if sign > 0:
                self._newcomers[row.node] = row
            else:
                del self._newcomers[row.node]

    def _unit(self, node: str, units: int, long: int = 0) -> None:
        self._held[node] += units
        self._held_long[node] += long
        if node in self._newcomers:
            self._count(self._newcomers[node], units, long)

    def _count(self, row: NodeRow, units: int, long: int) -> None:
        self.networks[row.network] += units
        self.unproven[row.network] += units * row.unproven
        self.long[row.network] += long * row.unproven

    def of(self, node: str) -> InHand:
        own = self._held[node] if node in self._newcomers else 0
        return InHand(own, +self.networks, +self.unproven, +self.long)


def _is_active(row: LeaseRow) -> bool:
    return row.state == LeaseState.ACTIVE


def _is_unjudged(row: SubmissionRow) -> bool:
    return row.state in UNDECIDED_SUBMISSIONS


def _is_established(row: NodeRow) -> bool:
    return row.role == "worker" and not row.on_probation and row.state == NodeState.ACTIVE


def _claim_of(row: SubmissionRow) -> tuple[int, ...] | None:
    if row.state != SubmissionState.AUDITING or row.claimed_until_ms is None:
        return None
    return (row.claimed_until_ms, row.unit)


@dataclass
class Tables:
    """Every row, by key."""

    journal: Journal = field(default_factory=Journal)
    hands: Hands = field(default_factory=Hands)
    settings: Table[str, str] = field(default_factory=Table)
    nodes: Nodes = field(init=False)
    presences: Table[str, Presence] = field(default_factory=Table)
    units: Units = field(default_factory=Units)
    leases: Leases = field(init=False)
    submissions: Submissions = field(init=False)
    shown: Shown = field(default_factory=Shown)
    verdicts: Table[str, str] = field(default_factory=Table)
    policies: Table[tuple[int, int], PolicyRef] = field(default_factory=Table)
    batches: Table[int, Batch] = field(default_factory=Table)
    tasks: Tasks = field(default_factory=Tasks)
    evaluations: Table[tuple[int, int, int], EvaluationRow] = field(default_factory=Table)
    reports: Table[int, StepReport] = field(default_factory=Table)
    alarms: Table[tuple[int, str], RaiseAlarm] = field(default_factory=Table)
    nonces: Nonces = field(default_factory=Nonces)
    ledger: Table[int, LedgerEntry] = field(default_factory=Table)
    subjects: Subjects = field(default_factory=Subjects)
    outbox: Table[int, Outgoing] = field(default_factory=Table)
    numbers: Table[str, int] = field(default_factory=Table)

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.hands.nodes)
        self.leases = Leases(self.hands.leases)
        self.submissions = Submissions(self.hands.submissions)
        for table in self.each().values():
            table.journal = self.journal

    def each(self) -> dict[str, Table[object, object]]:
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: table for name, table in named.items() if isinstance(table, Table)}

    def copy(self) -> Tables:
        copied = Tables()
        into = copied.each()
        for name, table in self.each().items():
            for key, row in table.items():
                into[name][key] = row
        return copied
