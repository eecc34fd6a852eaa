"""Everything that is written down about a unit or a node, with the documents that prove it.

Anyone may ask. So the seeds of a unit, and the leases that hold them, are told only once nobody can get the unit any
more; where a node is, never.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.hub.service.context import node_view, shared
from shoal.hub.state import Refusal, draws, orders, units
from shoal.hub.state.rows import (
    LeaseRow,
    LeaseState,
    NodeRow,
    Rules,
    SubmissionRow,
    SubmissionState,
    UnitRow,
    UnitState,
)
from shoal.hub.storage import Reader, Storage
from shoal.ledger import EVIDENCED, credit_for, node_subject, unit_subject
from shoal.protocol import NodeState, SignedDocument, status
from shoal.protocol.node import titled
from shoal.runtime.text import count_of

LEASES_SHOWN, RECENT_SHOWN, REFUSED_SHOWN, ENTRIES_SHOWN = 50, 20, 50, 200
EARNINGS = ("credit", "pending")  # kinds of entries that a node has by the thousand; its account sums them up


@dataclass(frozen=True)
class Stories:
    """`post` appends what waits for the ledger; of a run that is over nothing waits."""

    storage: Storage
    run: str
    secret: bytes
    rules: Rules
    now_ms: Callable[[], int]
    post: Callable[[], None] = lambda: None

    def unit(self, number: int) -> status.UnitStory:
        with self.storage.read() as reader:
            if reader.unit(number) is None:
                raise Refusal(404, "unit.unknown", f"there is no unit {number} in this run (yet)")
        self.post()
        with self.storage.read() as reader:
            unit = reader.unit(number)
            assert unit is not None, "no unit is ever taken back"
            entries = reader.ledger_about(unit_subject(number), (), ENTRIES_SHOWN)
            leases, rows = reader.leases_of_unit(number), reader.submissions_of_unit(number)
            sent = _submissions(reader, rows)
        # an accepted group without a batch may still be pulled, and the unit given out again
        batched = unit.state == UnitState.ACCEPTED and unit.step is not None
        decided = batched or unit.state in (UnitState.TRAINED, UnitState.DROPPED, UnitState.VOID)
        seeds = draws.unit_seeds(self.secret, self.run, number, self.rules.group_size) if decided else ()
        derived = {
            "run": self.run, "sentence": unit_sentence(unit, leases), "seeds": seeds,
            "leases": tuple(_lease(row, decided) for row in leases), "submissions": sent, "ledger": tuple(entries),
        }  # fmt: skip
        return status.UnitStory(**{**shared(unit, status.UnitStory), **derived})

    def node(self, node: str) -> status.NodeStory:
        with self.storage.read() as reader:
            if reader.node(node) is None:
                raise Refusal(404, "node.unknown", f"there is no node {node[:64]!r} in this run")
        self.post()
        with self.storage.read() as reader:
            row = reader.node(node)
            assert row is not None, "no node is ever taken out"
            derived = {
                "run": self.run, "sentence": node_sentence(row),
                "node": node_view(row, reader.presence(node), self.rules, self.now_ms()),
                "leases": tuple(_lease(lease, decided=False) for lease in reader.leases_of(node, LEASES_SHOWN)),
                "recent": _submissions(reader, reader.submissions_of(node, False, RECENT_SHOWN)),
                "refused": _submissions(reader, reader.submissions_of(node, True, REFUSED_SHOWN)),
                "ledger": tuple(reader.ledger_about(node_subject(node), EARNINGS, ENTRIES_SHOWN)),
            }  # fmt: skip
        return status.NodeStory(**{**shared(row, status.NodeStory), **derived})

    def nodes(self, after: str, limit: int) -> status.NodePage:
        rules, now_ms = self.rules, self.now_ms()
        with self.storage.read() as reader:
            rows, counts = reader.nodes_after(after, limit), reader.node_counts()
            presences = reader.presences_named([row.node for row in rows])
        views = (node_view(row, presences.get(row.node), rules, now_ms) for row in rows)
        return status.NodePage(nodes=tuple(views), counts=counts)

    def evidence(self, after: int, limit: int) -> status.EvidencePage:
        self.post()
        with self.storage.read() as reader:
            return status.EvidencePage(evidence=tuple(evidence_of(reader, reader.ledger_after(after, limit))))


def _submissions(reader: Reader, rows: Sequence[SubmissionRow]) -> tuple[status.SubmissionStory, ...]:
    voids = reader.ledger_of_kind("void", list(dict.fromkeys(unit_subject(row.unit) for row in rows)))
    voided = {entry.body.get("submission") for entry in voids}
    verdicts = reader.verdicts_of([row.submission for row in rows])
    found = []
    for row in rows:
        verdict = _signed(verdicts.get(row.submission))
        severity = "" if verdict is None else str(verdict.document.get("severity") or "")
        paid = "pending" if row.matures_at_ms is not None else "void" if row.submission in voided else "final"
        derived = {
            "rule": rule_of(row, severity), "credit": credit_for(row.generated_tokens), "verdict": verdict,
            "credit_state": paid if row.generated_tokens else "none", "receipt": _signed(row.receipt),
        }  # fmt: skip
        found.append(status.SubmissionStory(**{**shared(row, status.SubmissionStory), **derived}))
    return tuple(found)


def _signed(text: str | None) -> SignedDocument | None:
    return SignedDocument.model_validate_json(text) if text else None


def evidence_of(reader: Reader, entries: Iterable[status.LedgerEntry]) -> Iterator[status.Evidence]:
    rows = {entry.index: str(entry.body.get("submission")) for entry in entries if entry.kind in EVIDENCED}
    names = list(dict.fromkeys(rows.values()))
    submissions, verdicts = reader.submissions_named(names), reader.verdicts_of(names)
    for index, name in rows.items():
        receipt = submissions[name].receipt if name in submissions else None
        yield status.Evidence(row=index, receipt=_signed(receipt), verdict=_signed(verdicts.get(name)))


def _lease(row: LeaseRow, decided: bool) -> status.LeaseStory:
    document = _signed(row.document) if decided else None
    early = row.ended_at_ms is not None and row.ended_at_ms < row.deadline_ms
    sentence = {
        LeaseState.ACTIVE: "its node works on it",
        LeaseState.SUBMITTED: "answered with a submission",
        LeaseState.EXPIRED: "its node had lost it, or was not heard of any more" if early else "its deadline passed",
        LeaseState.RELEASED: "its node gave it back",
        LeaseState.VOID: "void: its node was banned, or its policy withdrawn",
    }[row.state]
    derived = {"policy": row.policy, "sentence": sentence, "document": document}
    return status.LeaseStory(**{**shared(row, status.LeaseStory), **derived})


VOID_SENTENCES = {
    units.VOID_ATTEMPTS: "given up: the validators themselves could not generate or score it; no worker is blamed",
    units.VOID_STALE: "void: the policy that generated it is too old to train on; what was accepted is paid",
    units.VOID_INCARNATION: "void: the trainer began a new incarnation, and groups of the old one fit nowhere",
}


def unit_sentence(unit: UnitRow, leases: Sequence[LeaseRow]) -> str:
    waits = f"waits for a worker again, after {count_of(len(leases), 'lease')}" if leases else "waits for a worker"
    if units.is_for_validators(unit):
        attempts = count_of(unit.failures, "attempt")
        waits = f"waits for a validator to generate it, after {attempts} that nobody could judge"
    return {
        UnitState.OPEN: waits,
        UnitState.LEASED: f"is with node {leases[-1].node}" if leases else "is with a worker",
        UnitState.SUBMITTED: "submitted; waits for its verdict",
        UnitState.ACCEPTED: "accepted; waits for a batch" if unit.step is None else f"in the batch of step {unit.step}",
        UnitState.TRAINED: f"trained on in step {unit.step}",
        UnitState.DROPPED: "accepted and paid, but not trained on: its rewards are equal, so it teaches nothing",
        UnitState.VOID: VOID_SENTENCES.get(unit.reason, f"void ({unit.reason})"),
    }[unit.state]


def rule_of(row: SubmissionRow, severity: str) -> str:
    if row.state == SubmissionState.REJECTED and severity == "certain":
        return "one failure of this kind cannot happen by accident: the submission is worth nothing, its node is banned"
    if row.state == SubmissionState.REJECTED and severity == "statistical":
        return "honest work fails this check once in 10,000 audits: its node is suspended, and banned the next time"
    if row.state == SubmissionState.UNSURE and severity == "statistical":
        return "most machines of its kind fail this check: no credit, no strike; the unit is given out again"
    return {
        SubmissionState.RECEIVED: "not judged yet: it waits for a validator",
        SubmissionState.AUDITING: "not judged yet: a validator is at it",
        SubmissionState.ACCEPTED: f"accepted by a {row.depth} audit: one credit for each generated token",
        SubmissionState.REJECTED: "a soft rejection: no credit; it costs no trust, unless several follow",
        SubmissionState.UNSURE: "nobody can tell whether it is honest work: no credit, no strike",
        SubmissionState.PULLED: "was accepted; then its node failed an audit before it was in a batch: not trained on",
    }[row.state]


def node_sentence(row: NodeRow) -> str:
    if row.state is NodeState.BANNED:
        is_final = row.certified or row.reason == orders.REVOKED
        end = ", and that is for good" if is_final else "; only the run's owner can pardon it"
        return f"banned: {row.reason}{end}"
    if row.state is NodeState.SUSPENDED:
        again = f", {row.suspensions} times so far" if row.suspensions > 1 else ""
        end = "it ends by itself" if row.until_ms is not None else "only the run's owner can pardon it"
        return f"suspended{again}: {row.reason}; {end}"
    if row.role != "worker":
        return f"a {titled(row.role)} that the root key certified"
    if row.on_probation:
        return f"on probation: {row.passed} full audits passed since it came, or since its last strike"
    return f"established: {row.streak} full audits passed in a row"
