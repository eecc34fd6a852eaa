"""What a run leaves for others to read: its ledger as `ledger.jsonl`, verified; its rollouts, counted."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from pydantic import ValidationError

from shoal.errors import LedgerError, ShoalError
from shoal.hub.storage import SqliteStorage
from shoal.ledger import verify
from shoal.protocol import LedgerEntry, LedgerHead
from shoal.runtime.files import write_atomically

PAGE = 1000


def read_ledger(database: Path) -> list[LedgerEntry]:
    if not database.is_file():
        raise LedgerError(f"there is no hub database {database}")
    with closing(SqliteStorage(database)) as storage, storage.read() as reader:
        entries: list[LedgerEntry] = []
        while page := reader.ledger_after(len(entries) - 1, PAGE):
            entries += page
        return entries


def write_ledger(entries: list[LedgerEntry], out: Path, head: LedgerHead | None) -> None:
    """Verify the chain, that it passes through `head` (an older one, from elsewhere), and write one entry per line."""
    verify(entries, head)
    write_atomically(out, "".join(f"{entry.model_dump_json()}\n" for entry in entries).encode())


def exported_head(export: Path) -> LedgerHead | None:
    """The ledger's head as the exported model's card has it."""
    try:
        head = json.loads((export / "shoal.json").read_bytes())["ledger_head"]
        return None if head is None else LedgerHead.model_validate(head)
    except (OSError, ValueError, KeyError, ValidationError) as error:
        raise LedgerError(f"{export / 'shoal.json'} does not name the ledger's head: {error}") from error


def rollouts_archived(folder: Path) -> tuple[int, int]:
    """How many files of rollouts there are, one per step, and how many rollouts are in them."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    paths = sorted(folder.glob("step-*.parquet"))
    try:
        return len(paths), sum(read_metadata(path).num_rows for path in paths)
    except (OSError, ArrowException) as error:
        raise ShoalError(f"the rollouts in {folder} cannot be read: {error}") from error
