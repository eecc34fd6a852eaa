"""An honest ledger made by hand with every document behind it, and what the holder of the hub's key can do to it."""

import copy
from dataclasses import dataclass, field
from typing import Any

from shoal.ledger import Accounts, Chain, Keys, Proofs, append, head_of
from shoal.protocol import AdminAction, AdminRequest, Receipt, Role, RoleCertificate, SigningKey, Vouch, fingerprint
from shoal.protocol.signing import SignedDocument, document_hash, sign_document
from shoal.protocol.status import Evidence, LedgerEntry
from shoal.protocol.verdict import Outcome, RolloutReward, Severity, Verdict

ROOT, HUB, TRAINER, JUDGE, LATER_JUDGE, ALICE, BOB, OWNER, STRANGER = (
    SigningKey.from_seed(bytes([number]) * 32) for number in range(1, 10)
)
RUN = f"small-{fingerprint(ROOT.public_key)[:12]}"
GROUP_SIZE, MAX_NEW_TOKENS = 2, 16


def certificate(key: SigningKey, role: Role, by: SigningKey = ROOT, run: str = RUN) -> SignedDocument:
    return sign_document(RoleCertificate(run=run, role=role, public_key=key.public_key, issued_at_ms=1), by)


def submission(number: int) -> str:
    return f"{number:064x}"


@dataclass
class Book:
    """A ledger that grows: rows, and the documents behind them."""

    entries: list[LedgerEntry] = field(default_factory=list)
    evidence: dict[int, Evidence] = field(default_factory=dict)
    judge: SigningKey = JUDGE

    def add(self, kind: str, body: dict[str, Any]) -> LedgerEntry:
        entry = append(self.entries[-1] if self.entries else None, kind, body, len(self.entries))
        self.entries.append(entry)
        return entry

    def begin(self, **changes: Any) -> None:
        hub = certificate(HUB, "hub").model_dump(mode="json")
        body = {"run": RUN, "root_key": ROOT.public_key, "environment_digest": "e0", "certificates": [hub]}
        limits = {"group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS, "audit": "reputation"}
        self.add("run", {**body, **limits, **changes})

    def join(self, key: SigningKey, role: Role = "worker") -> None:
        body: dict[str, Any] = {"node": key.node, "public_key": key.public_key, "role": role, "name": role}
        if role != "worker":
            body["certificate"] = certificate(key, role).model_dump(mode="json")
        self.add("node", body)

    def order(self, verb: str, by: SigningKey = ROOT, **changes: Any) -> None:
        action = AdminAction(run=RUN, id="ab" * 8, verb=verb, issued_at_ms=1, **changes)
        admin = None if by is ROOT else certificate(by, "admin")
        request = AdminRequest(action=sign_document(action, by), certificate=admin)
        order = request.model_dump(mode="json")
        self.add("admin", {"verb": verb, "target": action.target, "reason": "", "by": "root", "order": order})

    def receipt(self, unit: int, key: SigningKey, number: int, by: SigningKey = HUB) -> SignedDocument:
        head = head_of(RUN, self.entries[-1])
        values = {"run": RUN, "node": key.node, "lease": f"u{unit}a0", "unit": unit, "submission": submission(number)}
        return sign_document(Receipt(**values, size_bytes=9, received_at_ms=1, ledger=head), by)

    def verdict(self, unit: int, key: SigningKey, number: int, tokens: int, **changes: Any) -> SignedDocument:
        values: dict[str, Any] = {
            "run": RUN, "submission": submission(number), "unit": unit, "node": key.node, "outcome": Outcome.ACCEPTED,
            "rewards": tuple(RolloutReward(value=value) for value in (0.0, 1.0)), "generated_tokens": tokens,
            "decided_at_ms": 1, "environment_digest": "e0",
        }  # fmt: skip
        return sign_document(Verdict(**{**values, **changes}), self.judge)

    def earn(self, unit: int, key: SigningKey, tokens: int, kind: str = "credit", number: int | None = None) -> None:
        number = unit + 1 if number is None else number
        self.pay(
            kind, unit, key, number, tokens, self.receipt(unit, key, number), self.verdict(unit, key, number, tokens)
        )

    def pay(
        self, kind: str, unit: int, key: SigningKey, number: int, tokens: int,
        receipt: SignedDocument | None, verdict: SignedDocument | None,
    ) -> None:  # fmt: skip
        body = {"node": key.node, "unit": unit, "submission": submission(number), "tokens": tokens, "credit": tokens}
        hashes = {
            "receipt": document_hash(receipt) if receipt else "0" * 64,
            "verdict": document_hash(verdict) if verdict else "0" * 64,
        }
        row = self.add(kind, {**body, "validator": self.judge.node, **hashes}).index
        self.evidence[row] = Evidence(row=row, receipt=receipt, verdict=verdict)

    def mature(self, row: int) -> None:
        self.add("credit", self.entries[row].body)

    def reject(self, unit: int, key: SigningKey, number: int, severity: Severity | None = Severity.CERTAIN) -> None:
        failed = {"outcome": Outcome.REJECTED, "severity": severity, "reason": "sampling.seed", "rewards": ()}
        verdict = self.verdict(unit, key, number, 0, **failed)
        body = {"node": key.node, "unit": unit, "submission": submission(number), "reason": "sampling.seed"}
        level = severity.value if severity else ""
        told = {"severity": level, "validator": self.judge.node, "verdict": document_hash(verdict)}
        row = self.add("rejected", {**body, **told}).index
        self.evidence[row] = Evidence(row=row, receipt=self.receipt(unit, key, number), verdict=verdict)

    def void(self, row: int) -> None:
        names = ("node", "unit", "submission", "tokens", "credit")
        self.add("void", {**{name: self.entries[row].body[name] for name in names}, "reason": "sampling.seed"})

    def vouch(self, key: SigningKey, owner: SigningKey = OWNER) -> None:
        signed = sign_document(Vouch(owner=owner.public_key, node=key.node, issued_at_ms=1), owner)
        vouch = signed.model_dump(mode="json")
        self.add("vouch", {"node": key.node, "owner": owner.public_key, "vouch": vouch})

    def rewritten(self, row: int, body: dict[str, Any]) -> "Book":
        """The same ledger with another body in a row and every hash after it made again, as the hub could do it."""
        made = Book(evidence=dict(self.evidence))
        for entry in self.entries:
            made.add(entry.kind, body if entry.index == row else copy.deepcopy(entry.body))
        return made


def honest() -> Book:
    """Two workers, credit at once and pending, void, pulled and done again; an owner, orders, a later validator."""
    book = Book()
    book.begin()
    book.join(TRAINER, "trainer")
    book.join(JUDGE, "validator")
    book.join(ALICE)
    book.earn(0, ALICE, 30)
    book.join(BOB)
    book.vouch(BOB)
    book.earn(1, BOB, 5, "pending")
    book.earn(2, BOB, 7, "pending")
    book.mature(7)
    book.earn(3, BOB, 9, "pending")
    book.reject(4, BOB, 50)
    book.void(8)
    book.void(10)
    book.add("sanction", {"node": BOB.node, "state": "banned", "reason": "sampling.seed"})
    book.add("pulled", {"node": BOB.node, "units": [3], "submission": submission(50), "reason": "sampling.seed"})
    book.earn(3, ALICE, 8, number=60)
    book.order("certify", certificates=(certificate(LATER_JUDGE, "validator"),))
    book.join(LATER_JUDGE, "validator")
    book.judge = LATER_JUDGE
    book.earn(5, ALICE, 32)
    book.order("revoke", target=JUDGE.public_key)
    book.earn(6, ALICE, 0)
    book.add("batch", {"step": 0, "units": [0, 3], "digest": "d"})
    return book


def check(book: Book, needs_documents: bool = True) -> Proofs:
    """What `shoal ledger verify` does with the rows and the documents; raises `LedgerError`."""
    chain, accounts = Chain(), Accounts()
    proofs = Proofs(Keys(RUN, ROOT.public_key), chain, needs_documents)
    for entry in book.entries:
        chain.add(entry)
        accounts.add(entry)
        proofs.add(entry, book.evidence.get(entry.index))
    return proofs
