"""A broadcast without sockets or threads: plans and sources in simulated time, for tests of what a plan decides."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.protocol import Chunk, PolicyManifest, PolicyRef
from shoal.shardcast.plan import Flight, Kind, Plan, Question, SourceScores

STEP_S = 0.02
SIZE = 1000


def chunks_of(count: int) -> tuple[Chunk, ...]:
    return tuple(Chunk(hash=f"{index:064x}", size_bytes=SIZE) for index in range(count))


def manifest_of(chunks: Sequence[Chunk], version: int = 1) -> PolicyManifest:
    return PolicyManifest(
        run="simulated", policy=PolicyRef(incarnation=0, version=version, digest="a" * 64), entries=(),
        chunk_size_bytes=SIZE, chunks=tuple(chunks), size_bytes=len(chunks) * SIZE, created_at_ms=0,
    )  # fmt: skip


def bits(flags: Sequence[bool]) -> bytes:
    return sum(flag << index for index, flag in enumerate(flags)).to_bytes(-(-len(flags) // 8), "little")


@dataclass
class Source:
    """A server. `rate_bytes_s` is its uplink, shared by all; `claims` is what its map says beyond the truth."""

    url: str
    has: set[str]
    rate_bytes_s: float = 100 * SIZE
    maps: bool = True
    dead: bool = False
    corrupt: bool = False
    busy: bool = False
    silent: bool = False  # about its map only
    claims: set[str] = field(default_factory=set)
    announces: set[str] = field(default_factory=set)
    sending: list[Flight] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    sent_bytes: float = 0.0

    def map(self, chunks: Sequence[Chunk]) -> bytes | None:
        if self.dead or not self.maps:
            return None
        have = [chunk.hash in self.has or chunk.hash in self.claims for chunk in chunks]
        return bits(have) + bits([chunk.hash in self.announces for chunk in chunks])


class Node:
    """A client or relay: one plan, and as many slots for flights as it has connections."""

    def __init__(self, world: World, seed: int = 0, connections: int = 4, **sources: Sequence[str]) -> None:
        self.world = world
        named = [sources.get(kind, ()) for kind in ("upstreams", "peers", "last_resort")]
        self.scores = SourceScores(*named, world.clock)
        self.plan = Plan(self.scores, connections, random.Random(seed))
        self.flights: list[Flight] = []
        self.kept: set[str] = set()
        self.connections = connections
        self.manifest: PolicyManifest | None = None
        self.questions: dict[str, tuple[Question, float]] = {}
        world.nodes.append(self)

    def want(self, manifest: PolicyManifest) -> None:
        self.manifest = manifest
        self.plan.want(manifest, manifest.chunks, self.world.now_s)

    def step(self) -> None:
        self._ask_for_maps()
        for flight in list(self.flights):
            if not flight.source or flight.lost or self._left(flight):
                self._end(flight, False)
        while len(self.flights) < self.connections:
            flight = self.plan.take(self.world.now_s)
            if flight is None:
                break
            self.flights.append(flight)
            if flight.source:
                self._start(flight)

    def arrived(self, flight: Flight) -> None:
        source = self.world.sources[flight.source]
        self.plan.delivered(flight, self.world.now_s)
        if source.corrupt:
            self.scores.drop(flight.source, f"{flight.source} sent bytes that are not the chunk")
            self._end(flight, False)
            return
        self.scores.succeeded(flight.source, SIZE, self.world.now_s - flight.started_s)
        self.kept.add(flight.chunk.hash)
        self._end(flight, True)

    def _ask_for_maps(self) -> None:
        """A question that is held is answered when the map has grown or the time is over."""
        for source, kind in self.scores.kinds().items():
            if source not in self.questions:
                asked = self.plan.question(source)
                if asked is not None and kind is not Kind.LAST_RESORT:
                    self.questions[source] = (asked, self.world.now_s)
            if source in self.questions and self.manifest is not None and not self.world.sources[source].silent:
                question, asked_s = self.questions[source]
                body = self.world.sources[source].map(self.manifest.chunks)
                half = -(-question.size // 8)
                count = 0 if body is None else int.from_bytes(body[:half], "little").bit_count()
                if body is None or count > question.known or self.world.now_s - asked_s >= question.wait_s:
                    self.plan.see(source, question.place, body, asked_s, self.world.now_s)
                    del self.questions[source]

    def _left(self, flight: Flight) -> bool:
        if not self.plan.should_leave(flight, self.world.now_s):
            return False
        elapsed_s = self.world.now_s - flight.started_s
        self.scores.failed(flight.source, f"{flight.source} is slow", None, flight.received_bytes / elapsed_s)
        return True

    def _start(self, flight: Flight) -> None:
        source = self.world.sources[flight.source]
        source.asked[flight.chunk.hash] += 1
        if source.dead:
            self.scores.failed(flight.source, f"{flight.source} is dead")
            self._end(flight, False)
        elif source.busy or flight.chunk.hash not in source.has:
            self.plan.lacks(flight, 503 if source.busy else 404, self.world.now_s)
            self._end(flight, False)
        else:
            source.sending.append(flight)

    def _end(self, flight: Flight, done: bool) -> None:
        if flight.source and flight in self.world.sources[flight.source].sending:
            self.world.sources[flight.source].sending.remove(flight)
        self.flights.remove(flight)
        self.plan.land(flight, done)


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.sources: dict[str, Source] = {}
        self.nodes: list[Node] = []

    def clock(self) -> float:
        return self.now_s

    def add(self, source: Source) -> Source:
        self.sources[source.url] = source
        return source

    def run(self, seconds: float) -> bool:
        """Until every node has everything; false if that takes longer."""
        end_s = self.now_s + seconds
        while any(node.plan.pending() for node in self.nodes):
            if self.now_s > end_s:
                return False
            self.step()
        return True

    def step(self) -> None:
        self.now_s += STEP_S
        for node in self.nodes:
            node.step()
        for source in self.sources.values():
            self._send(source)

    def _send(self, source: Source) -> None:
        """The uplink of a step, in equal parts to all flights."""
        owners = {flight: node for node in self.nodes for flight in node.flights}
        for flight in list(source.sending):
            part = source.rate_bytes_s * STEP_S / max(1, len(source.sending))
            before = flight.received_bytes
            flight.received_bytes = min(SIZE, int(before + max(part, 1)))
            source.sent_bytes += flight.received_bytes - before
            if flight.received_bytes == SIZE:
                owners[flight].arrived(flight)


def swarm(world: World, chunks: Sequence[Chunk], count: int, origin_rate: float) -> tuple[Source, list[Node]]:
    """Relays of one level that trade: each is a node and, with what it has kept, a source for the others."""
    origin = world.add(Source("http://origin:1", {chunk.hash for chunk in chunks}, origin_rate, maps=False))
    urls = [f"http://relay-{number}:1" for number in range(count)]
    for number, url in enumerate(urls):
        node = Node(world, number, upstreams=[origin.url], peers=[other for other in urls if other != url])
        world.add(_Mirrored(url, node.kept, 10 * origin_rate, node=node))
    return origin, world.nodes


@dataclass
class _Mirrored(Source):
    node: Node | None = None

    def map(self, chunks: Sequence[Chunk]) -> bytes | None:
        assert self.node is not None
        self.announces = self.node.plan.announced()
        return super().map(chunks)
