"""What the hub needs of a database: `sqlite.py` for one hub (in memory for tests and simulations), `postgres.py` for
several, one contract for both.

A decision is one write transaction: rows are read, the pure core decides, its commands are applied, all or nothing.
What it read stays true until its commit: in SQLite, because writers exclude each other from their first
statement on; in PostgreSQL, because what a writer reads of single rows it locks, and what concerns all rows (the newest
policy, the next step) only an `exclusive` one changes.

    decision ─► Record ─► ledger_outbox ─ one poster, in order ─► ledger (the chain)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from shoal.errors import ShoalError
from shoal.hub.state.commands import Command
from shoal.hub.state.machines import SubmissionState, UnitState
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
from shoal.protocol import Batch, LedgerEntry, PolicyRef, StepReport


class StaleRow(ShoalError):
    """A row is not as the decision saw it, or a constraint forbids the change. The transaction is undone."""


@dataclass(frozen=True)
class Presence:
    """When a node was last heard of, and what it said."""

    node: str
    last_seen_ms: int = 0
    doing: str = ""
    waiting_for: str = ""
    waiting_since_ms: int = 0
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Crew:
    """Nodes of one role and state that are here, or away: how many, and what they have in sum."""

    role: str
    state: str
    here: bool
    count: int
    credit: int
    pending: int
    lapsed: int


@dataclass(frozen=True)
class Outgoing:
    """What a decision recorded for the ledger and is not in the chain yet; numbered in the order of recording."""

    id: int
    kind: str
    body: dict[str, Any]
    at_ms: int


class Reader(Protocol):
    """One consistent view."""

    def setting(self, key: str) -> str | None: ...

    def progress(self, counted: bool = True) -> Progress:
        """Where the run stands. Unless it is to be `counted`, `alive` may be 0: counting a large fleet takes long."""
        ...

    def policy(self, incarnation: int, version: int) -> PolicyRef | None: ...

    def node(self, node: str) -> NodeRow | None: ...

    def nodes(self) -> list[NodeRow]: ...

    def presence(self, node: str) -> Presence | None: ...

    def presences(self) -> dict[str, Presence]: ...

    def open_units(self, limit: int, entrusted: bool = False) -> list[UnitRow]:
        """The lowest-numbered open units that workers may have, or those that are `entrusted` to validators."""
        ...

    def kin(self, kind: str, check: str, since_ms: int) -> list[NodeRow]:
        """Workers of one kind that were heard of since then, and have failed this statistical check since then, or
        have passed an audit."""
        ...

    def alive_units(self) -> list[UnitRow]:
        """Units that are undecided, or accepted and in no batch, by number."""
        ...

    def alive_counts(self) -> dict[UnitState, int]:
        """How many units are alive, by state; accepted ones are those in no batch."""
        ...

    def batched_units(self) -> list[UnitRow]:
        """Units in a batch that are not marked trained yet."""
        ...

    def holding(self, lease: str) -> Holding | None: ...

    def holdings(self, node: str | None = None) -> list[Holding]:
        """Active leases with their units, oldest first; of one node, or of all."""
        ...

    def overdue_holdings(self, now_ms: int) -> list[Holding]:
        """Active leases past their deadline, by unit."""
        ...

    def silent_holdings(self, since_ms: int) -> list[Holding]:
        """Active leases that were issued before `since_ms` to nodes not heard of since then, by unit."""
        ...

    def newcomers_in_hand(self, node: str) -> InHand:
        """What nodes on probation have in hand, and this one of them; networks without anything may be left out."""
        ...

    def is_established_here(self, since_ms: int) -> bool:
        """Whether an active worker that is past probation was heard of since then."""
        ...

    def requested_leases(self, node: str, request: str) -> list[LeaseRow]:
        """The leases that this request got, in order of unit."""
        ...

    def shown(self, lease: str) -> list[ShownRow]:
        """What was shown of a lease, part by part."""
        ...

    def last_shown(self, lease: str) -> ShownRow | None:
        """The last part of what was shown of a lease."""
        ...

    def showing(self) -> list[LeaseRow]:
        """Active leases of which something was shown, by their deadline."""
        ...

    def unit(self, unit: int) -> UnitRow | None: ...

    def submission(self, submission: str) -> SubmissionRow | None: ...

    def submission_of_lease(self, lease: str) -> SubmissionRow | None: ...

    def claimed_by(self, validator: str) -> list[SubmissionRow]:
        """What a validator has claimed and not judged yet, by unit."""
        ...

    def submissions_in(self, states: Iterable[SubmissionState], limit: int) -> list[SubmissionRow]:
        """Submissions in one of these states, lowest unit first."""
        ...

    def waiting_audits(self, on_probation: bool, limit: int) -> list[SubmissionRow]:
        """Received submissions of nodes that are, or are not, on probation, lowest unit first."""
        ...

    def light_audits(self, node: str) -> list[SubmissionRow]:
        """What a node handed in that waits for a light audit or is in one, by unit."""
        ...

    def untrained(self, node: str) -> list[Filled]:
        """A node's accepted groups that are in no batch, by unit."""
        ...

    def pending_credit(self, node: str) -> list[SubmissionRow]:
        """What a node has pending credit for, by unit."""
        ...

    def due_credit(self, now_ms: int, limit: int) -> list[SubmissionRow]:
        """Submissions whose pending credit is due, longest due first."""
        ...

    def overdue_audits(self, now_ms: int) -> list[SubmissionRow]:
        """Submissions whose validator has let its claim run out."""
        ...

    def decided_submissions(self, limit: int) -> list[SubmissionRow]:
        """The newest decisions, newest first."""
        ...

    def refused_submissions(self, among: int) -> list[SubmissionRow]:
        """Those of the newest `among` decisions that are no acceptances, newest first."""
        ...

    def submissions_named(self, names: Sequence[str]) -> dict[str, SubmissionRow]: ...

    def verdicts_of(self, submissions: Sequence[str]) -> dict[str, str]:
        """Signed verdicts as they came, by submission."""
        ...

    def dropped_submissions(self, step: int) -> list[SubmissionRow]:
        """What fills the units that were dropped (equal rewards) while `step` was the next one, by unit."""
        ...

    def batch(self, step: int) -> Batch | None: ...

    def units_named(self, units: Sequence[int]) -> dict[int, UnitRow]: ...

    def task_row(self, task: str) -> TaskRow | None:
        """How a task did of late; None if no group of it was ever in a batch or dropped."""
        ...

    def task_rows(self, tasks: Sequence[str]) -> dict[str, TaskRow]: ...

    def pool_counts(self) -> dict[str, int]:
        """How many of the tasks that were seen are in each pool; pools without any are left out."""
        ...

    def evaluation(self, incarnation: int, version: int, first: int) -> EvaluationRow | None: ...

    def evaluations_under_way(self) -> list[EvaluationRow]:
        """All slices of the versions of which one is open or claimed, in order."""
        ...

    def evaluations_since(self, version: int, versions: int) -> list[EvaluationRow]:
        """All slices from that version on, in order; those of the newest `versions` at most, and of these all."""
        ...

    def unit_counts(self) -> dict[str, int]:
        """Units by state, and `void_<reason>` for the void ones."""
        ...

    def submission_counts(self) -> dict[str, int]: ...

    def reports(self, limit: int) -> list[StepReport]:
        """The newest step reports, oldest first."""
        ...

    def alarms(self, limit: int) -> list[str]:
        """The newest alarms, newest first."""
        ...

    def alarm_counts(self) -> Counter[tuple[str, ...]]:
        """All alarms, by the first word of their code."""
        ...

    def ledger_last(self) -> LedgerEntry | None: ...

    def ledger_after(self, index: int, limit: int) -> list[LedgerEntry]: ...

    def outbox(self, limit: int) -> list[Outgoing]:
        """What waits to be moved into the ledger, oldest first."""
        ...

    def outbox_length(self) -> int: ...

    def written_ms(self) -> int:
        """The newest time that is written down anywhere that matters: in the ledger, its outbox, or of a node."""
        ...


Rank: TypeAlias = Literal["trusted", "sanctioned", "credit", "seen"]


class StoryReader(Reader, Protocol):
    """A view for those who ask why, and for reports on fleets of any size; no decision needs it."""

    def leases_of_unit(self, unit: int) -> list[LeaseRow]:
        """The newest leases of a unit (`LEASES_TOLD`), in order of attempt."""
        ...

    def leases_of(self, node: str, limit: int) -> list[LeaseRow]:
        """The newest leases of a node, newest first."""
        ...

    def submissions_of_unit(self, unit: int) -> list[SubmissionRow]:
        """All that was ever handed in for a unit, oldest first."""
        ...

    def submissions_of(self, node: str, refused: bool, limit: int) -> list[SubmissionRow]:
        """What a node handed in, newest first; `refused`: only what was rejected, unsure or pulled."""
        ...

    def ledger_about(self, subject: str, but: Sequence[str], limit: int) -> list[LedgerEntry]:
        """The newest entries about a subject that are of no kind in `but`, oldest first."""
        ...

    def ledger_of_kind(self, kind: str, subjects: Sequence[str]) -> list[LedgerEntry]:
        """All entries of a kind about any of these subjects, oldest first."""
        ...

    def nodes_after(self, node: str, limit: int) -> list[NodeRow]:
        """Nodes in order of their ids, from the one after `node` on."""
        ...

    def nodes_ranked(self, by: Rank, limit: int) -> list[NodeRow]:
        """Those of a trusted role, those under a sanction, those with most credit, or any: last seen first."""
        ...

    def nodes_named(self, nodes: Sequence[str]) -> dict[str, NodeRow]: ...

    def presences_named(self, nodes: Sequence[str]) -> dict[str, Presence]: ...

    def waiting_presences(self, since_ms: int, limit: int) -> list[Presence]:
        """Nodes heard of since then that say they wait, the longest wait first."""
        ...

    def oldest_holdings(self, limit: int) -> list[Holding]:
        """Active leases with their units, the oldest first."""
        ...

    def node_counts(self) -> dict[str, int]:
        """How many nodes there are, by `role.state`."""
        ...

    def fleet(self, since_ms: int) -> list[Crew]:
        """All nodes, summed up by role, state and whether they were heard of since then; in that order."""
        ...


class Writer(Reader, Protocol):
    """A view that can be changed; nothing is visible to others before the transaction ends well."""

    def apply(self, commands: Iterable[Command]) -> None:
        """Do what the decision asked for, in order. A row that is not in the state it `was` in is an error."""
        ...

    def lock_nodes(self, nodes: Iterable[str]) -> None:
        """Let nobody else decide about these nodes until the end. Whoever touches several locks them first, at once:
        two that lock each other's in turn would wait for each other."""
        ...

    def frontier(self) -> Progress:
        """Let nobody else make units until the end, and say how things stand now. To be called last: after that,
        no row that somebody else may hold is waited for."""
        ...

    def post(self, entries: Sequence[LedgerEntry], up_to: int) -> None:
        """Append to the ledger and drop what was outgoing up to that number."""
        ...

    def put_setting(self, key: str, value: str) -> None: ...

    def put_presence(self, presence: Presence) -> None: ...

    def touch_presence(self, node: str, now_ms: int) -> None:
        """The node was heard of; what it said before stays. When it was last heard of never goes back, though two
        hubs' clocks may be a little apart."""
        ...

    def put_report(self, report: StepReport, at_ms: int) -> None: ...

    def take_nonce(self, node: str, nonce: str, expires_at_ms: int) -> bool:
        """Whether this is the first time that `node` uses `nonce`."""
        ...

    def forget_nonces(self, before_ms: int, limit: int) -> int:
        """Drop up to `limit` nonces that expired before then; how many."""
        ...

    def forget_shown(self, before_ms: int) -> int:
        """Drop what was shown of leases that ended before then and have no submission that is to be judged yet; how
        many parts."""
        ...


class Storage(Protocol):
    """A database. `durable=False` is for what may be lost with the machine (not with the process): no fsync."""

    @property
    def is_shared(self) -> bool:
        """Whether other hubs may work on it at the same time: then changes come without notice."""
        ...

    def read(self) -> AbstractContextManager[StoryReader]: ...

    def write(self, durable: bool = True, exclusive: bool = False) -> AbstractContextManager[Writer]:
        """One transaction. `exclusive`: nobody writes beside it, at no hub. Where the database is a file, that is
        always so."""
        ...

    def now_ms(self) -> int | None:
        """The database's own time, the one that all its hubs go by; None where one machine's clock will do."""
        ...

    def lead(self, name: str, holder: str, for_s: float) -> bool:
        """Whether `holder` is the one that does background work `name` for the next `for_s` seconds."""
        ...

    def resign(self, name: str, holder: str) -> None:
        """Leave the lead to others now, if `holder` has it."""
        ...

    def close(self) -> None: ...
