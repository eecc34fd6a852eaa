"""`shoal ledger verify`: a run's ledger, wherever it is, against all heads: the hub's, those of policy manifests and
receipts, the one kept from last time, --head, --witness."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path

from shoal.errors import LedgerError, LedgerForked, UserError
from shoal.ledger import Chain, Keys, Pin, Proofs, Shares, fold, head_of, shares_of
from shoal.ledger.evidence import Checked, check_rows, pages, read_first_row
from shoal.protocol import LedgerEntry
from shoal.run.ledger import sources
from shoal.run.ledger.sources import FolderLedger, LedgerSource, beside, open_ledger
from shoal.run.ledger.witness import witness_pins
from shoal.runtime import ensure_folder, printable, resource_error, sync_folder, write_atomically

LEAST_PREFIX = 4


def check_ledger(
    where: str, head: Path | None = None, wait_s: float = 3.0, needs_documents: bool = True,
    witnesses: Sequence[str] = (),
) -> Checked:  # fmt: skip
    """Verify the ledger at `where` and keep its head; `LedgerError` names the row and what is wrong."""
    if (fork := sources.read_proof(Path(where))) is not None:
        raise LedgerError(fork)
    with closing(open_ledger(where, wait_s)) as source:
        return check_source(source, head, needs_documents, witnesses)


def check_source(
    source: LedgerSource, head: Path | None = None, needs_documents: bool = True, witnesses: Sequence[str] = (),
    remember: bool = True,
) -> Checked:  # fmt: skip
    if missing := source.missing_evidence() if needs_documents else "":
        why = "without the signed receipts and verdicts nobody can tell whether credit was earned"
        remedy = "Export it by `shoal ledger verify RUN --out FILE`; --without-evidence checks the rest and proves less"
        raise LedgerError(f"{missing}: {why}. {remedy}")
    checked = read_first_row(source, needs_documents)
    given = [] if head is None else sources.read_head_file(head, checked.run)
    seen = [witness_pins(source, witness, checked.run, given) for witness in witnesses]
    others = [pin for pins in seen for pin in pins]
    if (known := sources.load_kept(checked.run)) is not None:
        if known.root_key != checked.root_key:
            raise LedgerError(f"run {checked.run} had another root key when its ledger was seen last: an impostor's")
        when = datetime.fromtimestamp(known.seen_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        others.insert(0, Pin(known.head, f"the head kept here since {when}", known.signed))
    if others and not source.complete:
        # A file may be older than heads seen since. A witness that was asked for must have signed a row of it.
        last = max((entry.index for entry in source.entries()), default=-1)
        for each in seen:
            if all(pin.head.index > last for pin in each):
                why = f"{each[0].source} signed row {each[0].head.index}, the file ends at row {last}"
                remedy = "Export the ledger again, or verify without --witness"
                raise LedgerError(f"{why}: it cannot be compared and may be a fork. {remedy}")
        for pin in (pin for pin in others if pin.head.index > last):
            beyond = f"the file ends at row {last}, before row {pin.head.index} ({pin.source})"
            checked.notes.append(f"{beyond}: it cannot be compared with that head, so it may be another ledger")
        others = [pin for pin in others if pin.head.index <= last]
    # The place's own pins last: its rows are read as of then, so a growing run is not behind another head.
    own = source.pins(checked.run, checked.root_key)
    pins = [*own, *given]
    if (other := next((pin for pin in pins if pin.head.run != checked.run), None)) is not None:
        raise LedgerError(f"{other.source} is of run {other.head.run}; this ledger is of {checked.run}")
    proofs = Proofs(Keys(checked.run, checked.root_key), Chain([*pins, *others]), needs_documents)
    try:
        check_rows(source, checked, proofs)
    except LedgerForked as error:
        raise LedgerError(f"{error}{sources.proven_fork(source, proofs.keys, error)}") from error
    if isinstance(source, FolderLedger):
        if (balances := source.balances()) is not None:
            checked.compare(balances)
        else:
            checked.notes.append("the newest rows are not appended yet: the hub's rows cannot be compared now")
    checked.notes += source.notes
    if not checked.pins:
        checked.notes.append("no head to compare with: only from now on would a rewritten ledger be noticed")
    # Rows of a file behind its signed head may be anybody's: only that head is remembered.
    newest = head_of(checked.run, checked.last) if source.complete else own[0].head if own else None
    if remember and newest is not None:
        signed = source.signed_head()
        sources.keep(checked.root_key, newest, None if signed is None else signed.head)
    return checked


def verified(source: LedgerSource, names: dict[str, str]) -> Iterator[LedgerEntry]:
    """Each entry is checked to follow from the one before; `names` collects the names of nodes."""
    chain = Chain()
    for entry in source.entries():
        chain.add(entry)
        if entry.kind == "node":
            names[str(entry.body["node"])] = printable(str(entry.body.get("name", "")))
        yield entry


class Book:
    def __init__(self, where: str, wait_s: float) -> None:
        self.names: dict[str, str] = {}
        with closing(open_ledger(where, wait_s)) as source:
            self.accounts = fold(verified(source, self.names))

    def find(self, who: str) -> list[str]:
        """The nodes that `who` means: an id or its start, a name, or an owner's public key or its start."""
        nodes = self.accounts.by_node
        if who in nodes:
            return [who]
        by_id = [node for node in nodes if node.startswith(who)] if len(who) >= LEAST_PREFIX else []
        named = [node for node, name in self.names.items() if name == who and node in nodes]
        if named and set(by_id) - set(named):  # a name may imitate an id
            raise UserError(f"{who} is the name of one node and the start of another's id: give more of the id")
        owned = [node for node, account in nodes.items() if account.owner and account.owner.startswith(who)]
        if found := named or (owned if len(who) >= LEAST_PREFIX else []):
            return found
        if len(by_id) > 1:
            raise UserError(f"{who} is the start of {len(by_id)} node ids: give more of it")
        if not by_id:
            raise UserError(f"the ledger knows no node and no owner {who!r}; give its id, its name, or an owner's key")
        return by_id


def shares_at(where: str, step: int | None, wait_s: float) -> tuple[Shares, dict[str, str]]:
    names: dict[str, str] = {}
    with closing(open_ledger(where, wait_s)) as source:
        return shares_of(verified(source, names), step), names


def export_ledger(where: str, out: Path, wait_s: float = 3.0) -> int:
    for path in (out, beside(out, "evidence"), beside(out, "head")):
        if path.is_dir():
            raise UserError(f"{path} is a folder: name a file, for example {path / 'ledger.jsonl'}")
    ensure_folder(out.absolute().parent)  # before anything is downloaded
    with closing(open_ledger(where, wait_s)) as source:
        return _write(source, out)


def _write(source: LedgerSource, out: Path) -> int:
    """Streamed into hidden files, which are renamed when they are complete and every hash fits."""
    signed, chain = source.signed_head(), Chain()
    targets = [out] if source.missing_evidence() else [out, beside(out, "evidence")]
    hidden = [path.with_name(f".{path.name}.{os.getpid()}") for path in targets]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in hidden]
            for page in pages(source.entries()):
                for entry in page:
                    chain.add(entry)
                    files[0].write(entry.model_dump_json().encode() + b"\n")
                for _, each in sorted(source.evidence(page).items()) if len(files) > 1 else ():
                    files[1].write(each.model_dump_json(exclude_none=True).encode() + b"\n")
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        if chain.last is None:
            raise LedgerError(f"the ledger at {source.label} is empty")
        for path, target in reversed(list(zip(hidden, targets, strict=True))):
            path.replace(target)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise resource_error("write the ledger to", out, error) from error
    finally:
        for path in hidden:
            path.unlink(missing_ok=True)
    index = None if signed is None else signed.head.document.get("index")
    if signed is not None and isinstance(index, int) and index <= chain.last.index:
        write_atomically(beside(out, "head"), signed.model_dump_json(indent=2).encode() + b"\n")
    return chain.last.index + 1
