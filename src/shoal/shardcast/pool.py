"""Chunks, many at a time: threads that carry out what the plan decides, and never keep a byte before its hash.

    want() ─► Plan ─► n threads, each: ┬─ keeper.has: already on this disk?
               ▲                       ├─ GET ─► hash while receiving ─┬─ matches, and the first to: keeper.keep
               │                       │                               └─ does not: the source is dropped
               ├── failed: elsewhere ──┘
               └── a thread per source that asks which chunks it has

Memory is one chunk per thread. A thread without work waits for a map, an arrival or a new chunk to fetch; only one of
them also looks at the clock, for what has become overdue.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from blake3 import blake3

from shoal.errors import BroadcastError, ChunkCorrupt
from shoal.protocol import Chunk, PolicyManifest
from shoal.runtime.clock import Backoff
from shoal.runtime.stop import StopToken
from shoal.runtime.targets import Reach
from shoal.shardcast.connection import Connection, Connections, Deadline, Timeouts
from shoal.shardcast.limits import Throttle
from shoal.shardcast.plan import FLIGHT_BYTES_S, Flight, Plan, Question
from shoal.shardcast.sources import UNKNOWN_S, Kind, SourceScores
from shoal.shardcast.tree import chunk_key

log = logging.getLogger(__name__)

TICK_S = 0.1  # how often somebody looks for what has become overdue, or too slow
IDLE_S = 10.0
PACE_S, MISSED = 0.01, Backoff(first_s=0.5, most_s=5.0)  # between two questions for a map; where there was none
CLOSE_S = 5.0
ABSENT = (403, 404)  # a public bucket says 403 of what it does not hold
LATER = (429, 503)


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
        connections = max(1, min(cls.connections, int(rate_bytes_s / FLIGHT_BYTES_S)))
        least = min(cls.min_rate_bytes_s, rate_bytes_s / connections / 4)
        return cls(connections, least, Timeouts(throttle=Throttle(rate_bytes_s), reach=reach))


class ChunkPool:
    """Start with `start`, end with `close`; `pending()` is 0 when everything wanted is kept."""

    def __init__(self, scores: SourceScores, keeper: Keeper, settings: PoolSettings = PoolSettings()) -> None:
        self._scores = scores
        self._keeper = keeper
        self._settings = settings
        self._closing = StopToken()
        self._lock = threading.RLock()
        self._work_there = threading.Condition(self._lock)  # what the threads wait for
        self._question_there = threading.Condition(self._lock)  # what the threads of the maps wait for
        self._over = threading.Condition(self._lock)  # what the owner waits for
        # An order of its own for every process, so that peers fetch different chunks.
        self._plan = Plan(scores, settings.connections, random.Random())
        self._started = False
        self._lines: dict[Flight, Connection] = {}  # who may be hung up on
        self._map_lines: dict[str, Connection] = {}  # of the threads that ask for maps
        self._looking_at_clock = False  # one of those without work, if there are any, while something is wanted
        self._at_keeper = 0
        self.error: Exception | None = None
        self.fetched_bytes: Counter[str] = Counter()  # of chunks that were kept
        self.wasted_bytes: Counter[str] = Counter()  # of all others: too slow, too late, corrupt

    @property
    def absent(self) -> set[str]:
        """Sources that lacked a chunk since the last one arrived."""
        return self._plan.absent

    def want(self, manifest: PolicyManifest, chunks: Iterable[Chunk]) -> None:
        """Fetch these of the chunks that a version offers, those of newer versions first."""
        with self._lock:
            self._plan.want(manifest, chunks, time.monotonic())
            self._work_there.notify_all()
            self._question_there.notify_all()
        self.follow_sources()

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

    def announced(self) -> set[str]:
        """The chunks that are being fetched from upstream now."""
        with self._lock:
            return self._plan.announced()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is pending or something has failed; true if so."""
        with self._lock:
            return self._over.wait_for(lambda: bool(self.error) or not self._plan.pending(), seconds)

    def start(self) -> None:
        self._started = True
        self.follow_sources()
        for number in range(self._settings.connections):
            threading.Thread(target=self._work, name=f"chunks-{number}", daemon=True).start()

    def close(self, reason: str = "closed") -> None:
        """End the threads. When it returns the keeper is not called again, though a connect may still be under way."""
        with self._lock:
            self._end(reason)
            self._over.wait_for(lambda: not self._at_keeper, CLOSE_S)

    def follow_sources(self) -> None:
        """A thread that asks for maps for each source that has none. One whose source is gone ends by itself."""
        timeouts = self._settings.timeouts
        patient = replace(timeouts, stall_s=timeouts.stall_s + UNKNOWN_S)
        with self._lock:
            for source, kind in self._scores.kinds().items() if self._started else ():
                if kind is not Kind.LAST_RESORT and source not in self._map_lines and not self._closing.is_set():
                    self._map_lines[source] = Connection(source, self._closing, patient)
                    threading.Thread(target=self._ask_for_maps, args=(source,), name="have-map", daemon=True).start()

    def _ask_for_maps(self, source: str) -> None:
        connection = self._map_lines[source]
        misses = 0
        while (question := self._next_question(source)) is not None:
            asked_s, body = time.monotonic(), None
            try:
                body = ask_for_map(connection, question)
            except BroadcastError as error:
                if connection.hung_up or self._closing.is_set():
                    continue  # its answer is wanted now, or never
                self._scores.note(source, str(error))
            misses = 0 if body is not None else misses + 1
            with self._lock:
                more = self._plan.see(source, question.place, body, asked_s, time.monotonic())
                self._work_there.notify(more)  # not all: each look around costs time
                self._question_there.wait(MISSED.wait_s(misses - 1) if misses else PACE_S)
        connection.close()

    def _next_question(self, source: str) -> Question | None:
        with self._lock:
            while not self._closing.is_set() and source in self._scores.kinds():
                question = self._plan.question(source)
                if question is not None:
                    return question
                self._question_there.wait(UNKNOWN_S)
            del self._map_lines[source]
        return None

    def _work(self) -> None:
        connections, memory = Connections(self._closing, self._settings.timeouts), bytearray()
        flight: Flight | None = None
        try:
            while (flight := flight or self._take(connections)) is not None:
                if len(memory) < flight.chunk.size_bytes:
                    memory = bytearray(flight.chunk.size_bytes)
                flight = self._carry_out(flight, connections, memoryview(memory)[: flight.chunk.size_bytes])
        except Exception as error:  # noqa: BLE001  a full disk, or a bug: whoever waits for the pool raises it
            with self._lock:
                self.error = self.error or error
                self._end("failed")
        finally:
            connections.close()

    def _take(self, connections: Connections) -> Flight | None:
        """The next thing to do, once there is one; None when the pool closes."""
        while not self._closing.is_set():
            with self._lock:
                flight = self._plan.take(time.monotonic())
                if flight is not None:
                    if not self._looking_at_clock:
                        self._work_there.notify()  # one of those without work looks at it from now on
                    return flight
                connections.close(self._plan.crowded)  # an idle one would keep a busy one out
                on_duty = self._plan.pending() > 0 and not self._looking_at_clock
                self._looking_at_clock |= on_duty
                self._work_there.wait(TICK_S if on_duty else IDLE_S)
                self._looking_at_clock &= not on_duty
            if on_duty:
                self.follow_sources()
        return None

    def _carry_out(self, flight: Flight, connections: Connections, buffer: memoryview) -> Flight | None:
        """One attempt at one chunk. Perhaps the next one, chosen before this one is kept: whoever hears that this one
        has arrived hears what is fetched next in the same breath, and fetches something else."""
        following, done, may_keep = None, False, False
        try:
            if not flight.source or self._fetch(flight, connections.to(flight.source), buffer):
                with self._lock:  # a pool that is closing calls its keeper no more
                    may_keep = not self._closing.is_set()
                    self._at_keeper += may_keep
                    following = self._plan.take(time.monotonic()) if may_keep and flight.source else None
                if may_keep and flight.source:
                    self._keeper.keep(flight.chunk, buffer)
                    done = True
                elif may_keep:
                    done = self._keeper.has(flight.chunk, buffer)
        finally:
            with self._lock:
                self._at_keeper -= may_keep
                self._lines.pop(flight, None)
                self._plan.land(flight, done)
                if following is not None and not done:
                    self._plan.land(following, False)
                self._over.notify_all()
                if not done:
                    self._work_there.notify()
        return following

    def _fetch(self, flight: Flight, connection: Connection, buffer: memoryview) -> bool:
        """Whether the chunk is in the buffer, verified, and the first to be so."""
        arrived, source = False, flight.source
        with self._lock:
            self._lines[flight] = connection
        try:
            arrived = self._download(connection, flight, buffer)
        except ChunkCorrupt as error:
            log.warning("%s; this source is not asked again", error)
            self._scores.drop(source, str(error))
        except BroadcastError as error:
            if flight.slow:
                log.info("%s", error)
                self._scores.slow(source, flight.received_bytes, time.monotonic() - flight.started_s, str(error))
            elif not (flight.lost or self._closing.is_set()):
                self._scores.failed(source, str(error))
        with self._lock:
            if arrived:
                self._plan.delivered(flight, time.monotonic())
            beaten = self._plan.win(flight) if arrived else None
            if beaten is None:
                self.wasted_bytes[source] += flight.received_bytes
                return False
            self._hang_up(beaten)
            self.fetched_bytes[source] += flight.chunk.size_bytes
            return True

    def _download(self, connection: Connection, flight: Flight, buffer: memoryview) -> bool:
        """Receive and check the chunk; false if the source does not have it (yet)."""
        chunk, source = flight.chunk, flight.source
        with self._lock:  # those that fly beside this one share its link
            share = self._settings.min_rate_bytes_s / max(1, self._plan.flights_at(source))
        deadline = Deadline(self._settings.timeouts.stall_s + chunk.size_bytes / share)
        asked_s = time.monotonic()
        answer = connection.get("/" + chunk_key(chunk.hash), deadline, partial(self._look_at, flight))
        if answer.status != 200:
            connection.drain(deadline)
            if answer.status not in ABSENT + LATER:
                raise BroadcastError(f"{source} answers {answer.status} to a request for a chunk")
            with self._lock:
                if self._plan.lacks(flight, 404 if answer.status in ABSENT else answer.status, time.monotonic()):
                    self._question_there.notify_all()
                    if source in self._map_lines:
                        self._map_lines[source].hang_up()  # a question that is held: its answer is wanted now
                if source in self._plan.crowded:
                    self._work_there.notify_all()  # those without work leave it
            return False
        if answer.size_bytes != chunk.size_bytes:
            connection.close()
            raise ChunkCorrupt(f"{source} offers {answer.size_bytes} bytes as chunk {chunk.hash[:16]}…")
        started_s = time.monotonic() if flight.may_be_held else asked_s
        hasher = blake3()
        connection.read_into(buffer, deadline, hasher)
        flight.received_bytes = chunk.size_bytes
        if hasher.hexdigest() != chunk.hash:
            connection.close()
            raise ChunkCorrupt(f"{source} sent bytes that are not chunk {chunk.hash[:16]}…")
        self._scores.succeeded(source, chunk.size_bytes, time.monotonic() - started_s)
        return True

    def _look_at(self, flight: Flight, received_bytes: int) -> str | None:
        """At every receive: why the source should be left, if it should."""
        flight.received_bytes = received_bytes
        if flight.lost:
            return "was left: the chunk is here already, or no longer wanted"
        now_s = time.monotonic()
        if now_s < max(flight.started_s, flight.looked_at_s) + TICK_S:
            return None
        flight.looked_at_s = now_s
        with self._lock:
            flight.slow = self._plan.should_leave(flight, now_s)
        rate = received_bytes / 1e6 / (now_s - flight.started_s)
        slow = f"is far slower than the others ({rate:.2f} MB/s) and was left in the middle of a chunk"
        return slow if flight.slow else None

    # Under the lock

    def _hang_up(self, flights: Iterable[Flight]) -> None:
        """A flight that has landed is no longer in `_lines`, so nobody else's request is cut."""
        for flight in flights:
            if flight in self._lines:
                self._lines[flight].hang_up()

    def _end(self, reason: str) -> None:
        self._closing.set(reason)
        self._hang_up(list(self._lines))
        for connection in self._map_lines.values():
            connection.hang_up()
        for condition in (self._work_there, self._question_there, self._over):
            condition.notify_all()


def ask_for_map(connection: Connection, question: Question) -> bytes | None:
    """HAVE and SOON of a version; None if the source sends no maps."""
    deadline = Deadline(question.wait_s + Timeouts().stall_s)
    where = f"{question.place[0]}.{question.place[1]}"
    answer = connection.get(f"/have/{where}?count={question.count}&wait_s={question.wait_s:g}", deadline)
    expected = 2 * -(-question.size // 8)
    if answer.status == 200 and answer.size_bytes == expected:
        return connection.read(expected, deadline)
    connection.drain(deadline)
    if answer.status != 200:
        return None
    sizes = f"{answer.size_bytes} bytes for {question.size} chunks, not {expected}"
    raise BroadcastError(f"{connection.source} sends a map of {sizes}")


def show_shares(fetched_bytes: Counter[str]) -> str:
    """Who sent how much, for a log line."""
    return ", ".join(f"{source}: {size / 1e6:.1f} MB" for source, size in fetched_bytes.most_common())
