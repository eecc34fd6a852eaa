"""`shoal ledger verify`: a run's ledger, wherever it is, against every head that is at hand (`ledger.verification`).

heads:  the hub's · those inside policy manifests and receipts · the one kept from last time · --head · --witness
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from shoal.errors import LedgerError, LedgerForked
from shoal.ledger import Chain, Keys, Pin, Proofs
from shoal.ledger.verification import Checked, begun, check_rows
from shoal.run.ledger.heads import is_proof, keep, load_kept, proven_fork, read_head_file, read_proof
from shoal.run.ledger.places import FilePlace, FolderPlace, Place, open_place
from shoal.run.ledger.witness import witness_pins


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
    place: Place,
    head: Path | None = None,
    needs_documents: bool = True,
    witnesses: Sequence[str] = (),
    remember: bool = True,
) -> Checked:
    missing = place.missing_evidence() if needs_documents else ""
    if missing:
        raise LedgerError(
            f"{missing}: without the signed receipts and verdicts nobody can tell whether credit was earned. Export it "
            "with `shoal ledger export`; --without-evidence checks the rest, which proves much less"
        )
    checked = begun(place, needs_documents)
    given = [] if head is None else read_head_file(head, checked.run)
    seen = [witness_pins(place, witness, checked.run, given) for witness in witnesses]
    others = _comparable(place, checked, _kept(checked), seen)
    # The place's own last: its rows are read as of then, so an honest run that grows meanwhile is behind no other head.
    pins = checked.of_this_run([*place.pins(checked.run, checked.root_key), *given])
    proofs = Proofs(Keys(checked.run, checked.root_key), Chain([*pins, *others]), needs_documents)
    try:
        check_rows(place, checked, proofs)
    except LedgerForked as error:
        raise LedgerError(f"{error}{proven_fork(place, proofs.keys, error)}") from error
    if isinstance(place, FolderPlace):
        balances = place.balances()
        if balances is not None:
            checked.compare(balances)
        else:
            checked.notes.append("the newest rows are not appended yet: the hub's rows cannot be compared now")
    checked.notes += place.notes
    if not checked.pins:
        checked.notes.append("no head to compare with: only from now on would a rewritten ledger be noticed")
    trusted = place.trusted(checked.last) if checked.last is not None and remember else None
    if trusted is not None:
        signed = place.signed_head()
        keep(checked.root_key, trusted, None if signed is None else signed.head)
    return checked


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
