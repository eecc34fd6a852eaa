"""Decides which chunk to fetch next, and from which source. No threads, sockets or clock; the pool does the work.

    want ─► open chunks, by version ─► next_attempt(now) ─┬─ disk      is the chunk here already?
                 ▲                                        ├─ fetch     draw a source, then a chunk that it has
                 │                                        └─ fallback  no other source has it: ask the last resort
                 └── finish(attempt): failed, or should_leave: another source would be much faster

Sources report which chunks they have (`ChunkMap`). A source without maps (nginx, a bucket, the origin's folder) is
assumed to have every chunk. A source whose maps are repeatedly wrong is dropped. Peers trade chunks: a chunk that a
peer has is fetched from the peer, a chunk that a peer announces is waited for, and the rest is fetched from upstream in
random order. So all peers of one level together download about one copy. Waits are limited by measured bandwidth; a
peer that is much slower than upstream is not waited for. The next source is drawn at random:

    weight   success × bandwidth, both exponential moving averages
    pause    after a failure the source is not asked for a while; the pause doubles with each failure in a row
    drop     after wrong bytes or an unsigned manifest the source is not asked until `restore`

An unknown bandwidth counts as the best known one, so a new source is tried soon.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import NamedTuple

from shoal.protocol import Chunk, PolicyManifest
from shoal.runtime.clock import Backoff
from shoal.shardcast.connection import ATTEMPT_BYTES_S, FEW_ATTEMPTS, Address
from shoal.shardcast.manifest import Place, offered

SMOOTHING = 0.3
RECOVERY = 0.01  # added at every update: a source that always fails keeps a success of 0.01 / 0.3 and is still tried
UNKNOWN_S = 1.0  # assumed time for a chunk, or for a map, of a source that was not measured yet
PAUSE = Backoff(first_s=0.1, most_s=2.0)
WINDOW = 128  # chunks that are compared for one decision
SLOW, LATE, SLACK_S = 2.0, 4.0, 0.1  # multiples of the time that another source needs, and a constant
ANNOUNCED_WAIT_S, ABSENT_WAIT_S = 15.0, 2.0  # before the last resort is asked for a chunk: announced, not announced
EMPTY_CLAIMS = 3  # wrong maps in a row after which a source is dropped


class Kind(Enum):
    UPSTREAM = "upstream"  # relays for a client, the origin or other relays for a relay
    PEER = "peer"  # a relay of the same level, which trades chunks
    LAST_RESORT = "last resort"  # the origin, for a client: asked when no other source can help


@dataclass
class SourceScore:
    """`bandwidth_bytes_s` is that of one connection; None: not measured yet."""

    kind: Kind = Kind.UPSTREAM
    success: float = 1.0
    bandwidth_bytes_s: float | None = None
    failures: int = 0  # in a row
    paused_until_s: float = 0.0
    dropped: bool = False
    problem: str = ""
    weight: float = 0.0

    def seconds(self, size_bytes: int) -> float:
        return UNKNOWN_S if self.bandwidth_bytes_s is None else size_bytes / self.bandwidth_bytes_s


class SourceScores:
    """The state of each source, for many threads. Updates of a source that was removed are ignored."""

    def __init__(
        self, sources: Sequence[str], peers: Sequence[str] = (), last_resort: Sequence[str] = (),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._now_s, self._lock = now_s, threading.Lock()
        self._scores: dict[str, SourceScore] = {}
        self.set_sources(sources, peers, last_resort)

    def set_sources(self, sources: Sequence[str], peers: Sequence[str] = (), last_resort: Sequence[str] = ()) -> None:
        """Replace the sources; scores of those that stay are kept. A source named twice has its first kind."""
        kinds: dict[str, Kind] = {}
        for kind, named in ((Kind.UPSTREAM, sources), (Kind.PEER, peers), (Kind.LAST_RESORT, last_resort)):
            for source in named:
                Address.parse(source)
                kinds.setdefault(source, kind)
        with self._lock:
            self._scores = {source: self._scores.get(source, SourceScore()) for source in kinds}
            for source, kind in kinds.items():
                self._scores[source].kind = kind

    def kinds(self) -> dict[str, Kind]:
        with self._lock:
            return {source: score.kind for source, score in self._scores.items()}

    def usable(self) -> dict[str, Kind]:
        with self._lock:
            return {source: score.kind for source, score in self._scores.items() if not score.dropped}

    def ready(self) -> dict[str, SourceScore]:
        with self._lock:
            now_s = self._now_s()
            best = max((score.bandwidth_bytes_s or 0.0 for score in self._scores.values()), default=0.0) or 1.0
            for score in self._scores.values():
                score.weight = score.success * (score.bandwidth_bytes_s or best)
            scores = self._scores.items()
            return {source: copy(one) for source, one in scores if not one.dropped and one.paused_until_s <= now_s}

    def choose(self) -> str | None:
        ready = self.ready()
        chosen = {source: one for source, one in ready.items() if one.kind is not Kind.LAST_RESORT} or ready
        return random.choices(list(chosen), [standing.weight for standing in chosen.values()])[0] if chosen else None

    def succeeded(self, source: str, size_bytes: int, seconds: float) -> None:
        self._update(source, success=1.0, rate=size_bytes / max(seconds, 1e-6))

    def failed(self, source: str, problem: str, success: float | None = 0.0, rate: float | None = None) -> None:
        """Pause a source. `success` None: it answered, but too slowly, or does not have the document yet. `rate`: its
        bandwidth, if it was left in the middle of a chunk."""
        self._update(source, problem, success, rate, pauses=True)

    def drop(self, source: str, problem: str) -> None:
        self._update(source, problem, drop=True)

    def note(self, source: str, problem: str) -> None:
        """Remember a problem for `describe`; the score stays as it is."""
        self._update(source, problem)

    def _update(
        self, source: str, problem: str = "", success: float | None = None, rate: float | None = None,
        pauses: bool = False, drop: bool = False,
    ) -> None:  # fmt: skip
        with self._lock:
            score, now_s = self._scores.get(source, SourceScore()), self._now_s()
            score.problem = score.problem if score.dropped else problem or score.problem  # keep the reason of a drop
            score.dropped |= drop
            if success is not None:
                score.success = min(1.0, (1 - SMOOTHING) * score.success + SMOOTHING * success + RECOVERY)
            if rate is not None:
                rate = max(1.0, rate)  # 0 would mean "not known"
                score.bandwidth_bytes_s = (1 - SMOOTHING) * (score.bandwidth_bytes_s or rate) + SMOOTHING * rate
            if success:
                score.failures, score.paused_until_s = 0, 0.0
            if pauses and score.paused_until_s <= now_s:  # several connections that fail at once count as one failure
                score.paused_until_s = now_s + PAUSE.wait_s(score.failures)
                score.failures += 1

    def restore(self) -> None:
        with self._lock:
            for score in self._scores.values():
                score.dropped = False

    def describe(self) -> str:
        with self._lock:
            lines = [score.problem for score in self._scores.values() if score.problem]
            return "; ".join(lines) or ("no source has failed" if self._scores else "no source is known")


@dataclass(frozen=True)
class ChunkMap:
    """A source's last map of a version, as bits by position in `offered`. `have`: chunks that it serves; `soon`: chunks
    that it is fetching from upstream; `mapless`: the source answered without a map."""

    have: int = 0
    soon: int = 0
    asked_s: float | None = None  # None: no answer yet
    mapless: bool = False


class MapRequest(NamedTuple):
    """A long poll for the map of a version of `size` chunks: the source holds it while it has at most `known`."""

    place: Place
    size: int
    known: int = 0
    wait_s: float = 0.0


@dataclass(eq=False)
class Version:
    """A version of which chunks are wanted. As bits: `deltas` are more urgent, `open` are not requested yet."""

    place: Place
    hashes: tuple[str, ...]
    deltas: int
    since_s: float
    pending: int = 0
    open: int = 0


@dataclass(eq=False)
class WantedChunk:
    chunk: Chunk
    version: Version  # the newest one that needs it
    position: int = 0
    attempt: Attempt | None = None
    absent: dict[str, tuple[float, int]] = field(default_factory=dict)  # source → (ask again at, misses)
    waiting_since_s: float | None = None  # when we began to wait for a peer to get it


@dataclass(eq=False)
class Attempt:
    """One attempt to get one chunk. `source` is empty for a look at this disk; `map` is the source's map then."""

    wanted: WantedChunk
    source: str
    kind: Kind | None
    map: ChunkMap
    started_s: float
    received_bytes: int = 0
    cancelled: bool = False  # the chunk is no longer wanted
    compared_s: float = 0.0  # when it was last compared with other sources
    slow: bool = False  # another source would be much faster

    @property
    def chunk(self) -> Chunk:
        return self.wanted.chunk


Sources = Mapping[str, SourceScore]


class Scheduler:
    """The wanted chunks, the running attempts and the sources' maps. Used under the pool's lock."""

    def __init__(self, scores: SourceScores, connections: int, chance: random.Random) -> None:
        self._scores, self._chance, self._max_disk_checks = scores, chance, max(1, connections // 2)
        self._versions: dict[Place, Version] = {}  # newest first
        self._maps: dict[tuple[str, Place], ChunkMap] = {}
        self._wanted: dict[str, WantedChunk] = {}
        self._unchecked: dict[str, WantedChunk] = {}
        self._running: set[Attempt] = set()
        self._max_attempts: dict[str, int] = {}  # at the same time, by source; follows its measured bandwidth
        self._empty_claims: dict[str, tuple[int, float]] = {}  # source → (wrong maps in a row, last at)
        self._kept_bytes = self._wanted_bytes = 0
        self._progress_s = 0.0  # when a source other than the last resort last delivered a chunk, or got one

    def want(self, manifest: PolicyManifest, chunks: Iterable[Chunk], now_s: float) -> None:
        """Add chunks of a version. A chunk that several versions share is fetched once."""
        place = manifest.policy.place
        if place not in self._versions:
            deltas = (1 << sum(len(delta.chunks) for delta in manifest.deltas)) - 1
            hashes = tuple(chunk.hash for chunk in offered(manifest))
            self._versions[place] = Version(place, hashes, deltas, now_s)
        for chunk in chunks:
            if chunk.hash not in self._wanted:
                wanted = WantedChunk(chunk, self._versions[place])
                self._wanted[chunk.hash] = self._unchecked[chunk.hash] = wanted
                self._wanted_bytes += chunk.size_bytes
        self._progress_s = now_s
        self._index()

    def forget_except(self, kept: set[str]) -> list[Attempt]:
        """Stop wanting all other chunks; their running attempts, cancelled."""
        gone = [wanted for key, wanted in self._wanted.items() if key not in kept]
        self._wanted_bytes -= sum(wanted.chunk.size_bytes for wanted in gone)
        for wanted in gone:
            del self._wanted[wanted.chunk.hash]
            self._unchecked.pop(wanted.chunk.hash, None)
        self._index()
        cancelled = [wanted.attempt for wanted in gone if wanted.attempt is not None]
        for attempt in cancelled:
            attempt.cancelled = True
        return cancelled

    def pending(self) -> int:
        return len(self._wanted)

    def progress(self) -> tuple[int, int]:
        """Bytes received, also of unfinished chunks, and bytes wanted in all."""
        running = sum(attempt.received_bytes for attempt in self._running if not attempt.cancelled)
        return self._kept_bytes + running, self._wanted_bytes

    def announced(self) -> set[str]:
        running = (one for one in self._running if one.source and one.kind is not Kind.PEER and not one.cancelled)
        return {attempt.chunk.hash for attempt in running}

    def _index(self) -> None:
        """Assign each wanted chunk to its newest version, and drop versions that need nothing any more."""
        for _, version in sorted(self._versions.items()):
            version.pending = version.open = 0
            for position, chunk_hash in enumerate(version.hashes):
                if chunk_hash in self._wanted:
                    self._wanted[chunk_hash].version, self._wanted[chunk_hash].position = version, position
        for wanted in self._wanted.values():
            wanted.version.pending += 1
            self._mark(wanted)
        newest_first = sorted(self._versions.items(), reverse=True)
        self._versions = {place: version for place, version in newest_first if version.pending}
        self._maps = {key: seen for key, seen in self._maps.items() if key[1] in self._versions}

    def _mark(self, wanted: WantedChunk) -> None:
        key = wanted.chunk.hash
        is_open = wanted.attempt is None and key not in self._unchecked and self._wanted.get(key) is wanted
        bit = 1 << wanted.position
        wanted.version.open = wanted.version.open | bit if is_open else wanted.version.open & ~bit

    def next_attempt(self, now_s: float) -> Attempt | None:
        checks = sum(not attempt.source for attempt in self._running)
        attempt = None
        if checks >= self._max_disk_checks or not self._unchecked:
            ready = self._scores.ready()
            attempt = self._fetch(ready, now_s) or self._last_resort(ready, now_s)
        if attempt is None and self._unchecked:
            attempt = self._begin(self._unchecked.pop(next(iter(self._unchecked))), "", None, now_s)
        return attempt

    def finish(self, attempt: Attempt, done: bool) -> None:
        wanted = attempt.wanted
        self._running.discard(attempt)
        wanted.attempt = None
        if done and self._wanted.get(wanted.chunk.hash) is wanted:
            del self._wanted[wanted.chunk.hash]
            wanted.version.pending -= 1
            self._kept_bytes += wanted.chunk.size_bytes
        self._mark(wanted)

    def delivered(self, attempt: Attempt, now_s: float) -> None:
        source = attempt.source
        self._empty_claims.pop(source, None)
        if attempt.kind is not Kind.LAST_RESORT:
            self._progress_s = now_s
        rate = self.attempts_at(source) * attempt.chunk.size_bytes / max(now_s - attempt.started_s, 1e-3)
        self._max_attempts[source] = max(FEW_ATTEMPTS, int(rate / ATTEMPT_BYTES_S))

    def attempts_at(self, source: str) -> int:
        return sum(attempt.source == source for attempt in self._running)

    def mark_missing(self, attempt: Attempt, status: int, now_s: float) -> None:
        """The source answered 404, 503 or 429 to the request for a chunk."""
        source, wanted, claims = attempt.source, attempt.wanted, attempt.map.have >> attempt.wanted.position & 1
        problem = f"{source} does not have chunk {attempt.chunk.hash[:16]}… (HTTP {status})"
        _, misses = wanted.absent.get(source, (0.0, 0))
        wanted.absent[source] = (now_s + PAUSE.wait_s(misses), misses + 1)
        if status == 429 or (claims and status == 503):
            self._scores.failed(source, f"{source} is busy (HTTP {status})")
        elif not claims:
            self._scores.note(source, problem)
        else:
            self._scores.failed(source, f"{problem}, although its map says so")
            self._maps[source, wanted.version.place] = ChunkMap(asked_s=0.0)  # assume no chunks until the next map
            count, last_s = self._empty_claims.get(source, (0, 0.0))
            if (attempt.map.asked_s or 0.0) > last_s:  # several attempts after one map count once
                self._empty_claims[source] = count + 1, now_s
                if count + 1 == EMPTY_CLAIMS:
                    self._scores.drop(source, f"{source} claims chunks that it does not deliver; it is dropped")

    def should_leave(self, attempt: Attempt, now_s: float) -> bool:
        """Whether another source is expected to deliver this chunk much sooner."""
        elapsed_s = now_s - attempt.started_s
        left_s = (attempt.chunk.size_bytes / max(1, attempt.received_bytes) - 1) * elapsed_s
        return any(
            min(elapsed_s, left_s) > SLOW * (other.seconds(attempt.chunk.size_bytes) + SLACK_S)
            and source != attempt.source
            and other.kind is not Kind.LAST_RESORT
            and not (other.failures and other.bandwidth_bytes_s is None)
            and self._may_ask(source, other.kind, attempt.wanted, now_s)
            for source, other in self._scores.ready().items()
        )

    def map(self, source: str, version: Version) -> ChunkMap:
        return self._maps.get((source, version.place), ChunkMap())

    def update_map(self, source: str, place: Place, body: bytes | None, asked_s: float, now_s: float) -> int:
        """Store a map, HAVE then SOON (None: the source sends no maps); how many threads have new work."""
        if (version := self._versions.get(place)) is None:
            return 1
        before, half = self.map(source, version), -(-len(version.hashes) // 8)
        after = ChunkMap(asked_s=asked_s, mapless=True)
        if body is not None:
            after = ChunkMap(int.from_bytes(body[:half], "little"), int.from_bytes(body[half:], "little"), asked_s)
        self._maps[source, place] = after
        if (grown := after.have.bit_count() - before.have.bit_count()) > 0:
            self._progress_s = now_s
        return max(1, grown)

    def next_map_request(self, source: str) -> MapRequest | None:
        """Ask again for the incomplete map that was asked for longest ago; with several, each poll is held shorter."""
        growing = [
            (seen.asked_s or 0.0, version, seen.have.bit_count())
            for version in self._versions.values()
            if version.pending and (seen := self.map(source, version)).have.bit_count() < len(version.hashes)
        ]
        if not growing:
            return None
        asked_s, version, count = min(growing, key=lambda one: one[0])
        return MapRequest(version.place, len(version.hashes), count, UNKNOWN_S / len(growing) if asked_s else 0.0)

    def _offers(self, source: str, kind: Kind, version: Version, now_s: float) -> int:
        if kind is Kind.LAST_RESORT:
            return -1
        seen = self.map(source, version)
        if seen.asked_s is not None and not seen.mapless:
            return seen.have
        # Before its first map a source is asked for one chunk only: it may hold the request until it has the chunk.
        heard = seen.mapless or now_s - version.since_s > UNKNOWN_S or not self.attempts_at(source)
        return -1 if heard and kind is Kind.UPSTREAM else 0

    def _may_ask(self, source: str, kind: Kind, wanted: WantedChunk, now_s: float) -> bool:
        has_it = self._offers(source, kind, wanted.version, now_s) >> wanted.position & 1
        return bool(has_it) and wanted.absent.get(source, (now_s, 0))[0] <= now_s

    def _announced_by(self, sources: Iterable[str], wanted: WantedChunk) -> bool:
        return any(self.map(source, wanted.version).soon >> wanted.position & 1 for source in sources)

    def _at(self, version: Version, bits: int) -> Iterator[WantedChunk]:
        while bits:
            lowest = bits & -bits
            yield self._wanted[version.hashes[lowest.bit_length() - 1]]
            bits ^= lowest

    def _fetch(self, ready: Sources, now_s: float) -> Attempt | None:
        ordinary = {source: one for source, one in ready.items() if one.kind is not Kind.LAST_RESORT}
        upstream = [one.bandwidth_bytes_s or 0.0 for one in ordinary.values() if one.kind is Kind.UPSTREAM]
        least = max(upstream, default=0.0) / LATE
        peers = {source: one.bandwidth_bytes_s for source, one in ordinary.items() if one.kind is Kind.PEER}
        worth_waiting_for = [source for source, rate in peers.items() if rate is None or rate >= least]
        for source in self._by_weight(ordinary):
            if self.attempts_at(source) >= self._max_attempts.get(source, FEW_ATTEMPTS):
                continue
            if found := self._candidates(source, ordinary[source], worth_waiting_for, now_s):
                return self._begin(self._chance.choice(found), source, ordinary[source].kind, now_s)
        return None

    def _candidates(self, source: str, standing: SourceScore, peers: list[str], now_s: float) -> list[WantedChunk]:
        """Chunks to request from this source, all from the most urgent group of which it has some."""
        if standing.kind is not Kind.UPSTREAM or self._to_probe(source, standing):
            peers = []
        for version in self._versions.values():
            bits = version.open & self._offers(source, standing.kind, version, now_s)
            for part in (bits & version.deltas, bits & ~version.deltas):
                suits = (
                    wanted
                    for wanted in self._at(version, part)
                    if wanted.absent.get(source, (now_s, 0))[0] <= now_s
                    and not (peers and self._left_to_peers(wanted, peers, standing, now_s))
                )
                if found := list(islice(suits, WINDOW)):
                    return found
        return []

    def _left_to_peers(self, wanted: WantedChunk, peers: list[str], upstream: SourceScore, now_s: float) -> bool:
        """Whether a peer has the chunk, or has announced it and is not late yet."""
        if any(self._may_ask(peer, Kind.PEER, wanted, now_s) for peer in peers):
            return True
        if not self._announced_by(peers, wanted):
            return False
        wanted.waiting_since_s = now_s if wanted.waiting_since_s is None else wanted.waiting_since_s
        return now_s - wanted.waiting_since_s < LATE * (upstream.seconds(wanted.chunk.size_bytes) + SLACK_S)

    def _last_resort(self, ready: Sources, now_s: float) -> Attempt | None:
        last = {source: one for source, one in ready.items() if one.kind is Kind.LAST_RESORT}
        if not last:
            return None
        others = [source for source, one in ready.items() if source not in last and one.failures < 2]
        alone = all(kind is Kind.LAST_RESORT for kind in self._scores.usable().values())
        found = []
        every = (wanted for version in self._versions.values() for wanted in self._at(version, version.open))
        for wanted in islice(every, WINDOW):
            able = [source for source in others if source not in wanted.absent]
            if any(self._may_ask(source, ready[source].kind, wanted, now_s) for source in able):
                self._progress_s = now_s
            patience_s = ANNOUNCED_WAIT_S if self._announced_by(able, wanted) else ABSENT_WAIT_S
            if alone or now_s - self._progress_s >= patience_s:
                found.append(wanted)
        for source in self._by_weight(last):
            if suits := [one for one in found if self._may_ask(source, Kind.LAST_RESORT, one, now_s)]:
                return self._begin(self._chance.choice(suits), source, Kind.LAST_RESORT, now_s)
        return None

    def _to_probe(self, source: str, standing: SourceScore) -> bool:
        return standing.bandwidth_bytes_s is None and not self.attempts_at(source)

    def _begin(self, wanted: WantedChunk, source: str, kind: Kind | None, now_s: float) -> Attempt:
        attempt = Attempt(wanted, source, kind, self.map(source, wanted.version), now_s)
        wanted.attempt = attempt
        self._mark(wanted)
        self._running.add(attempt)
        return attempt

    def _by_weight(self, standings: Sources) -> list[str]:
        """The sources in random order, those of higher weight sooner; unmeasured ones first."""
        times = {source: self._chance.expovariate(standing.weight) for source, standing in standings.items()}
        return sorted(standings, key=lambda source: (not self._to_probe(source, standings[source]), times[source]))
