"""Rows in a database, submissions as files.

A decision is one write transaction, and what it read stays true until its commit: in SQLite, because writers exclude
each other; in PostgreSQL, because a writer locks the single rows that it reads, and only an `exclusive` one changes
what concerns all rows (the newest policy, the next step).

    decision ─► Record ─► ledger_outbox ─ one poster, in order ─► ledger (the chain)
"""

import logging
from pathlib import Path

from shoal.hub.storage.blobs import BlobFolder, Blobs, bucket_of, open_blobs
from shoal.hub.storage.reader import Reader
from shoal.hub.storage.sqlite import SqliteStorage
from shoal.hub.storage.tables import Presence
from shoal.hub.storage.writer import StaleRow, Storage, Writer

__all__ = [
    "DATABASE_FILE", "BlobFolder", "Blobs", "Presence", "Reader", "SqliteStorage", "StaleRow", "Storage", "Writer",
    "check_places", "open_blobs", "open_storage",
]  # fmt: skip

DATABASE_FILE = "hub.db"
ATTEMPTS = 6  # a lock that somebody else holds is waited for ten seconds each time: a minute in all

log = logging.getLogger("shoal.hub")


def check_places(database: str, storage: str, endpoint: str) -> None:
    if database:
        from shoal.hub.storage.postgres import parsed

        parsed(database)
    if storage:
        bucket_of(storage, endpoint)


def open_storage(database: str, folder: Path, create: bool = True) -> Storage:
    """`database` is the setting `hub.database`. Without `create` a shared database that holds no run is refused."""
    if not database:
        return SqliteStorage(folder / DATABASE_FILE)
    from shoal.hub.storage.postgres import PostgresStorage  # with its driver: only who has such a database needs it

    for attempt in range(1, ATTEMPTS + 1):
        try:
            return PostgresStorage(database, create)
        except StaleRow as error:  # another hub that starts, or a restore
            if attempt == ATTEMPTS:
                raise
            log.info("the database is busy, trying again: %s", error)
    raise AssertionError("not reached")
