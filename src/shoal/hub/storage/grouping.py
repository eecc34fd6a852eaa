"""Group commit: writers that come while one is at the disk share the next trip to it.

    writer A ─ body ─┐
    writer B ─ body ─┼─ one transaction, one savepoint each ─► COMMIT (one fsync) ─► all three return
    writer C ─ body ─┘  one at a time: each sees what those before it did

No writer returns before its data is as safe as it asked for. A body that fails is undone alone; a commit that fails
fails all of its writers. The last writer in the queue commits: alone at once; under load a commit carries as many as
queued during the one before it. An fsync takes milliseconds, a decision one: without this the disk sets the pace.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine

from shoal.hub.storage.reader import driver_of

MOST = 64  # writers in one group: the first of them waits for all the others' bodies
LOOK_S = 0.1


class Busy(Exception):
    """The writer before was not done in time."""


class _Group:
    def __init__(self, connection: Connection, durable: bool) -> None:
        self.connection, self.driver, self.durable = connection, driver_of(connection), durable
        self.driver.execute("BEGIN IMMEDIATE")
        self.size, self.ended = 0, threading.Event()
        self.error: BaseException | None = None


class GroupCommit:
    """The commits of `durable` are on disk when they return, those of `relaxed` are not. `on_loss` is called when
    writers that had done their part are undone with others."""

    def __init__(
        self, durable: Engine, relaxed: Engine, patience_s: float, on_loss: Callable[[], None] = lambda: None
    ) -> None:
        self._engines = {True: durable, False: relaxed}
        self._connections: dict[bool, Connection] = {}
        self._patience_s, self._on_loss = patience_s, on_loss
        self._lock, self._queue_lock = threading.Lock(), threading.Lock()
        self._queued = 0
        self._group: _Group | None = None

    @contextmanager
    def write(self, durable: bool) -> Iterator[Connection]:
        """A connection inside the group's transaction; on return a `durable` one is committed."""
        self._enter()
        try:
            if self._group is not None and durable and not self._group.durable:
                self._end(self._group)
            if self._group is None:
                self._group = _Group(self._connection(durable), durable)
            group = self._group
            group.size += 1
            alone = group.size == 1  # to undo the first writer of a group, the whole transaction is rolled back
            if not alone:
                group.driver.execute("SAVEPOINT body")
            try:
                yield group.connection
            except BaseException as error:
                (self._fail if alone else self._undo)(group, error)
                raise
            if not alone:
                group.driver.execute("RELEASE body")
            self._end_unless_more_come(group)
        finally:
            self._lock.release()
        if durable:
            self._await(group)

    @contextmanager
    def look(self) -> Iterator[Connection]:
        self._enter()
        try:
            if self._group is not None:
                self._end(self._group)
            yield self._connection(False)
        finally:
            self._lock.release()

    def _connection(self, durable: bool) -> Connection:
        if durable not in self._connections:
            self._connections[durable] = self._engines[durable].connect()
        return self._connections[durable]

    def close(self) -> None:
        with self._lock:
            if self._group is not None:
                self._end(self._group)
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def _enter(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        with self._queue_lock:
            self._queued += 1
        try:
            if not self._lock.acquire(timeout=self._patience_s):
                raise Busy
        finally:
            with self._queue_lock:
                self._queued -= 1

    def _undo(self, group: _Group, error: BaseException) -> None:
        """Undo one body alone. Where the disk failed, SQLite has undone everything: then all have failed."""
        try:
            group.driver.execute("ROLLBACK TO body")
            group.driver.execute("RELEASE body")
        except sqlite3.Error:
            self._on_loss()
            self._fail(group, error)
        else:
            self._end_unless_more_come(group)

    def _end_unless_more_come(self, group: _Group) -> None:
        if group is self._group and (self._queued == 0 or group.size >= MOST):
            self._end(group)

    def _end(self, group: _Group) -> None:
        self._group = None
        try:
            group.driver.commit()
        except BaseException as error:
            group.error = error
            self._on_loss()
            self._drop_connection(group)
            raise
        finally:
            group.ended.set()

    def _fail(self, group: _Group, error: BaseException) -> None:
        self._group = None
        group.error = error
        try:
            group.driver.rollback()
        except sqlite3.Error:
            self._drop_connection(group)
        group.ended.set()

    def _drop_connection(self, group: _Group) -> None:
        """How far a failed commit or rollback came is unknown; closing the connection undoes the rest."""
        self._connections.pop(group.durable, None)
        group.connection.invalidate()
        group.connection.close()

    def _await(self, group: _Group) -> None:
        """Until the group is committed. If its last writer has given up in the queue, commit it here."""
        while not group.ended.wait(LOOK_S):
            if self._lock.acquire(blocking=False):
                try:
                    self._end_unless_more_come(group)
                finally:
                    self._lock.release()
        if group.error is not None:
            raise group.error
