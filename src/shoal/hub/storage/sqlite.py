"""SQLite: the database of one machine.

    write:  one at a time ─► BEGIN IMMEDIATE ─► rows ─► decision ─► commands ─► COMMIT (fsync), shared (`grouping`)
    read:   BEGIN ─► one snapshot (WAL): never waits for a writer, never makes one wait

A commit is on disk when it returns (`synchronous=FULL`), unless it may be lost with the machine, though not with the
process (nonces, presence): those have connections of their own with `synchronous=NORMAL` and cost no fsync.

With ten thousand workers it takes milliseconds to count rows, so the one process that writes keeps `Counts`. What a
failed transaction has changed is read again.

    where the run stands (`RunProgress`)     kept while units are leased and submitted; read again after anything else
    how many units are alive, by state    kept until an accepted one changes: it may have been in a batch, or not
    what newcomers have in hand           a sum for each network; a node whose rows changed is read again, alone
    nodes                                 rows as they were read or written last: every request asks for one
    nonces, signs of life                 `arrivals`: each transaction writes down what came before it
"""

import errno
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import NullPool, Pool, StaticPool

from shoal.errors import DiskError, ResourceError, ShoalError
from shoal.hub.state import AddBatch, AddPolicy, Command, NodeRow, RunProgress, Save, UnitRow, UnitState, rows
from shoal.hub.storage import tables
from shoal.hub.storage.arrivals import Arrived
from shoal.hub.storage.grouping import Busy, GroupCommit
from shoal.hub.storage.reader import IN_HAND, NEWCOMER, UNJUDGED, Reader, driver_of
from shoal.hub.storage.writer import Storage, Writer
from shoal.runtime.files import ensure_folder, is_full, make_private, resource_error

BUSY_TIMEOUT_MS, READERS_CACHE_KIB = 10_000, 512
NODES_KEPT = 20_000
_LOST = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

_HOLDERS = f"SELECT DISTINCT node FROM ({IN_HAND}) AS hands"
_LEASED = f"SELECT count(*) FROM leases WHERE leases.node = :node AND leases.state = '{rows.LeaseState.ACTIVE}'"
_HAND = f"""SELECT nodes.network, nodes.passed, ({_LEASED}), ({_LEASED} AND leases.brief),
    (SELECT count(*) FROM submissions WHERE submissions.node = :node AND {UNJUDGED})
    FROM nodes WHERE nodes.node = :node AND {NEWCOMER}"""


class UnitsInHand:
    """Units in hand of each node on probation, and sums by network: all, those of unproven nodes, and of these the ones
    that are not brief. Nodes in `changed` are to be read again."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.changed = set(nodes)
        self._nodes: dict[str, tuple[str, list[int]]] = {}
        self._networks: dict[str, list[int]] = {}

    def refresh(self, read: Callable[[str], tuple[str, list[int]] | None]) -> None:
        for node in self.changed:
            self._add(self._nodes.pop(node, None), -1)
            now = read(node)
            if now is not None and any(now[1]):
                self._nodes[node] = now
                self._add(now, 1)
        self.changed.clear()

    def _add(self, held: tuple[str, list[int]] | None, sign: int) -> None:
        if held is not None:
            network, counts = held
            before = self._networks.pop(network, [0, 0, 0])
            after = [one + sign * other for one, other in zip(before, counts, strict=True)]
            if any(after):
                self._networks[network] = after

    def of(self, node: str) -> rows.InHand:
        own = self._nodes[node][1][0] if node in self._nodes else 0
        parts = ({network: sums[place] for network, sums in self._networks.items()} for place in range(3))
        return rows.InHand(own, *parts)


class Counts:
    def __init__(self) -> None:
        self.progress: RunProgress | None = None
        self.alive: Counter[UnitState] | None = None
        self.in_hand: UnitsInHand | None = None
        self.nodes: dict[str, NodeRow] = {}

    def forget(self) -> None:
        self.progress = self.alive = self.in_hand = None
        self.nodes.clear()


class CountingWriter(Writer):
    def __init__(self, connection: Connection, counts: Counts) -> None:
        super().__init__(connection)
        self._counts = counts
        self._changed: set[str] = set()  # nodes, by this transaction
        self._is_moved = False

    def undone(self) -> None:
        if self._is_moved:
            self._counts.progress = self._counts.alive = None
        if self._counts.in_hand is not None:
            self._counts.in_hand.changed |= self._changed
        for node in self._changed:
            self._counts.nodes.pop(node, None)

    def node(self, node: str) -> NodeRow | None:
        known = self._counts.nodes.get(node)
        if known is None and (known := super().node(node)) is not None:
            self._keep(known)
        return known

    def _keep(self, row: NodeRow) -> None:
        if len(self._counts.nodes) >= NODES_KEPT:
            self._counts.nodes.clear()
        self._counts.nodes[row.node] = row

    def progress(self, counted: bool = True) -> RunProgress:  # noqa: ARG002  it is kept
        if self._counts.progress is None:
            self._counts.progress = super().progress()
        return self._counts.progress

    def alive_counts(self) -> dict[UnitState, int]:
        if self._counts.alive is None:
            self._counts.alive = Counter(super().alive_counts())
        return dict(+self._counts.alive)

    def newcomers_in_hand(self, node: str) -> rows.InHand:
        if self._counts.in_hand is None:
            self._counts.in_hand = UnitsInHand(holder for (holder,) in self._rows(_HOLDERS))
        self._counts.in_hand.refresh(self._hand)
        return self._counts.in_hand.of(node)

    def _hand(self, node: str) -> tuple[str, list[int]] | None:
        found = self._rows(_HAND, node=node)
        if not found:
            return None
        network, passed, leased, brief, submitted = found[0]
        units = leased + submitted
        return network, [units, 0, 0] if passed else [units, units, leased - brief]

    def _apply(self, command: Command) -> None:
        super()._apply(command)
        if isinstance(command, AddBatch | AddPolicy):
            self._counts.progress, self._is_moved = None, True
        elif isinstance(command, Save) and isinstance(command.row, UnitRow):
            self._unit_moved(command.row, command.was)
        elif isinstance(command, Save) and _moves_units(command):
            self._changed.add(command.row.node)
            if isinstance(command.row, NodeRow):
                self._keep(command.row)
            if self._counts.in_hand is not None:
                self._counts.in_hand.changed.add(command.row.node)

    def _unit_moved(self, row: UnitRow, was: Any) -> None:
        counts, self._is_moved = self._counts, True
        is_new, is_kept = was is None, was in rows.UNDECIDED_UNITS
        if counts.progress is not None:
            if row.alive and is_new and row.unit == counts.progress.next_unit:
                counts.progress = replace(counts.progress, next_unit=row.unit + 1, alive=counts.progress.alive + 1)
            elif not (row.alive and is_kept):
                counts.progress = None
        if not (is_new or is_kept):
            counts.alive = None
        elif counts.alive is not None:
            if is_kept:
                counts.alive[UnitState(was)] -= 1
            counts.alive[row.state] += row.alive


def _moves_units(command: Save[Any]) -> bool:
    """Whether a node may have more or fewer units in hand, or count otherwise."""
    row, was = command.row, command.was
    if isinstance(row, rows.LeaseRow):
        return was is not row.state
    if isinstance(row, rows.SubmissionRow):
        return (was in rows.UNDECIDED_SUBMISSIONS) != (row.state in rows.UNDECIDED_SUBMISSIONS)
    return isinstance(row, NodeRow)


class SqliteStorage(Storage):
    """One file, whose folder is locked against other hubs; without a `path` in memory, for simulations and tests: there
    readers exclude writers, and closing it loses nothing."""

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
            # as many readers as threads, each with a cache of its own: the system has the file in memory, too
            small = "journal_mode=WAL", "synchronous=NORMAL", f"cache_size=-{READERS_CACHE_KIB}"
            self._relaxed = _engine(f"/{path}", NullPool, *small)
        self._counts, self.arrivals = Counts(), Arrived()
        self._idle: list[Connection] = []  # of readers
        # SQLite's own lock makes waiting writers poll; this one wakes the next at once
        self._writers = GroupCommit(self._durable, self._relaxed, BUSY_TIMEOUT_MS / 1000, self._lost)
        try:
            with self.write() as transaction:
                tables.prepare(transaction._connection, str(self._path))
                self.arrivals.remember(transaction.nonces())
        except ShoalError:
            self.close()
            raise

    def _lost(self) -> None:
        self._counts.forget()
        self.arrivals.write_again()

    def known(self, node: str) -> NodeRow | None:
        return self._counts.nodes.get(node)

    def find(self, node: str) -> NodeRow | None:
        with self.read() as reader:
            if reader.node(node) is None:  # strangers make no writer wait
                return None
        with self.write(durable=False) as transaction:
            return transaction.node(node)

    def flush(self) -> None:
        if self.arrivals.noted:
            with self.write(durable=False):
                pass  # each transaction does it

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
                writer, noted = CountingWriter(connection, self._counts), self.arrivals.take()
                try:
                    writer.note(noted)
                    yield writer
                except BaseException:
                    writer.undone()
                    self.arrivals.back(noted)
                    raise
        except (DatabaseError, sqlite3.Error) as error:
            raise self._explained(error) from error
        except Busy as error:
            busy = f"the database {self._path} was busy for {BUSY_TIMEOUT_MS // 1000} s; is the disk stuck?"
            raise ResourceError(busy) from error

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
        """Not every call of SQLite says itself that the disk is full."""
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
