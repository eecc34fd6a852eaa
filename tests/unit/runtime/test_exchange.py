"""The client of hub and judges: how answers are framed, which connections are kept, and what is no answer."""

import select
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from kit.cast import ScriptedSource
from shoal.runtime.exchange import ClientRequest, HttpClient, Limit, NoAnswer
from shoal.runtime.stop import StopToken

OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "/length?a=1": OK + b"Content-Length: 2\r\n\r\nok",
    "/chunked": OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
    "/hints": b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok",
    "/last": OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok",
    "/old": b"HTTP/1.0 200 OK\r\n\r\nok",
    "/left": OK + b"Content-Length: 2\r\n\r\nok",
    "/cut": OK + b"Content-Length: 5\r\n\r\nok",
    "/nonsense": b"SSH-2.0-x\r\n\r\n",
    "/silent": b"",
}
KEPT = ("/length?a=1", "/chunked", "/hints")


class Server(ScriptedSource):
    def __init__(self) -> None:
        super().__init__(self.say)
        self.clients: list[int] = []

    def say(self, target: str, to: socket.socket) -> None:
        self.clients.append(to.getpeername()[1])
        to.sendall(ANSWERS[target])
        if target not in KEPT:
            to.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as served:
        yield served


def ask(http: HttpClient, server: Server, target: str) -> bytes:
    answer = http.send(ClientRequest("GET", server.url + target), Limit(20, StopToken()))
    assert (answer.status, answer.peer) == (200, "127.0.0.1")
    return answer.body


def test_connection_is_kept_until_an_answer_ends_it(server: Server) -> None:
    with closing(HttpClient()) as http:
        assert [ask(http, server, target) for target in (*KEPT, "/last", "/old", *KEPT)] == [b"ok"] * 8
    assert [server.clients.index(client) for client in server.clients] == [0, 0, 0, 0, 4, 5, 5, 5]


def test_kept_connection_that_the_server_closed_is_not_used_again(server: Server) -> None:
    with closing(HttpClient()) as http:
        for _ in range(3):
            assert ask(http, server, "/left") == b"ok"
            kept = [wire.socket for wires in http._idle.values() for wire in wires]
            assert select.select(kept, [], [], 20)[0] == kept
    assert len(set(server.clients)) == 3


@pytest.mark.parametrize(
    ("target", "words"), [("/cut", "no HTTP/1.1: .*2"), ("/nonsense", "no HTTP/1.1"), ("/silent", "without an answer")]
)
def test_broken_answer_is_an_error(server: Server, target: str, words: str) -> None:
    with closing(HttpClient()) as http, pytest.raises(NoAnswer, match=words):
        ask(http, server, target)
