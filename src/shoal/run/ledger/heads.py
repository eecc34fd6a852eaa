"""The head that was seen last, kept on this machine: whoever holds it notices a ledger that was rewritten or cut.

~/.shoal/heads/RUN.json     written after every verification that held; a head never goes back
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import ConfigError, LedgerError, LedgerForked, ProtocolError, ShoalError
from shoal.ledger import ForkProof, Keys, Pin, check_fork
from shoal.protocol import LedgerEntry, LedgerHead, Receipt, RoleCertificate, SignedDocument, open_document
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.files import ensure_folder, home, make_home, write_atomically

if TYPE_CHECKING:
    from shoal.run.ledger.places import Place

MAX_ROWS = 100_000
"""Rows between the two statements that a proof may hold: with more it would be too long to hand on."""
START = b'{\n  "run"'


class KeptHead(BaseModel):
    """What is remembered of a run's ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    root_key: str
    index: int
    hash: str
    seen_ms: int
    signed: SignedDocument | None = None

    @property
    def head(self) -> LedgerHead:
        return LedgerHead(run=self.run, index=self.index, hash=self.hash)


class CertifiedHead(BaseModel):
    """What lies beside an exported ledger: the hub's signed head, and what the root key says of the key that signed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: SignedDocument
    certificates: tuple[SignedDocument, ...]

    def opened(self, run: str, root_key: str, source: str) -> LedgerHead:
        """The head, if a hub of this very run signed it. The run's id holds the root key's fingerprint."""
        try:
            certificates = [open_document(each, RoleCertificate, root_key) for each in self.certificates]
            keys = {each.public_key for each in certificates if (each.run, each.role) == (run, "hub")}
            return open_document(self.head, LedgerHead, keys)
        except ProtocolError as error:
            raise LedgerError(f"{source} was not signed by a hub of run {run}: {error}") from error


def kept_path(run: str) -> Path:
    return home() / "heads" / f"{Path(run).name}.json"


def load_kept(run: str) -> KeptHead | None:
    path = kept_path(run)
    try:
        return KeptHead.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"cannot read the kept head {path}: {error}; restore it, or remove it to begin anew"
        ) from error


def keep(root_key: str, head: LedgerHead, signed: SignedDocument | None = None, clock: Clock = SystemClock()) -> None:
    """Remember the newest head that was verified, unless a newer one is known; `signed`: as the hub signed it."""
    known = load_kept(head.run)
    if known is not None and known.index >= head.index:
        return
    statement = signed if signed is not None and signed.document.get("index") == head.index else None
    kept = KeptHead(
        run=head.run, root_key=root_key, index=head.index, hash=head.hash, seen_ms=clock.now_ms(), signed=statement
    )
    make_home()
    ensure_folder(kept_path(head.run).parent)
    write_atomically(kept_path(head.run), kept.model_dump_json(indent=2).encode() + b"\n")


def read_head_file(path: Path, run: str) -> list[Pin]:
    """Heads that you kept: as `GET /ledger/head` answers, as one lies beside an export or is kept here, as a witness
    signed it, or a worker's `heads.jsonl`. Whose signatures they have does not matter: you vouch for them yourself."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the head {path}: {error.strerror}") from error
    many = path.suffix == ".jsonl"  # without a line that was being written when its machine stopped
    lines = data[: data.rfind(b"\n") + 1].splitlines() if many else [data]
    found = [pin for line in lines if (pin := _pin(line, f"--head {path}")) is not None]
    if not found:
        raise ConfigError(f"{path} is no ledger head: neither as a hub or a witness signs it nor as shoal keeps it")
    return [pin for pin in found if pin.head.run == run or not many]


def _pin(data: bytes, source: str) -> Pin | None:
    for kind in (KeptHead, CertifiedHead, SignedDocument):
        with suppress(ValidationError):
            found = kind.model_validate_json(data)
            if isinstance(found, KeptHead):
                return Pin(found.head, source, found.signed)
            signed = found.head if isinstance(found, CertifiedHead) else found
            named = signed.document.get("ledger") if signed.kind == Receipt.kind else signed.document
            return Pin(LedgerHead.model_validate(named, extra="ignore"), source, signed)
    return None


# ── ~/.shoal/forks/RUN-INDEX.json: the proof of a fork, which anybody can check without the hub ──────────────────────


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


def read_proof(path: Path) -> str | None:
    """What a proof shows, if the file is one rather than a ledger; raises `LedgerError` if it shows nothing."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(START)) != START:  # entries are one per line
            return None
    try:
        return check_fork(ForkProof.model_validate_json(path.read_bytes()))
    except ValidationError as error:
        raise LedgerError(f"{path} is no proof of a fork: {error}") from error
