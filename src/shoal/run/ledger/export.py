"""A ledger as files: one entry per line, verified on the way, whole or not there at all; and beside it the signed
documents behind the entries. Memory does not grow with the ledger: entries and documents are written page by page.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from pathlib import Path

from shoal.errors import LedgerError, UserError
from shoal.ledger import Chain
from shoal.ledger.verification import pages
from shoal.run.ledger.places import FolderPlace, Place, evidence_file, head_file, open_place
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically


def export_ledger(where: str, out: Path, wait_s: float = 3.0) -> int:
    """Write the ledger at `where` to `out` and the hub's signed head beside it; returns the number of rows."""
    for path in (out, evidence_file(out), head_file(out)):
        if path.is_dir():
            raise UserError(f"{path} is a folder: name a file, for example {path / 'ledger.jsonl'}")
    ensure_folder(out.absolute().parent)  # before anything is downloaded
    with closing(open_place(where, wait_s)) as place:
        return write_ledger(place, out)


def leave_ledger(path: Path) -> int:
    """What `shoal run` leaves in the run's folder at its end."""
    with closing(FolderPlace(path)) as place:
        return write_ledger(place, path / "ledger.jsonl")


def write_ledger(place: Place, out: Path) -> int:
    """Streamed into hidden files, which take their names when they are complete and every hash fits."""
    signed, chain = place.signed_head(), Chain()
    targets = [out] if place.missing_evidence() else [out, evidence_file(out)]
    hidden = [path.with_name(f".{path.name}.{os.getpid()}") for path in targets]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in hidden]
            for page in pages(place.entries()):
                for entry in page:
                    chain.add(entry)
                    files[0].write(entry.model_dump_json().encode() + b"\n")
                for _, each in sorted(place.evidence(page).items()) if len(files) > 1 else ():
                    files[1].write(each.model_dump_json(exclude_none=True).encode() + b"\n")
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        if chain.last is None:
            raise LedgerError(f"the ledger at {place.label} is empty")
        for path, target in reversed(list(zip(hidden, targets, strict=True))):
            path.replace(target)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise resource_error("write the ledger to", out, error) from error
    finally:
        for path in hidden:
            path.unlink(missing_ok=True)
    index = None if signed is None else signed.head.document.get("index")  # of a file beside the ledger: unproven
    if signed is not None and isinstance(index, int) and index <= chain.last.index:
        write_atomically(head_file(out), signed.model_dump_json(indent=2).encode() + b"\n")
    return chain.last.index + 1
