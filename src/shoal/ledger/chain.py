"""The hash chain: each entry's hash covers its index, its predecessor's hash, its kind, body and time.

    GENESIS ◄── entry 0 ◄── entry 1 ◄── … ◄── head

Changing, dropping or reordering an entry changes every later hash, so one known head fixes all entries before it.
`subjects` are the units and nodes of an entry.

A fork is proven by two signed documents that cannot both be about one ledger (`ForkProof`):

    first    row i has hash a     a head, a receipt or a policy manifest of this run, signed by its hub or trainer
    second   row j has hash b     the same, with j ≥ i
    entries  rows i … j of the second one's chain: they end at b, and row i is not a      (none if i = j)

A proof needs no trust: the run's id contains the fingerprint of the root key, which certified the signers.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import LedgerError, LedgerForked, ProtocolError
from shoal.protocol import LedgerEntry, LedgerHead, PolicyManifest, Receipt, Role, RoleCertificate, fingerprint
from shoal.protocol.signing import Message, SignedDocument, canonical_json, open_document

GENESIS = "0" * 64  # the previous hash of entry 0
EVIDENCED = ("credit", "pending", "rejected")  # kinds of entries that point to signed documents
KINDS = (
    "run", "node", "vouch", "policy", "batch", "pending", "credit", "void", "rejected", "pulled", "sanction", "admin",
)  # fmt: skip


def append(previous: LedgerEntry | None, kind: str, body: dict[str, Any], at_ms: int) -> LedgerEntry:
    """The entry that follows `previous` (None: the first one)."""
    if kind not in KINDS:
        raise LedgerError(f"{kind!r} is not a kind of ledger entry; the kinds are {', '.join(KINDS)}")
    index = 0 if previous is None else previous.index + 1
    before = GENESIS if previous is None else previous.hash
    digest = _hash(index, before, kind, body, at_ms)
    return LedgerEntry(index=index, kind=kind, body=body, at_ms=at_ms, previous=before, hash=digest)


def verify(entries: Iterable[LedgerEntry], head: LedgerHead | None = None, after: LedgerEntry | None = None) -> None:
    """Raise `LedgerError`, with the row, unless `entries` form a chain that contains `head`. `after` is the last
    verified entry, for reading page by page. A `head` beyond the end means that the ledger was rolled back."""
    chain = Chain(() if head is None else (Pin(head, "the head"),), after)
    for entry in entries:
        chain.add(entry)
    chain.finish()


@dataclass(frozen=True)
class Pin:
    """A head that a ledger must contain, its source, and the signed document that names it, if any."""

    head: LedgerHead
    source: str
    statement: SignedDocument | None = None


class Chain:
    def __init__(self, pins: Iterable[Pin] = (), after: LedgerEntry | None = None) -> None:
        self.last = after
        self.passed: list[Pin] = []
        self._start = -1 if after is None else after.index
        self._digests = bytearray()  # 32 bytes per row: a receipt may name any earlier row
        self._ahead: dict[int, list[Pin]] = {}
        for pin in pins:  # pins before the start were checked with the earlier pages
            if pin.head.index == self._start:
                self._compare(pin, GENESIS if self.last is None else self.last.hash)
            elif pin.head.index > self._start:
                self._ahead.setdefault(pin.head.index, []).append(pin)

    def add(self, entry: LedgerEntry) -> None:
        index, before = (-1, GENESIS) if self.last is None else (self.last.index, self.last.hash)
        if entry.index != index + 1:
            raise LedgerError(f"ledger row {index + 1} is missing: row {entry.index} comes next")
        if entry.previous != before:
            raise LedgerError(f"ledger row {entry.index} does not follow row {index}: its previous hash differs")
        if entry.hash != _hash(entry.index, entry.previous, entry.kind, entry.body, entry.at_ms):
            raise LedgerError(f"ledger row {entry.index} was changed: its hash does not match its content")
        self.last = entry
        self._digests += bytes.fromhex(entry.hash)
        for pin in self._ahead.pop(entry.index, ()):
            self._compare(pin, entry.hash)

    def hash_at(self, index: int) -> str | None:
        """The hash of an added row, or `GENESIS` for the row before the first; None for any other."""
        if index == self._start:
            return GENESIS if index < 0 else None
        at = 32 * (index - self._start - 1)
        return self._digests[at : at + 32].hex() or None if at >= 0 else None

    def finish(self) -> None:
        """Raise `LedgerError` if a pin lies beyond the end: the ledger was longer before."""
        if self._ahead:
            index, pins = max(self._ahead.items())
            end = f"the ledger ends at row {-1 if self.last is None else self.last.index}"
            raise LedgerError(f"{end}, but row {index} was signed for ({pins[0].source}): it was rolled back")

    def _compare(self, pin: Pin, found: str) -> None:
        if pin.head.hash != found:
            row = f"ledger row {pin.head.index} is not the one that was signed for ({pin.source})"
            problem = f"{row}: its hash differs from the head; the ledger was rewritten"
            raise LedgerForked(problem, pin.head.index, pin.statement)
        self.passed.append(pin)


def head_of(run: str, last: LedgerEntry | None) -> LedgerHead:
    if last is None:
        return LedgerHead(run=run, index=-1, hash=GENESIS)
    return LedgerHead(run=run, index=last.index, hash=last.hash)


def _hash(index: int, previous: str, kind: str, body: dict[str, Any], at_ms: int) -> str:
    content = {"index": index, "previous": previous, "kind": kind, "body": body, "at_ms": at_ms}
    try:
        return hashlib.sha256(b"shoal/ledger/v1\n" + canonical_json(content)).hexdigest()
    except (ValueError, TypeError) as error:
        raise LedgerError(f"ledger row {index} ({kind}) holds a value that JSON cannot carry: {error}") from error


def node_subject(node: str) -> str:
    return f"node:{node}"


def unit_subject(unit: int) -> str:
    return f"unit:{unit}"


def subjects(entry: LedgerEntry) -> tuple[str, ...]:
    """The node and units of an entry, each once, in a fixed order. Missing or wrong fields are ignored.

    >>> subjects(append(None, "credit", {"node": "ab", "unit": 3}, at_ms=1))
    ('node:ab', 'unit:3')
    """
    node, unit, units = (entry.body.get(name) for name in ("node", "unit", "units"))
    found = [node_subject(node)] if isinstance(node, str) and node else []
    numbers = [unit, *(units if isinstance(units, list) else ())]
    found += [unit_subject(number) for number in numbers if isinstance(number, int)]
    return tuple(dict.fromkeys(found))


RUN_SUFFIX_HEX = 12


class ForkProof(Message):
    """See the module's docstring. `certificates` are the root key's, for the signers."""

    run: str
    root_key: str
    certificates: tuple[SignedDocument, ...]
    first: SignedDocument
    second: SignedDocument
    entries: tuple[LedgerEntry, ...] = ()


def is_run_of(run: str, root_key: str) -> bool:
    """Whether a run's id, which becomes a file's name, contains this root key's fingerprint."""
    try:
        return run.isprintable() and run.endswith(f"-{fingerprint(root_key)[:RUN_SUFFIX_HEX]}")
    except ValueError:
        return False


def stated_head(signed: SignedDocument, keys: Mapping[Role, set[str]]) -> LedgerHead:
    """The head that a document names; raises unless a key of the right role signed it."""
    if signed.kind == LedgerHead.kind:
        return open_document(signed, LedgerHead, keys["hub"])
    if signed.kind == Receipt.kind:
        head = open_document(signed, Receipt, keys["hub"]).ledger
    else:
        head = open_document(signed, PolicyManifest, keys["trainer"]).ledger_head
    if head is None:
        raise ProtocolError(f"this {signed.kind} names no head of a ledger")
    return head


def check_fork(proof: ForkProof) -> str:
    """What the proof shows, in a sentence; `LedgerError` if it proves nothing."""
    try:
        if not is_run_of(proof.run, proof.root_key):
            raise ValueError(f"run {proof.run} has another root key")
        keys: dict[Role, set[str]] = {"hub": set(), "trainer": set()}
        for signed in proof.certificates:
            certificate = open_document(signed, RoleCertificate, proof.root_key)
            if certificate.run == proof.run:
                keys.setdefault(certificate.role, set()).add(certificate.public_key)
        first, second = (stated_head(signed, keys) for signed in (proof.first, proof.second))
        if {first.run, second.run} != {proof.run}:
            raise ValueError("a statement is about another run")
        found, rows = second.hash, proof.entries
        if first.index != second.index:
            if not rows or (rows[0].index, rows[-1].index) != (first.index, second.index):
                raise ValueError(f"the rows from {first.index} to {second.index} are not there")
            verify(rows[1:], second, after=rows[0])
            found = rows[0].hash
    except (ValueError, ProtocolError, LedgerError) as error:
        raise LedgerError(f"this proves no fork: {error}") from error
    if found == first.hash:
        raise LedgerError("this proves no fork: both statements fit one ledger")
    who = ["trainer" if one.kind == PolicyManifest.kind else "hub" for one in (proof.first, proof.second)]
    return (
        f"the ledger of {proof.run} was forked: its {who[0]} signed that row {first.index} is {first.hash[:16]}…, and "
        f"its {who[1]} signed for a ledger in which it is {found[:16]}…"
    )
