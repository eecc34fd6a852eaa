"""Threads that download chunks as the scheduler decides. Nothing is stored before its hash was checked.

    want() ─► Scheduler ─► n threads, each: ┬─ store.has: already on this disk?
               ▲                            ├─ GET ─► hash while receiving ─┬─ matches: store.keep
               │                            │                               └─ differs: the source is dropped
               ├── failed: another source ──┘
               └── one thread per source that polls its map

Each thread holds one chunk in memory. An idle thread waits for a map, a failed chunk or a new one.
"""

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
from shoal.runtime import StopToken, show_bytes
from shoal.shardcast.connection import Connection, Connections, Deadline, PoolSettings, Timeouts
from shoal.shardcast.lookup import ABSENT, get_document
from shoal.shardcast.scheduler import PAUSE, UNKNOWN_S, Attempt, Kind, MapRequest, Scheduler, SourceScores
from shoal.shardcast.tree import chunk_key

log = logging.getLogger(__name__)

TICK_S = 0.1  # between two looks for late or slow chunks
PACE_S = 0.01  # between two requests for a map
CLOSE_S = 5.0


class ChunkStore(Protocol):
    def has(self, chunk: Chunk, scratch: memoryview) -> bool:
        """Whether the chunk is here and its hash is right; `scratch` has its size."""

    def keep(self, chunk: Chunk, data: memoryview) -> None:
        """Store a verified chunk; `data` is valid during the call only."""


class ChunkPool:
    """Call `start`, then `close`; `pending()` is 0 when all wanted chunks are stored."""

    def __init__(self, scores: SourceScores, store: ChunkStore, settings: PoolSettings = PoolSettings()) -> None:
        self._scores, self._store, self._settings = scores, store, settings
        self._closing, self._lock = StopToken(), threading.RLock()
        self._chunk_work = threading.Condition(self._lock)  # the chunk threads wait for it
        self._map_work = threading.Condition(self._lock)  # the map threads wait for it
        self._over = threading.Condition(self._lock)  # the owner waits for it
        # Each process draws chunks in another order, so peers fetch different ones.
        self._scheduler = Scheduler(scores, settings.connections, random.Random())
        self._connections: dict[Attempt, Connection] = {}  # of running attempts
        self._map_connections: dict[str, Connection] = {}  # of the map threads
        self._in_store = self._idle = 0  # threads
        self.error: Exception | None = None
        self.fetched_bytes: Counter[str] = Counter()  # of stored chunks, by source

    def want(self, manifest: PolicyManifest, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            self._scheduler.want(manifest, chunks, time.monotonic())
            self._chunk_work.notify_all()
            self._map_work.notify_all()

    def forget_except(self, kept: set[str]) -> None:
        with self._lock:
            self._hang_up(self._scheduler.forget_except(kept))
            self._over.notify_all()

    def pending(self) -> int:
        with self._lock:
            return self._scheduler.pending()

    def progress(self) -> tuple[int, int]:
        with self._lock:
            return self._scheduler.progress()

    def announced(self) -> set[str]:
        with self._lock:
            return self._scheduler.announced()

    def shares(self) -> str:
        shares = self.fetched_bytes.most_common()
        return ", ".join(f"{source}: {show_bytes(size)}" for source, size in shares) or "this disk"

    def wait(self, seconds: float) -> bool:
        with self._lock:
            return self._over.wait_for(lambda: bool(self.error) or not self._scheduler.pending(), seconds)

    def start(self) -> None:
        self.start_map_threads()
        for number in range(self._settings.connections):
            threading.Thread(target=self._work, name=f"chunks-{number}", daemon=True).start()

    def close(self, reason: str = "closed") -> None:
        """End the threads. After it returns the store is not called again; a connect may still be running."""
        with self._lock:
            self._end(reason)
            self._over.wait_for(lambda: not self._in_store, CLOSE_S)

    def start_map_threads(self) -> None:
        timeouts = self._settings.timeouts
        patient = replace(timeouts, stall_s=timeouts.stall_s + UNKNOWN_S)
        with self._lock:
            for source, kind in self._scores.kinds().items():
                if kind is not Kind.LAST_RESORT and source not in self._map_connections and not self._closing.is_set():
                    self._map_connections[source] = Connection(source, self._closing, patient)
                    threading.Thread(target=self._ask_for_maps, args=(source,), name="have-map", daemon=True).start()

    def _ask_for_maps(self, source: str) -> None:
        connection, misses = self._map_connections[source], 0
        while source in self._scores.kinds() and not self._closing.is_set():
            with self._lock:
                if (question := self._scheduler.next_map_request(source)) is None:
                    self._map_work.wait(UNKNOWN_S)
                    continue
            asked_s, body = time.monotonic(), None
            try:
                body = fetch_map(connection, question)
            except BroadcastError as error:
                self._scores.note(source, str(error))
            misses = 0 if body is not None else misses + 1
            with self._lock:
                more = self._scheduler.update_map(source, question.place, body, asked_s, time.monotonic())
                self._chunk_work.notify(more)  # not all threads: each look costs time
                if not self._closing.is_set():
                    self._map_work.wait(PAUSE.wait_s(misses + 1) if misses else PACE_S)
        with self._lock:
            del self._map_connections[source]
        connection.close()

    def _work(self) -> None:
        connections, memory = Connections(self._closing, self._settings.timeouts), bytearray()
        attempt: Attempt | None = None
        try:
            while (attempt := attempt or self._take()) is not None:
                if len(memory) < attempt.chunk.size_bytes:
                    memory = bytearray(attempt.chunk.size_bytes)
                attempt = self._run_attempt(attempt, connections, memoryview(memory)[: attempt.chunk.size_bytes])
        except Exception as error:  # noqa: BLE001  a full disk, or a bug: raised again by who waits for the pool
            with self._lock:
                self.error = self.error or error
                self._end("failed")
        finally:
            connections.close()

    def _take(self) -> Attempt | None:
        while not self._closing.is_set():
            with self._lock:
                if (attempt := self._scheduler.next_attempt(time.monotonic())) is not None:
                    return attempt
                self._idle += 1  # with more idle threads each one looks less often
                self._chunk_work.wait(TICK_S * self._idle if self._scheduler.pending() else None)
                self._idle -= 1
            self.start_map_threads()
        return None

    def _run_attempt(self, attempt: Attempt, connections: Connections, buffer: memoryview) -> Attempt | None:
        """Run one attempt. Returns the next one, if it was chosen before this chunk was stored: our map then announces
        both chunks at once, and peers fetch others."""
        following, done, may_keep = None, False, False
        try:
            if not attempt.source or self._fetch(attempt, connections.to(attempt.source), buffer):
                with self._lock:  # after closing began, the store is not called
                    may_keep = not self._closing.is_set()
                    self._in_store += may_keep
                    following = self._scheduler.next_attempt(time.monotonic()) if may_keep and attempt.source else None
                if may_keep and attempt.source:
                    self._store.keep(attempt.chunk, buffer)
                    done = True
                elif may_keep:
                    done = self._store.has(attempt.chunk, buffer)
        finally:
            with self._lock:
                self._in_store -= may_keep
                self._connections.pop(attempt, None)
                self._scheduler.finish(attempt, done)
                if following is not None and not done:
                    self._scheduler.finish(following, False)
                self._over.notify_all()
                if not done:
                    self._chunk_work.notify()
        return following

    def _fetch(self, attempt: Attempt, connection: Connection, buffer: memoryview) -> bool:
        chunk, source, asked_s, hasher = attempt.chunk, attempt.source, time.monotonic(), blake3()
        with self._lock:
            self._connections[attempt] = connection
            share = self._settings.min_rate_bytes_s / self._scheduler.attempts_at(source)
        deadline = Deadline(self._settings.timeouts.stall_s + chunk.size_bytes / share)
        try:
            answer = connection.get("/" + chunk_key(chunk.hash), deadline, partial(self._check_speed, attempt))
            if answer.status in ABSENT:
                connection.drain(deadline)
                with self._lock:
                    self._scheduler.mark_missing(attempt, answer.status, time.monotonic())
                    self._map_work.notify_all()
                return False
            if answer.status != 200:
                raise BroadcastError(f"{source} answers {answer.status} to a request for a chunk")
            if answer.size_bytes != chunk.size_bytes:
                raise ChunkCorrupt(f"{source} offers {answer.size_bytes} bytes as chunk {chunk.hash[:16]}…")
            if attempt.map.asked_s is None:  # a relay may have held the request until it had the chunk
                asked_s = time.monotonic()
            connection.read_into(buffer, deadline, hasher)
            if hasher.hexdigest() != chunk.hash:
                raise ChunkCorrupt(f"{source} sent bytes that are not chunk {chunk.hash[:16]}…")
        except ChunkCorrupt as error:
            connection.close()
            log.warning("%s; the source is dropped", error)
            self._scores.drop(source, str(error))
            return False
        except BroadcastError as error:
            connection.close()
            if attempt.slow:
                log.info("%s", error)
                rate = attempt.received_bytes / (time.monotonic() - attempt.started_s)
                self._scores.failed(source, str(error), None, rate)
            elif not (attempt.cancelled or self._closing.is_set()):
                self._scores.failed(source, str(error))
            return False
        attempt.received_bytes = chunk.size_bytes
        self._scores.succeeded(source, chunk.size_bytes, time.monotonic() - asked_s)
        with self._lock:
            self._scheduler.delivered(attempt, time.monotonic())
            self.fetched_bytes[source] += 0 if attempt.cancelled else chunk.size_bytes
            return not attempt.cancelled

    def _check_speed(self, attempt: Attempt, received_bytes: int) -> str | None:
        attempt.received_bytes = received_bytes
        if attempt.cancelled:
            return "was left: the chunk is no longer wanted"
        now_s = time.monotonic()
        if now_s < max(attempt.started_s, attempt.compared_s) + TICK_S:
            return None
        attempt.compared_s = now_s
        with self._lock:
            attempt.slow = self._scheduler.should_leave(attempt, now_s)
        rate = received_bytes / 1e6 / (now_s - attempt.started_s)
        slow = f"is far slower than the others ({rate:.2f} MB/s) and was left in the middle of a chunk"
        return slow if attempt.slow else None

    def _hang_up(self, attempts: Iterable[Attempt]) -> None:
        """Under the lock. A finished attempt is not in `_connections`, so no other request is cut."""
        for attempt in attempts:
            if attempt in self._connections:
                self._connections[attempt].hang_up()

    def _end(self, reason: str) -> None:
        self._closing.set(reason)
        self._hang_up(list(self._connections))
        for connection in self._map_connections.values():
            connection.hang_up()
        for condition in (self._chunk_work, self._map_work, self._over):
            condition.notify_all()


def fetch_map(connection: Connection, question: MapRequest) -> bytes | None:
    """HAVE and SOON of a version; None if the source sends no maps."""
    (incarnation, version), size, count, wait_s = question
    target, expected = f"have/{incarnation}.{version}?count={count}&wait_s={wait_s:g}", 2 * -(-size // 8)
    body = get_document(connection, target, expected, Deadline(wait_s + Timeouts().stall_s))
    if body is not None and len(body) != expected:
        raise BroadcastError(f"{connection.source} sends a map of {len(body)} bytes, not {expected}")
    return body
