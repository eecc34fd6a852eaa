"""Chunks, many at a time: threads that carry out what the plan decides, and never keep a byte before its hash.

    want() ─► Plan ─► n threads, each: ┬─ keeper.has: already on this disk?
               ▲                       ├─ GET ─► hash while receiving ─┬─ matches, and the first to: keeper.keep
               │                       │                               └─ does not: the source is dropped
               └── failed: elsewhere ──┘
              maps ◄── one thread per source that asks who has what (`have`)

Memory is one chunk per thread. The downloader wants the chunks of one version and waits; a relay's pool lives as long
as the relay and is given new chunks, the newest version's first, whenever the head moves. A thread without work waits
for a map, an arrival or a wish; only one of them also looks at the clock, for what has become overdue.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from blake3 import blake3

from shoal.errors import BroadcastError, ChunkCorrupt
from shoal.protocol import Chunk, PolicyManifest
from shoal.runtime.stop import StopToken
from shoal.runtime.targets import Reach
from shoal.shardcast.connection import Connection, Deadline, Timeouts
from shoal.shardcast.have import MapWatch, Question
from shoal.shardcast.limits import Throttle
from shoal.shardcast.plan import UPSTREAM_WAIT_S, Flight, Plan
from shoal.shardcast.sources import Kind, SourceScores
from shoal.shardcast.tree import chunk_key

log = logging.getLogger(__name__)

IDLE_S = 0.1
LONG_IDLE_S = 10.0
LEAVE_CHECK_S = 0.1
CLOSE_S = 5.0
WORTH_BYTES_S = 128 * 1024  # what a connection of a throttled client should have for itself
ABSENT = (403, 404)  # a public bucket says 403 of what it does not hold
LATER = (*ABSENT, 429, 503)


class Keeper(Protocol):
    """Where chunks go. Called from several threads, for different chunks."""

    def has(self, chunk: Chunk, scratch: memoryview) -> bool:
        """Whether the chunk is already here, proven by its hash; `scratch` has its size."""

    def keep(self, chunk: Chunk, data: memoryview) -> None:
        """Store a chunk that has been verified; `data` is borrowed."""


@dataclass(frozen=True)
class PoolSettings:
    """`min_rate_bytes_s`: a source slower than this is left in the middle of a chunk, whatever the others do."""

    connections: int = 8
    min_rate_bytes_s: float = 32 * 1024
    timeouts: Timeouts = field(default_factory=Timeouts)

    @classmethod
    def throttled(cls, rate_bytes_s: float | None, reach: Reach | None = None) -> PoolSettings:
        """At most so many bytes per second in all: over so few connections that each of them is worth having, and no
        source is left because this side is slow."""
        if rate_bytes_s is None:
            return cls(timeouts=Timeouts(reach=reach))
        connections = max(1, min(cls.connections, int(rate_bytes_s / WORTH_BYTES_S)))
        least = min(cls.min_rate_bytes_s, rate_bytes_s / connections / 4)
        return cls(connections, least, Timeouts(throttle=Throttle(rate_bytes_s), reach=reach))


class _Desk:
    """What one thread works with: a connection to each source that it has asked, and one chunk of memory."""

    def __init__(self, stop: StopToken, timeouts: Timeouts) -> None:
        self._stop = stop
        self._timeouts = timeouts
        self._connections: dict[str, Connection] = {}
        self._buffer = bytearray()

    def connection(self, source: str) -> Connection:
        if source not in self._connections:
            self._connections[source] = Connection(source, self._stop, self._timeouts)
        return self._connections[source]

    def buffer(self, size_bytes: int) -> memoryview:
        if len(self._buffer) < size_bytes:
            self._buffer = bytearray(size_bytes)
        return memoryview(self._buffer)[:size_bytes]

    def leave(self, sources: Container[str]) -> None:
        """Close the connections to these: an idle one would keep a busy one out."""
        for source, connection in self._connections.items():
            if source in sources:
                connection.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class ChunkPool:
    """Start with `start`, end with `close`; `pending()` is 0 when everything wanted is kept."""

    def __init__(self, scores: SourceScores, keeper: Keeper, settings: PoolSettings = PoolSettings()) -> None:
        self._scores = scores
        self._keeper = keeper
        self._settings = settings
        self._closing = StopToken()
        self._lock = threading.Lock()
        self._work_there = threading.Condition(self._lock)  # what the threads wait for
        self._question_there = threading.Condition(self._lock)  # what the threads of the maps wait for
        self._over = threading.Condition(self._lock)  # what the owner waits for
        # An order of its own for every process, so that peers fetch different chunks.
        self._plan = Plan(scores, settings.connections, random.Random())
        timeouts = settings.timeouts
        patient = replace(timeouts, stall_s=timeouts.stall_s + UPSTREAM_WAIT_S)
        self._map_watch = MapWatch(self, scores, self._closing, patient)
        self._threads: list[threading.Thread] = []
        self._lines: dict[Flight, Connection] = {}  # who may be hung up on
        self._idle_threads = 0
        self._looking_at_clock = False  # one of them, if there are any, while something is wanted
        self._at_keeper = 0
        self.error: Exception | None = None
        self._crowded: set[str] = set()  # sources that have said 429
        self.fetched_bytes: Counter[str] = Counter()  # of chunks that were kept
        self.wasted_bytes: Counter[str] = Counter()  # of all others: too slow, too late, corrupt

    # What its owner says and asks

    @property
    def absent(self) -> set[str]:
        """Sources that lacked a chunk since the last one arrived."""
        return self._plan.absent

    def want(self, chunks: Iterable[Chunk], first: bool = True) -> None:
        """Add chunks, in front of all others or behind them. One that is wanted twice is fetched once."""
        with self._lock:
            self._plan.want(chunks, first)
            self._wake()

    def watch(self, manifest: PolicyManifest) -> None:
        """Ask the sources which chunks of this version they have, for as long as some of them are wanted."""
        with self._lock:
            self._plan.watch(manifest, time.monotonic())
            self._wake()
        if self._threads:
            self._follow_sources()

    def forget_except(self, kept: set[str]) -> None:
        """Stop wanting every chunk that is not in `kept`, and leave those on their way."""
        with self._lock:
            self._hang_up(self._plan.forget_except(kept))
            self._over.notify_all()

    def pending(self) -> int:
        with self._lock:
            return self._plan.pending()

    def progress(self) -> tuple[int, int]:
        """Bytes that are here or on their way here, and bytes that were wanted in all."""
        with self._lock:
            return self._plan.kept_bytes + self._plan.flying_bytes(), self._plan.wanted_bytes

    def soon(self, chunk_hash: str) -> bool:
        """Whether this chunk is being fetched from an upstream source now. Never waits."""
        return self._plan.soon(chunk_hash)

    def announced(self) -> set[str]:
        """All chunks of which `soon` is true."""
        with self._lock:
            return self._plan.announced()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is pending or something has failed; true if so."""
        with self._lock:
            return self._over.wait_for(lambda: bool(self.error) or not self._plan.pending(), seconds)

    def start(self) -> None:
        self._follow_sources()
        for number in range(self._settings.connections):
            thread = threading.Thread(target=self._work, name=f"chunks-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, reason: str = "closed") -> None:
        """End the threads. When it returns the keeper is not called again, though a connect may still be under way."""
        self._closing.set(reason)
        with self._lock:
            self._hang_up(list(self._lines))
            self._wake()
            self._over.wait_for(lambda: not self._at_keeper, CLOSE_S)
        self._map_watch.close()

    # What the threads of the maps ask

    def next_question(self, source: str) -> Question | None:
        with self._lock:
            while not self._closing.is_set():
                kind = self._scores.kinds().get(source)
                if kind is None:
                    return None
                question = self._plan.question(source, kind, time.monotonic())
                if isinstance(question, Question):
                    return question
                self._question_there.wait(question)
        return None

    def answered(self, source: str, question: Question, body: bytes | None, asked_s: float) -> None:
        with self._lock:
            more = self._plan.see(source, question.place, body, asked_s, time.monotonic())
            self._work_there.notify(more)  # not all: each look around costs time

    def _follow_sources(self) -> None:
        kinds = self._scores.kinds()
        self._map_watch.follow(source for source, kind in kinds.items() if kind is not Kind.LAST_RESORT)

    # What each thread does

    def _work(self) -> None:
        desk = _Desk(self._closing, self._settings.timeouts)
        try:
            flight = self._take(desk)
            while flight is not None:
                flight = self._carry_out(flight, desk) or self._take(desk)
        except Exception as error:  # noqa: BLE001  a full disk, or a bug: whoever waits for the pool raises it
            self._fail(error)
        finally:
            desk.close()

    def _take(self, desk: _Desk) -> Flight | None:
        """The next thing to do, once there is one; None when the pool closes."""
        while not self._closing.is_set():
            with self._lock:
                flight = self._plan.take(time.monotonic())
                if flight is not None:
                    if not self._looking_at_clock:
                        self._work_there.notify()  # one of those without work looks at it from now on
                    return flight
                desk.leave(self._crowded)
                on_duty = self._plan.pending() > 0 and not self._looking_at_clock
                self._idle(on_duty)
            if on_duty:
                self._follow_sources()
        return None

    def _idle(self, on_duty: bool) -> None:
        """Wait until there may be work; who is on duty, also until something may be overdue. Under the lock."""
        self._idle_threads += 1
        self._plan.hungry = True
        if on_duty:
            self._looking_at_clock = True
        self._work_there.wait(IDLE_S if on_duty else LONG_IDLE_S)
        if on_duty:
            self._looking_at_clock = False
        self._idle_threads -= 1
        self._plan.hungry = self._idle_threads > 0

    def _carry_out(self, flight: Flight, desk: _Desk) -> Flight | None:
        """One attempt at one chunk. Perhaps the next one, chosen already."""
        buffer = desk.buffer(flight.chunk.size_bytes)
        following = None
        done = False
        try:
            if not flight.source:
                done = self._look(flight, buffer)
            elif self._fetch(flight, desk.connection(flight.source), buffer):
                following = self._keep(flight, buffer)
                done = True
        finally:
            self._land(flight, done)
        return following

    def _look(self, flight: Flight, buffer: memoryview) -> bool:
        if not self._enter_keeper():
            return False
        try:
            return self._keeper.has(flight.chunk, buffer)
        finally:
            self._leave_keeper()

    def _keep(self, flight: Flight, buffer: memoryview) -> Flight | None:
        """Keep a chunk that has won. The next one is chosen before that: whoever hears that this one has arrived
        hears what is fetched next in the same breath, and fetches something else."""
        try:
            with self._lock:
                following = self._plan.take(time.monotonic())
            try:
                self._keeper.keep(flight.chunk, buffer)
            except BaseException:
                if following is not None:
                    self._land(following, False)
                raise
        finally:
            self._leave_keeper()
        return following

    def _land(self, flight: Flight, done: bool) -> None:
        with self._lock:
            self._lines.pop(flight, None)
            self._plan.land(flight, done)
            if not self._plan.pending():
                self._over.notify_all()
            elif not done:
                self._work_there.notify()

    def _enter_keeper(self) -> bool:
        with self._lock:
            if self._closing.is_set():
                return False
            self._at_keeper += 1
            return True

    def _leave_keeper(self) -> None:
        with self._lock:
            self._at_keeper -= 1
            if self._closing.is_set():
                self._over.notify_all()

    def _wake(self) -> None:
        self._work_there.notify_all()
        self._question_there.notify_all()

    def _hang_up(self, flights: list[Flight]) -> None:
        """Under the lock: a flight that has landed is no longer in `_lines`, so nobody else's request is cut."""
        for flight in flights:
            if flight in self._lines:
                self._lines[flight].hang_up()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.error = self.error or error
            self._closing.set("failed")
            self._hang_up(list(self._lines))
            self._wake()
            self._over.notify_all()

    def _fetch(self, flight: Flight, connection: Connection, buffer: memoryview) -> bool:
        """Whether the chunk is in the buffer, verified, and the first to be so; then the keeper has been entered."""
        source = flight.source
        with self._lock:
            self._lines[flight] = connection
        watcher = _Watcher(self, flight)
        try:
            arrived = self._download(connection, flight, buffer, watcher)
        except ChunkCorrupt as error:
            log.warning("%s; this source is not asked again", error)
            self._scores.drop(source, str(error))
            arrived = False
        except BroadcastError as error:
            arrived = False
            if watcher.slow:
                log.info("%s", error)
                self._scores.slow(source, flight.received_bytes, watcher.elapsed_s(), str(error))
            elif not (flight.lost or self._closing.is_set()):
                self._scores.failed(source, str(error))
        return self._arrive(flight, arrived)

    def _arrive(self, flight: Flight, arrived: bool) -> bool:
        with self._lock:
            if arrived:
                self._plan.delivered(flight, time.monotonic())
            if not arrived or self._closing.is_set() or not self._plan.win(flight):
                self.wasted_bytes[flight.source] += flight.received_bytes
                return False
            self._hang_up(self._plan.others(flight))
            self.fetched_bytes[flight.source] += flight.chunk.size_bytes
            self._at_keeper += 1
            return True

    def _download(self, connection: Connection, flight: Flight, buffer: memoryview, watcher: _Watcher) -> bool:
        """Receive and check the chunk; false if the source does not have it (yet)."""
        chunk, source = flight.chunk, flight.source
        with self._lock:  # those that fly beside this one share its link
            share = self._settings.min_rate_bytes_s / max(1, self._plan.flights_at(source))
        deadline = Deadline(self._settings.timeouts.stall_s + chunk.size_bytes / share)
        asked_s = time.monotonic()
        answer = connection.get("/" + chunk_key(chunk.hash), deadline, watcher.check)
        if answer.status != 200:
            connection.drain(deadline)
            if answer.status not in LATER:
                raise BroadcastError(f"{source} answers {answer.status} to a request for a chunk")
            self._lacks(flight, 404 if answer.status in ABSENT else answer.status)
            return False
        if answer.size_bytes != chunk.size_bytes:
            connection.close()
            raise ChunkCorrupt(
                f"{source} offers {answer.size_bytes} bytes as chunk {chunk.hash[:16]}…, which has {chunk.size_bytes}"
            )
        started_s = time.monotonic() if flight.may_be_held else asked_s
        hasher = blake3()
        connection.read_into(buffer, deadline, hasher)
        flight.received_bytes = chunk.size_bytes
        if hasher.hexdigest() != chunk.hash:
            connection.close()
            raise ChunkCorrupt(f"{source} sent bytes that are not chunk {chunk.hash[:16]}…")
        self._scores.succeeded(source, chunk.size_bytes, time.monotonic() - started_s)
        return True

    def _lacks(self, flight: Flight, status: int) -> None:
        with self._lock:
            if status == 429:
                self._plan.crowded(flight.source)
                self._crowded.add(flight.source)
                self._work_there.notify_all()  # those without work leave it
            doubtful = self._plan.lacks(flight, status, time.monotonic())
            if doubtful:
                self._question_there.notify_all()
        if doubtful:
            self._map_watch.refresh(flight.source)

    def should_leave(self, flight: Flight) -> bool:
        with self._lock:
            return self._plan.should_leave(flight, time.monotonic())


class _Watcher:
    """Looks at a flight at every receive: is it still wanted, and is it worth waiting for?"""

    def __init__(self, pool: ChunkPool, flight: Flight) -> None:
        self._pool = pool
        self._flight = flight
        self._started_s = time.monotonic()
        self._next_s = self._started_s + LEAVE_CHECK_S
        self.slow = False

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def check(self, received_bytes: int) -> str | None:
        flight = self._flight
        flight.received_bytes = received_bytes
        if flight.lost:
            return "was left: the chunk is here already, or no longer wanted"
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + LEAVE_CHECK_S
        self.slow = self._pool.should_leave(flight)
        if not self.slow:
            return None
        rate = received_bytes / 1e6 / self.elapsed_s()
        return f"is far slower than the others ({rate:.2f} MB/s) and was left in the middle of a chunk"
