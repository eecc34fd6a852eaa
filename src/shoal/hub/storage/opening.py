"""Which database a run has: the one that its settings name, else a file in the hub's folder."""

from __future__ import annotations

import logging
from pathlib import Path

from shoal.hub.storage.protocol import StaleRow, Storage
from shoal.hub.storage.sqlite import SqliteStorage

DATABASE_FILE = "hub.db"
ATTEMPTS = 6
"""A lock that somebody else holds is waited for ten seconds each time: a minute in all."""

log = logging.getLogger("shoal.hub")


def open_storage(database: str, folder: Path, create: bool = True) -> Storage:
    """The storage of the run whose hub has this `folder`; `database` is the setting `hub.database`.

    Without `create` a shared database that holds no run is refused.
    """
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
