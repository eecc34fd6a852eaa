"""Rows as the decision core sees them: frozen, loaded in one transaction, changed only through `to`.

`row.to(state, **changes)` is the only way to another state; it consults the tables in `machines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from shoal.hub.state import machines
from shoal.hub.state.machines import EvaluationState, LeaseState, SubmissionState, UnitState, check_move
from shoal.protocol import Depth, NodeState, PolicyRef, Role, Tally
from shoal.protocol.verdict import GainEvidence

AuditPolicy = Literal["all", "reputation"]

PROBATION_AUDITS = 8
"""Full audits that a node must have passed before it counts as established, and again after a strike."""


class Pool(StrEnum):
    NORMAL = "normal"
    EASY = "easy"
    HARD = "hard"
    RETIRED = "retired"


@dataclass(frozen=True)
class PoolRules:
    """When a task counts as easy, hard or solved, and how many of the easy and the hard ones that are drawn are taken
    (`environments.settings.PoolSettings`)."""

    retire_after: int = 2
    easy: float = 0.9
    hard: float = 0.05
    easy_share: float = 0.25
    hard_share: float = 0.5


@dataclass(frozen=True)
class EvaluationPlan:
    """Which versions validators measure, and on how many of the held-out tasks: every so many steps, and the last."""

    every: int
    tasks: int


@dataclass(frozen=True)
class Rules:
    """The settings that decide: those of the run, and the hub's own."""

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
    lease_hard_ms: int = 600_000
    proof_rows: int = 32
    pools: PoolRules | None = None
    evaluation: EvaluationPlan | None = None


@dataclass(frozen=True)
class Progress:
    """Where the run stands, in one transaction. `policy` is the newest one; `next_step` the first step without a batch;
    `dropped` and `failed` count the units that were lost (equal rewards, too many attempts) since the batch before
    `next_step` was written."""

    policy: PolicyRef | None = None
    next_step: int = 0
    next_unit: int = 0
    alive: int = 0
    dropped: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Moment:
    """What every decision looks at: the rules, where the run stands, and the time."""

    rules: Rules
    progress: Progress
    now_ms: int


@dataclass(frozen=True)
class UnitRow:
    """One group of one task. `task` never changes. `failures` counts attempts that nobody could judge (`units`);
    `attempt` numbers its leases. `incarnation`, `version`, `submission` belong to the submission that fills it; `step`
    is the batch it is in; `lost_step` the step during which it was dropped or failed."""

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
        return self.state in machines.UNDECIDED_UNITS or (self.state == UnitState.ACCEPTED and self.step is None)

    def to(self, state: UnitState, **changes: Any) -> UnitRow:
        check_move(machines.UNIT_MOVES, self.state, state, f"unit {self.unit}")
        return replace(self, state=state, **changes)

    def reopened(self) -> UnitRow:
        """Free for another lease: same task, same seeds, nothing of the failed attempt is kept."""
        return self.to(UnitState.OPEN, incarnation=None, version=None, submission=None)


@dataclass(frozen=True)
class LeaseRow:
    """A unit given to a node. `document` is the signed lease as JSON: an audit carries it unchanged. `deadline_ms` is
    the soft one: it moves on while `progress` (tokens, as the node says) grows, up to the hard one. `granted` is how
    many leases its request got: they are generated together, so what they take is shared by them. A `brief` one ends
    after `lease_s`, whatever progress is made (`newcomers.is_brief`)."""

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

    @property
    def policy(self) -> PolicyRef:
        return PolicyRef(incarnation=self.incarnation, version=self.version, digest=self.digest)

    def to(self, state: LeaseState, at_ms: int) -> LeaseRow:
        check_move(machines.LEASE_MOVES, self.state, state, f"lease {self.lease}")
        return replace(self, state=state, ended_at_ms=at_ms)


@dataclass(frozen=True)
class ShownRow:
    """A part of what a node on probation showed of a lease at work. `tokens` has how many of each rollout are there
    with it; `body` is the packed `ShownProgress` of what it added."""

    lease: str
    part: int
    tokens: tuple[int, ...]
    body: bytes = b""


@dataclass(frozen=True)
class SubmissionRow:
    """Bytes on the hub's disk, named by their hash; `receipt` is the signed promise as JSON. `depth` is how it is to be
    audited and, once it is decided, how it was. While its credit is pending, `matures_at_ms` says until when. `tokens`
    is how many a prefill of it has, prompts included. `pass_rate` is how much of its task the group solved, 0 to 1;
    rows of older versions have none."""

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

    @property
    def policy(self) -> PolicyRef:
        return PolicyRef(incarnation=self.incarnation, version=self.version, digest=self.digest)

    def to(self, state: SubmissionState, **changes: Any) -> SubmissionRow:
        check_move(machines.SUBMISSION_MOVES, self.state, state, f"submission {self.submission[:16]}")
        return replace(self, state=state, **changes)


@dataclass(frozen=True)
class NodeRow:
    """A registered key and its record. `certain` and `statistical` are its strikes by severity. `streak` counts full
    audits passed since the last rejection, `passed` those since the last strike. `record` sums what passed audits saw
    of it recently. `pending` is credit that a failed audit would still take. `owner` is the key that vouched for it by
    the signed `vouch` (JSON). `window` is how many leases it may hold (0: what a newcomer may), `lapsed` how many it
    let lapse, `lapses` of these in a row, `pace_ms` what a group takes it, from lease to submission. `until_ms` ends
    the present suspension, of which there were `suspensions`. `soft` counts rejections without a strike since the last
    group that was accepted. `network` is where it last asked for work from (/24 or /48; empty: from the hub's own
    machine); nobody is told. `kind` is what it last asked to generate with. `failed_check` is the statistical check
    that it failed last, at `failed_at_ms`. `doubt` grows with every unsure group and falls with every accepted one
    (`reputation`). `gains` is the evidence that it buys reward by tolerance."""

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

    @property
    def on_chain(self) -> bool:
        """Whether the ledger has rows about it: a worker from its first accepted group on. Keys cost nothing, rows of
        the ledger are kept for ever."""
        return self.role != "worker" or self.accepted > 0

    @property
    def trusted(self) -> bool:
        """Whether the root key certified it: a validator that generates a unit is believed, and earns nothing."""
        return self.role != "worker"

    @property
    def unproven(self) -> bool:
        """Whether nothing speaks for this worker yet: no full audit passed, or none since a strike."""
        return self.role == "worker" and self.passed == 0

    @property
    def on_probation(self) -> bool:
        return self.role == "worker" and self.passed < PROBATION_AUDITS

    @property
    def strikes(self) -> int:
        return self.certain + self.statistical

    def to(self, state: NodeState, **changes: Any) -> NodeRow:
        check_move(machines.NODE_MOVES, self.state, state, f"node {self.node}")
        return replace(self, state=state, **changes)


@dataclass(frozen=True)
class InHand:
    """Units in the hands of nodes on probation, leased, or submitted and not judged yet: of one of them (`own`), by
    network, and those of unproven nodes by network; `long` are leases of theirs that are not `brief`."""

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
    """How a task did recently: groups seen, recent pass rate, groups in a row that solved it wholly, and its pool."""

    task: str
    groups: int = 0
    rate: float = 0.0
    solved: int = 0
    pool: Pool = Pool.NORMAL
    last_unit: int = 0


@dataclass(frozen=True)
class EvaluationRow:
    """A slice of the evaluation of one version: the held-out tasks from `first` on, `tasks` of them. `tries` counts
    what went wrong with it; once it is done it has `scores` and `document`, the signed report as JSON."""

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
    def policy(self) -> PolicyRef:
        return PolicyRef(incarnation=self.incarnation, version=self.version, digest=self.digest)

    @property
    def key(self) -> tuple[int, int, int]:
        return self.incarnation, self.version, self.first

    def to(self, state: EvaluationState, **changes: Any) -> EvaluationRow:
        who = f"evaluation {self.incarnation}.{self.version} at {self.first}"
        check_move(machines.EVALUATION_MOVES, self.state, state, who)
        return replace(self, state=state, **changes)
