"""SQLite: the database of one machine.

    write:  one at a time ─► BEGIN IMMEDIATE ─► rows ─► decision ─► commands ─► COMMIT (fsync), shared by all who
            queued meanwhile (`grouping`)
    read:   BEGIN ─► one snapshot (WAL): never waits for a writer, never makes one wait

`synchronous=FULL`: a commit is on disk when it returns. Writes that may be lost with the machine, but not with the
process (nonces, presence), go through connections of their own with `synchronous=NORMAL` and cost no fsync.

What a decision needs to know of all rows together (how many units are alive, what newcomers have in hand) is counted
once and then kept by the one process that writes (`counts`): for ten thousand workers counting takes milliseconds.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import NullPool, Pool, StaticPool

from shoal.errors import DiskError, ResourceError, ShoalError
from shoal.hub.storage import tables
from shoal.hub.storage.counts import CountingWriter, Counts
from shoal.hub.storage.grouping import Busy, GroupCommit
from shoal.hub.storage.reader import Reader, driver_of
from shoal.hub.storage.writer import Storage
from shoal.runtime.files import ensure_folder, is_full, make_private, resource_error

BUSY_TIMEOUT_MS = 10_000
_LOST = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class SqliteStorage(Storage):
    """On one file, whose folder is locked against other hubs; without a `path` in memory, for simulations and tests:
    there who reads excludes who writes, and closing it loses nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._in_memory = path or Path(":memory:"), path is None
        if path is None:
            self._durable = self._relaxed = _engine("", StaticPool)
        else:
            ensure_folder(path.parent)
            make_private(path)  # it holds the seeds of units to come; what SQLite puts beside it has the same mode
            for suffix in ("-wal", "-shm"):
                if (beside := path.with_name(path.name + suffix)).exists():
                    make_private(beside)
            self._durable = _engine(f"/{path}", NullPool, "journal_mode=WAL", "synchronous=FULL")
            self._relaxed = _engine(f"/{path}", NullPool, "journal_mode=WAL", "synchronous=NORMAL")
        self._counts = Counts()
        self._idle: list[Connection] = []  # of readers
        # SQLite lets one writer in at a time and makes the others poll; these hand over at once.
        self._writers = GroupCommit(self._durable, self._relaxed, BUSY_TIMEOUT_MS / 1000, self._counts.forget)
        try:
            with self.write() as transaction:
                tables.prepare(transaction._connection, str(self._path))
        except ShoalError:
            self.close()
            raise

    @contextmanager
    def read(self) -> Iterator[Reader]:
        try:
            with self._writers.look() if self._in_memory else self._view() as connection:
                yield Reader(connection)
        except (DatabaseError, sqlite3.Error) as error:
            raise self._explained(error) from error

    @contextmanager
    def _view(self) -> Iterator[Connection]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._relaxed.connect()
        try:
            driver_of(connection).execute("BEGIN")
            yield connection
        finally:
            driver_of(connection).rollback()  # nothing was changed
            self._idle.append(connection)

    @contextmanager
    def write(self, durable: bool = True, exclusive: bool = False) -> Iterator[CountingWriter]:  # noqa: ARG002  always
        try:
            with self._writers.write(durable and not self._in_memory) as connection:
                writer = CountingWriter(connection, self._counts)
                try:
                    yield writer
                except BaseException:
                    writer.undone()
                    raise
        except (DatabaseError, sqlite3.Error) as error:
            raise self._explained(error) from error
        except Busy as error:
            raise ResourceError(
                f"the database {self._path} was busy for {BUSY_TIMEOUT_MS // 1000} s; is the disk stuck?"
            ) from error

    def close(self) -> None:
        if self._in_memory:
            return
        try:
            self._writers.close()
        except (DatabaseError, sqlite3.Error) as error:
            raise self._explained(error) from error
        while self._idle:
            self._idle.pop().close()
        self._durable.dispose()
        self._relaxed.dispose()

    def _explained(self, error: BaseException) -> ResourceError:
        """A full disk has several faces here: not every call of SQLite says so itself."""
        error = getattr(error, "orig", error)
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and is_full(self._path.parent)):
            return resource_error("write to the database", self._path, OSError(errno.ENOSPC, "disk full"))
        kind = DiskError if code in _LOST else ResourceError
        return kind(
            f"cannot use the database {self._path}: {error}; check the disk (damaged?), "
            "restore it from a backup, or start another run in another folder"
        )


def _engine(place: str, pool: type[Pool], *pragmas: str) -> Engine:
    engine = create_engine(f"sqlite://{place}", poolclass=pool, connect_args={"check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun here and by `grouping` alone
        for pragma in (*pragmas, "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}"):
            connection.execute(f"PRAGMA {pragma}")

    return engine
