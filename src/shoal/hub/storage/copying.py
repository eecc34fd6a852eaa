"""A run's rows and submissions, copied for backups and restores. The source is only read.

rows    one snapshot of the source ─► one transaction of the target ─► compared, table by table ─► commit
blobs   what is there already is not sent again ─► each is read back
file    one snapshot of either database as a single SQLite file
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, func, insert, select, text, true

from shoal.errors import ConfigError, ResourceError, ShoalError
from shoal.hub.storage import DATABASE_FILE, Reader, SqliteStorage, Storage, open_storage, tables
from shoal.hub.storage.tables import unhurried
from shoal.runtime.files import make_private, resource_error

ROWS_AT_A_TIME = 500
BLOBS_AT_A_TIME, BLOBS_HELD = 8, 64
INCOMING, RESTORED = "incoming", "restored"
"""A setting of a database into which a restore copied, and a file that the restore made in its folder at its end; both
hold the hash of the backup. The hub of that folder removes the setting; until then all others are refused."""
BLOB_STORE = "blob_store"  # names a blob among this database's blobs: a hub that does not find it looks elsewhere
OWN_SETTINGS = (INCOMING, BLOB_STORE, "schema_version")  # of the database, not of the run: never copied
COPIED: dict[Table, ColumnElement[bool]] = {table: true() for table in tables.metadata.sorted_tables}
COPIED[tables.meta] = tables.meta.c.key.not_in(OWN_SETTINGS)
del COPIED[tables.leaders]
"""Which rows of which tables, those that others refer to first."""


def copy_rows(source: Storage, target: Storage, mark: str = "") -> None:
    """Copy all rows or none. A target that holds a run is refused, unless it has this `mark`: then an earlier copy of
    the same backup crashed."""
    with source.read() as reader, target.write(exclusive=True) as writer:
        there, here = unhurried(connection_of(reader)), unhurried(connection_of(writer))
        known = writer.setting("run")
        if known is not None and not (mark and writer.setting(INCOMING) == mark):
            raise ConfigError(f"hub.database holds the run {json.loads(known)['run']} already: name an empty database")
        for table in reversed(COPIED):
            here.execute(delete(table).where(COPIED[table]))
        for table in COPIED:
            rows = _rows(there, table)
            while page := list(islice(rows, ROWS_AT_A_TIME)):
                here.execute(insert(table), page)
        last = here.execute(select(func.max(tables.ledger_outbox.c.id))).scalar()
        if (
            last and here.dialect.name == "postgresql"
        ):  # PostgreSQL numbers these rows by itself: no number may be used again
            here.execute(text("SELECT setval(pg_get_serial_sequence('ledger_outbox', 'id'), :last)"), {"last": last})
        wanted, found = extents(reader), extents(writer)
        differing = [name for name in wanted if wanted[name] != found[name]]
        if differing:
            raise ShoalError(f"the copy differs from what was copied, in {', '.join(differing)}: nothing was changed")
        if mark:
            writer.put_setting(INCOMING, mark)


def extents(reader: Reader) -> dict[str, int]:
    """For each table a sum over its rows, in any order: databases sort text differently."""
    connection = unhurried(connection_of(reader))

    def digest(row: dict[str, Any]) -> int:
        return int.from_bytes(hashlib.sha256(repr(tuple(row.values())).encode()).digest())

    return {table.name: sum(map(digest, _rows(connection, table))) for table in COPIED}


def _rows(connection: Connection, table: Table) -> Iterator[dict[str, Any]]:
    query = select(table).where(COPIED[table]).order_by(*table.primary_key.columns)
    return map(dict, connection.execute(query, execution_options={"yield_per": ROWS_AT_A_TIME}).mappings())


def connection_of(reader: Reader) -> Connection:
    return reader._connection


def side_by_side(act: Callable[[str], bytes], names: Sequence[str]) -> Iterator[bytes]:
    with ThreadPoolExecutor(BLOBS_AT_A_TIME, thread_name_prefix="blobs") as pool:
        for start in range(0, len(names), BLOBS_HELD):
            yield from pool.map(act, names[start : start + BLOBS_HELD])


def snapshot(database: str, folder: Path, target: Path) -> None:
    """A run's database, live or not, as a single file at `target` (which must not exist)."""
    if database:
        with closing(open_storage(database, folder, create=False)) as storage, closing(SqliteStorage(target)) as copy:
            copy_rows(storage, copy)
        with closing(sqlite3.connect(target)) as file:
            file.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
        return
    source = folder / DATABASE_FILE
    if not source.is_file():
        raise ResourceError(f"there is no database {source}; has this run's hub been started?")
    make_private(target)
    try:
        with closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True, timeout=30)) as live:
            live.execute("VACUUM INTO ?", (str(target),))
    except sqlite3.Error as error:
        raise resource_error("copy the database", source, error) from error
