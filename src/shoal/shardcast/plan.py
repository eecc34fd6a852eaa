"""Which chunk from which source next: decisions only. No threads, no sockets, no clock; the pool carries them out.

    want ─► open chunks, by version ─► take(now) ─┬─ look     is it on this disk already?
                 ▲                                ├─ fetch    a source by its weight, then a chunk that it has
                 │                                ├─ last     nobody else can give it: from the last resort
                 │                                └─ hedge    it flies, but slowly: again, from somebody faster
                 └──── land(flight): not done ─ elsewhere, later · done ─ the others that carry it have lost

Sources say which chunks they have (`Map`); whoever sends no map (nginx, a bucket, the origin's folder) is taken to have
everything. A map is only a claim: a chunk is believed by its hash, and whoever claims what it does not deliver is
dropped. Peers trade: what one of them has is fetched from it, what one announces is waited for, and only the rest is
fetched from upstream, in random order; so the peers of one level together take about one copy. Waits are bounded by
measured bandwidth, and a peer that is much slower than upstream is not waited for. All methods are called under the
pool's lock.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from shoal.protocol import Chunk, PolicyManifest
from shoal.shardcast.manifest import Place, offered, place_of
from shoal.shardcast.sources import REST, UNKNOWN_S, Kind, SourceScores, Standing

WINDOW = 128  # so many candidates are weighed against each other; more would only cost time
HEDGE, LATE, LITTLE_S = 1.5, 4.0, 0.1  # times as long as another source needs, and a little
COMING_S, LACKING_S = 15.0, 2.0  # how long the last resort waits for what a relay announces, and for what nobody does
# Eight chunks at a time over a slow link all arrive late; so a source begins with few, and gets as many as its link
# bears at this rate each.
FEW_FLIGHTS, FLIGHT_BYTES_S = 3, 128 * 1024
UNKEPT = 3  # claims that turn out empty before a source is dropped


@dataclass(frozen=True)
class Map:
    """What a source last said of a version, as bits by position in `offered`: the chunks that it serves now, and those
    that it is fetching from upstream. `mapless`: it answered without a map."""

    have: int = 0
    soon: int = 0
    asked_s: float | None = None  # None: nothing has been heard of it
    mapless: bool = False


@dataclass(frozen=True)
class Question:
    """What to ask a source: its map of a version of `size` chunks, held while it has no more than `count`."""

    place: Place
    size: int
    count: int = 0
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
    looked: bool = False
    flights: list[Flight] = field(default_factory=list)
    winner: Flight | None = None
    absent: dict[str, tuple[float, int]] = field(default_factory=dict)  # source → (not before, how often it lacked it)
    announced_s: float | None = None
    lacking_s: float | None = None


@dataclass(eq=False)
class Flight:
    """One attempt at one chunk. `source` is empty when it is looked for on this disk. `claimed`: its map says that it
    has the chunk. `may_be_held`: it may be a relay that waits for the chunk itself and answers when it is there; then
    the wait before the answer says nothing about its bandwidth."""

    wanted: Wanted
    source: str
    kind: Kind | None
    claimed: bool
    may_be_held: bool
    started_s: float
    received_bytes: int = 0
    lost: bool = False  # another was faster, or the chunk is no longer wanted
    looked_at_s: float = 0.0  # when it was last compared with others
    slow: bool = False  # another would be much faster

    @property
    def chunk(self) -> Chunk:
        return self.wanted.chunk

    def left_s(self, now_s: float) -> float:
        """What is left of it, if it continues as it has so far."""
        return (self.chunk.size_bytes / max(1, self.received_bytes) - 1) * (now_s - self.started_s)


class Plan:
    """What is wanted, what flies, and what is known of who has it."""

    def __init__(self, scores: SourceScores, connections: int, chance: random.Random) -> None:
        self.absent: set[str] = set()  # sources that lacked a chunk since the last one arrived
        self.kept_bytes = self.wanted_bytes = 0
        self.crowded: set[str] = set()  # sources that let no more connections of ours in
        self._scores = scores
        self._most_looks = max(1, connections // 2)
        self._chance = chance
        self._versions: dict[Place, Version] = {}  # newest first
        self._maps: dict[tuple[str, Place], Map] = {}
        self._wanted: dict[str, Wanted] = {}
        self._unlooked: dict[str, Wanted] = {}
        self._looks = 0
        self._flying: set[Flight] = set()
        self._most_flights: dict[str, int] = {}  # what a source's link bears, by what it has delivered so far
        self._doubts: dict[str, tuple[Wanted, float]] = {}  # by source: a chunk claimed and not delivered, since when
        self._unkept: Counter[str] = Counter()
        self._progress_s = 0.0  # when an ordinary source last delivered a chunk, or got one

    # What is wanted

    def want(self, manifest: PolicyManifest, chunks: Iterable[Chunk], now_s: float) -> None:
        """Chunks that a version offers. One that is wanted twice is fetched once."""
        place = place_of(manifest)
        if place not in self._versions:
            deltas = (1 << sum(len(delta.chunks) for delta in manifest.deltas)) - 1
            hashes = tuple(chunk.hash for chunk in offered(manifest))
            self._versions[place] = Version(place, hashes, deltas, now_s)
        for chunk in chunks:
            if chunk.hash not in self._wanted:
                wanted = Wanted(chunk, self._versions[place])
                self._wanted[chunk.hash] = self._unlooked[chunk.hash] = wanted
                self.wanted_bytes += chunk.size_bytes
        self._index()

    def forget_except(self, kept: set[str]) -> list[Flight]:
        """Stop wanting all others; the flights that are now in vain."""
        gone = [wanted for key, wanted in self._wanted.items() if key not in kept]
        self.wanted_bytes -= sum(wanted.chunk.size_bytes for wanted in gone)
        self._wanted = {key: wanted for key, wanted in self._wanted.items() if key in kept}
        self._unlooked = {key: wanted for key, wanted in self._unlooked.items() if key in kept}
        self._index()
        lost = [flight for wanted in gone for flight in wanted.flights]
        for flight in lost:
            flight.lost = True
        return lost

    def pending(self) -> int:
        return len(self._wanted)

    def flying_bytes(self) -> int:
        """What has been received of chunks that are not whole yet."""
        flying = {flight.wanted for flight in self._flying if not flight.lost}
        return sum(max(flight.received_bytes for flight in wanted.flights) for wanted in flying)

    def announced(self) -> set[str]:
        """The chunks that are being fetched, and not from a peer: soon our level has what it had not before."""
        brings = (one for one in self._flying if one.source and one.kind is not Kind.PEER and not one.lost)
        return {flight.chunk.hash for flight in brings}

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
        self._doubts = {key: doubt for key, doubt in self._doubts.items() if doubt[0].version.pending}

    def _mark(self, wanted: Wanted) -> None:
        is_open = wanted.looked and not wanted.flights and self._wanted.get(wanted.chunk.hash) is wanted
        bit = 1 << wanted.position
        wanted.version.open = wanted.version.open | bit if is_open else wanted.version.open & ~bit

    # What becomes of flights

    def take(self, now_s: float) -> Flight | None:
        """The next thing to do, if there is one now."""
        flight = self._look(now_s, self._most_looks)
        if flight is None:
            ready = self._scores.ready()
            flight = self._fetch(ready, now_s) or self._last_resort(ready, now_s) or self._hedge(ready, now_s)
            flight = flight or self._look(now_s, len(self._unlooked))
            if flight is None and self._wanted and not self._flying:  # those that answer and could have it do not
                heard = {(source, Kind.UPSTREAM) for (source, _), seen in self._maps.items() if not seen.mapless}
                answering = ((source, one.kind) for source, one in ready.items())
                self.absent |= {one[0] for one in answering if one[1] is Kind.PEER or one in heard}
        return flight

    def win(self, flight: Flight) -> list[Flight] | None:
        """If this flight is the first to bring its chunk, whole and verified: those that it has beaten."""
        if flight.lost or flight.wanted.winner is not None:
            return None
        flight.wanted.winner = flight
        beaten = [other for other in flight.wanted.flights if other is not flight]
        for other in beaten:
            other.lost = True
        return beaten

    def land(self, flight: Flight, done: bool) -> None:
        """The flight is over; `done` if its chunk is here now."""
        wanted = flight.wanted
        self._flying.discard(flight)
        wanted.flights.remove(flight)
        if not flight.source:
            self._looks -= 1
            wanted.looked = True
        if done and self._wanted.get(wanted.chunk.hash) is wanted:
            del self._wanted[wanted.chunk.hash]
            wanted.version.pending -= 1
            self.kept_bytes += wanted.chunk.size_bytes
        self._mark(wanted)

    def delivered(self, flight: Flight, now_s: float) -> None:
        source = flight.source
        self.absent.clear()
        if flight.kind is not Kind.LAST_RESORT:
            self._progress_s = now_s
        rate = self.flights_at(source) * flight.chunk.size_bytes / max(now_s - flight.started_s, 1e-3)
        if source not in self.crowded:
            self._most_flights[source] = max(FEW_FLIGHTS, int(rate / FLIGHT_BYTES_S))

    def flights_at(self, source: str) -> int:
        return sum(flight.source == source for flight in self._flying)

    def lacks(self, flight: Flight, status: int, now_s: float) -> bool:
        """The source answered 404, or 503 or 429 ("later"), for a chunk. True if its map should be asked for anew."""
        source, wanted = flight.source, flight.wanted
        sentence = f"{source} does not have chunk {flight.chunk.hash[:16]}… (HTTP {status})"
        _, attempts = wanted.absent.get(source, (0.0, 0))
        wanted.absent[source] = (now_s + REST.wait_s(attempts), attempts + 1)
        if status == 404:
            self.absent.add(source)
        if status == 429:  # too many connections: from now on one less than there were
            self.crowded.add(source)
            self._most_flights[source] = max(1, self.flights_at(source) - 1)
        if not flight.claimed:
            self._scores.note(source, sentence)
        elif status == 404:
            self._doubts.setdefault(source, (wanted, now_s))
            self._scores.failed(source, f"{sentence}, although its map says so")
        else:
            self._scores.failed(source, f"{source} is busy (HTTP {status})")
        return flight.claimed and status == 404

    def should_leave(self, flight: Flight, now_s: float) -> bool:
        """Whether another source would bring this chunk several times faster than the one that is at it."""
        ready = {source: one for source, one in self._scores.ready().items() if one.bandwidth_bytes_s is not None}
        return self._faster(flight, ready, LATE, now_s) is not None

    # Maps

    def map(self, source: str, version: Version) -> Map:
        return self._maps.get((source, version.place), Map())

    def see(self, source: str, place: Place, body: bytes | None, asked_s: float, now_s: float) -> int:
        """Take HAVE and SOON, one bit per chunk, the least significant bit first; or that the source sends no maps. How
        much more there is to do now. A claim that was found empty before, and is repeated here, is counted."""
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
        doubted, since_s = self._doubts.get(source, (None, now_s))
        if doubted is not None and since_s < asked_s and (doubted.version is version or not doubted.version.pending):
            del self._doubts[source]
            self._unkept[source] += doubted.version is version and after.have >> doubted.position & 1
            if self._unkept[source] >= UNKEPT:
                problem = f"{source} claims chunks that it does not deliver, {UNKEPT} times by now; it is dropped"
                self._scores.drop(source, problem)
        return max(1, grown)

    def question(self, source: str) -> Question | None:
        """What to ask this source for: of the maps that may still grow, or are in doubt, the one asked for longest ago.
        Several are held for a shorter time each."""
        open_ones = [
            (seen.asked_s or 0.0, Question(version.place, len(version.hashes), seen.have.bit_count()))
            for version in self._versions.values()
            if version.pending
            and ((seen := self.map(source, version)).have.bit_count() < len(version.hashes) or source in self._doubts)
        ]
        if not open_ones:
            return None
        asked_s, question = min(open_ones, key=lambda one: one[0])
        at_once = asked_s == 0.0 or source in self._doubts
        return question if at_once else replace(question, wait_s=UNKNOWN_S / len(open_ones))

    def _offers(self, source: str, kind: Kind, version: Version, now_s: float) -> int:
        """The chunks of a version that this source can be asked for, as bits."""
        if kind is Kind.LAST_RESORT:
            return -1
        seen = self.map(source, version)
        if seen.asked_s is not None and not seen.mapless:
            return 0 if source in self._doubts else seen.have
        # Before its map has come, a source is asked for one chunk: the request may be held until the chunk is there.
        heard = seen.mapless or now_s - version.since_s > UNKNOWN_S or not self.flights_at(source)
        return -1 if heard and kind is Kind.UPSTREAM else 0

    def _may_ask(self, source: str, kind: Kind, wanted: Wanted, now_s: float) -> bool:
        offered_here = self._offers(source, kind, wanted.version, now_s) >> wanted.position & 1
        return bool(offered_here) and wanted.absent.get(source, (now_s, 0))[0] <= now_s

    def _announced_by(self, sources: Iterable[str], wanted: Wanted) -> bool:
        return any(self.map(source, wanted.version).soon >> wanted.position & 1 for source in sources)

    def _at(self, version: Version, bits: int) -> Iterator[Wanted]:
        while bits:
            lowest = bits & -bits
            yield self._wanted[version.hashes[lowest.bit_length() - 1]]
            bits ^= lowest

    # The choices of `take`

    def _look(self, now_s: float, most: int) -> Flight | None:
        if not self._unlooked or self._looks >= most:
            return None
        self._looks += 1
        return self._launch(self._unlooked.pop(next(iter(self._unlooked))), "", None, now_s)

    def _fetch(self, ready: dict[str, Standing], now_s: float) -> Flight | None:
        ordinary = {source: standing for source, standing in ready.items() if standing.kind is not Kind.LAST_RESORT}
        upstream = [one.bandwidth_bytes_s or 0.0 for one in ordinary.values() if one.kind is Kind.UPSTREAM]
        least = max(upstream, default=0.0) / LATE
        peers = {source: one.bandwidth_bytes_s for source, one in ordinary.items() if one.kind is Kind.PEER}
        worth_waiting_for = [source for source, rate in peers.items() if rate is None or rate >= least]
        for source in self._drawn(ordinary):
            if self.flights_at(source) < self._most_flights.get(source, FEW_FLIGHTS):
                found = self._candidates(source, ordinary[source], worth_waiting_for, now_s)
                if len(ordinary) > 1 and found:  # the rarest
                    maps = [self.map(one, found[0].version).have for one in ordinary]
                    has = [sum(have >> wanted.position & 1 for have in maps) for wanted in found]
                    found = [wanted for wanted, count in zip(found, has, strict=True) if count == min(has)]
                if found:
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
        wanted.announced_s = now_s if wanted.announced_s is None else wanted.announced_s
        return now_s - wanted.announced_s < LATE * (upstream.seconds(wanted.chunk.size_bytes) + LITTLE_S)

    def _last_resort(self, ready: dict[str, Standing], now_s: float) -> Flight | None:
        last = {source: standing for source, standing in ready.items() if standing.kind is Kind.LAST_RESORT}
        if not last:
            return None
        usable = self._scores.usable()
        alone = all(kind is Kind.LAST_RESORT for source, kind in self._scores.kinds().items() if source in usable)
        first = islice((one for version in self._versions.values() for one in self._at(version, version.open)), WINDOW)
        lacking = [wanted for wanted in first if alone or self._lacking(wanted, ready, now_s)]
        for source in self._drawn(last):
            found = [wanted for wanted in lacking if self._may_ask(source, Kind.LAST_RESORT, wanted, now_s)]
            if found:
                return self._launch(self._chance.choice(found), source, Kind.LAST_RESORT, now_s)
        return None

    def _lacking(self, wanted: Wanted, ready: dict[str, Standing], now_s: float) -> bool:
        """Whether for some time now no ordinary source was able to give this chunk, nor promised it."""
        ordinary = {
            source: standing.kind
            for source, standing in ready.items()
            if standing.kind is not Kind.LAST_RESORT and standing.failures < 2 and source not in wanted.absent
        }
        if any(self._may_ask(source, kind, wanted, now_s) for source, kind in ordinary.items()):
            wanted.lacking_s = None
            return False
        wanted.lacking_s = now_s if wanted.lacking_s is None else wanted.lacking_s
        if self._announced_by(ordinary, wanted):
            return now_s - wanted.lacking_s >= COMING_S
        return now_s - max(wanted.lacking_s, self._progress_s) >= LACKING_S

    def _hedge(self, ready: dict[str, Standing], now_s: float) -> Flight | None:
        """The slowest flight again, from a source that would be done with it well before."""
        alone = [one for one in self._flying if one.source and not one.lost and len(one.wanted.flights) == 1]
        for flight in sorted(alone, key=lambda one: -one.left_s(now_s)):
            source = self._faster(flight, ready, 1.0, now_s)
            if source is not None and flight.wanted.winner is None:
                return self._launch(flight.wanted, source, ready[source].kind, now_s)
        return None

    def _faster(self, flight: Flight, ready: dict[str, Standing], times: float, now_s: float) -> str | None:
        """A source that would bring the chunk well before this flight does, which has had its time, so many times."""
        left_s, elapsed_s = flight.left_s(now_s), now_s - flight.started_s
        for source, standing in ready.items():
            other_s = standing.seconds(flight.chunk.size_bytes)
            late = left_s > HEDGE * other_s + LITTLE_S and elapsed_s > times * (other_s + LITTLE_S)
            another = source != flight.source and standing.kind is not Kind.LAST_RESORT
            if late and another and self._may_ask(source, standing.kind, flight.wanted, now_s):
                return source
        return None

    def _to_probe(self, source: str, standing: Standing) -> bool:
        """Nothing is known of its bandwidth, so one chunk is fetched from it, to know."""
        return standing.bandwidth_bytes_s is None and not self.flights_at(source)

    def _launch(self, wanted: Wanted, source: str, kind: Kind | None, now_s: float) -> Flight:
        seen = self.map(source, wanted.version)
        flight = Flight(wanted, source, kind, bool(seen.have >> wanted.position & 1), seen.asked_s is None, now_s)
        wanted.flights.append(flight)
        self._mark(wanted)
        self._flying.add(flight)
        return flight

    def _drawn(self, standings: dict[str, Standing]) -> list[str]:
        """The sources in random order, the weightier the sooner; before them those that are to be probed."""
        times = {source: self._chance.expovariate(standing.weight) for source, standing in standings.items()}
        return sorted(standings, key=lambda source: (not self._to_probe(source, standings[source]), times[source]))
