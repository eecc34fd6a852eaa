"""The run as a person sees it: ledger entries, who waits for whom, recent verdicts; and why something happened.

Seeds of a unit, and leases (which contain them), are shown only when the unit is decided: until then it may be issued
again.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from shoal.protocol.batch import StepReport
from shoal.protocol.node import NodeView
from shoal.protocol.policy import HEX_256, LedgerHead, PolicyRef
from shoal.protocol.signing import Document, Message, Milliseconds, SignedDocument
from shoal.protocol.verdict import Evaluation, Tally

Conduct = Literal["running", "paused", "draining"]


class LedgerEntry(Message):
    """One row of the hash chain: `hash` covers index, previous hash, kind, body and time."""

    index: int = Field(ge=0)
    kind: str
    body: dict[str, Any]
    at_ms: Milliseconds
    previous: str = Field(pattern=HEX_256)
    hash: str = Field(pattern=HEX_256)


class LedgerPage(Message):
    entries: tuple[LedgerEntry, ...]
    head: LedgerHead


class Wait(Message):
    who: str
    what: str
    since_ms: Milliseconds


class RecentVerdict(Message):
    unit: int
    node: str
    outcome: str
    reason: str
    message: str
    decided_at_ms: Milliseconds


class OwnerOrders(Message):
    """The owner's orders, since when and why. `drained`: draining is complete."""

    conduct: Conduct = "running"
    since_ms: Milliseconds = 0
    reason: str = ""
    drained: bool = False


class RunStatus(Message):
    """Everything `shoal status` and the dashboard show. `nodes`: the most important ones if there are very many;
    `node_counts`: all, by `role.state`. `outbox`: entries that wait to be appended to the ledger. `pools`: tasks by
    difficulty, if they are drawn by it. `unscored`: groups that the validators could not score since they were started.
    `standstill`: who is missing to train, check or work, why, and what to do."""

    run: str
    name: str
    now_ms: Milliseconds
    finished: bool
    steps: int
    step: int
    policy: PolicyRef | None
    max_staleness: int
    units: dict[str, int]
    submissions: dict[str, int]
    nodes: tuple[NodeView, ...]
    waits: tuple[Wait, ...]
    verdicts: tuple[RecentVerdict, ...]
    reports: tuple[StepReport, ...]
    alarms: tuple[str, ...]
    ledger: LedgerHead
    standing: OwnerOrders = Field(default=OwnerOrders())
    node_counts: dict[str, int] = Field(default={})
    outbox: int = Field(default=0)
    outbox_since_ms: Milliseconds | None = Field(default=None)
    pools: dict[str, int] = Field(default={})
    evaluations: tuple[Evaluation, ...] = Field(default=())
    unscored: int = Field(default=0, ge=0)
    standstill: tuple[str, ...] = Field(default=())


class Problem(Message):
    """The body of every error answer: a code for programs, a message for people. `clock`: with `auth.skew`."""

    code: str
    message: str
    clock: SignedDocument | None = None


MAX_EVIDENCE_PER_PAGE = 200


class Evidence(Message):
    """The documents behind ledger row `row`: the hub's signed `Receipt`, the validator's signed `Verdict`."""

    row: int = Field(ge=0)
    receipt: SignedDocument | None = None
    verdict: SignedDocument | None = None


class EvidencePage(Message):
    evidence: tuple[Evidence, ...] = Field(max_length=MAX_EVIDENCE_PER_PAGE)


class WitnessedHead(Document):
    """A witness says: at this time the ledger ended with this row, and all rows that I saw before lead to it."""

    kind: ClassVar[str] = "ledger-witness"
    run: str
    index: int = Field(ge=0)
    hash: str = Field(pattern=HEX_256)
    at_ms: Milliseconds = Field(ge=0)


MAX_NODES_PER_PAGE = 1000

CreditState = Literal["none", "pending", "final", "void"]


class LeaseStory(Message):
    """A lease and how it ended. `document` is the signed lease, once its unit is decided."""

    lease: str
    unit: int
    node: str
    attempt: int
    policy: PolicyRef
    issued_at_ms: Milliseconds
    deadline_ms: Milliseconds
    hard_deadline_ms: Milliseconds
    progress: int
    state: str
    ended_at_ms: Milliseconds | None
    sentence: str
    document: SignedDocument | None = None


class SubmissionStory(Message):
    """A submission, what was found, the rule that decided, and its credit. `verdict` is the validator's signed one;
    `receipt` the hub's."""

    submission: str
    lease: str
    unit: int
    node: str
    state: str
    size_bytes: int
    received_at_ms: Milliseconds
    decided_at_ms: Milliseconds | None
    validator: str | None
    depth: str
    reason: str
    message: str
    rule: str
    generated_tokens: int
    rewards: tuple[float, ...]
    credit: int
    credit_state: CreditState
    matures_at_ms: Milliseconds | None
    receipt: SignedDocument | None = None
    verdict: SignedDocument | None = None


class UnitStory(Message):
    """Everything that happened to one unit, oldest first. `seeds` are empty until it is decided."""

    run: str
    unit: int
    task: str
    state: str
    sentence: str
    failures: int
    version: int | None
    step: int | None
    lost_step: int | None
    seeds: tuple[str, ...] = ()
    leases: tuple[LeaseStory, ...]
    submissions: tuple[SubmissionStory, ...]
    ledger: tuple[LedgerEntry, ...]


class NodeStory(Message):
    """What the hub holds of a node, for an appeal. `refused` and `recent`: newest first. `ledger`: what changed its
    standing, oldest first. `record`: sums of recent audits."""

    run: str
    node: NodeView
    public_key: str
    registered_at_ms: Milliseconds
    sentence: str
    streak: int
    passed: int
    certain: int
    statistical: int
    lapsed: int
    pace_ms: Milliseconds
    record: Tally
    leases: tuple[LeaseStory, ...]
    recent: tuple[SubmissionStory, ...]
    refused: tuple[SubmissionStory, ...]
    ledger: tuple[LedgerEntry, ...]


class NodePage(Message):
    """Nodes in order of their ids; ask for more with `after` the last one. `counts` are of all, `role.state`."""

    nodes: tuple[NodeView, ...] = Field(max_length=MAX_NODES_PER_PAGE)
    counts: dict[str, int]


def behind(sanction: LedgerEntry, ledger: tuple[LedgerEntry, ...]) -> list[dict[str, Any]]:
    """The bodies of the rejections behind a sanction: those of the same moment."""
    return [entry.body for entry in ledger if entry.kind == "rejected" and entry.at_ms == sanction.at_ms]
