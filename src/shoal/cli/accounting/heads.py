"""The head that was seen last, kept on this machine: whoever holds it notices a ledger that was rewritten or cut.

~/.shoal/heads/RUN.json     written after every verification that held; a head never goes back
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import ConfigError, LedgerError, ProtocolError
from shoal.protocol import LedgerHead, RoleCertificate, SignedDocument, open_document
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.files import ensure_folder, write_atomically
from shoal.runtime.home import home, make_home


class KeptHead(BaseModel):
    """What is remembered of a run's ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    root_key: str
    index: int
    hash: str
    seen_ms: int

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


def keep(root_key: str, head: LedgerHead, clock: Clock = SystemClock()) -> None:
    """Remember the newest head that was verified, unless a newer one is known."""
    known = load_kept(head.run)
    if known is not None and known.index >= head.index:
        return
    kept = KeptHead(run=head.run, root_key=root_key, index=head.index, hash=head.hash, seen_ms=clock.now_ms())
    make_home()
    ensure_folder(kept_path(head.run).parent)
    write_atomically(kept_path(head.run), kept.model_dump_json(indent=2).encode() + b"\n")


def read_head_file(path: Path) -> LedgerHead:
    """A head that you kept: as `GET /ledger/head` answers it, as it lies beside an export, or as it is kept here.

    Whose signature it has does not matter: it is you who vouches for it, and it can only make a check stricter.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the head {path}: {error.strerror}") from error
    try:
        return KeptHead.model_validate_json(data).head
    except ValidationError:
        pass
    try:
        return LedgerHead.model_validate(CertifiedHead.model_validate_json(data).head.document)
    except ValidationError:
        pass
    try:
        return LedgerHead.model_validate(SignedDocument.model_validate_json(data).document)
    except ValidationError as error:
        raise ConfigError(f"{path} is no ledger head: neither as a hub signs it nor as shoal keeps it") from error
