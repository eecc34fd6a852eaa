"""Rows as the decision core sees them: frozen, loaded in one transaction, changed only through `to`.

    unit        open ─► leased ─► submitted ─► accepted ─► trained
                  ▲  ◄────┘  ◄───────┘  └────► dropped          (any of the alive ones ─► void)
                  │  ◄───────────────────────┘ pulled: its node failed an audit before the group was in a batch
                  └──────────────────► submitted                 a late submission whose unit is still free

    lease       active ─► submitted | expired | released | void        expired ─► submitted (late, unit still free)
    submission  received ⇄ auditing ─► accepted | rejected | unsure        accepted ─► pulled
    node        active ⇄ suspended ─► banned        banned ─► active: a pardon by the run's owner
    evaluation  open ⇄ claimed ─► done | void        open ─► void: overtaken by a newer version

An illegal move is an exception, never a row in the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Literal, Self

from shoal.errors import ShoalError
from shoal.protocol import Depth, GainEvidence, NodeState, PolicyRef, Role, Tally
from shoal.protocol.node import WORKERS

AuditPolicy = Literal["all", "reputation"]

PROBATION_AUDITS = 8  # full audits that a node must have passed to be established, and again after a strike


# Each value is its name in lower case.
UnitState = StrEnum("UnitState", "OPEN LEASED SUBMITTED ACCEPTED DROPPED TRAINED VOID")  # dropped: equal rewards
LeaseState = StrEnum("LeaseState", "ACTIVE SUBMITTED EXPIRED RELEASED VOID")
SubmissionState = StrEnum("SubmissionState", "RECEIVED AUDITING ACCEPTED REJECTED UNSURE PULLED")
EvaluationState = StrEnum("EvaluationState", "OPEN CLAIMED DONE VOID")
Pool = StrEnum("Pool", "NORMAL EASY HARD RETIRED")

UNDECIDED_UNITS = frozenset({UnitState.OPEN, UnitState.LEASED, UnitState.SUBMITTED})
UNDECIDED_SUBMISSIONS = frozenset({SubmissionState.RECEIVED, SubmissionState.AUDITING})


class IllegalMove(ShoalError):
    """A defect of the hub itself."""


@dataclass(frozen=True)
class Movable:
    """A row with a state; final states have no `MOVES`."""

    MOVES: ClassVar[Mapping[Any, set[Any]]]

    def to(self, state: StrEnum, **changes: Any) -> Self:
        before = vars(self)["state"]
        if state not in self.MOVES.get(before, ()):
            named = next(iter(vars(self).values()))
            raise IllegalMove(f"{type(self).__name__} {named} cannot go from {before.value} to {state.value}")
        return replace(self, **{"state": state, **changes})


class ByPolicy:
    incarnation: int
    version: int
    digest: str

    @property
    def policy(self) -> PolicyRef:
        return PolicyRef(incarnation=self.incarnation, version=self.version, digest=self.digest)


@dataclass(frozen=True)
class PoolRules:
    """Tasks with a recent pass rate of `easy` or more, or `hard` or less; the shares of them, when drawn, that are
    taken: a task that most groups solve, or fail, teaches little."""

    retire_after: int = 2
    easy: float = 0.9
    hard: float = 0.05
    easy_share: float = 0.25
    hard_share: float = 0.5


@dataclass(frozen=True)
class EvaluationPlan:
    """Validators measure one version in `every`, and the last, on so many of the held-out tasks."""

    every: int
    tasks: int


@dataclass(frozen=True)
class Rules:
    steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    max_new_tokens: int
    refill_cap: int
    leases_per_node: int
    lease_ms: int
    audit_ms: int
    audit: AuditPolicy = "all"
    drop_equal: Literal["task", "total"] = "task"
    credit_window_ms: int = 600_000
    newcomer_share: float = 0.25
    trusted_audit: float = 0.05
    lease_hard_ms: int = 600_000
    proof_rows: int = 32
    pools: PoolRules | None = None
    evaluation: EvaluationPlan | None = None


@dataclass(frozen=True)
class RunProgress:
    """`policy` is the newest one; `next_step` the first step without a batch; `dropped` (equal rewards) and `failed`
    (too many attempts) count the units lost since the batch before it."""

    policy: PolicyRef | None = None
    next_step: int = 0
    next_unit: int = 0
    alive: int = 0
    dropped: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Moment:
    rules: Rules
    progress: RunProgress
    now_ms: int


@dataclass(frozen=True)
class UnitRow(Movable):
    """`task` never changes. `failures` counts attempts that nobody could judge (`units`); `attempt` numbers its leases.
    `incarnation`, `version`, `submission` are of the submission that fills it; `step` is its batch; during `lost_step`
    it was dropped or failed."""

    MOVES: ClassVar[Mapping[Any, set[Any]]] = {
        UnitState.OPEN: {UnitState.LEASED, UnitState.SUBMITTED, UnitState.VOID},
        UnitState.LEASED: {UnitState.SUBMITTED, UnitState.OPEN, UnitState.VOID},
        UnitState.SUBMITTED: {UnitState.ACCEPTED, UnitState.DROPPED, UnitState.OPEN, UnitState.VOID},
        UnitState.ACCEPTED: {UnitState.TRAINED, UnitState.OPEN, UnitState.VOID},
    }

    unit: int
    task: str
    state: UnitState = UnitState.OPEN
    attempt: int = 0
    failures: int = 0
    incarnation: int | None = None
    version: int | None = None
    submission: str | None = None
    step: int | None = None
    lost_step: int | None = None
    reason: str = ""

    @property
    def alive(self) -> bool:
        return self.state in UNDECIDED_UNITS or (self.state == UnitState.ACCEPTED and self.step is None)

    def reopened(self) -> UnitRow:
        """Same task, same seeds, nothing of the failed attempt."""
        return self.to(UnitState.OPEN, incarnation=None, version=None, submission=None)


@dataclass(frozen=True)
class LeaseRow(Movable, ByPolicy):
    """`document` is the signed lease as JSON: an audit carries it unchanged. `deadline_ms` is extended while `progress`
    (tokens) grows, up to the hard one. `granted` is how many leases its request got: they are generated together and
    share their time. A `brief` one ends after `lease_s`, whatever its progress."""

    MOVES: ClassVar[Mapping[Any, set[Any]]] = {
        LeaseState.ACTIVE: set(LeaseState) - {LeaseState.ACTIVE},
        LeaseState.EXPIRED: {LeaseState.SUBMITTED},
    }

    lease: str
    unit: int
    node: str
    attempt: int
    request: str
    incarnation: int
    version: int
    digest: str
    issued_at_ms: int
    deadline_ms: int
    state: LeaseState = LeaseState.ACTIVE
    document: str = ""
    hard_deadline_ms: int = 0
    progress: int = 0
    ended_at_ms: int | None = None
    granted: int = 1
    brief: bool = False


@dataclass(frozen=True)
class ShownRow:
    """A part of what a node on probation showed of a lease. `tokens`: how many of each rollout are there with it;
    `body`: the packed `ShownProgress` that it added."""

    lease: str
    part: int
    tokens: tuple[int, ...]
    body: bytes = b""


@dataclass(frozen=True)
class SubmissionRow(Movable, ByPolicy):
    """Named by the hash of its bytes; `receipt` is the signed promise as JSON. `depth` is how it is to be audited and,
    once decided, how it was. Until `matures_at_ms` its credit is pending. `tokens` are those of a prefill, prompts
    included. `pass_rate` is how much of its task the group solved, 0 to 1."""

    MOVES: ClassVar[Mapping[Any, set[Any]]] = {
        SubmissionState.RECEIVED: set(SubmissionState) - {SubmissionState.RECEIVED, SubmissionState.PULLED},
        SubmissionState.AUDITING: set(SubmissionState) - {SubmissionState.AUDITING, SubmissionState.PULLED},
        SubmissionState.ACCEPTED: {SubmissionState.PULLED},
    }

    submission: str
    lease: str
    unit: int
    node: str
    incarnation: int
    version: int
    digest: str
    size_bytes: int
    received_at_ms: int
    state: SubmissionState = SubmissionState.RECEIVED
    receipt: str = ""
    validator: str | None = None
    claimed_until_ms: int | None = None
    rewards: tuple[float, ...] = ()
    generated_tokens: int = 0
    reason: str = ""
    message: str = ""
    decided_at_ms: int | None = None
    depth: Depth = "full"
    matures_at_ms: int | None = None
    pass_rate: float | None = None
    tokens: int = 0


@dataclass(frozen=True)
class TraceRow:
    """A packed `TokenTrace` of a judged submission, until it is among the records."""

    submission: str
    body: bytes


@dataclass(frozen=True)
class NodeRow(Movable):
    """`certain` and `statistical` are strikes by severity; `streak` counts full audits passed since the last rejection,
    `passed` since the last strike; `record` sums what passed audits saw recently. `pending` is credit that a failed
    audit would still take; `owner` vouched for it by the signed `vouch` (JSON). `window`: leases it may hold (0: a
    newcomer's); `lapsed`: how many it let lapse, `lapses` of these in a row; `pace_ms`: what a group takes it.
    `until_ms` ends the present one of its `suspensions`. `soft`: rejections without a strike since the last accepted
    group. `network` is where it last asked from (/24 or /48; empty: the hub's own machine), told to nobody; `kind` what
    it last asked to generate with. `failed_check` is the statistical check that it failed last, at `failed_at_ms`.
    `doubt` and `gains`: see `reputation`. `expires_at_ms` is when its certificate ends."""

    MOVES: ClassVar[Mapping[Any, set[Any]]] = {
        NodeState.ACTIVE: {NodeState.SUSPENDED, NodeState.BANNED},
        NodeState.SUSPENDED: {NodeState.ACTIVE, NodeState.BANNED},
        NodeState.BANNED: {NodeState.ACTIVE},
    }

    node: str
    public_key: str
    role: Role
    name: str
    registered_at_ms: int
    software: str = ""
    state: NodeState = NodeState.ACTIVE
    accepted: int = 0
    rejected: int = 0
    unsure: int = 0
    certain: int = 0
    statistical: int = 0
    credit: int = 0
    reason: str = ""
    pending: int = 0
    streak: int = 0
    passed: int = 0
    record: Tally = field(default_factory=Tally)
    owner: str = ""
    window: int = 0
    lapsed: int = 0
    lapses: int = 0
    pace_ms: int = 0
    suspensions: int = 0
    until_ms: int | None = None
    soft: int = 0
    vouch: str = ""
    network: str = ""
    kind: str = ""
    failed_check: str = ""
    failed_at_ms: int = 0
    doubt: float = 0.0
    gains: GainEvidence = field(default_factory=GainEvidence)
    expires_at_ms: int | None = None

    @property
    def on_chain(self) -> bool:
        """Whether the ledger has rows about it. Keys cost nothing, rows are kept for ever: a worker gets there with its
        first accepted group."""
        return self.role != "worker" or self.accepted > 0

    @property
    def is_ours(self) -> bool:
        """A validator that generates a unit is believed, and earns nothing."""
        return self.role not in WORKERS

    @property
    def certified(self) -> bool:
        """A trusted worker: the root key certified it, so that its groups are audited by sample. Never a newcomer."""
        return self.role == "trusted"

    def is_unpaid(self, depth: Depth) -> bool:
        """What is believed without a full audit earns nothing, unless the node's own record was the reason."""
        return self.is_ours or (self.certified and depth == "light")

    @property
    def unproven(self) -> bool:
        """Passed no full audit, or none since a strike."""
        return self.role == "worker" and self.passed == 0

    @property
    def on_probation(self) -> bool:
        return self.role == "worker" and self.passed < PROBATION_AUDITS

    @property
    def strikes(self) -> int:
        return self.certain + self.statistical


@dataclass(frozen=True)
class InHand:
    """Units of nodes on probation, leased or not judged yet: one node's `own`, by network, and of unproven nodes by
    network; `long` are leases of theirs that are not `brief`."""

    own: int = 0
    networks: Mapping[str, int] = field(default_factory=dict)
    unproven: Mapping[str, int] = field(default_factory=dict)
    long: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Filled:
    unit: UnitRow
    submission: SubmissionRow


@dataclass(frozen=True)
class Holding:
    lease: LeaseRow
    unit: UnitRow


@dataclass(frozen=True)
class TaskRow:
    """Groups seen, recent pass rate, groups in a row that solved it wholly, and its pool."""

    task: str
    groups: int = 0
    rate: float = 0.0
    solved: int = 0
    pool: Pool = Pool.NORMAL
    last_unit: int = 0


@dataclass(frozen=True)
class EvaluationRow(Movable, ByPolicy):
    """A slice of the evaluation of one version: `tasks` held-out tasks from `first` on. `tries` counts what went wrong;
    once it is done it has `scores` and `document`, the signed report as JSON."""

    MOVES: ClassVar[Mapping[Any, set[Any]]] = {
        EvaluationState.OPEN: {EvaluationState.CLAIMED, EvaluationState.DONE, EvaluationState.VOID},
        EvaluationState.CLAIMED: {EvaluationState.OPEN, EvaluationState.DONE, EvaluationState.VOID},
    }

    incarnation: int
    version: int
    first: int
    digest: str
    tasks: int
    state: EvaluationState = EvaluationState.OPEN
    validator: str | None = None
    claimed_until_ms: int | None = None
    tries: int = 0
    scores: tuple[float | None, ...] = ()
    document: str = ""
    decided_at_ms: int | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        return self.incarnation, self.version, self.first
