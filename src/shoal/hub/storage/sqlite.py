"""SQLite: the database of one machine.

    write:  process-wide lock ─► BEGIN IMMEDIATE ─► rows ─► decision ─► commands ─► COMMIT (fsync)
    read:   BEGIN ─► one snapshot (WAL): never waits for a writer, never makes one wait

`synchronous=FULL`: a commit is on disk when it returns. Writes that may be lost with the machine, but not with the
process (nonces, presence), go through a second set of connections with `synchronous=NORMAL` and cost no fsync.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect
from sqlalchemy.exc import DatabaseError

from shoal.errors import ConfigError, DiskError, ResourceError, ShoalError
from shoal.hub.storage import tables
from shoal.hub.storage.queries import SqlReader
from shoal.hub.storage.writes import SqlWriter
from shoal.runtime.files import ensure_folder, is_full, resource_error

BUSY_TIMEOUT_MS = 10_000
CONNECTIONS = 48
"""More than the threads that serve requests, so that nobody waits for a connection."""
_LOST = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class SqliteStorage:
    """Implements `protocol.Storage` on one file."""

    def __init__(self, path: Path) -> None:
        ensure_folder(path.parent)
        self._path = path
        # SQLite lets one writer in at a time and makes the others poll; a lock hands over at once.
        self._write_lock = threading.Lock()
        self._durable = _engine(path, synchronous="FULL")
        self._relaxed = _engine(path, synchronous="NORMAL")
        try:
            self._prepare()
        except ShoalError:
            self.close()
            raise

    @contextmanager
    def read(self) -> Iterator[SqlReader]:
        with self._failures(), _transaction(self._durable, "BEGIN") as connection:
            yield SqlReader(connection)

    @contextmanager
    def write(self, durable: bool = True) -> Iterator[SqlWriter]:
        engine = self._durable if durable else self._relaxed
        if not self._write_lock.acquire(timeout=BUSY_TIMEOUT_MS / 1000):
            raise ResourceError(
                f"the database {self._path} was busy for {BUSY_TIMEOUT_MS // 1000} s; is the disk stuck?"
            )
        try:
            with self._failures(), _transaction(engine, "BEGIN IMMEDIATE") as connection:
                yield SqlWriter(connection)
        finally:
            self._write_lock.release()

    def close(self) -> None:
        self._durable.dispose()
        self._relaxed.dispose()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What the database says about its disk, as one sentence. The transaction is undone by then."""
        try:
            yield
        except DatabaseError as error:
            raise self._explained(error.orig) from error

    def _explained(self, error: BaseException | None) -> ResourceError:
        """A full disk has several faces here: not every call of SQLite says so itself."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and is_full(self._path.parent)):
            return resource_error("write to the database", self._path, OSError(errno.ENOSPC, "disk full"))
        kind = DiskError if code in _LOST else ResourceError
        return kind(
            f"cannot use the database {self._path}: {error}; check the disk (damaged?), "
            "restore it from a backup, or start another run in another folder"
        )

    def _prepare(self) -> None:
        with self.write() as transaction:
            connection = transaction._connection
            if inspect(connection).has_table(tables.meta.name):
                self._check_version(transaction.setting("schema_version"))
                return
            tables.metadata.create_all(connection, checkfirst=False)
            transaction.put_setting("schema_version", str(tables.SCHEMA_VERSION))

    def _check_version(self, found: str | None) -> None:
        if found is None or not found.isdigit():
            raise ConfigError(f"{self._path} is not a hub's database; move it away or use another folder")
        if int(found) > tables.SCHEMA_VERSION:
            raise ConfigError(
                f"{self._path} was written by a newer shoal (schema {found}, this one knows {tables.SCHEMA_VERSION}): "
                "upgrade shoal, or use another folder"
            )
        if int(found) < tables.SCHEMA_VERSION:
            raise ConfigError(
                f"{self._path} was written by an older shoal (schema {found}, this one needs {tables.SCHEMA_VERSION}): "
                "finish that run with the version that began it, or start another one in another folder"
            )


def _engine(path: Path, synchronous: str) -> Engine:
    engine = create_engine(f"sqlite:///{path}", pool_size=CONNECTIONS, max_overflow=0, pool_timeout=30)

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun by `_begin` alone
        for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options()["shoal_begin"])

    return engine


@contextmanager
def _transaction(engine: Engine, begin: str) -> Iterator[Connection]:
    with engine.connect().execution_options(shoal_begin=begin) as connection, connection.begin():
        yield connection
