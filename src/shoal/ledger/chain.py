"""The hash chain: each entry's hash covers its index, its predecessor's hash, its kind, body and time.

    GENESIS ◄── entry 0 ◄── entry 1 ◄── … ◄── head

Changing, dropping or reordering any entry changes every hash after it, so one remembered head pins all before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from shoal.errors import LedgerError
from shoal.protocol import LedgerEntry, LedgerHead, canonical_json

GENESIS = "0" * 64
"""What stands in for the hash before entry 0."""

KINDS = ("run", "node", "policy", "batch", "pending", "credit", "void", "rejected", "pulled", "sanction")


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
    known = {} if after is None else {after.index: after.hash}
    index, before = (-1, GENESIS) if after is None else (after.index, after.hash)
    for entry in entries:
        if entry.index != index + 1:
            raise LedgerError(f"ledger row {index + 1} is missing: row {entry.index} comes next")
        if entry.previous != before:
            raise LedgerError(f"ledger row {entry.index} does not follow row {index}: its previous hash differs")
        if entry.hash != _hash(entry.index, entry.previous, entry.kind, entry.body, entry.at_ms):
            raise LedgerError(f"ledger row {entry.index} was changed: its hash does not match its content")
        index, before = entry.index, entry.hash
        known[index] = before
    if head is not None:
        _check_head(head, index, known)


def head_of(run: str, last: LedgerEntry | None) -> LedgerHead:
    """The head of a ledger whose newest entry is `last`."""
    if last is None:
        return LedgerHead(run=run, index=-1, hash=GENESIS)
    return LedgerHead(run=run, index=last.index, hash=last.hash)


def _check_head(head: LedgerHead, last_index: int, known: dict[int, str]) -> None:
    if head.index > last_index:
        raise LedgerError(
            f"the ledger ends at row {last_index}, but row {head.index} was signed for: it was rolled back"
        )
    expected = GENESIS if head.index == -1 else known.get(head.index)
    if expected is None:
        return  # the head lies before the part that was handed in; whoever pages has checked it there
    if expected != head.hash:
        raise LedgerError(f"ledger row {head.index} is not the one that was signed for: its hash differs from the head")


def _hash(index: int, previous: str, kind: str, body: dict[str, Any], at_ms: int) -> str:
    content = {"index": index, "previous": previous, "kind": kind, "body": body, "at_ms": at_ms}
    try:
        return hashlib.sha256(b"shoal/ledger/v1\n" + canonical_json(content)).hexdigest()
    except (ValueError, TypeError) as error:
        raise LedgerError(f"ledger row {index} ({kind}) holds a value that JSON cannot carry: {error}") from error
