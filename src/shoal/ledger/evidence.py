"""Checks that credit was earned: each row against the signed documents that it points to, and against earlier rows.

    root key ──certifies──► hub ──────► receipt   these bytes came from this node, for this unit
             └─certifies──► validator ─► verdict  they were accepted, and hold so many generated tokens
                                            │
    node row (its id is the hash of its key) └─► credit row: same node, unit, submission, tokens; hashes of both

With the hub's key alone nobody can sign a verdict, so credit that no validator accepted does not pass. It cannot be
shown that the work was done: an owner, who certifies validators, can let one accept anything. `check_rows` makes all
checks in one pass, without I/O:

    entries ─► chain (hashes, heads) ─► accounts (formula, once per submission) ─► proofs (receipts, verdicts, orders)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from shoal.errors import LedgerError, LedgerForked, ProtocolError
from shoal.ledger.accounts import Accounts
from shoal.ledger.chain import EVIDENCED, KINDS, Chain, Pin, is_run_of
from shoal.protocol import MAX_EVIDENCE_PER_PAGE, MAX_GROUP, MAX_NEW_TOKENS, Outcome, Receipt, Verdict, node_id
from shoal.protocol.node import AdminAction, AdminRequest, AdminVerb, Role, RoleCertificate, Vouch, open_admin
from shoal.protocol.signing import Document, SignedDocument, document_hash, open_document
from shoal.protocol.status import Evidence, LedgerEntry

_FIXED = ("node", "unit", "tokens", "validator", "receipt", "verdict")
_ABOUT = ("node", "unit", "submission")
_DEPTHS = {"all": ("full",), "reputation": ("full", "light")}  # of audits that a run pays for, by what it audits


@dataclass
class Keys:
    """The keys that the root key trusts, by the rows so far. `certificates` are its signatures, by certified key."""

    run: str
    root_key: str
    certificates: dict[str, SignedDocument] = field(default_factory=dict)
    roles: dict[str, set[Role]] = field(default_factory=dict)
    revoked: set[str] = field(default_factory=set)

    def certify(self, signed: Any) -> RoleCertificate:
        document = SignedDocument.model_validate(signed)
        certificate = open_document(document, RoleCertificate, self.root_key)
        if certificate.run != self.run:
            raise ValueError(f"a certificate is for run {certificate.run[:80]}")
        self.certificates[certificate.public_key] = document
        self.roles.setdefault(certificate.public_key, set()).add(certificate.role)
        return certificate

    def with_role(self, role: Role) -> set[str]:
        """The keys certified for a role, revoked ones included: what they signed before may be recorded later."""
        return {key for key, roles in self.roles.items() if role in roles}


@dataclass
class Proofs:
    """Checks entries in order, after `Chain`. Without `needs_documents` the documents are not checked: far weaker."""

    keys: Keys
    chain: Chain
    needs_documents: bool = True
    credited: int = 0
    rejections: int = 0
    orders: int = 0
    _group_size: int = 0
    _max_tokens: int = 0  # of a group
    _depths: tuple[str, ...] = ()
    _environment: str = ""
    _nodes: dict[str, Role] = field(default_factory=dict)
    _earned: set[int] = field(default_factory=set)
    _pending: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    _void: dict[int, str] = field(default_factory=dict)
    _failed: dict[str, str] = field(default_factory=dict)
    _failed_at: dict[str, int] = field(default_factory=dict)

    def add(self, entry: LedgerEntry, evidence: Evidence | None = None) -> None:
        handler: Callable[[LedgerEntry, Evidence | None], None] | None = getattr(self, f"_on_{entry.kind}", None)
        try:
            if entry.kind not in KINDS:
                raise ValueError(f"{entry.kind!r} is not a kind of ledger entry")
            if handler is not None:
                handler(entry, evidence)
        except LedgerForked:
            raise
        except (KeyError, TypeError, ValueError, ProtocolError, LedgerError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise LedgerError(f"ledger row {entry.index} ({entry.kind}) is not proven: {problem}") from error

    def _on_run(self, entry: LedgerEntry, _: Evidence | None) -> None:
        body = entry.body
        _require(entry.index == 0, "a run begins once, with row 0")
        self._group_size, longest = _whole(body, "group_size"), _whole(body, "max_new_tokens")
        if not (1 <= self._group_size <= MAX_GROUP and 1 <= longest <= MAX_NEW_TOKENS):
            raise ValueError(f"no run has groups of {self._group_size} with up to {longest} tokens each")
        if body["audit"] not in _DEPTHS:
            raise ValueError(f"audit is {str(body['audit'])[:40]!r}, not one of {', '.join(_DEPTHS)}")
        self._max_tokens, self._depths = self._group_size * longest, _DEPTHS[body["audit"]]
        self._environment = body["environment_digest"]
        for signed in body["certificates"]:
            self.keys.certify(signed)

    def _on_node(self, entry: LedgerEntry, _: Evidence | None) -> None:
        body = entry.body
        _require(body["node"] == node_id(body["public_key"]), "the node's id is not the one of its public key")
        _require(body["node"] not in self._nodes, "this node has a row already")
        self._nodes[body["node"]] = body["role"]
        if body["role"] != "worker":
            certificate = self.keys.certify(body["certificate"])
            if (certificate.role, certificate.public_key) != (body["role"], body["public_key"]):
                raise ValueError(f"its certificate is that of another key, or of a {certificate.role}")

    def _on_vouch(self, entry: LedgerEntry, _: Evidence | None) -> None:
        self._require_worker(entry.body)
        vouch = open_document(SignedDocument.model_validate(entry.body["vouch"]), Vouch, entry.body["owner"])
        is_the_same = (vouch.owner, vouch.node) == (entry.body["owner"], entry.body["node"])
        _require(is_the_same, "the signed vouch is of another owner, or for another node")

    def _on_admin(self, entry: LedgerEntry, _: Evidence | None) -> None:
        action = open_order(entry.body, self.keys.run, self.keys.root_key)
        signer = entry.body["order"]["action"]["signed_by"]
        _require(signer not in self.keys.revoked, "the key that signed this order had been revoked")
        is_the_same = (action.verb, action.target) == (entry.body["verb"], entry.body["target"])
        _require(is_the_same, "it says another thing than the order that was signed")
        for signed in action.certificates if action.verb is AdminVerb.CERTIFY else ():
            self.keys.certify(signed)
        if action.verb is AdminVerb.REVOKE:
            may = signer == self.keys.root_key or self.keys.roles.get(action.target, set()) == {"validator"}
            _require(may, "only the root key revokes a key that is no validator's")
            self.keys.revoked.add(action.target)
        self.orders += 1

    def _on_credit(self, entry: LedgerEntry, evidence: Evidence | None) -> None:
        body = entry.body
        self._require_worker(body)
        submission, says = body["submission"], {name: body[name] for name in _FIXED}
        if entry.kind == "credit" and submission in self._pending:
            _, pending = self._pending.pop(submission)
            differ = [name for name in _FIXED if says[name] != pending[name]]
            _require(not differ, f"its {' and '.join(differ)} is another than when the credit was pending")
            return
        if not 0 <= _whole(body, "tokens") <= self._max_tokens:
            raise ValueError(f"{body['tokens']} tokens are more than a group of this run can have ({self._max_tokens})")
        _require(_whole(body, "unit") not in self._earned, f"unit {body['unit']} has earned before")
        self._earned.add(body["unit"])
        if entry.kind == "pending":
            self._pending[submission] = entry.index, says
        self.credited += 1
        if self.needs_documents:
            document = _present(entry, evidence, "receipt")
            receipt = open_document(document, Receipt, self.keys.with_role("hub"))
            _require_same(receipt, {"run": self.keys.run, **{name: entry.body[name] for name in _ABOUT}})
            if receipt.ledger is None or receipt.ledger.run != self.keys.run or receipt.ledger.index >= entry.index:
                raise ValueError("the receipt does not name a head of this ledger from before")
            if self.chain.hash_at(receipt.ledger.index) != receipt.ledger.hash:
                row = f"ledger row {receipt.ledger.index} is not the one that the hub named in the receipt behind row"
                raise LedgerForked(f"{row} {entry.index}: the ledger was rewritten", receipt.ledger.index, document)
            verdict = self._open_verdict(entry, evidence)
            if verdict.outcome is not Outcome.ACCEPTED or verdict.generated_tokens != body["tokens"]:
                signed = f"the signed verdict is {verdict.outcome.value} with {verdict.generated_tokens} tokens"
                raise ValueError(f"{signed}; the row has {body['tokens']}")
            paid = ("full",) if self._nodes[body["node"]] == "trusted" else self._depths
            if verdict.depth not in paid:
                raise ValueError(f"the verdict is of a {verdict.depth} audit; this run pays for {' or '.join(paid)}")
            if len(verdict.rewards) != self._group_size:
                raise ValueError(f"the verdict has {len(verdict.rewards)} rewards for a group of {self._group_size}")

    _on_pending = _on_credit

    def _open_verdict(self, entry: LedgerEntry, evidence: Evidence | None) -> Verdict:
        """The verdict behind a row, by a validator that the root key trusted at that row, about what the row says."""
        signed, body = _present(entry, evidence, "verdict"), entry.body
        verdict = open_document(signed, Verdict, self.keys.with_role("validator") - self.keys.revoked)
        is_named = node_id(signed.signed_by) == body["validator"]
        _require(is_named, "the verdict is signed by another validator than the row names")
        about = {"run": self.keys.run, "environment_digest": self._environment}
        _require_same(verdict, about | {name: body[name] for name in _ABOUT})
        return verdict

    def _on_void(self, entry: LedgerEntry, _: Evidence | None) -> None:
        """Pending credit becomes void only by a failed audit of the same node."""
        body = entry.body
        row, pending = self._pending.pop(body["submission"], (0, None))
        is_the_same = pending is not None and all(body[name] == pending[name] for name in ("node", "unit", "tokens"))
        _require(is_the_same, "it is not what was pending for this submission")
        _require(
            self._failed_at.get(body["node"], -1) >= row, "no audit of this node failed since the credit is pending"
        )
        self._void[body["unit"]] = body["node"]

    def _on_rejected(self, entry: LedgerEntry, evidence: Evidence | None) -> None:
        body = entry.body
        self._require_worker(body)
        if body["severity"]:  # without a severity the rejection costs no trust
            self._failed[body["submission"]] = body["node"]
            self._failed_at[body["node"]] = entry.index
        self.rejections += 1
        if self.needs_documents:
            verdict = self._open_verdict(entry, evidence)
            severity = verdict.severity.value if verdict.severity else ""
            if (verdict.outcome, verdict.reason, severity) != (Outcome.REJECTED, body["reason"], body["severity"]):
                raise ValueError(f"the signed verdict is {verdict.outcome.value} ({verdict.reason}, {severity})")

    def _on_pulled(self, entry: LedgerEntry, _: Evidence | None) -> None:
        """Units whose accepted group is withdrawn, and whose credit is void, may earn again."""
        body = entry.body
        if self._failed.get(body["submission"]) != body["node"]:
            raise ValueError("the audit that it names did not fail, or was of another node")
        unpaid = body.get("unpaid", [])
        if unpaid and (self._nodes[body["node"]] != "trusted" or not self._earned.isdisjoint(unpaid)):
            raise ValueError(f"units {unpaid} are not unpaid: they have earned, or the node is no trusted worker")
        for unit in (each for each in body["units"] if each not in unpaid):
            if self._void.pop(unit, None) != body["node"]:
                raise ValueError(f"unit {unit} has no void credit of this node: final credit stays")
            self._earned.remove(unit)

    def _on_sanction(self, entry: LedgerEntry, _: Evidence | None) -> None:
        _require(entry.body["node"] in self._nodes, "the node is not in the ledger")

    def _require_worker(self, body: dict[str, Any]) -> None:
        is_worker = self._nodes.get(body["node"]) in ("worker", "trusted")
        _require(is_worker, f"node {str(body['node'])[:64]} is not registered in the ledger as a worker")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _whole(body: dict[str, Any], name: str) -> int:
    value = body[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {str(value)[:40]!r}, not a whole number")
    return value


def _present(entry: LedgerEntry, evidence: Evidence | None, name: str) -> SignedDocument:
    signed: SignedDocument | None = None if evidence is None else getattr(evidence, name)
    if signed is None:
        raise ValueError(f"its signed {name} is missing")
    _require(document_hash(signed) == entry.body[name], f"the signed {name} is not the one that the row points to")
    return signed


def _require_same(document: Document, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        found = getattr(document, name)
        _require(found == value, f"the signed {document.kind} says {name} {str(found)[:80]}")


def open_order(body: dict[str, Any], run: str, root_key: str) -> AdminAction:
    try:
        return open_admin(AdminRequest.model_validate(body["order"]), run, root_key)
    except (KeyError, ValueError, ProtocolError) as error:
        raise LedgerError(f"an order of the run's owner does not hold: {error}") from error


class LedgerReader(Protocol):
    """Reads a ledger from a hub, folder or file: its rows in order, and the signed documents behind them, by row."""

    label: str
    root_key: str | None

    def entries(self) -> Iterator[LedgerEntry]: ...
    def evidence(self, entries: Sequence[LedgerEntry]) -> dict[int, Evidence]: ...


@dataclass
class Checked:
    run: str = ""
    root_key: str = ""
    last: LedgerEntry | None = None
    accounts: Accounts = field(default_factory=Accounts)
    pins: list[Pin] = field(default_factory=list)
    orders: int = 0
    credited: int = 0
    rejections: int = 0
    is_proven: bool = True
    compared: bool = False
    notes: list[str] = field(default_factory=list)

    def compare(self, balances: Mapping[str, tuple[int, int]]) -> None:
        """Compare the hub's balances with the ledger's: both are written in one transaction."""
        for node, (credit, pending) in balances.items():
            account = self.accounts.by_node.get(node)
            found = (0, 0) if account is None else (account.credit, account.pending)
            if found != (credit, pending):
                row = f"the hub's row of node {node} has {credit} credit and {pending} pending"
                raise LedgerError(f"{row}, the ledger {found[0]} and {found[1]}: one of them was changed by hand")
        self.compared = True


def read_first_row(rows: LedgerReader, needs_documents: bool) -> Checked:
    """The run and its root key in row 0: the run's id contains the key's fingerprint."""
    if (first := next(rows.entries(), None)) is None:
        raise LedgerError(f"the ledger at {rows.label} is empty: it has not even the row of the run")
    run, root = first.body.get("run"), first.body.get("root_key")
    if first.kind != "run" or not isinstance(run, str) or not isinstance(root, str):
        raise LedgerError(f"ledger row 0 does not say which run this is (it is a {first.kind} row)")
    if not is_run_of(run, root) or rows.root_key not in (None, root):
        raise LedgerError("ledger row 0 names a run that does not fit its root key, or another root key than expected")
    return Checked(run, root, is_proven=needs_documents)


def check_rows(rows: LedgerReader, checked: Checked, proofs: Proofs) -> None:
    """Check every entry with its documents. A signed head beyond the last row is an error."""
    for page in pages(rows.entries()):
        evidence = rows.evidence(page) if checked.is_proven else {}
        for entry in page:
            proofs.chain.add(entry)
            checked.accounts.add(entry)
            proofs.add(entry, evidence.pop(entry.index, None) if entry.kind in EVIDENCED else None)
        if evidence:
            raise LedgerError(f"there are documents for row {min(evidence)}, which has none or is not there")
    try:
        proofs.chain.finish()
    except LedgerError as error:
        raise LedgerError(f"{error} (run {checked.run}, read from {rows.label})") from error
    checked.orders, checked.credited, checked.rejections = proofs.orders, proofs.credited, proofs.rejections
    checked.last, checked.pins = proofs.chain.last, proofs.chain.passed


def pages(entries: Iterable[LedgerEntry]) -> Iterator[list[LedgerEntry]]:
    left = iter(entries)
    while page := list(islice(left, MAX_EVIDENCE_PER_PAGE)):
        yield page
