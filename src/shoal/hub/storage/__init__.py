"""Where the hub keeps things: rows in a database, the one that its settings name or a file; submissions as files.

A decision is one write transaction: rows are read, the pure core decides, its commands are applied, all or nothing.
What it read stays true until its commit: in SQLite, because writers exclude each other from their first statement on;
in PostgreSQL, because what a writer reads of single rows it locks, and what concerns all rows (the newest policy, the
next step) only an `exclusive` one changes.

    decision ─► Record ─► ledger_outbox ─ one poster, in order ─► ledger (the chain)
"""

from __future__ import annotations

import logging
from pathlib import Path

from shoal.hub.storage.blobs import BlobFolder, Blobs, open_blobs
from shoal.hub.storage.reader import Reader
from shoal.hub.storage.sqlite import SqliteStorage
from shoal.hub.storage.tables import Presence
from shoal.hub.storage.writer import StaleRow, Storage, Writer

__all__ = [
    "DATABASE_FILE", "BlobFolder", "Blobs", "Presence", "Reader", "SqliteStorage", "StaleRow", "Storage", "Writer",
    "open_blobs", "open_storage",
]  # fmt: skip

DATABASE_FILE = "hub.db"
ATTEMPTS = 6  # a lock that somebody else holds is waited for ten seconds each time: a minute in all

log = logging.getLogger("shoal.hub")


def open_storage(database: str, folder: Path, create: bool = True) -> Storage:
    """The storage of the run whose hub has this `folder`; `database` is the setting `hub.database`. Without `create` a
    shared database that holds no run is refused."""
    if not database:
        return SqliteStorage(folder / DATABASE_FILE)
    from shoal.hub.storage.postgres import PostgresStorage  # with its driver: only who has such a database needs it

    for attempt in range(1, ATTEMPTS + 1):
        try:
            return PostgresStorage(database, create)
        except StaleRow as error:  # another hub that starts, a restore: it ends by itself
            if attempt == ATTEMPTS:
                raise
            log.info("the database is busy, trying again: %s", error)
    raise AssertionError("not reached")
