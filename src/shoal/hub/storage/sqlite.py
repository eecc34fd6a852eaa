"""SQLite: the database of one machine.

    write:  one at a time ─► BEGIN IMMEDIATE ─► rows ─► decision ─► commands ─► COMMIT (fsync), shared by all who
            queued meanwhile (`grouping`)
    read:   BEGIN ─► one snapshot (WAL): never waits for a writer, never makes one wait

`synchronous=FULL`: a commit is on disk when it returns. Writes that may be lost with the machine, but not with the
process (nonces, presence), go through connections of their own with `synchronous=NORMAL` and cost no fsync.
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

from shoal.errors import DiskError, ResourceError, ShoalError
from shoal.hub.storage import schema
from shoal.hub.storage.grouping import Busy, GroupCommit
from shoal.hub.storage.story_queries import SqlStoryReader
from shoal.hub.storage.writes import SqlWriter
from shoal.runtime.files import ensure_folder, is_full, make_private, resource_error

BUSY_TIMEOUT_MS = 10_000
CONNECTIONS = 48
"""More than the threads that serve requests, so that nobody waits for a connection."""
_LOST = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class SqliteStorage:
    """Implements `protocol.Storage` on one file."""

    def __init__(self, path: Path) -> None:
        ensure_folder(path.parent)
        make_private(path)  # it holds the seeds of units to come; what SQLite puts beside it has the same mode
        for suffix in ("-wal", "-shm"):
            if (beside := path.with_name(path.name + suffix)).exists():
                make_private(beside)
        self._path = path
        self._durable = _engine(path, synchronous="FULL")
        self._relaxed = _engine(path, synchronous="NORMAL")
        # SQLite lets one writer in at a time and makes the others poll; these hand over at once.
        self._writers = GroupCommit(self._durable, self._relaxed, BUSY_TIMEOUT_MS / 1000)
        try:
            self._prepare()
        except ShoalError:
            self.close()
            raise

    @property
    def is_shared(self) -> bool:
        return False

    def now_ms(self) -> int | None:
        return None

    def lead(self, name: str, holder: str, for_s: float) -> bool:  # noqa: ARG002  the folder's lock keeps others out
        return True

    def resign(self, name: str, holder: str) -> None:
        """There is nobody to leave it to."""

    @contextmanager
    def read(self) -> Iterator[SqlStoryReader]:
        with self._failures(), _transaction(self._durable, "BEGIN") as connection:
            yield SqlStoryReader(connection)

    @contextmanager
    def write(self, durable: bool = True, exclusive: bool = False) -> Iterator[SqlWriter]:  # noqa: ARG002  always
        try:
            with self._failures(), self._writers.write(durable) as connection:
                yield SqlWriter(connection)
        except Busy as error:
            raise ResourceError(
                f"the database {self._path} was busy for {BUSY_TIMEOUT_MS // 1000} s; is the disk stuck?"
            ) from error

    def close(self) -> None:
        with self._failures():
            self._writers.close()
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
            schema.prepare(transaction._connection, str(self._path))


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
