"""Why: what happened to a unit, to a node; every answer with the signed documents and ledger entries behind it.

    UnitStory   leases (who, when, how each ended) ─► submissions (which check, which numbers, which rule) ─► ledger
    NodeStory   what the hub holds of a node, and what it can be appealed with: leases, verdicts, sanctions

The seeds of a unit, and leases, which hold them, are told only once the unit is decided: until then somebody may still
get it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from shoal.protocol.node import NodeView
from shoal.protocol.policy import PolicyRef
from shoal.protocol.signing import Message, Milliseconds, SignedDocument
from shoal.protocol.status import LedgerEntry
from shoal.protocol.verdict import Tally

MAX_NODES_PER_PAGE = 1000

CreditState = Literal["none", "pending", "final", "void"]


class LeaseStory(Message):
    """A lease and how it ended, in a sentence. `document` is the signed lease, once its unit is decided."""

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
    """A submission, what was found, by which rule it was decided, and what that brought or cost.

    `verdict` is the validator's signed one with every check and its numbers; `receipt` the hub's signed promise.
    """

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
    """What the hub holds of a node. `refused` and `recent` are newest first, `ledger` oldest first.

    `ledger` has what made or unmade its standing: registration, vouch, rejections, sanctions, void credit, orders; what
    it earned is in its account. `record` sums what audits saw of it of late, and is what a statistical check looks at.
    """

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
    """The bodies of the rejections that a sanction followed from: those written down in the same moment."""
    return [entry.body for entry in ledger if entry.kind == "rejected" and entry.at_ms == sanction.at_ms]
