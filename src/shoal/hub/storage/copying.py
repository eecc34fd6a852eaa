"""Whole runs copied from one place to another: every row in one transaction, every blob by its hash.

    rows    one snapshot of the source ─► one transaction of the target ─► compared, table by table ─► commit
    blobs   those that rows name; what is there already is not sent again ─► read back, hash by hash
    file    one snapshot of either database as a single SQLite file, for backups

Nothing is changed at the source. A copy that fails leaves the target as it was before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, delete, func, insert, select, text

from shoal.errors import ConfigError, ResourceError, ShoalError
from shoal.hub.storage import tables
from shoal.hub.storage.blobs import Blobs
from shoal.hub.storage.opening import DATABASE_FILE, open_storage
from shoal.hub.storage.protocol import Reader, Storage, Writer
from shoal.hub.storage.queries import SqlReader
from shoal.hub.storage.schema import unhurried
from shoal.hub.storage.sqlite import SqliteStorage
from shoal.runtime.files import make_private, resource_error

ROWS_AT_A_TIME = 500
BLOBS_AT_A_TIME = 8
MOVED_TO, INCOMING = "moved_to", "incoming"
"""Settings that a migration leaves: on a database that the run has left, and on one that it has not arrived in yet."""
LEAVING, LEFT = "leaving", "another database"
"""What `MOVED_TO` says: a shared database is being left (nobody may work on it meanwhile), or was left."""
BLOB_STORE = "blob_store"
"""Names a blob that lies where this database's blobs are: a hub that does not find it there looks at another place."""
OWN_SETTINGS = (MOVED_TO, INCOMING, BLOB_STORE, "schema_version")
"""Of the database, not of the run: never copied."""
LEFT_OUT = frozenset({tables.leaders.name})
"""Who leads there says nothing here."""

OnProgress = Callable[[int, int], None]
"""Done, of how many."""


@dataclass(frozen=True)
class Extent:
    """How many rows a table has, and a sum over their content that does not depend on their order."""

    rows: int
    digest: str


def copied_tables() -> list[Table]:
    """Every table of a run, those that others refer to first."""
    return [table for table in tables.metadata.sorted_tables if table.name not in LEFT_OUT]


def extents(reader: Reader) -> dict[str, Extent]:
    """What a database holds, for comparison with another one. Databases sort text differently: so does this not."""
    connection = unhurried(connection_of(reader))
    return {table.name: _extent(_rows(connection, table)) for table in copied_tables()}


def copy_rows(source: Storage, target: Storage, settings: dict[str, str] | None = None) -> dict[str, Extent]:
    """Put every row of `source` in the place of whatever `target` holds, and compare; all or nothing.

    `settings` are written in the same transaction.
    """
    with source.read() as reader, target.write(exclusive=True) as writer:
        unhurried(connection_of(reader))
        here = unhurried(connection_of(writer))
        for table in reversed(copied_tables()):
            here.execute(delete(table).where(*_of_the_run(table)))
        for table in copied_tables():
            rows = iter(_rows(connection_of(reader), table))
            while page := list(islice(rows, ROWS_AT_A_TIME)):
                here.execute(insert(table), page)
        _continue_numbers(here)
        wanted, found = extents(reader), extents(writer)
        differing = [name for name in wanted if wanted[name] != found[name]]
        if differing:
            raise ShoalError(f"the copy differs from what was copied, in {', '.join(differing)}: nothing was changed")
        for key, value in (settings or {}).items():
            writer.put_setting(key, value)
        return found


def run_in(reader: Reader) -> str | None:
    """The run whose rows a database holds, if it holds any."""
    known = reader.setting("run")
    return None if known is None else str(json.loads(known)["run"])


def moved_away(reader: Reader) -> ConfigError | None:
    """Why no hub may work on this database, if a migration has said so."""
    said = reader.setting(MOVED_TO)
    if said == LEAVING:
        return ConfigError(
            "this run is being moved by `shoal migrate`, which needs all hubs stopped. If that was cut short: give the "
            "same command again there, or `shoal migrate RUN --database` with the database that the recipe in that "
            "folder names, to stay"
        )
    if said:
        return ConfigError(
            "this run was moved away from this database by `shoal migrate`: start it with the recipe that the "
            "migration wrote, or move it back with `shoal migrate`"
        )
    return None


def holds_run(folder: Path) -> bool:
    """Whether a hub's folder has an SQLite database with a run in it that has not moved away. Changes nothing."""
    path = folder / DATABASE_FILE
    if not path.is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as file:
            found: dict[str, str] = dict(
                file.execute("SELECT key, value FROM meta WHERE key IN ('run', ?)", (MOVED_TO,))
            )
    except sqlite3.Error:
        return False  # no database of a hub's
    return "run" in found and not found.get(MOVED_TO)


def mark_blobs(transaction: Writer, blobs: Blobs, run: str) -> None:
    """Say that the blobs of this database are where `blobs` is, and nowhere else."""
    content = f"the blobs of shoal run {run} ({secrets.token_hex(8)})\n"
    transaction.put_setting(BLOB_STORE, blobs.put(content.encode()))


def submissions_of(reader: Reader) -> list[str]:
    """The names of all blobs that rows refer to, and of the one by which hubs know the place."""
    mark = reader.setting(BLOB_STORE)
    names = [row[0] for row in connection_of(reader).execute(select(tables.submissions.c.submission))]
    return names if mark is None else [*names, mark]


def copy_blobs(source: Blobs, target: Blobs, names: Sequence[str], on_progress: OnProgress) -> int:
    """Bring these blobs to the target and read each back from there; how many were not there before."""

    def bring(name: str) -> bool:
        missing = not target.has(name)
        if missing:
            target.put(source.get(name))
        target.get(name)  # also what was there: an earlier attempt may have met a bad disk
        return missing

    new = 0
    with ThreadPoolExecutor(max_workers=BLOBS_AT_A_TIME, thread_name_prefix="copy") as pool:
        pending = (pool.map(bring, names[start : start + 256]) for start in range(0, len(names), 256))
        for done, missing in enumerate((answer for page in pending for answer in page), start=1):
            new += missing
            on_progress(done, len(names))
    return new


def snapshot(database: str, folder: Path, target: Path) -> None:
    """One consistent view of a run's database, live or not, as a single file at `target` (which must not exist)."""
    if not database:
        _snapshot_sqlite(folder / DATABASE_FILE, target)
        return
    with (
        contextlib.closing(open_storage(database, folder, create=False)) as source,
        contextlib.closing(SqliteStorage(target)) as copy,
    ):
        copy_rows(source, copy)
    with contextlib.closing(sqlite3.connect(target)) as file:
        file.execute("PRAGMA journal_mode=DELETE")


def _snapshot_sqlite(source: Path, target: Path) -> None:
    """By SQLite itself, page by page: it is not opened as a database of ours, which might bring it up to date."""
    if not source.is_file():
        raise ResourceError(f"there is no database {source}; has this run's hub been started?")
    make_private(target)
    try:
        with (
            contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True, timeout=30)) as live,
            contextlib.closing(sqlite3.connect(target)) as copy,
        ):
            live.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
    except sqlite3.Error as error:
        raise resource_error("copy the database", source, error) from error


def connection_of(reader: Reader) -> Connection:
    """The open transaction behind a reader or a writer."""
    if not isinstance(reader, SqlReader):
        raise ShoalError("only a database can be copied, not what is in memory")
    return reader._connection


def _of_the_run(table: Table) -> list[Any]:
    return [table.c.key.not_in(OWN_SETTINGS)] if table is tables.meta else []


def _rows(connection: Connection, table: Table) -> Iterator[dict[str, Any]]:
    query = select(table).where(*_of_the_run(table)).order_by(*table.primary_key.columns)
    result = connection.execute(query, execution_options={"yield_per": ROWS_AT_A_TIME})
    return (dict(row) for row in result.mappings())


def _extent(rows: Iterable[dict[str, Any]]) -> Extent:
    count, total = 0, 0
    for row in rows:
        count += 1
        total += int.from_bytes(hashlib.sha256(repr(tuple(row.values())).encode()).digest())
    return Extent(count, f"{total % 2**256:064x}")


def _continue_numbers(target: Connection) -> None:
    """A database that counts by itself is told where to go on: an outbox row may never get an older one's number."""
    outbox = tables.ledger_outbox
    last = target.execute(select(func.coalesce(func.max(outbox.c.id), 0))).scalar_one()
    if target.dialect.name == "postgresql" and last:
        target.execute(text("SELECT setval(pg_get_serial_sequence('ledger_outbox', 'id'), :last)"), {"last": last})
