"""A broadcast without sockets or threads: sources in simulated time, for tests of what the scheduler decides."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.protocol import Chunk, PolicyManifest, PolicyRef
from shoal.shardcast.scheduler import Attempt, Kind, MapRequest, Scheduler, SourceScores

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
    sending: list[Attempt] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    sent_bytes: float = 0.0

    def map(self, chunks: Sequence[Chunk]) -> bytes | None:
        if self.dead or not self.maps:
            return None
        have = [chunk.hash in self.has or chunk.hash in self.claims for chunk in chunks]
        return bits(have) + bits([chunk.hash in self.announces for chunk in chunks])


class Node:
    """A client or relay: one scheduler, and as many slots for attempts as it has connections."""

    def __init__(self, world: "World", seed: int = 0, connections: int = 4, **sources: Sequence[str]) -> None:
        self.world = world
        named = [sources.get(kind, ()) for kind in ("upstreams", "peers", "last_resort")]
        self.scores = SourceScores(*named, world.clock)
        self.scheduler = Scheduler(self.scores, connections, random.Random(seed))
        self.attempts: list[Attempt] = []
        self.kept: set[str] = set()
        self.connections = connections
        self.manifest: PolicyManifest | None = None
        self.requests: dict[str, tuple[MapRequest, float]] = {}
        world.nodes.append(self)

    def want(self, manifest: PolicyManifest) -> None:
        self.manifest = manifest
        self.scheduler.want(manifest, manifest.chunks, self.world.now_s)

    def step(self) -> None:
        self._ask_for_maps()
        for attempt in list(self.attempts):
            if not attempt.source or attempt.cancelled or self._left(attempt):
                self._end(attempt, False)
        while len(self.attempts) < self.connections:
            attempt = self.scheduler.next_attempt(self.world.now_s)
            if attempt is None:
                break
            self.attempts.append(attempt)
            if attempt.source:
                self._start(attempt)

    def arrived(self, attempt: Attempt) -> None:
        source = self.world.sources[attempt.source]
        self.scheduler.delivered(attempt, self.world.now_s)
        if source.corrupt:
            self.scores.drop(attempt.source, f"{attempt.source} sent bytes that are not the chunk")
            self._end(attempt, False)
            return
        self.scores.succeeded(attempt.source, SIZE, self.world.now_s - attempt.started_s)
        self.kept.add(attempt.chunk.hash)
        self._end(attempt, True)

    def _ask_for_maps(self) -> None:
        """A request that is held is answered when the map has grown or the time is over."""
        for source, kind in self.scores.kinds().items():
            if source not in self.requests:
                asked = self.scheduler.next_map_request(source)
                if asked is not None and kind is not Kind.LAST_RESORT:
                    self.requests[source] = (asked, self.world.now_s)
            if source in self.requests and self.manifest is not None and not self.world.sources[source].silent:
                request, asked_s = self.requests[source]
                body = self.world.sources[source].map(self.manifest.chunks)
                half = -(-request.size // 8)
                count = 0 if body is None else int.from_bytes(body[:half], "little").bit_count()
                if body is None or count > request.known or self.world.now_s - asked_s >= request.wait_s:
                    self.scheduler.update_map(source, request.place, body, asked_s, self.world.now_s)
                    del self.requests[source]

    def _left(self, attempt: Attempt) -> bool:
        if not self.scheduler.should_leave(attempt, self.world.now_s):
            return False
        elapsed_s = self.world.now_s - attempt.started_s
        self.scores.failed(attempt.source, f"{attempt.source} is slow", None, attempt.received_bytes / elapsed_s)
        return True

    def _start(self, attempt: Attempt) -> None:
        source = self.world.sources[attempt.source]
        source.asked[attempt.chunk.hash] += 1
        if source.dead:
            self.scores.failed(attempt.source, f"{attempt.source} is dead")
            self._end(attempt, False)
        elif source.busy or attempt.chunk.hash not in source.has:
            self.scheduler.mark_missing(attempt, 503 if source.busy else 404, self.world.now_s)
            self._end(attempt, False)
        else:
            source.sending.append(attempt)

    def _end(self, attempt: Attempt, done: bool) -> None:
        if attempt.source and attempt in self.world.sources[attempt.source].sending:
            self.world.sources[attempt.source].sending.remove(attempt)
        self.attempts.remove(attempt)
        self.scheduler.finish(attempt, done)


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
        while any(node.scheduler.pending() for node in self.nodes):
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
        """The uplink of a step, in equal parts to all attempts."""
        owners = {attempt: node for node in self.nodes for attempt in node.attempts}
        for attempt in list(source.sending):
            part = source.rate_bytes_s * STEP_S / max(1, len(source.sending))
            before = attempt.received_bytes
            attempt.received_bytes = min(SIZE, int(before + max(part, 1)))
            source.sent_bytes += attempt.received_bytes - before
            if attempt.received_bytes == SIZE:
                owners[attempt].arrived(attempt)


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
        self.announces = self.node.scheduler.announced()
        return super().map(chunks)
