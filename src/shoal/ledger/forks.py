"""Forks: two signed documents that cannot both be about one ledger are a proof by themselves.

    first    row i has hash a     a head, a receipt or a policy manifest of this run, signed by its hub or trainer
    second   row j has hash b     the same, with j ≥ i
    entries  rows i … j of the second one's chain: they end at b, and row i is not a      (none if i = j)

Nobody has to be believed: the run's id holds the fingerprint of the root key, which certified whoever signed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.errors import LedgerError, ProtocolError
from shoal.ledger.chain import Chain
from shoal.protocol import (
    LedgerEntry,
    LedgerHead,
    Message,
    PolicyManifest,
    Receipt,
    Role,
    RoleCertificate,
    SignedDocument,
    fingerprint,
    open_document,
)

RUN_SUFFIX_HEX = 12


class ForkProof(Message):
    """See above. `certificates` are the root key's for those who signed."""

    run: str
    root_key: str
    certificates: tuple[SignedDocument, ...]
    first: SignedDocument
    second: SignedDocument
    entries: tuple[LedgerEntry, ...] = ()


def is_run_of(run: str, root_key: str) -> bool:
    """Whether a run's id, which becomes a file's name, holds this root key's fingerprint."""
    try:
        return run.isprintable() and run.endswith(f"-{fingerprint(root_key)[:RUN_SUFFIX_HEX]}")
    except ValueError:
        return False


def stated_head(signed: SignedDocument, keys: Mapping[Role, set[str]]) -> LedgerHead:
    """The head that a document names; raises unless a key of the right role signed it."""
    if signed.kind == LedgerHead.kind:
        return open_document(signed, LedgerHead, keys["hub"])
    head = (
        open_document(signed, Receipt, keys["hub"]).ledger
        if signed.kind == Receipt.kind
        else open_document(signed, PolicyManifest, keys["trainer"]).ledger_head
    )
    if head is None:
        raise ProtocolError(f"this {signed.kind} names no head of a ledger")
    return head


def check_fork(proof: ForkProof) -> str:
    """What the proof shows, in a sentence; raises `LedgerError` if it shows nothing."""
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
        found = _hash_at(first.index, second, proof.entries)
    except (ValueError, ProtocolError, LedgerError) as error:
        raise LedgerError(f"this proves no fork: {error}") from error
    if found == first.hash:
        raise LedgerError("this proves no fork: both statements fit one ledger")
    return (
        f"the ledger of {proof.run} was forked: its {_who(proof.first)} signed that row {first.index} is "
        f"{first.hash[:16]}…, and its {_who(proof.second)} signed for a ledger in which it is {found[:16]}…"
    )


def _hash_at(index: int, head: LedgerHead, entries: Sequence[LedgerEntry]) -> str:
    """The hash of a row in the ledger that `head` is of, by the entries from that row on."""
    if head.index == index:
        return head.hash
    if not entries or entries[0].index != index or entries[-1].index != head.index:
        raise ValueError(f"the rows from {index} to {head.index} are not there")
    chain = Chain(after=entries[0])
    for entry in entries[1:]:
        chain.add(entry)
    if entries[-1].hash != head.hash:
        raise ValueError("its rows do not lead to the second statement")
    return entries[0].hash


def _who(signed: SignedDocument) -> str:
    return "trainer" if signed.kind == PolicyManifest.kind else "hub"
