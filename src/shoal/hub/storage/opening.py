"""Which database a run has: the one that its settings name, else a file in the hub's folder."""

from __future__ import annotations

from pathlib import Path

from shoal.hub.storage.protocol import Storage
from shoal.hub.storage.sqlite import SqliteStorage

DATABASE_FILE = "hub.db"


def open_storage(database: str, folder: Path) -> Storage:
    """The storage of the run whose hub has this `folder`; `database` is the setting `hub.database`."""
    if not database:
        return SqliteStorage(folder / DATABASE_FILE)
    from shoal.hub.storage.postgres import PostgresStorage  # with its driver: only who has such a database needs it

    return PostgresStorage(database)
