"""A ledger as a file: one entry per line, verified on the way, whole or not there at all."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from shoal.cli.accounting.places import FolderPlace, Place, head_file, open_place
from shoal.errors import LedgerError, UserError
from shoal.ledger import Chain
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically


def export_ledger(where: str, out: Path, wait_s: float = 3.0) -> int:
    """Write the ledger at `where` to `out` and the hub's signed head beside it; returns the number of rows."""
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file, for example {out / 'ledger.jsonl'}")
    with closing(open_place(where, wait_s)) as place:
        return write_ledger(place, out)


def leave_ledger(path: Path) -> int:
    """What `shoal run` leaves in the run's folder at its end."""
    with closing(FolderPlace(path)) as place:
        return write_ledger(place, path / "ledger.jsonl")


def write_ledger(place: Place, out: Path) -> int:
    """Streamed into a hidden file, which takes the name when it is complete and every hash fits."""
    signed, chain = place.signed_head(), Chain()
    ensure_folder(out.absolute().parent)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for entry in place.entries():
                chain.add(entry)
                file.write(entry.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if chain.last is None:
            raise LedgerError(f"the ledger at {place.label} is empty")
        temporary.replace(out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise resource_error("write the ledger to", out, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    if signed is not None and signed.head.document["index"] <= chain.last.index:
        write_atomically(head_file(out), signed.model_dump_json(indent=2).encode() + b"\n")
    return chain.last.index + 1
