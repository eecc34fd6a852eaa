"""The head that was seen last, kept on this machine: whoever holds it notices a ledger that was rewritten or cut.

~/.shoal/heads/RUN.json     written after every verification that held; a head never goes back
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import ConfigError
from shoal.protocol import LedgerEntry, LedgerHead, SignedDocument
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.files import ensure_folder, write_atomically


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


def kept_path(run: str) -> Path:
    return Path.home() / ".shoal" / "heads" / f"{Path(run).name}.json"


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


def keep(run: str, root_key: str, last: LedgerEntry, clock: Clock = SystemClock()) -> None:
    """Remember the newest entry that was verified, unless a newer one is known."""
    known = load_kept(run)
    if known is not None and known.index >= last.index:
        return
    head = KeptHead(run=run, root_key=root_key, index=last.index, hash=last.hash, seen_ms=clock.now_ms())
    ensure_folder(kept_path(run).parent)
    write_atomically(kept_path(run), head.model_dump_json(indent=2).encode() + b"\n")


def read_head_file(path: Path) -> LedgerHead:
    """A head that somebody kept: as `GET /ledger/head` answers it, or as it is kept here."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the head {path}: {error.strerror}") from error
    try:
        return KeptHead.model_validate_json(data).head
    except ValidationError:
        pass
    try:
        return LedgerHead.model_validate(SignedDocument.model_validate_json(data).document)
    except ValidationError as error:
        raise ConfigError(f"{path} is no ledger head: neither as a hub signs it nor as shoal keeps it") from error
