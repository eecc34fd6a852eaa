"""Which chunk from which source next: decisions only. No threads, no sockets, no clock; the pool carries them out.

    want ─► wanted, in order ─► take(now) ─┬─ look     is it on this disk already?
                 ▲                         ├─ fetch    a source by its weight, then a chunk that it has
                 │                         ├─ last     nobody else can give it: from the last resort
                 │                         └─ hedge    it flies, but slowly: a second time, from somebody faster
                 └──── land(flight): not done ─ elsewhere, later · done ─ the others that carry it have lost

Peers trade: what one of them has is fetched from it, what one announces is waited for, and only the rest is fetched
from upstream, in an order of chance. So the peers of one level together take about one copy from upstream:

    upstream ─► chunks that no peer has or announces          peer ─► chunks that it has

No promise is waited for beyond a bound that follows from measured bandwidth, and a peer that is much slower than
upstream is not waited for at all. All methods are called under the pool's lock.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shoal.protocol import Chunk, PolicyManifest
from shoal.runtime.retry import Backoff
from shoal.shardcast.have import Claim, HaveMaps, Question
from shoal.shardcast.manifest import Place
from shoal.shardcast.sources import Kind, SourceScores, Standing

WINDOW = 128  # so many candidates are weighed against each other; more would only cost time
AGAIN = Backoff(first_s=0.1, most_s=2.0)
SILENCE_S = 1.0  # a source that has not sent its map by then is asked as one that sends none
PATIENCE, PATIENCE_S = 3.0, 0.5  # an announced chunk is waited for: 3 times as long as upstream takes, and a little
UNMEASURED_PATIENCE_S = 5.0
COMING_S = 15.0  # how long the last resort waits for what a relay announces
LACKING_S = 2.0  # and for what nobody announces
WORTH = 0.25  # a peer with less than this share of upstream's bandwidth is not waited for
SLOW, SLOW_S = 4.0, 0.5  # a source that takes 4 times as long as another would is left
HEDGE, HEDGE_S = 1.5, 0.05
# Eight chunks at a time over a slow link all arrive late; so a source begins with few, and gets as many as its link
# bears at this rate each.
FIRST_FLIGHTS, FEWEST_FLIGHTS, FLIGHT_BYTES_S = 3, 2, 128 * 1024
UNMEASURED_S = 1.0
UNKEPT = 3  # claims that turn out empty before a source is dropped
BUSY = 10  # answers "busy" in a row before a source is dropped, where there is another
HUNGRY_PACE_S, PACE_S, MISS_PACE_S = 0.01, 0.1, 0.2
PEER_WAIT_S, UPSTREAM_WAIT_S, OLDER_PACE_S = 1.0, 5.0, 1.0
NOTHING_TO_ASK_S = 10.0


@dataclass(eq=False)
class Wanted:
    chunk: Chunk
    looked: bool = False
    flights: list[Flight] = field(default_factory=list)
    winner: Flight | None = None
    absent: dict[str, tuple[float, int]] = field(default_factory=dict)  # source → (not before, how often it lacked it)
    announced_s: float | None = None
    lacking_s: float | None = None

    def idle(self) -> bool:
        return self.looked and not self.flights


@dataclass(eq=False)
class Flight:
    """One attempt at one chunk. `source` is empty when it is looked for on this disk.

    `claimed`: its map says that it has the chunk. `may_be_held`: it may be a relay that waits for the chunk itself and
    answers when it is there; then the wait before the answer says nothing about its bandwidth.
    """

    wanted: Wanted
    source: str
    kind: Kind | None
    claimed: bool
    may_be_held: bool
    started_s: float
    received_bytes: int = 0
    lost: bool = False  # another was faster, or the chunk is no longer wanted

    @property
    def chunk(self) -> Chunk:
        return self.wanted.chunk


class Plan:
    """What is wanted, what flies, and what is known of who has it."""

    def __init__(self, scores: SourceScores, connections: int, chance: random.Random) -> None:
        self.maps = HaveMaps()
        self.absent: set[str] = set()  # sources that lacked a chunk since the last one arrived
        self.kept_bytes = self.wanted_bytes = 0
        self.hungry = False  # whether there are threads without work
        self._scores = scores
        self._most_looks = max(1, connections // 2)
        self._chance = chance
        self._wanted: dict[str, Wanted] = {}
        self._unlooked: dict[str, Wanted] = {}
        self._looks = 0
        self._flying: set[Flight] = set()
        self._admitted: dict[str, int] = {}  # how many a source that limits its clients was seen to let in
        self._most_flights: dict[str, int] = {}  # what a source's link bears, by what it has delivered so far
        self._disputed: dict[tuple[str, str], float] = {}  # (source, chunk) claimed and not delivered, since when
        self._unkept: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()
        self._watched_s: dict[Place, float] = {}
        self._unwatched = False  # whether chunks are wanted of which no map can tell
        self._begun: set[Place] = set()  # versions of which something has been wanted
        self._progress_s = 0.0  # when an ordinary source last delivered a chunk, or got one

    # What is wanted

    def want(self, chunks: Iterable[Chunk], first: bool) -> None:
        new: dict[str, Wanted] = {}
        for chunk in chunks:
            if chunk.hash not in self._wanted and chunk.hash not in new:
                self._unlooked[chunk.hash] = new[chunk.hash] = Wanted(chunk)
                self.wanted_bytes += chunk.size_bytes
            elif chunk.hash in self._wanted:
                new[chunk.hash] = self._wanted[chunk.hash]
        self._wanted = new | self._wanted if first else self._wanted | new
        self._note_begun()
        self._mark_all()

    def forget_except(self, kept: set[str]) -> list[Flight]:
        """Stop wanting all others; the flights that are now in vain."""
        gone = [wanted for key, wanted in self._wanted.items() if key not in kept]
        self.wanted_bytes -= sum(wanted.chunk.size_bytes for wanted in gone)
        self._wanted = {key: wanted for key, wanted in self._wanted.items() if key in kept}
        self._unlooked = {key: wanted for key, wanted in self._unlooked.items() if key in kept}
        self._mark_all()
        return [flight for wanted in gone for flight in _lose(wanted.flights)]

    def pending(self) -> int:
        return len(self._wanted)

    def flying_bytes(self) -> int:
        """What has been received of chunks that are not whole yet."""
        received: dict[str, int] = {}
        for flight in self._flying:
            best = max(received.get(flight.chunk.hash, 0), flight.received_bytes)
            received[flight.chunk.hash] = min(best, flight.chunk.size_bytes - 1)
        return sum(received.values())

    def soon(self, chunk_hash: str) -> bool:
        """Whether the chunk is being fetched, and not from a peer. Without the lock: one look at one entry."""
        wanted = self._wanted.get(chunk_hash)
        return wanted is not None and any(_brings(flight) for flight in list(wanted.flights))

    def announced(self) -> set[str]:
        """All chunks of which `soon` is true."""
        return {flight.chunk.hash for flight in self._flying if _brings(flight)}

    def take(self, now_s: float) -> Flight | None:
        """The next thing to do, if there is one now."""
        flight = self._look(now_s, self._most_looks)
        if flight is None:
            ready = self._scores.ready()
            flight = self._fetch(ready, now_s) or self._last_resort(ready, now_s) or self._hedge(ready, now_s)
            flight = flight or self._look(now_s, len(self._unlooked))
            if flight is None and self._wanted and not self._flying:
                self._note_absence(ready)
        return flight

    def win(self, flight: Flight) -> bool:
        """Whether this flight was the first to bring its chunk, whole and verified. Then it alone is kept."""
        if flight.lost or flight.wanted.winner is not None:
            return False
        flight.wanted.winner = flight
        _lose(other for other in flight.wanted.flights if other is not flight)
        return True

    def land(self, flight: Flight, done: bool) -> None:
        """The flight is over; `done` if its chunk is here now."""
        self._flying.discard(flight)
        flight.wanted.flights.remove(flight)
        if not flight.source:
            self._looks -= 1
            flight.wanted.looked = True
        self._mark(flight.wanted)
        if done and self._wanted.get(flight.chunk.hash) is flight.wanted:
            del self._wanted[flight.chunk.hash]
            self.maps.mark(flight.chunk.hash, False)
            self.kept_bytes += flight.chunk.size_bytes

    def others(self, flight: Flight) -> list[Flight]:
        """Those that carry the same chunk."""
        return [other for other in flight.wanted.flights if other is not flight]

    # What is seen of sources

    def delivered(self, flight: Flight, now_s: float) -> None:
        self.absent.clear()
        if flight.kind is not Kind.LAST_RESORT:
            self._progress_s = now_s
        self._busy.pop(flight.source, None)
        rate = self.flights_at(flight.source) * flight.chunk.size_bytes / max(now_s - flight.started_s, 1e-3)
        most = max(FEWEST_FLIGHTS, int(rate / FLIGHT_BYTES_S))
        self._most_flights[flight.source] = min(most, self._admitted.get(flight.source, most))

    def crowded(self, source: str) -> None:
        """The source says that this client has too many connections (429): from now on one less than there were."""
        self._admitted[source] = self._most_flights[source] = max(1, self.flights_at(source) - 1)

    def flights_at(self, source: str) -> int:
        return sum(flight.source == source for flight in self._flying)

    def lacks(self, flight: Flight, status: int, now_s: float) -> bool:
        """The source answered 404, or 503 or 429 ("later"), for a chunk. True if its map should be asked for anew."""
        source, wanted = flight.source, flight.wanted
        sentence = f"{source} does not have chunk {flight.chunk.hash[:16]}… (HTTP {status})"
        _, attempts = wanted.absent.get(source, (0.0, 0))
        wanted.absent[source] = (now_s + AGAIN.wait_s(attempts), attempts + 1)
        if status == 404:
            self.absent.add(source)
        if not flight.claimed:
            self._scores.note(source, sentence)
        elif status == 404:
            self._disputed[source, flight.chunk.hash] = now_s
            self._scores.failed(source, f"{sentence}, although its map says so")
            return True
        else:
            self._scores.failed(source, f"{source} is busy (HTTP {status})")
            self._busy[source] += 1
            if self._busy[source] >= BUSY and len(self._scores.usable()) > 1:
                self._scores.drop(source, f"{source} was busy (HTTP {status}) {BUSY} times in a row; it is dropped")
        return False

    def should_leave(self, flight: Flight, now_s: float) -> bool:
        """Whether another source would bring this chunk several times faster than the one that is at it."""
        elapsed_s = now_s - flight.started_s
        if elapsed_s < SLOW_S:
            return False
        best_s = min(
            (
                _seconds(flight.chunk, standing)
                for source, standing in self._scores.ready().items()
                if standing.bandwidth_bytes_s is not None and self._could_take_over(source, standing, flight, now_s)
            ),
            default=float("inf"),
        )
        return elapsed_s > SLOW * best_s + SLOW_S and _remaining_s(flight, now_s) > 2 * best_s

    def watch(self, manifest: PolicyManifest, now_s: float) -> None:
        self.maps.drop([place for place in self._begun if not self._pending_in(place)])
        self.maps.watch(manifest)
        self._note_begun()
        self._mark_all()
        self._disputed = {key: since for key, since in self._disputed.items() if key[1] in self._wanted}
        places = set(self.maps.places())
        self._watched_s = {place: since for place, since in self._watched_s.items() if place in places}
        self._watched_s.update({place: now_s for place in places if place not in self._watched_s})

    def see(self, source: str, place: Place, body: bytes | None, asked_s: float, now_s: float) -> int:
        """Take a map; how much more there is to do now. Claims found empty before, and repeated here, are counted."""
        grown = self.maps.see(source, place, body, asked_s)
        if grown > 0:
            self._progress_s = now_s
        for (disputed, chunk_hash), since_s in list(self._disputed.items()):
            where = self.maps.group(chunk_hash)
            if disputed != source or since_s >= asked_s or (where is not None and where[0] != place):
                continue
            del self._disputed[disputed, chunk_hash]
            if self.maps.claim(source, chunk_hash) is not Claim.HAS:
                continue
            self._unkept[source] += 1
            if self._unkept[source] >= UNKEPT:
                problem = f"{source} claims chunks that it does not deliver, {UNKEPT} times by now; it is dropped"
                self._scores.drop(source, problem)
        return max(1, grown)

    def question(self, source: str, kind: Kind, now_s: float) -> Question | float:
        """What to ask this source for its map now; or how many seconds there is nothing to ask."""
        places = [place for place in self.maps.places() if self._pending_in(place)]
        pause_s = NOTHING_TO_ASK_S
        for place in reversed(places):  # the newest last: it is the one whose question may be held
            newest = place == places[0]
            seen, size = self.maps.map(source, place), len(self.maps.hashes(place))
            if seen is None:
                return Question(place, size)
            doubted = self._doubted(source, place)
            due_s = seen.asked_s + self._pace_s(seen.misses, kind, newest)
            if (seen.count() == size or now_s < due_s) and not doubted:
                pause_s = min(pause_s, max(0.001, due_s - now_s)) if seen.count() < size else pause_s
                continue
            held_s = PEER_WAIT_S if kind is Kind.PEER else UPSTREAM_WAIT_S
            held_s = min(held_s, OLDER_PACE_S) if len(places) > 1 else held_s
            return Question(place, size, seen.count(), held_s if newest and not doubted else 0.0)
        return pause_s

    def _mark(self, wanted: Wanted) -> None:
        self.maps.mark(wanted.chunk.hash, wanted.idle() and self._wanted.get(wanted.chunk.hash) is wanted)

    def _mark_all(self) -> None:
        self._unwatched = any(self.maps.group(key) is None for key in self._wanted)
        for wanted in self._wanted.values():
            self._mark(wanted)

    def _note_begun(self) -> None:
        """A version is watched until what was wanted of it is here, not before something is wanted."""
        self._begun = {place for place in self.maps.places() if place in self._begun or self._pending_in(place)}

    def _doubted(self, source: str, place: Place) -> bool:
        groups = (self.maps.group(chunk_hash) for who, chunk_hash in self._disputed if who == source)
        return any(group is not None and group[0] == place for group in groups)

    def _pace_s(self, misses: int, kind: Kind, newest: bool) -> float:
        if misses:
            return min(5.0, MISS_PACE_S * 2.0 ** min(misses, 10))
        if not newest:
            return OLDER_PACE_S
        return HUNGRY_PACE_S if self.hungry or kind is Kind.PEER else PACE_S

    def _pending_in(self, place: Place) -> bool:
        return any(chunk_hash in self._wanted for chunk_hash in self.maps.hashes(place))

    # The choices of `take`

    def _look(self, now_s: float, most: int) -> Flight | None:
        if not self._unlooked or self._looks >= most:
            return None
        wanted = self._unlooked.pop(next(iter(self._unlooked)))
        self._looks += 1
        return self._launch(wanted, "", None, now_s)

    def _fetch(self, ready: dict[str, Standing], now_s: float) -> Flight | None:
        ordinary = {source: standing for source, standing in ready.items() if standing.kind is not Kind.LAST_RESORT}
        covering = _covering(ordinary)
        for source in self._drawn(ordinary):
            if self.flights_at(source) >= self._most_flights.get(source, FIRST_FLIGHTS):
                continue
            found = self._candidates(source, ordinary[source], covering, now_s)
            if found:
                return self._launch(self._rarest(found, ordinary), source, ordinary[source].kind, now_s)
        return None

    def _candidates(self, source: str, standing: Standing, covering: list[str], now_s: float) -> list[Wanted]:
        """Chunks to ask this source for, all of the most urgent group that it can help with."""
        upstream = standing.kind is Kind.UPSTREAM
        probing = self._to_probe(source, standing)
        found: list[Wanted] = []
        group = None
        for wanted in self._choices(source):
            if not wanted.idle() or not self._may_ask(source, standing.kind, wanted, now_s):
                continue
            if upstream and covering and not probing and self._covered(wanted, covering, standing, now_s):
                continue
            if found and self.maps.group(wanted.chunk.hash) != group:
                break
            group = self.maps.group(wanted.chunk.hash)
            found.append(wanted)
            if len(found) == WINDOW:
                break
        return found

    def _choices(self, source: str) -> Iterable[Wanted]:
        """Where the source's maps say it all, what they say; else everything that is wanted."""
        known = None if self._unwatched else self.maps.open_chunks(source)
        return self._wanted.values() if known is None else (self._wanted[chunk_hash] for chunk_hash in known)

    def _may_ask(self, source: str, kind: Kind, wanted: Wanted, now_s: float) -> bool:
        if wanted.absent and wanted.absent.get(source, (0.0, 0))[0] > now_s:
            return False
        if kind is Kind.LAST_RESORT:
            return True
        claim = self.maps.claim(source, wanted.chunk.hash)
        if claim is Claim.HAS:
            return (source, wanted.chunk.hash) not in self._disputed
        if claim is Claim.LACKS or kind is Kind.PEER:
            return False
        # Before its map has come, a source is asked for one chunk: the request may be held until the chunk is there.
        return claim is Claim.MAPLESS or self._spoken_for(source, wanted, now_s)

    def _spoken_for(self, source: str, wanted: Wanted, now_s: float) -> bool:
        group = self.maps.group(wanted.chunk.hash)
        since_s = self._watched_s.get(group[0], 0.0) if group is not None else 0.0
        return now_s - since_s > SILENCE_S or not self._flies_at(source)

    def _covered(self, wanted: Wanted, covering: list[str], upstream: Standing, now_s: float) -> bool:
        """Whether a peer has the chunk, or announces it and has not had its time yet."""
        announced = False
        for peer in covering:
            if self._may_ask(peer, Kind.PEER, wanted, now_s):
                return True
            announced = announced or self.maps.announces(peer, wanted.chunk.hash)
        if not announced:
            return False
        if wanted.announced_s is None:
            wanted.announced_s = now_s
        return now_s - wanted.announced_s < _patience_s(wanted.chunk, upstream)

    def _rarest(self, found: list[Wanted], ordinary: dict[str, Standing]) -> Wanted:
        if len(ordinary) > 1:
            has = [sum(self.maps.claim(source, one.chunk.hash) is Claim.HAS for source in ordinary) for one in found]
            least = min(has)
            found = [one for one, count in zip(found, has, strict=True) if count == least]
        return self._chance.choice(found)

    def _last_resort(self, ready: dict[str, Standing], now_s: float) -> Flight | None:
        last = {source: standing for source, standing in ready.items() if standing.kind is Kind.LAST_RESORT}
        if not last:
            return None
        usable = self._scores.usable()
        alone = all(kind is Kind.LAST_RESORT for source, kind in self._scores.kinds().items() if source in usable)
        for source in self._drawn(last):
            found = [
                wanted
                for wanted in self._first_idle()
                if (alone or self._lacking(wanted, ready, now_s))
                and self._may_ask(source, Kind.LAST_RESORT, wanted, now_s)
            ]
            if found:
                return self._launch(self._chance.choice(found), source, Kind.LAST_RESORT, now_s)
        return None

    def _first_idle(self) -> Iterator[Wanted]:
        left = WINDOW
        for wanted in self._wanted.values():
            if wanted.idle():
                yield wanted
                left -= 1
                if not left:
                    return

    def _lacking(self, wanted: Wanted, ready: dict[str, Standing], now_s: float) -> bool:
        """Whether for some time now no ordinary source was able to give this chunk, nor promised it."""
        ordinary = [
            source
            for source, standing in ready.items()
            if standing.kind is not Kind.LAST_RESORT and standing.failures < 2 and source not in wanted.absent
        ]
        if any(self._may_ask(source, ready[source].kind, wanted, now_s) for source in ordinary):
            wanted.lacking_s = None
            return False
        if wanted.lacking_s is None:
            wanted.lacking_s = now_s
        coming = any(self.maps.announces(source, wanted.chunk.hash) for source in ordinary)
        since_s = wanted.lacking_s if coming else max(wanted.lacking_s, self._progress_s)
        return now_s - since_s >= (COMING_S if coming else LACKING_S)

    def _hedge(self, ready: dict[str, Standing], now_s: float) -> Flight | None:
        """The slowest flight again, from a source that would be done with it well before."""
        worst: tuple[float, Wanted, str] | None = None
        for flight in self._flying:
            wanted = flight.wanted
            if not flight.source or flight.lost or wanted.winner is not None or len(wanted.flights) > 1:
                continue
            remaining_s = _remaining_s(flight, now_s)
            for source, standing in ready.items():
                if not self._could_take_over(source, standing, flight, now_s):
                    continue
                other_s = _seconds(wanted.chunk, standing)
                late = remaining_s > HEDGE * other_s + HEDGE_S and now_s - flight.started_s > other_s + HEDGE_S
                if late and (worst is None or remaining_s > worst[0]):
                    worst = (remaining_s, wanted, source)
        return None if worst is None else self._launch(worst[1], worst[2], ready[worst[2]].kind, now_s)

    def _could_take_over(self, source: str, standing: Standing, flight: Flight, now_s: float) -> bool:
        """Whether another source can be asked for the chunk of a flight."""
        other = source != flight.source and standing.kind is not Kind.LAST_RESORT
        return other and self._may_ask(source, standing.kind, flight.wanted, now_s)

    def _flies_at(self, source: str) -> bool:
        return any(flight.source == source for flight in self._flying)

    def _to_probe(self, source: str, standing: Standing) -> bool:
        """Nothing is known of its bandwidth, so one chunk is fetched from it, to know."""
        return standing.bandwidth_bytes_s is None and not self._flies_at(source)

    def _launch(self, wanted: Wanted, source: str, kind: Kind | None, now_s: float) -> Flight:
        claim = self.maps.claim(source, wanted.chunk.hash)
        unwatched = self.maps.group(wanted.chunk.hash) is None
        flight = Flight(wanted, source, kind, claim is Claim.HAS, unwatched or claim is Claim.SILENT, now_s)
        wanted.flights.append(flight)
        self._mark(wanted)
        self._flying.add(flight)
        return flight

    def _drawn(self, standings: dict[str, Standing]) -> Iterator[str]:
        """The sources in an order of chance, the weightier the sooner; before them those that are to be probed."""
        left = dict(standings)
        probed = [source for source, standing in standings.items() if self._to_probe(source, standing)]
        self._chance.shuffle(probed)
        for source in probed:
            del left[source]
            yield source
        while left:
            source = self._chance.choices(list(left), [standing.weight for standing in left.values()])[0]
            del left[source]
            yield source

    def _note_absence(self, ready: dict[str, Standing]) -> None:
        """Nothing flies and nothing can be asked for: those that answer and could have it do not."""
        for source, standing in ready.items():
            maps = (self.maps.map(source, place) for place in self.maps.places())
            heard = any(seen is not None and seen.body is not None for seen in maps)
            if standing.kind is Kind.PEER or (heard and standing.kind is Kind.UPSTREAM):
                self.absent.add(source)


def _covering(ordinary: dict[str, Standing]) -> list[str]:
    """The peers worth waiting for, where there is an upstream to compare them with."""
    upstream = [one.bandwidth_bytes_s or 0.0 for one in ordinary.values() if one.kind is Kind.UPSTREAM]
    least = WORTH * max(upstream, default=0.0)
    return [
        source
        for source, one in ordinary.items()
        if one.kind is Kind.PEER and (one.bandwidth_bytes_s is None or one.bandwidth_bytes_s >= least)
    ]


def _patience_s(chunk: Chunk, upstream: Standing) -> float:
    """How long a peer may take with a chunk that it is fetching from there, too."""
    if upstream.bandwidth_bytes_s is None:
        return UNMEASURED_PATIENCE_S
    return PATIENCE * chunk.size_bytes / upstream.bandwidth_bytes_s + PATIENCE_S


def _seconds(chunk: Chunk, standing: Standing) -> float:
    """What a chunk takes from a source, as far as that is known."""
    return UNMEASURED_S if standing.bandwidth_bytes_s is None else chunk.size_bytes / standing.bandwidth_bytes_s


def _remaining_s(flight: Flight, now_s: float) -> float:
    """What is left of a flight, if it goes on as it has so far."""
    missing = flight.chunk.size_bytes - flight.received_bytes
    return missing * (now_s - flight.started_s) / max(1, flight.received_bytes)


def _brings(flight: Flight) -> bool:
    """Whether it brings to our level what was not there before."""
    return bool(flight.source) and flight.kind is not Kind.PEER and not flight.lost


def _lose(flights: Iterable[Flight]) -> list[Flight]:
    lost = list(flights)
    for flight in lost:
        flight.lost = True
    return lost
