"""Maps of who has what: their bits, and the threads that ask for them."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable

import pytest
from castkit import Handler, ScriptedSource, reply
from castsim import bits, chunks_of, manifest_of
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import Delta, PolicyRef
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Timeouts
from shoal.shardcast.have import Claim, HaveMaps, Map, MapWatch, Question, map_bytes
from shoal.shardcast.sources import SourceScores

A, B = "http://a:1", "http://b:1"
CHUNKS = chunks_of(11)
PLACE = (0, 1)
WITHIN_S = 10.0
Scripted = Callable[[Handler], ScriptedSource]


def maps_with(body: bytes | None) -> HaveMaps:
    maps = HaveMaps()
    maps.watch(manifest_of(CHUNKS))
    maps.see(A, PLACE, body, 1.0)
    return maps


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=70))
def test_each_bit_belongs_to_one_chunk(flags: list[tuple[bool, bool]]) -> None:
    have, soon = ([flag[index] for flag in flags] for index in (0, 1))
    body = bits(have) + bits(soon)
    seen = Map(body, len(flags), 0.0)
    assert len(body) == map_bytes(len(flags))
    assert [seen.has(position) for position in range(len(flags))] == have
    assert [seen.soon(position) for position in range(len(flags))] == soon
    assert seen.count() == sum(have)


def test_the_bits_are_those_of_the_contract() -> None:
    """HAVE of chunks 0 and 9, SOON of chunk 1: least significant bit first, two bytes each."""
    maps = maps_with(bytes([0b1, 0b10, 0b10, 0]))
    assert [maps.claim(A, chunk.hash) is Claim.HAS for chunk in CHUNKS] == [at in (0, 9) for at in range(11)]
    assert [maps.announces(A, chunk.hash) for chunk in CHUNKS] == [at == 1 for at in range(11)]


def test_a_source_is_silent_until_it_is_heard_and_mapless_if_it_has_no_map() -> None:
    maps = maps_with(None)
    chunk = CHUNKS[0].hash
    assert maps.claim(A, chunk) is Claim.MAPLESS
    assert maps.claim(B, chunk) is Claim.SILENT
    assert maps.claim(B, "f" * 64) is Claim.MAPLESS  # of no version that is watched
    assert not maps.announces(A, chunk)
    assert not maps.announces(B, "f" * 64)
    assert maps.group("f" * 64) is None


def test_a_map_that_has_grown_is_news() -> None:
    maps = maps_with(None)
    assert maps.see(A, PLACE, bytes([1, 0, 0, 0]), 2.0) == 1
    assert maps.see(A, PLACE, bytes([1, 0, 2, 0]), 3.0) == 0
    assert maps.see(A, PLACE, bytes([7, 0, 0, 0]), 4.0) == 2
    assert maps.see(A, (0, 7), bytes([255, 7, 0, 0]), 4.0) == 0
    assert maps.map(A, (0, 7)) is None  # not watched, so not kept


def test_a_chunk_of_two_versions_is_looked_up_in_the_newer() -> None:
    maps = maps_with(bytes([255, 7, 0, 0]))
    maps.watch(manifest_of(CHUNKS[:3], version=2))
    assert maps.claim(A, CHUNKS[0].hash) is Claim.SILENT
    assert maps.claim(A, CHUNKS[5].hash) is Claim.HAS
    assert maps.places() == [(0, 2), (0, 1)]
    maps.drop([(0, 2)])
    assert maps.claim(A, CHUNKS[0].hash) is Claim.HAS


def test_deltas_are_a_group_of_their_own() -> None:
    base = PolicyRef(incarnation=0, version=0, digest="b" * 64)
    delta = Delta(base=base, size_bytes=2000, chunks=CHUNKS[:2])
    maps = HaveMaps()
    maps.watch(manifest_of(CHUNKS[2:]).model_copy(update={"deltas": (delta,)}))
    assert [maps.group(chunk.hash) for chunk in CHUNKS] == [(PLACE, at < 2) for at in range(11)]


def test_open_chunks_are_found_newest_version_first_and_only_by_maps() -> None:
    maps = maps_with(bytes([0b1110, 0, 0, 0]))
    maps.watch(manifest_of(CHUNKS[8:], version=2))
    for at in (1, 2, 5):
        maps.mark(CHUNKS[at].hash, True)
    maps.mark(CHUNKS[2].hash, False)
    assert list(maps.open_chunks(A) or ()) == [CHUNKS[1].hash]
    maps.mark(CHUNKS[9].hash, True)
    assert maps.open_chunks(A) is None  # nothing has been heard of the newer version
    maps.see(A, (0, 2), bytes([0b10, 0]), 2.0)
    assert list(maps.open_chunks(A) or ()) == [CHUNKS[9].hash, CHUNKS[1].hash]
    maps.see(A, PLACE, None, 3.0)
    assert maps.open_chunks(A) is None


class Notebook:
    """Asks what it is told to, and writes down the answers."""

    def __init__(self) -> None:
        self.questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def next_question(self, source: str) -> Question | None:
        return self.questions.get(timeout=WITHIN_S)

    def answered(self, source: str, question: Question, body: bytes | None, asked_s: float) -> None:
        self.answers.put(body)


class Watched:
    def __init__(self, url: str) -> None:
        self.notebook, self.stop, self.scores = Notebook(), StopToken(), SourceScores([url])
        self.watch = MapWatch(self.notebook, self.scores, self.stop, Timeouts(2, 5))
        self.watch.follow([url])

    def ask(self, question: Question) -> bytes | None:
        self.notebook.questions.put(question)
        return self.notebook.answers.get(timeout=WITHIN_S)

    def end(self) -> None:
        self.notebook.questions.put(None)


def test_a_map_is_asked_for_by_version_and_count(scripted: Scripted) -> None:
    source = scripted(lambda target, to: reply(to, 200, b"abcd"))
    watched = Watched(source.url)
    assert watched.ask(Question((2, 31), 11, 5, 2.5)) == b"abcd"
    assert source.seen == ["/have/2.31?count=5&wait_s=2.5"]
    watched.end()


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [(404, b"no such thing", "no source has failed"), (200, b"abc", "a map of 3 bytes for 11 chunks, not 4")],
)
def test_no_map_or_a_wrong_one_is_none(scripted: Scripted, status: int, body: bytes, sentence: str) -> None:
    watched = Watched(scripted(lambda target, to: reply(to, status, body)).url)
    assert watched.ask(Question(PLACE, 11)) is None
    assert sentence in watched.scores.describe()
    watched.end()


def test_a_huge_map_is_not_read(scripted: Scripted) -> None:
    watched = Watched(scripted(lambda target, to: reply(to, 200, b"", size=1 << 40)).url)
    assert watched.ask(Question(PLACE, 11)) is None
    watched.end()


def test_a_question_that_is_held_is_asked_anew_when_its_answer_is_wanted_now(scripted: Scripted) -> None:
    asked, held = threading.Event(), threading.Event()

    def hold_the_first(target: str, to: socket.socket) -> None:
        if asked.is_set():
            reply(to, 200, b"abcd")
        asked.set()
        held.wait(WITHIN_S)

    watched = Watched(scripted(hold_the_first).url)
    watched.notebook.questions.put(Question(PLACE, 11, 0, 5))
    assert asked.wait(WITHIN_S)
    watched.watch.refresh(next(iter(watched.scores.sources())))
    assert watched.ask(Question(PLACE, 11)) == b"abcd"
    held.set()
    watched.end()


def test_a_stop_ends_the_thread_that_is_held(scripted: Scripted) -> None:
    asked = threading.Event()
    source = scripted(lambda target, to: (asked.set(), source.closed.wait(WITHIN_S)))  # type: ignore[arg-type, return-value]
    watched = Watched(source.url)
    watched.notebook.questions.put(Question(PLACE, 11, 0, 5))
    assert asked.wait(WITHIN_S)
    threads = [thread for thread in threading.enumerate() if thread.name == "have-map"]
    watched.stop.set("test")
    watched.watch.close()
    for thread in threads:
        thread.join(WITHIN_S)
        assert not thread.is_alive()
