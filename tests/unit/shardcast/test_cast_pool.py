"""The pool over real sockets: maps, trading, slow and lying sources. Only what matches its hash is ever kept."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

from blake3 import blake3
from castsim import bits, manifest_of

from kit import eventually
from kit.cast import WITHIN_S, Handler, Lab, instead, reply, says
from shoal.protocol import Chunk
from shoal.shardcast.connection import PoolSettings, Timeouts
from shoal.shardcast.pool import ChunkPool
from shoal.shardcast.scheduler import SourceScores

SIZE = 1000


def data_of(count: int) -> dict[str, bytes]:
    blobs = (random.Random(index).randbytes(SIZE) for index in range(count))
    return {blake3(blob).hexdigest(): blob for blob in blobs}


DATA = data_of(24)
CHUNKS = [Chunk(hash=key, size_bytes=SIZE) for key in DATA]
MANIFEST = manifest_of(CHUNKS)


class Shelf:
    """A keeper in memory. What is put there must match, and must not be there already."""

    def __init__(self) -> None:
        self.chunks: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.closed = False

    def has(self, chunk: Chunk, scratch: memoryview) -> bool:
        assert not self.closed
        return chunk.hash in self.chunks

    def keep(self, chunk: Chunk, data: memoryview) -> None:
        assert not self.closed
        assert blake3(data).hexdigest() == chunk.hash
        with self.changed:
            assert chunk.hash not in self.chunks
            self.chunks[chunk.hash] = bytes(data)
            self.changed.notify_all()


def serving(shelf: Shelf, soon: Callable[[str], bool] = lambda key: False) -> Handler:
    """A relay's answers: chunks that are there, 404 for others, and a map that is held until it has grown."""

    def handle(target: str, to: socket.socket) -> None:
        url = urlsplit(target)
        if not url.path.startswith("/have/"):
            blob = shelf.chunks.get(url.path.rpartition("/")[2])
            reply(to, 404, b"") if blob is None else reply(to, 200, blob)
            return
        query = parse_qs(url.query)
        with shelf.changed:
            shelf.changed.wait_for(lambda: len(shelf.chunks) > int(query["count"][0]), float(query["wait_s"][0]))
            have = bits([key in shelf.chunks for key in DATA])
        reply(to, 200, have + bits([soon(key) for key in DATA]))

    return handle


def full(blobs: dict[str, bytes] = DATA) -> Shelf:
    shelf = Shelf()
    shelf.chunks = dict(blobs)
    return shelf


@contextmanager
def pool_of(scores: SourceScores, shelf: Shelf, connections: int = 4, **settings: float) -> Iterator[ChunkPool]:
    timeouts = Timeouts(connect_s=2, stall_s=settings.pop("stall_s", 20))
    pool = ChunkPool(scores, shelf, PoolSettings(connections, timeouts=timeouts, **settings))
    try:
        yield pool
    finally:
        pool.close("test is over")
        shelf.closed = True


def fetch_all(scores: SourceScores, **settings: int) -> ChunkPool:
    """Everything, or an error that says what was in the way."""
    shelf = Shelf()
    with pool_of(scores, shelf, **settings) as pool:
        pool.want(MANIFEST, CHUNKS)
        pool.start()
        assert pool.wait(WITHIN_S), scores.describe()
        assert pool.error is None
    assert shelf.chunks == DATA
    assert sum(pool.fetched_bytes.values()) == len(DATA) * SIZE
    return pool


def test_the_next_chunk_is_announced_before_the_last_has_arrived(lab: Lab) -> None:
    """Else a peer that hears of the arrival could choose the very chunk that we choose a moment later."""
    announced: list[set[str]] = []

    class Listening(Shelf):
        def keep(self, chunk: Chunk, data: memoryview) -> None:
            announced.append(pool.announced() - {chunk.hash})
            super().keep(chunk, data)

    def map_first(target: str, to: socket.socket) -> None:
        """Before a source has said that it sends no maps, it is asked for one chunk at a time."""
        if target.startswith("/chunks/"):
            eventually(lambda: bool(pool._scheduler._maps), WITHIN_S)
        honest(target, to)

    honest = chunks_by(serving(full()), says(b"", 404))
    with pool_of(SourceScores([lab.source(map_first).url]), Listening(), 1) as pool:
        pool.want(MANIFEST, CHUNKS)
        pool.start()
        assert pool.wait(WITHIN_S)
    assert [len(others) for others in announced] == [1] * 23 + [0]


def chunks_by(handler: Handler, maps: Handler | None = None) -> Handler:
    """Chunks as this handler sends them; maps of everything, unless told otherwise."""
    return instead(handler, {"/have/": maps or serving(full())})


def drip(_target: str, to: socket.socket) -> None:
    reply(to, 200, size=SIZE)
    for _ in range(SIZE):
        to.sendall(b"x")
        threading.Event().wait(0.1)  # the drip itself


def test_a_source_far_slower_than_the_other_is_left_in_the_middle_of_a_chunk(lab: Lab) -> None:
    slow, quick = lab.source(chunks_by(drip)), lab.source(serving(full()))
    scores = SourceScores([slow.url, quick.url])
    pool = fetch_all(scores, connections=2)
    assert pool.fetched_bytes[quick.url] == 24 * SIZE
    assert "slow" in scores.describe()


def test_a_source_that_stalls_is_hung_up_on_and_another_is_asked(lab: Lab) -> None:
    hung_up = threading.Event()

    def stall(_target: str, to: socket.socket) -> None:
        if to.recv(1) == b"":
            hung_up.set()

    stalled, other = lab.source(chunks_by(stall, says(b"", 404))), lab.source(serving(full()))
    pool = fetch_all(SourceScores([stalled.url, other.url]))
    assert pool.fetched_bytes == {other.url: 24 * SIZE}
    assert hung_up.wait(WITHIN_S)


def test_a_source_that_appears_later_is_asked_for_its_map_and_its_chunks(lab: Lab) -> None:
    scores, shelf = SourceScores([]), Shelf()
    honest, asked = serving(full()), threading.Event()

    def map_first(target: str, to: socket.socket) -> None:
        """However busy the machine, no chunk arrives before the map was asked for."""
        if target.startswith("/have/0.1?"):
            asked.set()
        assert asked.wait(WITHIN_S)
        honest(target, to)

    source = lab.source(map_first)
    with pool_of(scores, shelf) as pool:
        pool.want(MANIFEST, CHUNKS)
        pool.start()
        assert not pool.wait(0.05)
        scores.set_sources([source.url])
        assert pool.wait(WITHIN_S)


def test_a_closed_pool_does_not_call_its_store_and_its_threads_end(lab: Lab) -> None:
    asked = threading.Event()
    holding = lab.source(lambda target, to: (asked.set(), holding.closed.wait(WITHIN_S)))  # type: ignore[arg-type, return-value]
    before = set(threading.enumerate())
    with pool_of(SourceScores([holding.url]), Shelf()) as pool:
        pool.want(MANIFEST, CHUNKS)
        pool.start()
        assert asked.wait(WITHIN_S)
        ours = [one for one in set(threading.enumerate()) - before if one.name.startswith(("chunks-", "have-map"))]
        assert len(ours) == 5
    for thread in ours:
        thread.join(WITHIN_S)
        assert not thread.is_alive()


def test_attempts_for_unwanted_chunks_are_cancelled(lab: Lab) -> None:
    left, asked = threading.Event(), threading.Event()

    def stall(target: str, to: socket.socket) -> None:
        asked.set()
        if to.recv(1) == b"":
            left.set()

    with pool_of(SourceScores([lab.source(stall).url]), Shelf(), 1) as pool:
        pool.want(MANIFEST, CHUNKS[:1])
        pool.start()
        assert asked.wait(WITHIN_S)
        pool.forget_except(set())
        assert left.wait(WITHIN_S)
        assert pool.wait(WITHIN_S)
        assert pool.progress() == (0, 0)
