"""One pass over a ledger: every hash, every available head, every account, every signed document behind a row.

    entries ─► chain (hashes, heads) ─► accounts (formula, once per submission) ─► proofs (receipts, verdicts, orders)
    heads:  the hub's · those inside policy manifests and receipts · the one kept from last time · --head · --witness

A row that was changed, dropped or swapped breaks the hashes. Whoever recomputes all hashes, or drops the end, is found
out by any head from before. Whoever invents credit, and holds the hub's key, has no verdict for it (`ledger.evidence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from shoal.cli.accounting.forks import is_proof, proven_fork, read_proof
from shoal.cli.accounting.heads import keep, load_kept, read_head_file
from shoal.cli.accounting.places import MANIFEST, FilePlace, FolderPlace, Place, open_place, pages
from shoal.cli.accounting.witnessing import witness_pins
from shoal.errors import LedgerError, LedgerForked
from shoal.ledger import EVIDENCED, Account, Accounts, Chain, Keys, Pin, Proofs, is_run_of
from shoal.protocol import LedgerEntry
from shoal.runtime.text import count_of


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

    @property
    def lines(self) -> list[str]:
        """For people."""
        accounts, rows = self.accounts, 0 if self.last is None else self.last.index + 1
        owners = len({account.owner for account in accounts.by_node.values() if account.owner})
        total = Account()
        for account in accounts.by_node.values():
            total = total.plus(account)
        found = [
            f"ledger of {self.run}: {count_of(rows, 'row')}, every hash fits",
            *_passed(self.pins),
            f"accounts: {count_of(len(accounts.by_node), 'node')}, {count_of(owners, 'owner')}; "
            f"{total.credit:,} credit, {total.pending:,} pending, {total.void:,} void; "
            "each by the formula, once per submission",
        ]
        found.append(self._evidence_line())
        if self.orders:
            found.append(f"orders of the owner: {self.orders}, each signed by the root key or an admin it certified")
        if self.compared:
            found.append("the hub's own rows agree with the accounts")
        return [*found, *(f"note: {note}" for note in self.notes)]

    def _evidence_line(self) -> str:
        rows = f"{count_of(self.credited, 'row')} of credit and {self.rejections:,} of rejections"
        if self.is_proven:
            return (
                f"evidence: {rows}, each with a verdict by a validator that the root key certified, credit also with "
                "the hub's receipt; each node registered before, each unit paid once, within the run's limits"
            )
        return (
            f"NOT PROVEN: {rows}. Their signed receipts and verdicts were not looked at (--without-evidence): whoever "
            "holds the hub's key may have invented them"
        )


def _passed(pins: list[Pin]) -> list[str]:
    """A line for each head; those inside policy manifests, of which there may be many, share one."""
    signed = [pin for pin in pins if pin.source.startswith(MANIFEST)]
    lines = [f"passes through row {pin.head.index}: {pin.source}" for pin in pins if pin not in signed]
    if signed:
        versions = ", ".join(pin.source.removeprefix(MANIFEST) for pin in (signed[0], signed[-1]))
        what = f"{len(signed)} policy manifests ({versions})" if len(signed) > 1 else signed[0].source
        first, last = signed[0].head.index, signed[-1].head.index
        rows = f"rows {first} to {last}" if len(signed) > 1 else f"row {first}"
        lines.insert(0, f"passes through {rows}: {what}")
    return lines


def check_ledger(
    where: str,
    head: Path | None = None,
    wait_s: float = 3.0,
    needs_documents: bool = True,
    witnesses: Sequence[str] = (),
) -> Checked:
    """Verify the ledger at `where`; raises `LedgerError` with the row and what is wrong. Keeps its head."""
    if is_proof(Path(where)):
        raise LedgerError(read_proof(Path(where)))
    with closing(open_place(where, wait_s)) as place:
        return check_place(place, head, needs_documents, witnesses)


def check_place(
    place: Place, head: Path | None = None, needs_documents: bool = True, witnesses: Sequence[str] = ()
) -> Checked:
    missing = place.missing_evidence() if needs_documents else ""
    if missing:
        raise LedgerError(
            f"{missing}: without the signed receipts and verdicts nobody can tell whether credit was earned. Export it "
            "with `shoal ledger export`; --without-evidence checks the rest, which proves much less"
        )
    first = next(place.entries(), None)
    if first is None:
        raise LedgerError(f"the ledger at {place.label} is empty: not even the run is written down")
    checked = Checked(*_begins(first, place), is_proven=needs_documents)
    given = [] if head is None else read_head_file(head, checked.run)
    seen = [witness_pins(place, witness, checked.run, given) for witness in witnesses]
    others = _comparable(place, checked, _kept(checked), seen)
    # The place's own last: its rows are read as of then, so an honest run that grows meanwhile is behind no other head.
    pins = _of_this_run(checked, [*place.pins(checked.run, checked.root_key), *given])
    chain = Chain([*pins, *others])
    proofs = Proofs(Keys(checked.run, checked.root_key), chain, needs_documents)
    try:
        _read(place, checked, proofs)
        _finish(place, chain, checked)
    except LedgerForked as error:
        raise LedgerError(f"{error}{proven_fork(place, proofs.keys, error)}") from error
    checked.last, checked.pins = chain.last, chain.passed
    _compare(place, checked)
    checked.notes += place.notes
    if not chain.passed:
        checked.notes.append("no head to compare with: only from now on would a rewritten ledger be noticed")
    trusted = place.trusted(checked.last) if checked.last is not None else None
    if trusted is not None:
        signed = place.signed_head()
        keep(checked.root_key, trusted, None if signed is None else signed.head)
    return checked


def _begins(first: LedgerEntry, place: Place) -> tuple[str, str]:
    """The run and its root key, as row 0 has them: the run's id holds the key's fingerprint."""
    run, root = first.body.get("run"), first.body.get("root_key")
    if first.kind != "run" or not isinstance(run, str) or not isinstance(root, str):
        raise LedgerError(f"ledger row 0 does not say which run this is (it is a {first.kind} row)")
    if not is_run_of(run, root) or place.root_key not in (None, root):
        raise LedgerError("ledger row 0 is of another run than it says, or of another than was asked for")
    return run, root


def _of_this_run(checked: Checked, pins: list[Pin]) -> list[Pin]:
    for pin in pins:
        if pin.head.run != checked.run:
            raise LedgerError(f"{pin.source} is of run {pin.head.run}; this ledger is of {checked.run}")
    return pins


def _kept(checked: Checked) -> list[Pin]:
    """The head from last time."""
    known = load_kept(checked.run)
    if known is None:
        return []
    if known.root_key != checked.root_key:
        raise LedgerError(f"run {checked.run} had another root key when its ledger was seen last: an impostor's")
    seen = datetime.fromtimestamp(known.seen_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [Pin(known.head, f"the head kept here since {seen}", known.signed)]


def _comparable(place: Place, checked: Checked, kept: list[Pin], seen: list[list[Pin]]) -> list[Pin]:
    """Those that lie within a file: it may be older than what was seen since, and that is no rollback. Whoever asks
    for a witness gets its word on this file, or an error."""
    pins = [*kept, *(pin for each in seen for pin in each)]
    if not pins or not isinstance(place, FilePlace):
        return pins
    last = -1
    for entry in place.entries():
        last = entry.index
    for each in seen:
        if all(pin.head.index > last for pin in each):
            raise LedgerError(
                f"{each[0].source} signed row {each[0].head.index}, the file ends at row {last}: it cannot be compared "
                "and may be a fork. Export the ledger again, or verify without --witness"
            )
    checked.notes += [
        f"the file ends at row {last}, before row {pin.head.index} ({pin.source}): it cannot be compared with that "
        "head, so it may be another ledger"
        for pin in pins
        if pin.head.index > last
    ]
    return [pin for pin in pins if pin.head.index <= last]


def _read(place: Place, checked: Checked, proofs: Proofs) -> None:
    """Every entry, with the documents behind it."""
    for page in pages(place.entries()):
        evidence = place.evidence(page) if proofs.needs_documents else {}
        for entry in page:
            proofs.chain.add(entry)
            checked.accounts.add(entry)
            proofs.add(entry, evidence.pop(entry.index, None) if entry.kind in EVIDENCED else None)
        if evidence:
            raise LedgerError(f"there are documents for row {min(evidence)}, which has none or is not there")
    checked.orders, checked.credited, checked.rejections = proofs.orders, proofs.credited, proofs.rejections


def _finish(place: Place, chain: Chain, checked: Checked) -> None:
    """A head may be ahead of a database whose last rows are not appended yet; never of a ledger that was complete."""
    try:
        chain.finish()
    except LedgerError as error:
        raise LedgerError(f"{error} (run {checked.run}, read from {place.label})") from error


def _compare(place: Place, checked: Checked) -> None:
    """What the hub's rows say against what the ledger says: they are written in one transaction."""
    if not isinstance(place, FolderPlace):
        return
    balances = place.balances()
    if balances is None:
        checked.notes.append("the newest rows are not appended yet: the hub's rows cannot be compared now")
        return
    for node, (credit, pending) in balances.items():
        account = checked.accounts.by_node.get(node)
        found = (0, 0) if account is None else (account.credit, account.pending)
        if found != (credit, pending):
            raise LedgerError(
                f"the hub's row of node {node} has {credit} credit and {pending} pending, the ledger {found[0]} and "
                f"{found[1]}: one of them was changed by hand"
            )
    checked.compared = True
