"""The pool over real sockets: maps, trading, slow and lying sources. Only what matches its hash is ever kept."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import parse_qs, urlsplit

from blake3 import blake3
from castsim import bits, manifest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.cast import Handler, ScriptedSource, eventually, reply
from shoal.protocol import Chunk
from shoal.shardcast.connection import Timeouts
from shoal.shardcast.limits import PoolSettings
from shoal.shardcast.plan import SourceScores
from shoal.shardcast.pool import ChunkPool

SIZE = 1000
WITHIN_S = 30.0
Scripted = Callable[[Handler], ScriptedSource]


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


def static(blobs: dict[str, bytes]) -> Handler:
    def handle(target: str, to: socket.socket) -> None:
        blob = blobs.get(target.rpartition("/")[2])
        reply(to, 404, b"") if blob is None else reply(to, 200, blob)

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


def test_the_next_chunk_is_announced_before_the_last_has_arrived(scripted: Scripted) -> None:
    """Else a peer that hears of the arrival could choose the very chunk that we choose a moment later."""
    announced: list[set[str]] = []

    class Listening(Shelf):
        def keep(self, chunk: Chunk, data: memoryview) -> None:
            announced.append(pool.announced() - {chunk.hash})
            super().keep(chunk, data)

    def map_first(target: str, to: socket.socket) -> None:
        """Before a source has said that it sends no maps, it is asked for one chunk at a time."""
        if target.startswith("/chunks/"):
            eventually(lambda: bool(pool._plan._maps), WITHIN_S)
        honest(target, to)

    honest = static(DATA)
    with pool_of(SourceScores([scripted(map_first).url]), Listening(), 1) as pool:
        pool.want(MANIFEST, CHUNKS)
        pool.start()
        assert pool.wait(WITHIN_S)
    assert [len(others) for others in announced] == [1] * 23 + [0]


def _drip(target: str, to: socket.socket) -> None:
    if target.startswith("/have/"):
        reply(to, 200, bits([True] * 24) + bits([False] * 24))
        return
    reply(to, 200, b"", size=SIZE)
    with suppress(OSError):
        for _ in range(SIZE):
            to.sendall(b"x")
            time.sleep(0.1)  # the drip itself


def test_a_source_far_slower_than_the_other_is_left_in_the_middle_of_a_chunk(scripted: Scripted) -> None:
    slow, quick = scripted(_drip), scripted(serving(full()))
    scores = SourceScores([slow.url, quick.url])
    pool = fetch_all(scores, connections=2)
    assert pool.fetched_bytes[quick.url] == 24 * SIZE
    assert "slow" in scores.describe()


def test_a_source_that_stalls_is_hung_up_on_and_another_is_asked(scripted: Scripted) -> None:
    hung_up = threading.Event()

    def stall(target: str, to: socket.socket) -> None:
        if target.startswith("/have/"):
            reply(to, 404, b"")
        elif to.recv(1) == b"":
            hung_up.set()

    stalled, other = scripted(stall), scripted(serving(full()))
    pool = fetch_all(SourceScores([stalled.url, other.url]))
    assert pool.fetched_bytes == {other.url: 24 * SIZE}
    assert hung_up.wait(WITHIN_S)


def test_a_source_that_appears_later_is_asked_for_its_map_and_its_chunks(scripted: Scripted) -> None:
    scores, shelf = SourceScores([]), Shelf()
    honest, asked = serving(full()), threading.Event()

    def map_first(target: str, to: socket.socket) -> None:
        """However busy the machine, no chunk arrives before the map was asked for."""
        if target.startswith("/have/0.1?"):
            asked.set()
        assert asked.wait(WITHIN_S)
        honest(target, to)

    source = scripted(map_first)
    with pool_of(scores, shelf) as pool:
        pool.want(MANIFEST, CHUNKS)
        pool.start()
        assert not pool.wait(0.05)
        scores.set_sources([source.url])
        assert pool.wait(WITHIN_S)


def test_a_closed_pool_calls_its_keeper_no_more_and_its_threads_end(scripted: Scripted) -> None:
    asked = threading.Event()
    holding = scripted(lambda target, to: (asked.set(), holding.closed.wait(WITHIN_S)))  # type: ignore[arg-type, return-value]
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


def test_what_is_no_longer_wanted_is_left_on_its_way(scripted: Scripted) -> None:
    left, asked = threading.Event(), threading.Event()

    def stall(target: str, to: socket.socket) -> None:
        asked.set()
        if to.recv(1) == b"":
            left.set()

    with pool_of(SourceScores([scripted(stall).url]), Shelf(), 1) as pool:
        pool.want(MANIFEST, CHUNKS[:1])
        pool.start()
        assert asked.wait(WITHIN_S)
        pool.forget_except(set())
        assert left.wait(WITHIN_S)
        assert pool.wait(WITHIN_S)
        assert pool.progress() == (0, 0)


def _server(trouble: str, part: dict[str, bytes]) -> Handler:
    honest = serving(full(part))
    false = serving(full(DATA))

    def corrupt(target: str, to: socket.socket) -> None:
        honest(target, to) if target.startswith("/have/") else reply(to, 200, bytes(SIZE))

    def claims(target: str, to: socket.socket) -> None:
        (false if target.startswith("/have/") else honest)(target, to)

    def truncated(target: str, to: socket.socket) -> None:
        if target.startswith("/have/"):
            honest(target, to)
        else:
            reply(to, 200, b"abc", size=SIZE)
            to.shutdown(socket.SHUT_RDWR)

    def noise(target: str, to: socket.socket) -> None:
        reply(to, 200, b"\xff" * 6) if target.startswith("/have/") else to.sendall(b"noise\r\n\r\n")

    handlers: dict[str, Handler] = {
        "lacking": honest, "corrupt": corrupt, "claims": claims, "truncated": truncated, "noise": noise,
        "mapless": static(part), "drip": _drip, "busy": lambda target, to: reply(to, 503, b""),
    }  # fmt: skip
    return handlers[trouble]


TROUBLES = ["lacking", "corrupt", "claims", "truncated", "noise", "mapless", "drip", "busy"]


@settings(max_examples=12, deadline=None)
@given(
    others=st.lists(
        st.tuples(st.sampled_from(TROUBLES), st.sampled_from([0, 1, 2]), st.integers(0, 2**24 - 1)), max_size=4
    ),
    halves=st.booleans(),
)
def test_whatever_others_send_every_chunk_arrives_and_matches(others: list[tuple[str, int, int]], halves: bool) -> None:
    """`Shelf.keep` refuses what does not match and what comes twice; the honest sources together have everything."""
    keys = list(DATA)
    honest = [keys[0::2], keys[1::2]] if halves else [keys]
    sources = [ScriptedSource(serving(full({key: DATA[key] for key in part}))) for part in honest]
    named: list[list[str]] = [[source.url for source in sources], [], []]
    for trouble, kind, mask in others:
        part = {key: blob for at, (key, blob) in enumerate(DATA.items()) if mask >> at & 1}
        sources.append(ScriptedSource(_server(trouble, part)))
        named[kind].append(sources[-1].url)
    try:
        fetch_all(SourceScores(*named))
    finally:
        for source in sources:
            source.close()
