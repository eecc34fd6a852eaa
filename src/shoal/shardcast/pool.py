"""Chunks, many at a time: threads that take the next wanted chunk, find it here or fetch it, check it, keep it.

    want() ─► wanted, in order of importance ─► n threads, each: ┬─ keeper.has: already on this disk?
                 ▲                                               ├─ scores.choose ─► GET ─► hash while receiving
                 │                                               │        ├─ matches: keeper.keep
                 └── not there yet: later · failed: elsewhere ───┘        └─ does not: the source is dropped

Memory is one chunk per thread. The downloader wants the chunks of one version and waits; a relay's pool lives as long
as the relay and is given new chunks, the newest version's first, whenever the head moves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from blake3 import blake3

from shoal.errors import BroadcastError, ChunkCorrupt
from shoal.protocol import Chunk
from shoal.runtime.retry import Backoff
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Connection, Deadline, Timeouts
from shoal.shardcast.sources import SourceScores
from shoal.shardcast.tree import chunk_key

log = logging.getLogger(__name__)

IDLE_S = 0.05
AGAIN = Backoff(first_s=0.1, most_s=2.0)


class Keeper(Protocol):
    """Where chunks go. Called from several threads, for different chunks."""

    def has(self, chunk: Chunk, scratch: memoryview) -> bool:
        """Whether the chunk is already here, proven by its hash; `scratch` has its size."""

    def keep(self, chunk: Chunk, data: memoryview) -> None:
        """Store a chunk that has been verified; `data` is borrowed."""


@dataclass(frozen=True)
class PoolSettings:
    """`min_rate_bytes_s`: a source slower than this is left in the middle of a chunk."""

    connections: int = 4
    min_rate_bytes_s: float = 32 * 1024
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass
class _Wanted:
    chunk: Chunk
    looked_here: bool = False
    absent: set[str] = field(default_factory=set)  # sources that do not have it (yet)
    rounds: int = 0
    not_before_s: float = 0.0
    forgotten: bool = False


class ChunkPool:
    """Start with `start`, end with `close`; `pending()` is 0 when everything wanted is kept."""

    def __init__(self, scores: SourceScores, keeper: Keeper, settings: PoolSettings = PoolSettings()) -> None:
        self._scores = scores
        self._keeper = keeper
        self._settings = settings
        self._closing = StopToken()
        self._changed = threading.Condition()
        self._queue: dict[str, _Wanted] = {}
        self._flying: dict[str, _Wanted] = {}
        self._threads: list[threading.Thread] = []
        self.error: Exception | None = None
        self.fetched_bytes: Counter[str] = Counter()
        self.absent: set[str] = set()  # sources that lacked a chunk since the last one arrived

    def want(self, chunks: Iterable[Chunk], first: bool = True) -> None:
        """Add chunks, in front of all others or behind them. One that is wanted twice is fetched once."""
        with self._changed:
            known = self._queue | self._flying
            new = {chunk.hash: known.get(chunk.hash, _Wanted(chunk)) for chunk in chunks}
            for wanted in new.values():
                wanted.forgotten = False
            new = {key: wanted for key, wanted in new.items() if key not in self._flying}
            self._queue = new | self._queue if first else self._queue | new
            self._changed.notify_all()

    def forget_except(self, kept: set[str]) -> None:
        """Stop wanting every chunk that is not in `kept`."""
        with self._changed:
            self._queue = {key: wanted for key, wanted in self._queue.items() if key in kept}
            for key, wanted in self._flying.items():
                wanted.forgotten = key not in kept

    def pending(self) -> int:
        with self._changed:
            return len(self._queue) + len(self._flying)

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is pending or something has failed; true if so."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self.error) or not (self._queue or self._flying), seconds)

    def start(self) -> None:
        for number in range(self._settings.connections):
            thread = threading.Thread(target=self._work, name=f"chunks-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, reason: str = "closed") -> None:
        """End the threads. They leave whatever they receive at once; only a connect in progress is waited for."""
        self._closing.set(reason)
        with self._changed:
            self._changed.notify_all()
        deadline = Deadline(self._settings.timeouts.connect_s + 2)
        for thread in self._threads:
            thread.join(max(0.0, deadline.remaining_s()))

    def _work(self) -> None:
        connections: dict[str, Connection] = {}
        buffer = bytearray()
        try:
            while (wanted := self._take()) is not None:
                if len(buffer) < wanted.chunk.size_bytes:
                    buffer = bytearray(wanted.chunk.size_bytes)
                done = self._obtain(wanted, memoryview(buffer)[: wanted.chunk.size_bytes], connections)
                self._give_back(wanted, done)
        except Exception as error:  # noqa: BLE001  a full disk, or a bug: whoever waits for the pool raises it
            self._fail(error)
        finally:
            for connection in connections.values():
                connection.close()

    def _take(self) -> _Wanted | None:
        """The first chunk whose time has come; None when the pool closes."""
        with self._changed:
            while not self._closing.is_set():
                now = time.monotonic()
                for key, wanted in self._queue.items():
                    if wanted.not_before_s <= now:
                        self._flying[key] = self._queue.pop(key)
                        return wanted
                self._changed.wait(IDLE_S if self._queue else 1.0)
        return None

    def _give_back(self, wanted: _Wanted, done: bool) -> None:
        with self._changed:
            del self._flying[wanted.chunk.hash]
            if not (done or wanted.forgotten):
                self._queue[wanted.chunk.hash] = wanted
            elif not (self._queue or self._flying):
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.error = self.error or error
            self._closing.set("failed")
            self._changed.notify_all()

    def _obtain(self, wanted: _Wanted, buffer: memoryview, connections: dict[str, Connection]) -> bool:
        """One attempt at one chunk; false if it has to be tried again."""
        if not wanted.looked_here:
            wanted.looked_here = True
            if self._keeper.has(wanted.chunk, buffer):
                return True
        source = self._scores.choose(without=wanted.absent)
        if source is None:
            wanted.absent.clear()
            wanted.not_before_s = time.monotonic() + AGAIN.wait_s(wanted.rounds)
            wanted.rounds += 1
            return False
        if source not in connections:
            connections[source] = Connection(source, self._closing, self._settings.timeouts)
        try:
            arrived = self._download(connections[source], wanted, buffer)
        except ChunkCorrupt as error:
            log.warning("%s; this source is not asked again", error)
            self._scores.drop(source, str(error))
            return False
        except BroadcastError as error:
            self._scores.failed(source, str(error))
            return False
        if arrived:
            self._keeper.keep(wanted.chunk, buffer)
        return arrived

    def _download(self, connection: Connection, wanted: _Wanted, buffer: memoryview) -> bool:
        """Receive and check the chunk; false if the source does not have it (yet)."""
        chunk, source = wanted.chunk, connection.source
        deadline = Deadline(self._settings.timeouts.stall_s + chunk.size_bytes / self._settings.min_rate_bytes_s)
        answer = connection.get("/" + chunk_key(chunk.hash), deadline)
        if answer.status != 200:
            connection.drain(deadline)
            if answer.status not in (404, 503):
                raise BroadcastError(f"{source} answers {answer.status} to a request for a chunk")
            self._scores.note(source, f"{source} does not have chunk {chunk.hash[:16]}… (HTTP {answer.status})")
            wanted.absent.add(source)
            if answer.status == 404:
                self.absent.add(source)
            return False
        if answer.size_bytes != chunk.size_bytes:
            connection.close()
            raise ChunkCorrupt(
                f"{source} offers {answer.size_bytes} bytes as chunk {chunk.hash[:16]}…, which has {chunk.size_bytes}"
            )
        started_s = time.monotonic()
        hasher = blake3()
        connection.read_into(buffer, deadline, hasher)
        if hasher.hexdigest() != chunk.hash:
            connection.close()
            raise ChunkCorrupt(f"{source} sent bytes that are not chunk {chunk.hash[:16]}…")
        self._scores.succeeded(source, chunk.size_bytes, time.monotonic() - started_s)
        self._note_arrival(source, chunk.size_bytes)
        return True

    def _note_arrival(self, source: str, size_bytes: int) -> None:
        with self._changed:
            self.fetched_bytes[source] += size_bytes
            self.absent.clear()
