"""Who has which chunk: the maps that relays send of a version, and a thread per source that asks for them.

    GET /have/0.12?count=40&wait_s=5    held until more than 40 chunks are there, or 5 seconds are over
    body: HAVE, then SOON; each one bit per chunk of `offered(manifest)`, least significant bit first

    HAVE   verified and served now
    SOON   being fetched from upstream just now: whoever trades with that source need not fetch it from upstream too

A source that sends no map (nginx, a bucket, the origin's folder) answers 404: it is taken to have everything. A map is
a claim and nothing more: a chunk is believed by its hash, and whoever claims what it does not deliver is dropped
(`shoal.shardcast.plan`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from shoal.errors import BroadcastError
from shoal.protocol import PolicyManifest
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Connection, Deadline, Timeouts
from shoal.shardcast.manifest import Place, offered, place_of
from shoal.shardcast.sources import SourceScores

ANSWER_S = 15.0
MAX_MAP_BYTES = 8 * 1024 * 1024  # more than the largest manifest can need


class Claim(Enum):
    """What a source says of a chunk. `SILENT`: it has not been heard yet; `MAPLESS`: it sends no maps."""

    HAS = "has"
    LACKS = "lacks"
    SILENT = "silent"
    MAPLESS = "mapless"


@dataclass
class Map:
    """What one source last said of one version. `body` is None where it sends no map."""

    body: bytes | None
    size: int
    asked_s: float
    misses: int = 0
    have: int = field(init=False)

    def __post_init__(self) -> None:
        self.have = 0 if self.body is None else int.from_bytes(self.body[: -(-self.size // 8)], "little")

    def has(self, position: int) -> bool:
        return self.body is not None and bool(self.body[position >> 3] >> (position & 7) & 1)

    def soon(self, position: int) -> bool:
        half = -(-self.size // 8)
        return self.body is not None and bool(self.body[half + (position >> 3)] >> (position & 7) & 1)

    def count(self) -> int:
        """How many chunks are there."""
        return self.have.bit_count()


def map_bytes(size: int) -> int:
    """The length of a map over `size` chunks.

    >>> map_bytes(9)
    4
    """
    return 2 * -(-size // 8)


@dataclass(frozen=True)
class _Version:
    hashes: tuple[str, ...]
    deltas: int  # as many of them, at the front, belong to deltas


class HaveMaps:
    """The maps of the versions that are watched. Bounded by their manifests; used under its owner's lock."""

    def __init__(self) -> None:
        self._versions: dict[Place, _Version] = {}
        self._places: dict[str, tuple[Place, int]] = {}
        self._maps: dict[tuple[str, Place], Map] = {}
        self._open: dict[Place, int] = {}  # as bits: the chunks that somebody could be asked for

    def watch(self, manifest: PolicyManifest) -> None:
        hashes = tuple(chunk.hash for chunk in offered(manifest))
        deltas = sum(len(delta.chunks) for delta in manifest.deltas)
        self._versions[place_of(manifest)] = _Version(hashes, deltas)
        self._index()

    def places(self) -> list[Place]:
        """The versions watched, newest first."""
        return sorted(self._versions, reverse=True)

    def hashes(self, place: Place) -> tuple[str, ...]:
        return self._versions[place].hashes

    def drop(self, places: Iterable[Place]) -> None:
        gone = set(places)
        self._versions = {place: version for place, version in self._versions.items() if place not in gone}
        self._maps = {key: seen for key, seen in self._maps.items() if key[1] not in gone}
        self._index()

    def see(self, source: str, place: Place, body: bytes | None, asked_s: float) -> int:
        """Take a map, or that there is none; by how many chunks it has grown. Only of versions that are watched."""
        version = self._versions.get(place)
        if version is None:
            return 0
        before = self._maps.get((source, place)) or Map(None, 0, 0.0)
        misses = 0 if body is not None else 1 + before.misses
        after = Map(body, len(version.hashes), asked_s, misses)
        self._maps[source, place] = after
        return after.count() - before.count()

    def map(self, source: str, place: Place) -> Map | None:
        return self._maps.get((source, place))

    def claim(self, source: str, chunk_hash: str) -> Claim:
        """What `source` says of a chunk, going by the newest watched version that it belongs to."""
        where = self._places.get(chunk_hash)
        if where is None:
            return Claim.MAPLESS
        seen = self._maps.get((source, where[0]))
        if seen is None:
            return Claim.SILENT
        if seen.body is None:
            return Claim.MAPLESS
        return Claim.HAS if seen.has(where[1]) else Claim.LACKS

    def announces(self, source: str, chunk_hash: str) -> bool:
        where = self._places.get(chunk_hash)
        seen = self._maps.get((source, where[0])) if where is not None else None
        return where is not None and seen is not None and seen.soon(where[1])

    def group(self, chunk_hash: str) -> tuple[Place, bool] | None:
        """Chunks of one group are equally urgent: those of one version's deltas, or of its payload."""
        where = self._places.get(chunk_hash)
        return None if where is None else (where[0], where[1] < self._versions[where[0]].deltas)

    def mark(self, chunk_hash: str, is_open: bool) -> None:
        """Note whether somebody could be asked for this chunk. All are closed again when versions come or go."""
        where = self._places.get(chunk_hash)
        if where is not None:
            bit = 1 << where[1]
            bits = self._open.get(where[0], 0)
            self._open[where[0]] = bits | bit if is_open else bits & ~bit

    def open_chunks(self, source: str) -> Iterator[str] | None:
        """The open chunks that the source has, most urgent first; None if it has not sent maps of all their versions.

        Found by bits, so that a source that has little to offer costs no look at everything that it has not.
        """
        places = sorted((place for place, bits in self._open.items() if bits), reverse=True)
        maps = [(place, self._maps.get((source, place))) for place in places]
        known = [(place, seen.have & self._open[place]) for place, seen in maps if seen is not None and seen.body]
        return self._hashes_of(known) if self._open and len(known) == len(maps) else None

    def _hashes_of(self, known: list[tuple[Place, int]]) -> Iterator[str]:
        for place, bits in known:
            left = bits
            while left:
                lowest = left & -left
                yield self._versions[place].hashes[lowest.bit_length() - 1]
                left ^= lowest

    def _index(self) -> None:
        self._open = dict.fromkeys(self._versions, 0)
        self._places = {}
        for place, version in sorted(self._versions.items()):
            self._places.update({chunk_hash: (place, at) for at, chunk_hash in enumerate(version.hashes)})


@dataclass(frozen=True)
class Question:
    """What to ask a source: its map of a version of `size` chunks, held while it has no more than `count`."""

    place: Place
    size: int
    count: int = 0
    wait_s: float = 0.0

    @property
    def target(self) -> str:
        return f"/have/{self.place[0]}.{self.place[1]}?count={self.count}&wait_s={self.wait_s:g}"


class Asker(Protocol):
    """Who wants to know."""

    def next_question(self, source: str) -> Question | None:
        """Waits until there is something to ask this source; None when there never will be again."""

    def answered(self, source: str, question: Question, body: bytes | None, asked_s: float) -> None:
        """The map, of the right length, asked for at `asked_s`; None if the source has none or could not be asked."""


class MapWatch:
    """The threads that ask, one per source. `follow` those there are; `refresh` one whose map is in doubt; `close`."""

    def __init__(self, asker: Asker, scores: SourceScores, stop: StopToken, timeouts: Timeouts) -> None:
        self._asker = asker
        self._scores = scores
        self._stop = stop
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._watches: dict[str, _Watch] = {}

    def follow(self, sources: Iterable[str]) -> None:
        """A thread for each that has none. One whose source is gone ends by itself."""
        with self._lock:
            self._watches = {source: watch for source, watch in self._watches.items() if watch.is_alive()}
            for source in sources:
                if source not in self._watches and not self._stop.is_set():
                    watch = _Watch(source, self._asker, self._scores, self._stop, self._timeouts)
                    self._watches[source] = watch
                    watch.start()

    def refresh(self, source: str) -> None:
        """Let go a question that is held: its answer is wanted now."""
        with self._lock:
            watch = self._watches.get(source)
        if watch is not None:
            watch.connection.hang_up()

    def close(self) -> None:
        """Once the stop is set: every thread is let go. None of them touches anything but its socket after that."""
        with self._lock:
            watches = list(self._watches.values())
        for watch in watches:
            watch.connection.hang_up()


class _Watch:
    """One source's thread."""

    def __init__(self, source: str, asker: Asker, scores: SourceScores, stop: StopToken, timeouts: Timeouts) -> None:
        self._source = source
        self._asker = asker
        self._scores = scores
        self._stop = stop
        self.connection = Connection(source, stop, timeouts)
        self._thread = threading.Thread(target=self._run, name="have-map", daemon=True)
        self.start: Callable[[], None] = self._thread.start
        self.is_alive: Callable[[], bool] = self._thread.is_alive

    def _run(self) -> None:
        while (question := self._asker.next_question(self._source)) is not None:
            asked_s = time.monotonic()
            try:
                body = self._ask(question)
            except BroadcastError as error:
                if self._stop.is_set():
                    break
                if self.connection.hung_up:
                    continue
                self._scores.note(self._source, str(error))
                body = None
            self._asker.answered(self._source, question, body, asked_s)
        self.connection.close()

    def _ask(self, question: Question) -> bytes | None:
        deadline = Deadline(question.wait_s + ANSWER_S)
        answer = self.connection.get(question.target, deadline)
        expected = map_bytes(question.size)
        if answer.status == 200 and answer.size_bytes == expected:
            return self.connection.read(MAX_MAP_BYTES, deadline)
        self.connection.drain(deadline)
        if answer.status == 200:
            raise BroadcastError(
                f"{self._source} sends a map of {answer.size_bytes} bytes for {question.size} chunks, not {expected}"
            )
        return None
