"""Choosing sources, and the connection to one."""

import socket
import threading
from collections import Counter

import pytest
from blake3 import blake3

from kit.cast import Lab, ScriptedSource, reply, says
from kit.forged import hanging_up
from shoal.errors import BroadcastError, ConfigError
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Connection, Deadline, Timeouts
from shoal.shardcast.scheduler import Kind, SourceScores

A, B, C = "http://a:1", "http://b:2", "http://c:3"


def weights(scores: SourceScores) -> dict[str, float]:
    return {source: standing.weight for source, standing in scores.ready().items()}


def test_a_faster_source_weighs_more_and_a_choice_follows_the_weights() -> None:
    scores = SourceScores([A, B])
    for _ in range(10):
        scores.succeeded(A, 9_000_000, 1.0)
        scores.succeeded(B, 1_000_000, 1.0)
    assert weights(scores)[A] == pytest.approx(9 * weights(scores)[B])
    chosen = Counter(scores.choose() for _ in range(500))
    assert chosen[A] > 4 * chosen[B] > 0


def test_a_failing_source_rests_longer_each_time_and_comes_back() -> None:
    now = [0.0]
    scores = SourceScores([A], now_s=lambda: now[0])
    rests = []
    for _ in range(6):
        for _ in range(20):  # failures of many connections at once count as one
            scores.failed(A, "is broken")
        started = now[0]
        while scores.choose() is None:
            now[0] += 0.01
        rests.append(now[0] - started)
    assert rests[0] < 0.12
    assert rests[-1] > 0.9
    assert scores.describe() == "is broken"


def test_failure_lowers_the_weight_and_success_heals_it() -> None:
    now = [0.0]
    scores = SourceScores([A, B], now_s=lambda: now[0])
    for source in (A, B):
        scores.succeeded(source, 1000, 1.0)
    for _ in range(5):
        now[0] += 10
        scores.failed(B, "x")
    now[0] += 10
    assert 0 < weights(scores)[B] < weights(scores)[A] / 4
    for _ in range(20):
        scores.succeeded(B, 1000, 1.0)
    assert weights(scores)[B] == pytest.approx(weights(scores)[A], rel=0.1)


def test_a_dropped_source_is_not_asked_until_restored_even_in_a_new_list() -> None:
    scores = SourceScores([A, B])
    scores.drop(A, "lied")
    assert {scores.choose() for _ in range(50)} == {B}
    assert set(scores.usable()) == {B}
    scores.restore()
    assert {scores.choose() for _ in range(50)} == {A, B}
    scores = SourceScores([A])
    scores.drop(A, "lied")
    scores.set_sources([A, B])
    assert set(scores.usable()) == {B}
    scores.set_sources([])
    assert scores.choose() is None
    scores.failed(A, "a late answer about a source that is gone does no harm")
    assert scores.describe() == "no source is known"


def test_each_source_is_one_kind_and_the_nearest_counts() -> None:
    scores = SourceScores([A], peers=[B, A], last_resort=[C, B])
    assert scores.kinds() == {A: Kind.UPSTREAM, B: Kind.PEER, C: Kind.LAST_RESORT}
    scores.drop(B, "lied")
    scores.set_sources([B], last_resort=[A])
    assert scores.kinds() == {B: Kind.UPSTREAM, A: Kind.LAST_RESORT}
    assert set(scores.usable()) == {A}


@pytest.mark.parametrize(
    "source", ["", "host:80", "ftp://host", "http://", "http://host:port", "http://h/a b", "http://h?q"]
)
def test_invalid_source_urls_are_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="source"):
        SourceScores([source])


def connect(source: ScriptedSource, stop: StopToken | None = None, stall_s: float = 5) -> Connection:
    return Connection(source.url, stop or StopToken(), Timeouts(connect_s=2, stall_s=stall_s))


def test_body_is_received_in_place_and_hashed_over_a_reopened_connection_without_bytes_beyond_it(lab: Lab) -> None:
    body = bytes(range(256)) * 20_000
    connection = connect(lab.source(says(body)))
    hasher, buffer = blake3(), bytearray(len(body))
    for _ in range(2):  # the second over the same connection
        answer = connection.get("/x", Deadline(5))
        assert (answer.status, answer.size_bytes) == (200, len(body))
        connection.read_into(memoryview(buffer), Deadline(5), hasher)
        assert buffer == body
    assert hasher.digest() == blake3(body + body).digest()
    connection = connect(lab.source(hanging_up(b"ok", 2)))
    assert [read_all(connection, Deadline(5)) for _ in range(3)] == [b"ok"] * 3
    evil = b"HTTP/1.1 200 X\r\nContent-Length: 4\r\n\r\nevil"
    connection = connect(lab.source(lambda target, to: reply(to, 200, target.encode() + evil, size=len(target))))
    for target in ("/first", "/second"):
        assert read_all(connection, Deadline(5), target) == target.encode()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(("answer", "sentence"), [
    (b"SSH-2.0-x\r\n\r\n", "does not speak HTTP"), (OK + b"\r\n", "Content-Length"),
    (OK + b"Content-Length: -1\r\n\r\n", "Content-Length"),
    (OK + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n", "Content-Length"),
    (OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", "Content-Length"),
    (OK + b"Content-Length: 1099511627776\r\n\r\n", "at most 1048576"),
    (OK + b"Content-Length: 10\r\n\r\nabc", "after 3 of 10 bytes"),
    (OK + b"X: " + b"y" * 40_000, "endless answer head"),
])  # fmt: skip
def test_answers_that_are_not_plain_http_are_refused(lab: Lab, answer: bytes, sentence: str) -> None:
    def say(_target: str, to: socket.socket) -> None:
        to.sendall(answer)
        to.shutdown(socket.SHUT_RDWR)

    with pytest.raises(BroadcastError, match=sentence):
        read_all(connect(lab.source(say)), Deadline(5))


def read_all(connection: Connection, deadline: Deadline, target: str = "/x") -> bytes:
    connection.get(target, deadline)
    return connection.read(1 << 20, deadline)


def test_hanging_up_ends_a_wait_at_once_from_another_thread(lab: Lab) -> None:
    """In the head of the answer and in its body; and the connection can be used again."""
    asked = threading.Event()

    def stall(target: str, to: socket.socket) -> None:
        if target == "/body":
            to.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        if target == "/fine":
            reply(to, 200, b"fine")
        asked.set()

    connection = connect(lab.source(stall), stall_s=60)
    for target in ("/head", "/body"):
        asked.clear()
        thread = threading.Thread(target=lambda: asked.wait(10) and connection.hang_up())
        thread.start()
        with pytest.raises(BroadcastError, match=r"closed the connection|broke the connection"):
            read_all(connection, Deadline(60), target)
        thread.join(10)
        assert connection.hung_up
    assert read_all(connection, Deadline(5), "/fine") == b"fine"
    assert not connection.hung_up
