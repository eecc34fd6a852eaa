"""All that makes a ledger believable, in one pass: hashes, heads, accounts, the documents behind each row. No I/O.

    entries ─► chain (hashes, heads) ─► accounts (formula, once per submission) ─► proofs (receipts, verdicts, orders)

A row that was changed, dropped or swapped breaks the hashes. Whoever recomputes all hashes, or drops the end, is found
out by any head from before. Whoever invents credit, and holds the hub's key, has no verdict for it (`evidence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from shoal.errors import LedgerError
from shoal.ledger.accounts import Accounts
from shoal.ledger.chain import EVIDENCED, Pin, is_run_of
from shoal.ledger.evidence import Proofs
from shoal.protocol import MAX_EVIDENCE_PER_PAGE, Evidence, LedgerEntry


class Rows(Protocol):
    """A ledger somewhere: its rows from first to last, and the signed documents behind some of them, by row; these are
    asked for in order."""

    label: str
    root_key: str | None

    def entries(self) -> Iterator[LedgerEntry]: ...
    def evidence(self, entries: Sequence[LedgerEntry]) -> dict[int, Evidence]: ...


@dataclass
class Checked:
    """What was verified, and what could not be."""

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

    def of_this_run(self, pins: list[Pin]) -> list[Pin]:
        for pin in pins:
            if pin.head.run != self.run:
                raise LedgerError(f"{pin.source} is of run {pin.head.run}; this ledger is of {self.run}")
        return pins

    def compare(self, balances: Mapping[str, tuple[int, int]]) -> None:
        """What the hub's rows say against what the ledger says: they are written in one transaction."""
        for node, (credit, pending) in balances.items():
            account = self.accounts.by_node.get(node)
            found = (0, 0) if account is None else (account.credit, account.pending)
            if found != (credit, pending):
                row = f"the hub's row of node {node} has {credit} credit and {pending} pending"
                raise LedgerError(f"{row}, the ledger {found[0]} and {found[1]}: one of them was changed by hand")
        self.compared = True


def begun(rows: Rows, needs_documents: bool) -> Checked:
    """The run and its root key, as row 0 has them: the run's id holds the key's fingerprint."""
    first = next(rows.entries(), None)
    if first is None:
        raise LedgerError(f"the ledger at {rows.label} is empty: not even the run is written down")
    run, root = first.body.get("run"), first.body.get("root_key")
    if first.kind != "run" or not isinstance(run, str) or not isinstance(root, str):
        raise LedgerError(f"ledger row 0 does not say which run this is (it is a {first.kind} row)")
    if not is_run_of(run, root) or rows.root_key not in (None, root):
        raise LedgerError("ledger row 0 is of another run than it says, or of another than was asked for")
    return Checked(run, root, is_proven=needs_documents)


def check_rows(rows: Rows, checked: Checked, proofs: Proofs) -> None:
    """Read every entry, with the documents behind it; raises `LedgerError` with the row and what is wrong. A head may
    be ahead of a database whose last rows are not appended yet; never of a ledger that was complete."""
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
    """Entries by the hundred, as evidence is asked for."""
    left = iter(entries)
    while page := list(islice(left, MAX_EVIDENCE_PER_PAGE)):
        yield page
