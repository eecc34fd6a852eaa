"""Chunks, many at a time: threads that carry out what the plan decides, and never keep a byte before its hash.

    want() ─► Plan ─► n threads, each: ┬─ keeper.has: already on this disk?
               ▲                       ├─ GET ─► hash while receiving ─┬─ matches: keeper.keep
               │                       │                               └─ does not: the source is dropped
               ├── failed: elsewhere ──┘
               └── a thread per source that asks which chunks it has

Memory is one chunk per thread. A thread without work waits for a map, a chunk that failed elsewhere or a new one.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

from blake3 import blake3

from shoal.errors import BroadcastError, ChunkCorrupt
from shoal.protocol import Chunk, PolicyManifest
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Connection, Connections, Deadline, Timeouts
from shoal.shardcast.limits import PoolSettings
from shoal.shardcast.lookup import ABSENT, get_document
from shoal.shardcast.plan import REST, UNKNOWN_S, Flight, Kind, Plan, Question, SourceScores
from shoal.shardcast.tree import chunk_key

log = logging.getLogger(__name__)

TICK_S = 0.1  # how often somebody looks for what has become overdue, or too slow
PACE_S = 0.01  # between two questions for a map
CLOSE_S = 5.0


class Keeper(Protocol):
    """Where chunks go. Called from several threads, for different chunks."""

    def has(self, chunk: Chunk, scratch: memoryview) -> bool:
        """Whether the chunk is already here, proven by its hash; `scratch` has its size."""

    def keep(self, chunk: Chunk, data: memoryview) -> None:
        """Store a verified chunk; `data` is borrowed."""


class ChunkPool:
    """Start with `start`, end with `close`; `pending()` is 0 when everything wanted is kept."""

    def __init__(self, scores: SourceScores, keeper: Keeper, settings: PoolSettings = PoolSettings()) -> None:
        self._scores, self._keeper, self._settings = scores, keeper, settings
        self._closing, self._lock = StopToken(), threading.RLock()
        self._work_there = threading.Condition(self._lock)  # what the threads wait for
        self._question_there = threading.Condition(self._lock)  # what the threads of the maps wait for
        self._over = threading.Condition(self._lock)  # what the owner waits for
        # An order of its own for every process, so that peers fetch different chunks.
        self._plan = Plan(scores, settings.connections, random.Random())
        self._lines: dict[Flight, Connection] = {}  # who may be hung up on
        self._map_lines: dict[str, Connection] = {}  # of the threads that ask for maps
        self._at_keeper = self._idle = 0  # threads
        self.error: Exception | None = None
        self.fetched_bytes: Counter[str] = Counter()  # of chunks that were kept

    def want(self, manifest: PolicyManifest, chunks: Iterable[Chunk]) -> None:
        """Chunks of newer versions come first."""
        with self._lock:
            self._plan.want(manifest, chunks, time.monotonic())
            self._work_there.notify_all()
            self._question_there.notify_all()

    def forget_except(self, kept: set[str]) -> None:
        with self._lock:
            self._hang_up(self._plan.forget_except(kept))
            self._over.notify_all()

    def pending(self) -> int:
        with self._lock:
            return self._plan.pending()

    def progress(self) -> tuple[int, int]:
        with self._lock:
            return self._plan.progress()

    def announced(self) -> set[str]:
        with self._lock:
            return self._plan.announced()

    def shares(self) -> str:
        """Who sent how much, for a log line."""
        shares = self.fetched_bytes.most_common()
        return ", ".join(f"{source}: {size / 1e6:.1f} MB" for source, size in shares) or "this disk"

    def wait(self, seconds: float) -> bool:
        with self._lock:
            return self._over.wait_for(lambda: bool(self.error) or not self._plan.pending(), seconds)

    def start(self) -> None:
        self.follow_sources()
        for number in range(self._settings.connections):
            threading.Thread(target=self._work, name=f"chunks-{number}", daemon=True).start()

    def close(self, reason: str = "closed") -> None:
        """End the threads. When it returns the keeper is not called again, though a connect may still be under way."""
        with self._lock:
            self._end(reason)
            self._over.wait_for(lambda: not self._at_keeper, CLOSE_S)

    def follow_sources(self) -> None:
        """One thread per source asks for its maps; it ends by itself when its source is gone."""
        timeouts = self._settings.timeouts
        patient = replace(timeouts, stall_s=timeouts.stall_s + UNKNOWN_S)
        with self._lock:
            for source, kind in self._scores.kinds().items():
                if kind is not Kind.LAST_RESORT and source not in self._map_lines and not self._closing.is_set():
                    self._map_lines[source] = Connection(source, self._closing, patient)
                    threading.Thread(target=self._ask_for_maps, args=(source,), name="have-map", daemon=True).start()

    def _ask_for_maps(self, source: str) -> None:
        connection, misses = self._map_lines[source], 0
        while source in self._scores.kinds() and not self._closing.is_set():
            with self._lock:
                if (question := self._plan.question(source)) is None:
                    self._question_there.wait(UNKNOWN_S)
                    continue
            asked_s, body = time.monotonic(), None
            try:
                body = ask_for_map(connection, question)
            except BroadcastError as error:
                self._scores.note(source, str(error))
            misses = 0 if body is not None else misses + 1
            with self._lock:
                more = self._plan.see(source, question.place, body, asked_s, time.monotonic())
                self._work_there.notify(more)  # not all: each look around costs time
                if not self._closing.is_set():
                    self._question_there.wait(REST.wait_s(misses + 1) if misses else PACE_S)
        with self._lock:
            del self._map_lines[source]
        connection.close()

    def _work(self) -> None:
        connections, memory = Connections(self._closing, self._settings.timeouts), bytearray()
        flight: Flight | None = None
        try:
            while (flight := flight or self._take()) is not None:
                if len(memory) < flight.chunk.size_bytes:
                    memory = bytearray(flight.chunk.size_bytes)
                flight = self._carry_out(flight, connections, memoryview(memory)[: flight.chunk.size_bytes])
        except Exception as error:  # noqa: BLE001  a full disk, or a bug: whoever waits for the pool raises it
            with self._lock:
                self.error = self.error or error
                self._end("failed")
        finally:
            connections.close()

    def _take(self) -> Flight | None:
        while not self._closing.is_set():
            with self._lock:
                if (flight := self._plan.take(time.monotonic())) is not None:
                    return flight
                self._idle += 1  # the more are idle, the more rarely each looks: it costs time
                self._work_there.wait(TICK_S * self._idle if self._plan.pending() else None)
                self._idle -= 1
            self.follow_sources()
        return None

    def _carry_out(self, flight: Flight, connections: Connections, buffer: memoryview) -> Flight | None:
        """One attempt at one chunk; perhaps the next one, chosen before this one is kept: a peer that hears of this one
        then hears of that, too, and fetches something else."""
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
        """Whether the chunk is in the buffer, verified, and still wanted."""
        chunk, source, asked_s, hasher = flight.chunk, flight.source, time.monotonic(), blake3()
        with self._lock:
            self._lines[flight] = connection
            share = self._settings.min_rate_bytes_s / self._plan.flights_at(source)
        deadline = Deadline(self._settings.timeouts.stall_s + chunk.size_bytes / share)
        try:
            answer = connection.get("/" + chunk_key(chunk.hash), deadline, partial(self._look_at, flight))
            if answer.status in ABSENT:
                connection.drain(deadline)
                with self._lock:
                    self._plan.lacks(flight, answer.status, time.monotonic())
                    self._question_there.notify_all()
                return False
            if answer.status != 200:
                raise BroadcastError(f"{source} answers {answer.status} to a request for a chunk")
            if answer.size_bytes != chunk.size_bytes:
                raise ChunkCorrupt(f"{source} offers {answer.size_bytes} bytes as chunk {chunk.hash[:16]}…")
            if flight.map.asked_s is None:  # a relay, perhaps, that held the request until it had the chunk itself
                asked_s = time.monotonic()
            connection.read_into(buffer, deadline, hasher)
            if hasher.hexdigest() != chunk.hash:
                raise ChunkCorrupt(f"{source} sent bytes that are not chunk {chunk.hash[:16]}…")
        except ChunkCorrupt as error:
            connection.close()
            log.warning("%s; this source is not asked again", error)
            self._scores.drop(source, str(error))
            return False
        except BroadcastError as error:
            connection.close()
            if flight.slow:
                log.info("%s", error)
                rate = flight.received_bytes / (time.monotonic() - flight.started_s)
                self._scores.failed(source, str(error), None, rate)
            elif not (flight.lost or self._closing.is_set()):
                self._scores.failed(source, str(error))
            return False
        flight.received_bytes = chunk.size_bytes
        self._scores.succeeded(source, chunk.size_bytes, time.monotonic() - asked_s)
        with self._lock:
            self._plan.delivered(flight, time.monotonic())
            self.fetched_bytes[source] += 0 if flight.lost else chunk.size_bytes
            return not flight.lost

    def _look_at(self, flight: Flight, received_bytes: int) -> str | None:
        """At every receive: why the source should be left, if it should."""
        flight.received_bytes = received_bytes
        if flight.lost:
            return "was left: the chunk is no longer wanted"
        now_s = time.monotonic()
        if now_s < max(flight.started_s, flight.looked_at_s) + TICK_S:
            return None
        flight.looked_at_s = now_s
        with self._lock:
            flight.slow = self._plan.should_leave(flight, now_s)
        rate = received_bytes / 1e6 / (now_s - flight.started_s)
        slow = f"is far slower than the others ({rate:.2f} MB/s) and was left in the middle of a chunk"
        return slow if flight.slow else None

    def _hang_up(self, flights: Iterable[Flight]) -> None:
        """Under the lock. A flight that has landed is no longer in `_lines`, so nobody else's request is cut."""
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
    (incarnation, version), size, count, wait_s = question
    target, expected = f"have/{incarnation}.{version}?count={count}&wait_s={wait_s:g}", 2 * -(-size // 8)
    body = get_document(connection, target, expected, Deadline(wait_s + Timeouts().stall_s))
    if body is not None and len(body) != expected:
        raise BroadcastError(f"{connection.source} sends a map of {len(body)} bytes, not {expected}")
    return body
