"""PostgreSQL: the database of several hubs.

    read        REPEATABLE READ, READ ONLY: one snapshot, which waits for nobody
    write       READ COMMITTED, under the run's lock (an advisory lock of the database)
                  shared     most writers: each row is locked when it is read; a search (for an open unit, for a
                             submission to audit) skips rows that others have locked
                  exclusive  writers that change what all others rely on: policy, batch, sweep, posting, restore
    frontier    a second such lock, for making new units: two hubs never give out the same number, nor too many
    epoch       a number in `meta` that every change of policy, batches or settings increases: while it is the same, a
                hub does not read them again (`Remembered`). It is read together with taking the run's lock

Locks are taken in one order: the run's, then nodes (several: sorted), then leases or submissions, then units, then the
frontier. A deadlock that happens anyway is a `StaleRow`: tried again. Every wait ends: see `LIMITS`.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from shoal.errors import ConfigError, ResourceError, ShoalError
from shoal.hub.state import AddBatch, AddPolicy, Command, NodeRow, Refusal, RunProgress
from shoal.hub.storage import tables
from shoal.hub.storage.arrivals import Arrived
from shoal.hub.storage.reader import Reader, among, driver_of, with_percent
from shoal.hub.storage.writer import INSERT_NONCE, StaleRow, Storage, Writer, is_overtaken
from shoal.runtime.extras import of_extra
from shoal.runtime.text import install_command

log = logging.getLogger("shoal.hub")

CONNECTIONS = 24  # of one hub; PostgreSQL allows a hundred by default: enough for four hubs
DURABLE = {"synchronous_commit": "on"}  # whatever the server, the database or the role say: a receipt is a promise
LIMITS = {"lock_timeout": "10s", "statement_timeout": "30s", "idle_in_transaction_session_timeout": "60s"}
NETWORK = {"connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "tcp_user_timeout": 20_000}
MANY = 3  # from so many commands on they are sent in one round trip, which costs as much time as two single commands
NODES_KEPT = 20_000
KNOWN_S = 20.0  # another hub's change of a node is seen at its second request at the latest, and by each decision
RUN, FRONTIER = 1, 2
_SPACE = 0x73686F61  # "shoa": advisory locks are numbers that a whole database shares
_AGAIN = frozenset({"40001", "40P01", "55P03"})  # serialization failure, deadlock, lock timeout

_RELAXED = "; SET LOCAL synchronous_commit TO off"
_SHARED = f"; SELECT pg_advisory_xact_lock_shared({_SPACE}, {RUN}); SELECT max(value) FROM meta WHERE key = 'epoch'"
_EXCLUSIVE = f"; SELECT pg_advisory_xact_lock({_SPACE}, {RUN})"
_AT_FRONTIER = f"SELECT pg_advisory_xact_lock({_SPACE}, {FRONTIER})"
_NEXT_EPOCH = """INSERT INTO meta AS known VALUES ('epoch', '1')
    ON CONFLICT (key) DO UPDATE SET value = (known.value::bigint + 1)::text"""
_NONCE = with_percent(f"BEGIN{_RELAXED}; {INSERT_NONCE}; COMMIT")
_CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_NOW = text(f"SELECT {_CLOCK}")
_LEAD = text(f"""INSERT INTO leaders AS held (name, holder, until_ms) VALUES (:name, :holder, {_CLOCK} + :for_ms)
    ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, until_ms = excluded.until_ms
    WHERE held.holder = excluded.holder OR held.until_ms < excluded.until_ms - :for_ms RETURNING name""")
_RESIGN = text("DELETE FROM leaders WHERE name = :name AND holder = :holder")


class PostgresStorage(Storage):
    def __init__(self, url: str, create: bool = True) -> None:
        place = parsed(url)
        self._where = f"the database {place.set(query={}).render_as_string(hide_password=True).replace('+psycopg', '')}"
        self._engine = _engine(place)
        self._driver = self._engine.dialect.loaded_dbapi
        self.arrivals, self._known = Arrived(), dict[str, tuple[NodeRow, float]]()
        self.standing = Remembered()
        try:
            with self.write(exclusive=True) as transaction:
                tables.prepare(transaction._connection, self._where, create)
                if transaction._connection.execute(text("SHOW fsync")).scalar() == "off":
                    log.warning("%s runs with fsync off: what it has promised is lost with its machine", self._where)
        except ShoalError:
            self.close()
            raise

    @property
    def is_shared(self) -> bool:
        return True

    def known(self, node: str) -> NodeRow | None:
        row, until_s = self._known.get(node, (None, 0.0))
        return row if until_s > time.monotonic() else None

    def find(self, node: str) -> NodeRow | None:
        with self.read() as reader:
            row = reader.node(node)
        self._keep([row] if row else [])
        return row

    def _keep(self, found: Iterable[NodeRow]) -> None:
        """Only workers: whether a trusted node was banned is looked up each time."""
        if len(self._known) >= NODES_KEPT:
            self._known.clear()
        self._known |= {row.node: (row, time.monotonic() + KNOWN_S) for row in found if row.role == "worker"}

    def flush(self) -> None:
        """Write without a lock, as no other row is concerned; and read the nodes that were heard of, so that their next
        requests find them in memory."""
        heard, noted = list(self.arrivals.waiting()), self.arrivals.take()
        try:
            with self._connected() as connection:
                PostgresWriter(connection, self, durable=False, lock="").note(noted)
        except BaseException:
            self.arrivals.back(noted)
            raise
        if heard:
            with self.read() as reader:
                self._keep(reader.nodes_named(heard).values())

    @contextmanager
    def read(self) -> Iterator[Reader]:
        with self._connected() as connection:
            driver_of(connection).execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield Reader(connection)

    @contextmanager
    def write(self, durable: bool = True, exclusive: bool = False) -> Iterator[Writer]:
        with self._connected() as connection:
            yield PostgresWriter(connection, self, durable, _EXCLUSIVE if exclusive else _SHARED)

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """What is done in a transaction is committed at the end. The driver is called directly: SQLAlchemy, which keeps
        the connections, would cost as much again as the statements."""
        with self._failures(), self._engine.connect() as connection:
            driver = driver_of(connection)
            try:
                yield connection
                driver.commit()
            finally:
                if driver.closed:
                    connection.invalidate()
                else:
                    driver.rollback()

    def take_nonce(self, node: str, nonce: str, expires_at_ms: int) -> bool:
        """One round trip: the client puts the values into the text."""
        with self._connected() as connection, self._driver.ClientCursor(driver_of(connection)) as cursor:
            cursor.execute(_NONCE, {"node": node, "nonce": nonce, "expires_at_ms": expires_at_ms})
            return any(cursor.statusmessage == "INSERT 0 1" for _ in cursor.results())

    def now_ms(self) -> int:
        with self._failures(), self._engine.begin() as connection:
            return int(connection.execute(_NOW).scalar_one())

    def lead(self, name: str, holder: str, for_s: float) -> bool:
        with self._failures(), self._engine.begin() as connection:
            values = {"name": name, "holder": holder, "for_ms": round(for_s * 1000)}
            return connection.execute(_LEAD, values).first() is not None

    def resign(self, name: str, holder: str) -> None:
        with self._failures(), self._engine.begin() as connection:
            connection.execute(_RESIGN, {"name": name, "holder": holder})

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except PoolTimeout as error:
            raise ResourceError(f"{self._where} is too slow: all connections are in use") from error
        except (DBAPIError, self._driver.Error) as error:
            own = getattr(error, "orig", error)
            said = (str(own).strip() or type(own).__name__).splitlines()[0]
            if isinstance(own, self._driver.DataError):  # a character or a number that it cannot hold
                sentence = f"the database cannot hold a value of this request: {said}"
                raise Refusal(422, "request.value", sentence) from error
            if is_overtaken(own) or getattr(own, "sqlstate", None) in _AGAIN:
                raise StaleRow(f"somebody else was at the same rows: {said}") from error
            advice = "is the server running, and may this user change this database?"
            raise ResourceError(f"cannot use {self._where}: {said}; {advice}") from error


@dataclass
class Remembered:
    """What this hub's writers read under one epoch."""

    epoch: str = ""
    progress: RunProgress | None = None
    settings: dict[str, str | None] = field(default_factory=dict)


class PostgresWriter(Writer):
    """Single rows that it reads stay locked until the end, unless it is exclusive. Beginning, taking the run's `lock`
    and looking at the epoch is one trip."""

    def __init__(self, connection: Connection, storage: PostgresStorage, durable: bool, lock: str) -> None:
        super().__init__(connection)
        self._storage, self._exclusive, self._standing = storage, lock == _EXCLUSIVE, Remembered()
        found = driver_of(connection).execute(f"BEGIN{'' if durable else _RELAXED}{lock}")
        if lock == _SHARED:
            while found.nextset():
                pass
            epoch = str(found.fetchone()[0] or "")
            if storage.standing.epoch != epoch:
                storage.standing = Remembered(epoch)
            self._standing = storage.standing

    def lock_nodes(self, nodes: Iterable[str]) -> None:
        listed, values = among(sorted(set(nodes)))
        self._rows(f"SELECT node FROM nodes WHERE node IN {listed} ORDER BY node{self._lock('nodes')}", **values)

    def frontier(self) -> RunProgress:
        self._execute(_AT_FRONTIER, {})
        self._standing = Remembered()  # the holder of the lock before may have changed it
        return self.progress()

    def standing(self) -> RunProgress:
        if self._standing.progress is None:
            self._standing.progress = self.progress(counted=False)
        return self._standing.progress

    def setting(self, key: str) -> str | None:
        if key not in self._standing.settings:
            self._standing.settings[key] = super().setting(key)
        return self._standing.settings[key]

    def put_setting(self, key: str, value: str) -> None:
        super().put_setting(key, value)
        self._next_epoch()

    def apply(self, wanted: Iterable[Command]) -> None:
        """Many commands make one trip."""
        together, self._sent = len(commands := list(wanted)) >= MANY, list[tuple[Any, str]]()
        with driver_of(self._connection).pipeline() if together else nullcontext():
            super().apply(commands)
        for changed, sentence in self._sent:
            super()._require_one(changed, sentence)

    def _require_one(self, changed: Any, sentence: str) -> None:
        self._sent.append((changed, sentence))  # answers come later

    def _apply(self, command: Command) -> None:
        super()._apply(command)
        if isinstance(command, AddBatch | AddPolicy):
            self._next_epoch()

    def _next_epoch(self) -> None:
        self._execute(_NEXT_EPOCH, {})
        self._standing = Remembered()

    def _lock(self, *tables: str, skip: bool = False) -> str:
        # Not the strongest lock: rows that merely refer to a locked one may be written meanwhile.
        if self._exclusive:
            return ""
        return f" FOR NO KEY UPDATE OF {', '.join(tables)}{' SKIP LOCKED' if skip else ''}"


def parsed(url: str) -> URL:
    try:
        place = make_url(url)
    except (ArgumentError, ValueError):  # what it says may quote the password
        raise ConfigError(f"hub.database is not a URL; it looks like {EXAMPLE}") from None
    if place.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise ConfigError(f"hub.database is for {place.drivername}, not for PostgreSQL; it looks like {EXAMPLE}")
    return place.set(drivername="postgresql+psycopg")


EXAMPLE = "postgresql://user:password@host:5432/name"


def _engine(place: URL) -> Engine:
    options = " ".join(f"-c {name}={value}" for name, value in {**LIMITS, **DURABLE}.items())
    try:
        return create_engine(
            place, pool_size=CONNECTIONS, max_overflow=0, pool_timeout=30, isolation_level="AUTOCOMMIT",
            pool_use_lifo=True,  # idle connections stay idle, and the ones in use have their statements prepared
            connect_args={**NETWORK, "options": options, "application_name": "shoal hub"},
        )  # fmt: skip
    except (ImportError, NoSuchModuleError) as error:
        raise ConfigError(f"hub.database needs a driver: {install_command(of_extra('fleet'))}") from error
