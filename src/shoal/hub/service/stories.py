"""Why: everything that is written down about a unit or a node, with the documents that prove it.

Anyone may ask, so nothing that must stay secret is told: the seeds of a unit, and the leases that hold them, only once
the unit is decided and nobody can get it any more; where a node is, never.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shoal.hub.service.context import Context, node_view, shared
from shoal.hub.service.upkeep import Posting
from shoal.hub.state import draws
from shoal.hub.state.commands import Refusal
from shoal.hub.state.machines import LeaseState, SubmissionState, UnitState
from shoal.hub.state.orders import REVOKED
from shoal.hub.state.rows import LeaseRow, NodeRow, SubmissionRow, UnitRow
from shoal.hub.state.units import TRUSTED_AFTER, VOID_ATTEMPTS, VOID_INCARNATION, VOID_STALE, is_entrusted
from shoal.hub.storage import Reader
from shoal.ledger import EVIDENCED, credit_for, node_subject, unit_subject
from shoal.protocol.node import NodeState
from shoal.protocol.signing import SignedDocument
from shoal.protocol.status import (
    Evidence,
    EvidencePage,
    LeaseStory,
    LedgerEntry,
    NodePage,
    NodeStory,
    SubmissionStory,
    UnitStory,
)
from shoal.protocol.verdict import Outcome
from shoal.runtime.text import count_of

LEASES_SHOWN = 50
RECENT_SHOWN = 20
REFUSED_SHOWN = 50
ENTRIES_SHOWN = 200
EARNINGS = ("credit", "pending")
"""Kinds of entries that a node has by the thousand; its account sums them up."""


class Stories:
    def __init__(self, context: Context, posting: Posting) -> None:
        self._context = context
        self._posting = posting

    def unit(self, number: int) -> UnitStory:
        with self._context.storage.read() as reader:
            if reader.unit(number) is None:
                raise Refusal(404, "unit.unknown", f"there is no unit {number} in this run (yet)")
        self._posting.post_for_reader()
        with self._context.storage.read() as reader:
            unit = reader.unit(number)
            assert unit is not None, "no unit is ever taken back"
            entries = reader.ledger_about(unit_subject(number), (), ENTRIES_SHOWN)
            leases, rows = reader.leases_of_unit(number), reader.submissions_of_unit(number)
            told = self._submissions(reader, rows)
        decided = is_decided(unit)
        config = self._context.config
        seeds = draws.unit_seeds(self._context.secret, config.run_id, number, config.run.group_size) if decided else ()
        derived = {
            "run": config.run_id, "sentence": unit_sentence(unit, leases), "seeds": seeds,
            "leases": tuple(_lease(row, decided) for row in leases), "submissions": told, "ledger": tuple(entries),
        }  # fmt: skip
        return UnitStory(**{**shared(unit, UnitStory), **derived})

    def node(self, node: str) -> NodeStory:
        with self._context.storage.read() as reader:
            if reader.node(node) is None:
                raise Refusal(404, "node.unknown", f"there is no node {node[:64]!r} in this run")
        self._posting.post_for_reader()
        with self._context.storage.read() as reader:
            row = reader.node(node)
            assert row is not None, "no node is ever taken out"
            view = node_view(row, reader.presence(node), self._context.rules, self._context.clock.now_ms())
            leases = reader.leases_of(node, LEASES_SHOWN)
            recent = self._submissions(reader, reader.submissions_of(node, False, RECENT_SHOWN))
            refused = self._submissions(reader, reader.submissions_of(node, True, REFUSED_SHOWN))
            entries = reader.ledger_about(node_subject(node), EARNINGS, ENTRIES_SHOWN)
        derived = {
            "run": self._context.config.run_id, "node": view, "sentence": node_sentence(row),
            "leases": tuple(_lease(lease, decided=False) for lease in leases), "recent": recent, "refused": refused,
            "ledger": tuple(entries),
        }  # fmt: skip
        return NodeStory(**{**shared(row, NodeStory), **derived})

    def nodes(self, after: str, limit: int) -> NodePage:
        now_ms = self._context.clock.now_ms()
        with self._context.storage.read() as reader:
            rows = reader.nodes_after(after, limit)
            presences = reader.presences_named([row.node for row in rows])
            counts = reader.node_counts()
        return NodePage(
            nodes=tuple(node_view(row, presences.get(row.node), self._context.rules, now_ms) for row in rows),
            counts=counts,
        )

    def evidence(self, after: int, limit: int) -> EvidencePage:
        self._posting.post_for_reader()
        with self._context.storage.read() as reader:
            return EvidencePage(evidence=tuple(evidence_of(reader, reader.ledger_after(after, limit))))

    def _submissions(self, reader: Reader, rows: Sequence[SubmissionRow]) -> tuple[SubmissionStory, ...]:
        voids = reader.ledger_of_kind("void", list(dict.fromkeys(unit_subject(row.unit) for row in rows)))
        voided = {entry.body.get("submission") for entry in voids}
        verdicts = reader.verdicts_of([row.submission for row in rows])
        return tuple(_submission(row, verdicts.get(row.submission), row.submission in voided) for row in rows)


def _submission(row: SubmissionRow, verdict: str | None, is_void: bool) -> SubmissionStory:
    """What became of a submission; of its credit, by the row while it is pending, afterwards by the ledger."""
    signed = None if verdict is None else SignedDocument.model_validate_json(verdict)
    severity = "" if signed is None else str(signed.document.get("severity") or "")
    credit_state = "none" if row.generated_tokens == 0 else "void" if is_void else "final"
    derived = {
        "rule": rule_of(row, severity),
        "credit": credit_for(row.generated_tokens),
        "credit_state": "pending" if row.generated_tokens and row.matures_at_ms is not None else credit_state,
        "receipt": SignedDocument.model_validate_json(row.receipt) if row.receipt else None,
        "verdict": signed,
    }
    return SubmissionStory(**{**shared(row, SubmissionStory), **derived})


def evidence_of(reader: Reader, entries: Iterable[LedgerEntry]) -> Iterator[Evidence]:
    """The documents that these entries point to: of each that gives or refuses credit."""
    rows = {entry.index: str(entry.body.get("submission")) for entry in entries if entry.kind in EVIDENCED}
    names = list(dict.fromkeys(rows.values()))
    submissions, verdicts = reader.submissions_named(names), reader.verdicts_of(names)
    for index, name in rows.items():
        row = submissions.get(name)
        receipt, verdict = "" if row is None else row.receipt, verdicts.get(name)
        yield Evidence(
            row=index,
            receipt=SignedDocument.model_validate_json(receipt) if receipt else None,
            verdict=SignedDocument.model_validate_json(verdict) if verdict else None,
        )


def is_decided(unit: UnitRow) -> bool:
    """Whether nobody can get the unit any more: it is trained on, in a batch, dropped or void."""
    if unit.state == UnitState.ACCEPTED:
        return unit.step is not None  # before that its group may still be pulled, and the unit given out again
    return unit.state in (UnitState.TRAINED, UnitState.DROPPED, UnitState.VOID)


def _lease(row: LeaseRow, decided: bool) -> LeaseStory:
    document = SignedDocument.model_validate_json(row.document) if decided and row.document else None
    derived = {"policy": row.policy, "sentence": lease_sentence(row), "document": document}
    return LeaseStory(**{**shared(row, LeaseStory), **derived})


def lease_sentence(row: LeaseRow) -> str:
    early = row.ended_at_ms is not None and row.ended_at_ms < row.deadline_ms
    return {
        LeaseState.ACTIVE: "its node works on it",
        LeaseState.SUBMITTED: "answered with a submission",
        LeaseState.EXPIRED: "its node had lost it, or was not heard of any more" if early else "its deadline passed",
        LeaseState.RELEASED: "its node gave it back",
        LeaseState.VOID: "void: its node was banned, or its policy withdrawn",
    }[row.state]


def unit_sentence(unit: UnitRow, leases: Sequence[LeaseRow]) -> str:
    if unit.state == UnitState.OPEN and is_entrusted(unit):
        return (
            f"waits for a validator to generate it, after {count_of(unit.failures, 'attempt')} that nobody could judge"
        )
    if unit.state == UnitState.OPEN:
        return (
            "waits for a worker" if not leases else f"waits for a worker again, after {count_of(len(leases), 'lease')}"
        )
    if unit.state == UnitState.LEASED:
        return f"is with node {leases[-1].node}" if leases else "is with a worker"
    if unit.state == UnitState.ACCEPTED:
        return "accepted; waits for a batch" if unit.step is None else f"in the batch of step {unit.step}"
    return {
        UnitState.SUBMITTED: "submitted; waits for its verdict",
        UnitState.TRAINED: f"trained on in step {unit.step}",
        UnitState.DROPPED: "accepted and paid, but not trained on: the rewards of its group are equal, so it "
        f"teaches nothing; another unit took its place in step {unit.lost_step}",
        UnitState.VOID: VOID_SENTENCES.get(unit.reason, f"void ({unit.reason})"),
    }[unit.state]


VOID_SENTENCES = {
    VOID_ATTEMPTS: "given up: the validators themselves could not generate or score it; no worker is blamed",
    VOID_STALE: "void: the policy that generated it is too old to train on; what was accepted is paid all the same",
    VOID_INCARNATION: "void: the trainer began a new incarnation, and groups of the old one fit nowhere",
}


def rule_of(row: SubmissionRow, severity: str) -> str:
    """Which rule decided about a submission, and what it costs or brings, in words."""
    if row.state == SubmissionState.REJECTED:
        return {
            "certain": "one failure of this kind cannot happen by accident: the submission is worth nothing and its "
            "node is banned",
            "statistical": "honest work fails this check about once in ten thousand audits: the submission is worth "
            "nothing, its node is on probation and suspended, and banned if work leased after that fails, too",
        }.get(severity, "a soft rejection: this submission is worth nothing; it costs no trust, unless several follow")
    if row.state == SubmissionState.UNSURE and severity == "statistical":
        return (
            "most machines of its kind fail this check, so it says nothing about this one: no credit, no strike; the "
            "unit is given out again, and an alarm tells the run's owner to calibrate that kind"
        )
    return {
        SubmissionState.RECEIVED.value: "not judged yet: it waits for a validator",
        SubmissionState.AUDITING.value: "not judged yet: a validator is at it",
        Outcome.ACCEPTED.value: f"accepted by a {row.depth} audit: one credit for each generated token",
        Outcome.UNSURE.value: "nobody can tell whether it is honest work: no credit, no strike; the unit is given out "
        f"again, and after {TRUSTED_AFTER} unsure attempts a validator generates it",
        SubmissionState.PULLED.value: "was accepted; then its node failed an audit before this group was in a batch: "
        "it is not trained on",
    }[row.state.value]


def node_sentence(row: NodeRow) -> str:
    if row.state is NodeState.BANNED:
        if row.reason == REVOKED:
            return f"banned: {row.reason}, and that is for good"
        return f"banned: {row.reason}; only the run's owner can pardon it"
    if row.state is NodeState.SUSPENDED:
        again = f", {row.suspensions} times so far" if row.suspensions > 1 else ""
        end = "it ends by itself" if row.until_ms is not None else "only the run's owner can pardon it"
        return f"suspended{again}: {row.reason}; {end}"
    if row.role != "worker":
        return f"a {row.role} that the root key certified"
    if row.on_probation:
        return f"on probation: {row.passed} full audits passed since it came, or since its last strike"
    return f"established: {row.streak} full audits passed in a row"
