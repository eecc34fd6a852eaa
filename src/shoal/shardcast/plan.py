"""Which chunk from which source next: decisions only. No threads, no sockets, no clock; the pool carries them out.

    want ─► open chunks, by version ─► take(now) ─┬─ look     is it on this disk already?
                 ▲                                ├─ fetch    a source by its weight, then a chunk that it has
                 │                                └─ last     nobody else can give it: from the last resort
                 └──── land(flight): not done, or should_leave: another source would be much faster

Sources say which chunks they have (`Map`); whoever sends no map (nginx, a bucket, the origin's folder) is taken to have
everything. A map is only a claim: a chunk is believed by its hash, and a source that keeps claiming what it does not
deliver is dropped. Peers trade: what one of them has is fetched from it, what one announces is waited for, and only the
rest is fetched from upstream, in random order; so the peers of one level together take about one copy. Waits are
bounded by measured bandwidth, and a peer that is much slower than upstream is not waited for.

Which source is asked next is drawn, the better it has served the likelier; none is forgotten for ever:

    weight   success × bandwidth, both exponential moving averages; a success rate heals a little with every update
    rest     after a failure: not asked for a while, doubling with every failure in a row
    drop     after a lie (bytes that do not match their hash, an unsigned manifest): not asked until `restore`

Bandwidth that is not known yet counts as the best that is, so that a new source is tried soon.
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
from shoal.shardcast.connection import Address
from shoal.shardcast.limits import FEW_FLIGHTS, FLIGHT_BYTES_S
from shoal.shardcast.manifest import Place, offered

SMOOTHING = 0.3
HEALING = 0.01  # a source that always fails keeps 0.01 / 0.3 of its success, so that it is still asked now and then
UNKNOWN_S = 1.0  # what an unmeasured source is taken to need for a chunk, or for its map
REST = Backoff(first_s=0.1, most_s=2.0)
WINDOW = 128  # candidates that are weighed against each other; more would only cost time
SLOW, LATE, LITTLE_S = 2.0, 4.0, 0.1  # times as long as another source needs, and a little
COMING_S, LACKING_S = 15.0, 2.0  # how long the last resort waits for what a relay announces, and for what nobody does
EMPTY_CLAIMS = 3  # maps in a row whose claims turn out empty, after which a source is dropped


class Kind(Enum):
    UPSTREAM = "upstream"  # has what we want, or will have it: relays for a client, the origin or relays for a relay
    PEER = "peer"  # of our own level: fetches other chunks than we do and trades them
    LAST_RESORT = "last resort"  # the origin, for a client: asked when nobody else can help


@dataclass
class Standing:
    """What is known of a source. `bandwidth_bytes_s` is that of one connection, as far as it is known."""

    kind: Kind = Kind.UPSTREAM
    success: float = 1.0
    bandwidth_bytes_s: float | None = None
    failures: int = 0  # in a row, up to now
    resting_until_s: float = 0.0
    dropped: bool = False
    problem: str = ""
    weight: float = 0.0

    def seconds(self, size_bytes: int) -> float:
        """What so many bytes take from it, as far as that is known."""
        return UNKNOWN_S if self.bandwidth_bytes_s is None else size_bytes / self.bandwidth_bytes_s


class SourceScores:
    """What is known of each source. Used from many threads. What is said of a source that is gone does no harm.

    >>> scores = SourceScores(["http://a:8471", "http://b:8471"], last_resort=["http://origin:8471"])
    >>> scores.drop("http://a:8471", "sent a corrupt chunk")
    >>> scores.choose()
    'http://b:8471'
    """

    def __init__(
        self, sources: Sequence[str], peers: Sequence[str] = (), last_resort: Sequence[str] = (),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._now_s = now_s
        self._lock = threading.Lock()
        self._scores: dict[str, Standing] = {}
        self.set_sources(sources, peers, last_resort)

    def set_sources(self, sources: Sequence[str], peers: Sequence[str] = (), last_resort: Sequence[str] = ()) -> None:
        """From now on these; what is known of those that stay is kept. Who is named twice is what comes first here."""
        kinds: dict[str, Kind] = {}
        for kind, named in ((Kind.UPSTREAM, sources), (Kind.PEER, peers), (Kind.LAST_RESORT, last_resort)):
            for source in named:
                Address.parse(source)
                kinds.setdefault(source, kind)
        with self._lock:
            self._scores = {source: self._scores.get(source, Standing()) for source in kinds}
            for source, kind in kinds.items():
                self._scores[source].kind = kind

    def kinds(self) -> dict[str, Kind]:
        with self._lock:
            return {source: score.kind for source, score in self._scores.items()}

    def usable(self) -> dict[str, Kind]:
        """Those that are not dropped, resting or not."""
        with self._lock:
            return {source: score.kind for source, score in self._scores.items() if not score.dropped}

    def ready(self) -> dict[str, Standing]:
        """Those that may be asked now: neither dropped nor resting."""
        with self._lock:
            now_s = self._now_s()
            best = max((score.bandwidth_bytes_s or 0.0 for score in self._scores.values()), default=0.0) or 1.0
            for score in self._scores.values():
                score.weight = score.success * (score.bandwidth_bytes_s or best)
            scores = self._scores.items()
            return {source: copy(one) for source, one in scores if not one.dropped and one.resting_until_s <= now_s}

    def choose(self) -> str | None:
        """A source to ask now, by chance in proportion to its weight; None if all of them rest or are dropped. A last
        resort is chosen only where there is no other."""
        ready = self.ready()
        chosen = {source: one for source, one in ready.items() if one.kind is not Kind.LAST_RESORT} or ready
        return random.choices(list(chosen), [standing.weight for standing in chosen.values()])[0] if chosen else None

    def succeeded(self, source: str, size_bytes: int, seconds: float) -> None:
        self._update(source, success=1.0, rate=size_bytes / max(seconds, 1e-6))

    def failed(self, source: str, problem: str, success: float | None = 0.0, rate: float | None = None) -> None:
        """It rests. `success` None: it answered, but does not have it yet, or not fast enough. `rate`: what is known of
        its bandwidth, if it was left in the middle of a chunk."""
        self._update(source, problem, success, rate, rests=True)

    def drop(self, source: str, problem: str) -> None:
        self._update(source, problem, drop=True)

    def note(self, source: str, problem: str) -> None:
        """Remember a problem for `describe`, without any consequence."""
        self._update(source, problem)

    def _update(
        self, source: str, problem: str = "", success: float | None = None, rate: float | None = None,
        rests: bool = False, drop: bool = False,
    ) -> None:  # fmt: skip
        with self._lock:
            score, now_s = self._scores.get(source, Standing()), self._now_s()
            score.problem = score.problem if score.dropped else problem or score.problem  # why it was dropped stays
            score.dropped |= drop
            if success is not None:
                score.success = min(1.0, (1 - SMOOTHING) * score.success + SMOOTHING * success + HEALING)
            if rate is not None:
                rate = max(1.0, rate)  # never 0, which would read as "not known"
                score.bandwidth_bytes_s = (1 - SMOOTHING) * (score.bandwidth_bytes_s or rate) + SMOOTHING * rate
            if success:
                score.failures, score.resting_until_s = 0, 0.0
            if rests and score.resting_until_s <= now_s:  # several connections failing at once are one failure
                score.resting_until_s = now_s + REST.wait_s(score.failures)
                score.failures += 1

    def restore(self) -> None:
        """Forgive those that were dropped."""
        with self._lock:
            for score in self._scores.values():
                score.dropped = False

    def describe(self) -> str:
        """The last problem of each source, for an error message."""
        with self._lock:
            lines = [score.problem for score in self._scores.values() if score.problem]
            return "; ".join(lines) or ("no source has failed" if self._scores else "no source is known")


@dataclass(frozen=True)
class Map:
    """What a source last said of a version, as bits by position in `offered`: the chunks that it serves now, and those
    that it is fetching from upstream. `mapless`: it answered without a map."""

    have: int = 0
    soon: int = 0
    asked_s: float | None = None  # None: nothing has been heard of it
    mapless: bool = False


class Question(NamedTuple):
    """What to ask a source: its map of a version of `size` chunks, held while it has no more than `known`."""

    place: Place
    size: int
    known: int = 0
    wait_s: float = 0.0


@dataclass(eq=False)
class Version:
    """A version of which chunks are wanted. As bits: `deltas` are the more urgent, `open` nobody was asked for yet."""

    place: Place
    hashes: tuple[str, ...]
    deltas: int
    since_s: float
    pending: int = 0
    open: int = 0


@dataclass(eq=False)
class Wanted:
    chunk: Chunk
    version: Version  # the newest that it is wanted of
    position: int = 0
    flight: Flight | None = None
    absent: dict[str, tuple[float, int]] = field(default_factory=dict)  # source → (not before, how often it lacked it)
    waiting_s: float | None = None  # since when others are waited for, that they may get it


@dataclass(eq=False)
class Flight:
    """One attempt at one chunk. `source` is empty when it is looked for on this disk; `map` is what it said before."""

    wanted: Wanted
    source: str
    kind: Kind | None
    map: Map
    started_s: float
    received_bytes: int = 0
    lost: bool = False  # the chunk is no longer wanted
    looked_at_s: float = 0.0  # when it was last compared with others
    slow: bool = False  # another would be much faster

    @property
    def chunk(self) -> Chunk:
        return self.wanted.chunk


Sources = Mapping[str, Standing]


class Plan:
    """What is wanted, what is in flight, and what is known of who has it. Used under the pool's lock."""

    def __init__(self, scores: SourceScores, connections: int, chance: random.Random) -> None:
        self._scores = scores
        self._most_looks = max(1, connections // 2)
        self._chance = chance
        self._versions: dict[Place, Version] = {}  # newest first
        self._maps: dict[tuple[str, Place], Map] = {}
        self._wanted: dict[str, Wanted] = {}
        self._unlooked: dict[str, Wanted] = {}
        self._flying: set[Flight] = set()
        self._most_flights: dict[str, int] = {}  # what a source's link bears, by what it has delivered so far
        self._empty_claims: dict[str, tuple[int, float]] = {}  # of a source since it last delivered: count, last when
        self._kept_bytes = self._wanted_bytes = 0
        self._progress_s = 0.0  # when an ordinary source last delivered a chunk, or got one

    # What is wanted

    def want(self, manifest: PolicyManifest, chunks: Iterable[Chunk], now_s: float) -> None:
        """Chunks that a version offers. One that is wanted twice is fetched once."""
        place = manifest.policy.place
        if place not in self._versions:
            deltas = (1 << sum(len(delta.chunks) for delta in manifest.deltas)) - 1
            hashes = tuple(chunk.hash for chunk in offered(manifest))
            self._versions[place] = Version(place, hashes, deltas, now_s)
        for chunk in chunks:
            if chunk.hash not in self._wanted:
                wanted = Wanted(chunk, self._versions[place])
                self._wanted[chunk.hash] = self._unlooked[chunk.hash] = wanted
                self._wanted_bytes += chunk.size_bytes
        self._progress_s = now_s
        self._index()

    def forget_except(self, kept: set[str]) -> list[Flight]:
        """Stop wanting all others; the flights that are now in vain."""
        gone = [wanted for key, wanted in self._wanted.items() if key not in kept]
        self._wanted_bytes -= sum(wanted.chunk.size_bytes for wanted in gone)
        for wanted in gone:
            del self._wanted[wanted.chunk.hash]
            self._unlooked.pop(wanted.chunk.hash, None)
        self._index()
        lost = [wanted.flight for wanted in gone if wanted.flight is not None]
        for flight in lost:
            flight.lost = True
        return lost

    def pending(self) -> int:
        return len(self._wanted)

    def progress(self) -> tuple[int, int]:
        """Bytes that are here or on their way here, and bytes that were wanted in all."""
        flying = sum(flight.received_bytes for flight in self._flying if not flight.lost)
        return self._kept_bytes + flying, self._wanted_bytes

    def announced(self) -> set[str]:
        """The chunks that are being fetched, and not from a peer: soon our level has what it had not before."""
        flying = (one for one in self._flying if one.source and one.kind is not Kind.PEER and not one.lost)
        return {flight.chunk.hash for flight in flying}

    def _index(self) -> None:
        """After chunks have come or gone: which version each belongs to, and which versions are still of interest."""
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

    def _mark(self, wanted: Wanted) -> None:
        key = wanted.chunk.hash
        is_open = wanted.flight is None and key not in self._unlooked and self._wanted.get(key) is wanted
        bit = 1 << wanted.position
        wanted.version.open = wanted.version.open | bit if is_open else wanted.version.open & ~bit

    # What becomes of flights

    def take(self, now_s: float) -> Flight | None:
        """The next thing to do, if there is one now."""
        if sum(not flight.source for flight in self._flying) < self._most_looks and self._unlooked:
            return self._look(now_s)
        ready = self._scores.ready()
        flight = self._fetch(ready, now_s) or self._last_resort(ready, now_s)
        return self._look(now_s) if flight is None and self._unlooked else flight

    def land(self, flight: Flight, done: bool) -> None:
        """The flight is over; `done` if its chunk is here now."""
        wanted = flight.wanted
        self._flying.discard(flight)
        wanted.flight = None
        if done and self._wanted.get(wanted.chunk.hash) is wanted:
            del self._wanted[wanted.chunk.hash]
            wanted.version.pending -= 1
            self._kept_bytes += wanted.chunk.size_bytes
        self._mark(wanted)

    def delivered(self, flight: Flight, now_s: float) -> None:
        source = flight.source
        self._empty_claims.pop(source, None)
        if flight.kind is not Kind.LAST_RESORT:
            self._progress_s = now_s
        rate = self.flights_at(source) * flight.chunk.size_bytes / max(now_s - flight.started_s, 1e-3)
        self._most_flights[source] = max(FEW_FLIGHTS, int(rate / FLIGHT_BYTES_S))

    def flights_at(self, source: str) -> int:
        return sum(flight.source == source for flight in self._flying)

    def lacks(self, flight: Flight, status: int, now_s: float) -> None:
        """The source answered 404, or 503 or 429 ("later"), for a chunk."""
        source, wanted, claims = flight.source, flight.wanted, flight.map.have >> flight.wanted.position & 1
        problem = f"{source} does not have chunk {flight.chunk.hash[:16]}… (HTTP {status})"
        _, attempts = wanted.absent.get(source, (0.0, 0))
        wanted.absent[source] = (now_s + REST.wait_s(attempts), attempts + 1)
        if status == 429 or (claims and status == 503):
            self._scores.failed(source, f"{source} is busy (HTTP {status})")
        elif not claims:
            self._scores.note(source, problem)
        else:
            self._scores.failed(source, f"{problem}, although its map says so")
            self._maps[source, wanted.version.place] = Map(asked_s=0.0)  # nothing, until it is asked again
            count, last_s = self._empty_claims.get(source, (0, 0.0))
            if (flight.map.asked_s or 0.0) > last_s:  # several flights by one map are one empty claim
                self._empty_claims[source] = count + 1, now_s
                if count + 1 == EMPTY_CLAIMS:
                    self._scores.drop(source, f"{source} claims chunks that it does not deliver; it is dropped")

    def should_leave(self, flight: Flight, now_s: float) -> bool:
        """Whether another source, as far as is known, would bring this chunk well before the one that is at it."""
        elapsed_s = now_s - flight.started_s
        left_s = (flight.chunk.size_bytes / max(1, flight.received_bytes) - 1) * elapsed_s
        return any(
            min(elapsed_s, left_s) > SLOW * (other.seconds(flight.chunk.size_bytes) + LITTLE_S)
            and source != flight.source
            and other.kind is not Kind.LAST_RESORT
            and not (other.failures and other.bandwidth_bytes_s is None)
            and self._may_ask(source, other.kind, flight.wanted, now_s)
            for source, other in self._scores.ready().items()
        )

    # Maps

    def map(self, source: str, version: Version) -> Map:
        return self._maps.get((source, version.place), Map())

    def see(self, source: str, place: Place, body: bytes | None, asked_s: float, now_s: float) -> int:
        """Take HAVE and SOON, one bit per chunk, the least significant bit first; or that the source sends no maps. How
        much more there is to do now."""
        version = self._versions.get(place)
        if version is None:
            return 1
        before, half = self.map(source, version), -(-len(version.hashes) // 8)
        after = Map(asked_s=asked_s, mapless=True)
        if body is not None:
            after = Map(int.from_bytes(body[:half], "little"), int.from_bytes(body[half:], "little"), asked_s)
        self._maps[source, place] = after
        grown = after.have.bit_count() - before.have.bit_count()
        if grown > 0:
            self._progress_s = now_s
        return max(1, grown)

    def question(self, source: str) -> Question | None:
        """What to ask this source for: of the maps that may still grow the one asked for longest ago. Several are held
        for a shorter time each."""
        growing = [
            (seen.asked_s or 0.0, version, seen.have.bit_count())
            for version in self._versions.values()
            if version.pending and (seen := self.map(source, version)).have.bit_count() < len(version.hashes)
        ]
        if not growing:
            return None
        asked_s, version, count = min(growing, key=lambda one: one[0])
        return Question(version.place, len(version.hashes), count, UNKNOWN_S / len(growing) if asked_s else 0.0)

    def _offers(self, source: str, kind: Kind, version: Version, now_s: float) -> int:
        """The chunks of a version that this source can be asked for, as bits."""
        if kind is Kind.LAST_RESORT:
            return -1
        seen = self.map(source, version)
        if seen.asked_s is not None and not seen.mapless:
            return seen.have
        # Before its map has come, a source is asked for one chunk: the request may be held until the chunk is there.
        heard = seen.mapless or now_s - version.since_s > UNKNOWN_S or not self.flights_at(source)
        return -1 if heard and kind is Kind.UPSTREAM else 0

    def _may_ask(self, source: str, kind: Kind, wanted: Wanted, now_s: float) -> bool:
        has_it = self._offers(source, kind, wanted.version, now_s) >> wanted.position & 1
        return bool(has_it) and wanted.absent.get(source, (now_s, 0))[0] <= now_s

    def _announced_by(self, sources: Iterable[str], wanted: Wanted) -> bool:
        return any(self.map(source, wanted.version).soon >> wanted.position & 1 for source in sources)

    def _at(self, version: Version, bits: int) -> Iterator[Wanted]:
        while bits:
            lowest = bits & -bits
            yield self._wanted[version.hashes[lowest.bit_length() - 1]]
            bits ^= lowest

    # The choices of `take`

    def _look(self, now_s: float) -> Flight:
        return self._launch(self._unlooked.pop(next(iter(self._unlooked))), "", None, now_s)

    def _fetch(self, ready: Sources, now_s: float) -> Flight | None:
        ordinary = {source: one for source, one in ready.items() if one.kind is not Kind.LAST_RESORT}
        upstream = [one.bandwidth_bytes_s or 0.0 for one in ordinary.values() if one.kind is Kind.UPSTREAM]
        least = max(upstream, default=0.0) / LATE
        peers = {source: one.bandwidth_bytes_s for source, one in ordinary.items() if one.kind is Kind.PEER}
        worth_waiting_for = [source for source, rate in peers.items() if rate is None or rate >= least]
        for source in self._drawn(ordinary):
            if self.flights_at(source) >= self._most_flights.get(source, FEW_FLIGHTS):
                continue
            if found := self._candidates(source, ordinary[source], worth_waiting_for, now_s):
                return self._launch(self._chance.choice(found), source, ordinary[source].kind, now_s)
        return None

    def _candidates(self, source: str, standing: Standing, peers: list[str], now_s: float) -> list[Wanted]:
        """Chunks to ask this source for, all of the most urgent group that it can help with."""
        if standing.kind is not Kind.UPSTREAM or self._to_probe(source, standing):
            peers = []
        for version in self._versions.values():
            bits = version.open & self._offers(source, standing.kind, version, now_s)
            for part in (bits & version.deltas, bits & ~version.deltas):
                suits = (
                    wanted
                    for wanted in self._at(version, part)
                    if wanted.absent.get(source, (now_s, 0))[0] <= now_s
                    and not (peers and self._covered(wanted, peers, standing, now_s))
                )
                if found := list(islice(suits, WINDOW)):
                    return found
        return []

    def _covered(self, wanted: Wanted, peers: list[str], upstream: Standing, now_s: float) -> bool:
        """Whether a peer has the chunk, or announces it and has not had its time yet."""
        if any(self._may_ask(peer, Kind.PEER, wanted, now_s) for peer in peers):
            return True
        if not self._announced_by(peers, wanted):
            return False
        wanted.waiting_s = now_s if wanted.waiting_s is None else wanted.waiting_s
        return now_s - wanted.waiting_s < LATE * (upstream.seconds(wanted.chunk.size_bytes) + LITTLE_S)

    def _last_resort(self, ready: Sources, now_s: float) -> Flight | None:
        """A chunk that for some time now no ordinary source was able to give, nor promised."""
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
            patience_s = COMING_S if self._announced_by(able, wanted) else LACKING_S
            if alone or now_s - self._progress_s >= patience_s:
                found.append(wanted)
        for source in self._drawn(last):
            if suits := [one for one in found if self._may_ask(source, Kind.LAST_RESORT, one, now_s)]:
                return self._launch(self._chance.choice(suits), source, Kind.LAST_RESORT, now_s)
        return None

    def _to_probe(self, source: str, standing: Standing) -> bool:
        """Nothing is known of its bandwidth, so one chunk is fetched from it, to know."""
        return standing.bandwidth_bytes_s is None and not self.flights_at(source)

    def _launch(self, wanted: Wanted, source: str, kind: Kind | None, now_s: float) -> Flight:
        flight = Flight(wanted, source, kind, self.map(source, wanted.version), now_s)
        wanted.flight = flight
        self._mark(wanted)
        self._flying.add(flight)
        return flight

    def _drawn(self, standings: Sources) -> list[str]:
        """The sources in random order, the weightier the sooner; before them those that are to be probed."""
        times = {source: self._chance.expovariate(standing.weight) for source, standing in standings.items()}
        return sorted(standings, key=lambda source: (not self._to_probe(source, standings[source]), times[source]))
