"""The hash chain: each entry's hash covers its index, its predecessor's hash, its kind, body and time.

    GENESIS ◄── entry 0 ◄── entry 1 ◄── … ◄── head

Changing, dropping or reordering any entry changes every hash after it, so one remembered head pins all before it.

`subjects` are what a ledger entry is about, so that all entries about a unit or a node can be found without reading the
chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal.errors import LedgerError, LedgerForked
from shoal.protocol import LedgerEntry, LedgerHead, SignedDocument, canonical_json

GENESIS = "0" * 64
"""What stands in for the hash before entry 0."""

EVIDENCED = ("credit", "pending", "rejected")
"""Kinds of entries that point to signed documents."""
KINDS = (
    "run", "node", "vouch", "policy", "batch", "pending", "credit", "void", "rejected", "pulled", "sanction", "admin",
)  # fmt: skip


def append(previous: LedgerEntry | None, kind: str, body: dict[str, Any], at_ms: int) -> LedgerEntry:
    """The entry that follows `previous` (None: the first one).

    >>> first = append(None, "run", {"run": "demo"}, at_ms=1)
    >>> append(first, "node", {"node": "ab"}, at_ms=2).previous == first.hash
    True
    """
    if kind not in KINDS:
        raise LedgerError(f"{kind!r} is not a kind of ledger entry; the kinds are {', '.join(KINDS)}")
    index = 0 if previous is None else previous.index + 1
    before = GENESIS if previous is None else previous.hash
    digest = _hash(index, before, kind, body, at_ms)
    return LedgerEntry(index=index, kind=kind, body=body, at_ms=at_ms, previous=before, hash=digest)


def verify(entries: Iterable[LedgerEntry], head: LedgerHead | None = None, after: LedgerEntry | None = None) -> None:
    """Raise `LedgerError`, naming the row, unless `entries` form a chain that contains `head`.

    `after` is the last entry already verified, for whoever reads page by page. A `head` older than the last entry is
    fine if the chain passes through it; one beyond the end means that the ledger was rolled back.
    """
    chain = Chain(() if head is None else (Pin(head, "the head"),), after)
    for entry in entries:
        chain.add(entry)
    chain.finish()


@dataclass(frozen=True)
class Pin:
    """A head that a ledger must pass through, and who vouches for it: `the manifest of policy 0.12`. `statement` is the
    signed document that names it, if there is one."""

    head: LedgerHead
    source: str
    statement: SignedDocument | None = None


class Chain:
    """A chain under verification, entry by entry; keeps the last one and what its pins need, however long it is.

    >>> chain = Chain()
    >>> chain.add(append(None, "run", {"run": "demo"}, at_ms=1))
    >>> chain.last.index
    0
    """

    def __init__(self, pins: Iterable[Pin] = (), after: LedgerEntry | None = None) -> None:
        self.last = after
        self.passed: list[Pin] = []
        self._start = -1 if after is None else after.index
        self._digests = bytearray()  # 32 bytes a row: receipts name any row before theirs
        self._ahead: dict[int, list[Pin]] = {}
        for pin in pins:
            self._expect(pin)

    def _expect(self, pin: Pin) -> None:
        """What lies at the start is looked at now, what lies before it was looked at by whoever read it."""
        if pin.head.index == self._start:
            self._meet(pin, GENESIS if self.last is None else self.last.hash)
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
            self._meet(pin, entry.hash)

    def hash_at(self, index: int) -> str | None:
        """The hash of a row that was added; of the start, for what lies before it; None for any other."""
        if index == self._start:
            return GENESIS if index < 0 else None
        at = 32 * (index - self._start - 1)
        return self._digests[at : at + 32].hex() or None if at >= 0 else None

    def finish(self) -> None:
        """Raise unless every pin was met: the ledger has been longer than it is now."""
        if self._ahead:
            index, pins = max(self._ahead.items())
            end = -1 if self.last is None else self.last.index
            raise LedgerError(
                f"the ledger ends at row {end}, but row {index} was signed for ({pins[0].source}): it was rolled back"
            )

    def _meet(self, pin: Pin, found: str) -> None:
        if pin.head.hash != found:
            raise LedgerForked(
                f"ledger row {pin.head.index} is not the one that was signed for ({pin.source}): its hash differs from "
                "the head; the ledger was rewritten",
                pin.head.index,
                pin.statement,
            )
        self.passed.append(pin)


def head_of(run: str, last: LedgerEntry | None) -> LedgerHead:
    """The head of a ledger whose newest entry is `last`."""
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
    """Each once, in a fixed order. What a body should hold and does not is left out: it is the chain's business.

    >>> from shoal.ledger.chain import append
    >>> subjects(append(None, "credit", {"node": "ab", "unit": 3}, at_ms=1))
    ('node:ab', 'unit:3')
    """
    body: dict[str, Any] = entry.body
    found: list[str] = []
    if isinstance(body.get("node"), str) and body["node"]:
        found.append(node_subject(body["node"]))
    numbers = [body.get("unit"), *(body["units"] if isinstance(body.get("units"), list) else ())]
    found += [unit_subject(number) for number in numbers if isinstance(number, int)]
    return tuple(dict.fromkeys(found))
