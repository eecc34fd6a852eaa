"""The proof of a forked ledger as a file, which anybody can check without the hub: `shoal ledger verify PROOF`.

~/.shoal/forks/RUN-INDEX.json      two documents that the run's own keys signed, and the rows between them
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from shoal.cli.accounting.places import Place
from shoal.errors import LedgerError, LedgerForked, ShoalError
from shoal.ledger import ForkProof, Keys, check_fork
from shoal.protocol import LedgerEntry, SignedDocument
from shoal.runtime.files import ensure_folder, home, write_atomically

MAX_ROWS = 100_000
"""Rows between the two statements that a proof may hold: with more it would be too long to hand on."""
START = b'{\n  "run"'


def proven_fork(place: Place, keys: Keys, error: LedgerForked) -> str:
    """Write down what proves a fork, if what is at hand does; what to add to the error."""
    head = place.signed_head()
    if head is None or not isinstance(error.statement, SignedDocument):
        return ""
    certificates = {str(each.document.get("public_key")): each for each in place.certificates()} | keys.certificates
    rows = (entry for entry in place.entries() if entry.index >= error.index)
    try:
        path = save_proof(keys, tuple(certificates.values()), error.statement, head.head, list(islice(rows, MAX_ROWS)))
    except ShoalError as nothing:  # a hub that does not help to prove it does not hide it, either
        return f" ({nothing})"
    return f". The proof is in {path}: it needs nobody's word; check it with shoal ledger verify {path}"


def save_proof(
    keys: Keys,
    certificates: tuple[SignedDocument, ...],
    first: SignedDocument,
    second: SignedDocument,
    entries: list[LedgerEntry],
) -> Path:
    """The file with the proof; raises `LedgerError` if it is none. `entries`: the second one's rows."""
    last = second.document.get("index")
    between = tuple(entry for entry in entries if isinstance(last, int) and entry.index <= last)
    proof = ForkProof(
        run=keys.run, root_key=keys.root_key, certificates=certificates, first=first, second=second, entries=between
    )
    check_fork(proof)
    path = home() / "forks" / f"{Path(keys.run).name}-{entries[0].index if entries else 0}.json"
    ensure_folder(path.parent)
    write_atomically(path, proof.model_dump_json(indent=2).encode() + b"\n")
    return path


def is_proof(path: Path) -> bool:
    """Whether a file is a proof rather than a ledger: entries are one per line."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(START)) == START


def read_proof(path: Path) -> str:
    """What a proof shows; raises `LedgerError` if it shows nothing."""
    try:
        return check_fork(ForkProof.model_validate_json(path.read_bytes()))
    except ValidationError as error:
        raise LedgerError(f"{path} is no proof of a fork: {error}") from error
