"""The small HTTP server, over real sockets: what it parses, frames, refuses, and when it hangs up."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kit.asgi import in_loop
from shoal.runtime import http
from shoal.runtime.http import HttpConnection, HttpRequest, OpenConnections, Reply

Answer = Callable[[HttpRequest], Awaitable[Reply]]
WAIT_S = 10.0


async def echo(request: HttpRequest) -> Reply:
    """What it was asked, and the body."""
    body = b""
    while part := await request.read():
        body += part
    return Reply(200, f"{request.method} {request.target} ".encode() + body, "text/plain")


@asynccontextmanager
async def connected(answer: Answer = echo, **limits: float) -> AsyncIterator[tuple["Wire", OpenConnections]]:
    refused: list[str] = []
    limits = {"per_client": math.inf, "in_all": math.inf, **limits}
    connections = OpenConnections(answer, refused.append, lambda peer: peer, **limits)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpConnection(connections), "127.0.0.1", 0, family=socket.AF_INET)
    watching = asyncio.create_task(connections.watch())
    try:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield Wire(reader, writer), connections
        writer.close()
    finally:
        server.close()
        watching.cancel()
        await connections.drain(0.1)


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, text: str) -> None:
        self.writer.write(text.encode())

    async def answer(self, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_S)).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers.get("content-length", 0)) if has_body else 0)
        return int(head[0].split()[1]), headers, body

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), WAIT_S)


@in_loop
async def test_requests_of_one_connection_are_answered_in_order() -> None:
    async with connected() as (wire, _):
        wire.send("PUT /a?b=1 HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabcGET /c HTTP/1.1\r\nhost: x\r\n\r\n")
        wire.send("POST /d HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nde\r\n1\r\nf\r\n0\r\n\r\n")
        bodies = [(await wire.answer())[2] for _ in range(3)]
    assert bodies == [b"PUT /a?b=1 abc", b"GET /c ", b"POST /d def"]


@in_loop
async def test_a_head_request_is_answered_without_its_body() -> None:
    async with connected() as (wire, _):
        wire.send("HEAD /a HTTP/1.1\r\nhost: x\r\n\r\nGET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        status, headers, _body = await wire.answer(has_body=False)
        assert (status, headers["content-length"]) == (200, str(len("HEAD /a ")))
        assert (await wire.answer())[2] == b"GET /b "


@pytest.mark.parametrize("last", ["connection: close\r\n", ""])
@in_loop
async def test_the_client_says_when_the_connection_ends(last: str) -> None:
    async with connected() as (wire, _):
        version = "1.1" if last else "1.0"
        wire.send(f"GET /a HTTP/{version}\r\nhost: x\r\n{last}\r\n")
        _status, headers, body = await wire.answer()
        assert (headers["connection"], body, await wire.rest()) == ("close", b"GET /a ", b"")


@in_loop
async def test_a_client_that_waits_for_100_is_told_to_continue_once_the_body_is_wanted() -> None:
    async def refuse_unless(request: HttpRequest) -> Reply:
        return await echo(request) if request.path == "/wanted" else Reply(413)

    head = "HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    async with connected(refuse_unless) as (wire, _):
        wire.send(f"PUT /wanted {head}")
        assert (await wire.answer())[0] == 100
        wire.send("ok")
        assert (await wire.answer())[2] == b"PUT /wanted ok"
        wire.send(f"PUT /other {head}")
        assert (await wire.answer())[0] == 413


@in_loop
async def test_a_body_that_nobody_reads_is_dropped_after_the_answer() -> None:
    async def at_once(_request: HttpRequest) -> Reply:
        return Reply(401)

    async with connected(at_once) as (wire, _):
        wire.send("PUT /a HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert (await wire.answer())[0] == 401
        wire.send("x" * 1_000_000 + "GET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await wire.answer())[0] == 401


@in_loop
async def test_a_body_that_ends_early_is_an_error_for_its_reader() -> None:
    seen: asyncio.Queue[Exception] = asyncio.Queue()

    async def note(request: HttpRequest) -> Reply:
        try:
            return await echo(request)
        except ConnectionError as error:
            seen.put_nowait(error)
            raise

    async with connected(note) as (wire, _):
        wire.send("PUT /a HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc")
        wire.writer.close()
        assert isinstance(await asyncio.wait_for(seen.get(), WAIT_S), ConnectionError)


@pytest.mark.parametrize(("sent", "status"), [
    ("nonsense\r\n\r\n", 400), ("GET / HTTP/1.1\r\nhost: x\r\nx: " + "y" * 20_000, 431),
    ("GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 501),
], ids=["nonsense", "a long head", "two lengths", "an unknown coding"])  # fmt: skip
@in_loop
async def test_what_is_no_request_is_refused_and_the_connection_ends(sent: str, status: int) -> None:
    async with connected() as (wire, _):
        wire.send(sent)
        assert (await wire.answer())[0] == status
        assert await wire.rest() == b""


@in_loop
async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_S", 0.1)
    async with connected() as (wire, connections):
        wire.send("GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        await wire.answer()
        assert await wire.rest() == b""
        assert not connections.by_client


@in_loop
async def test_stopping_answers_what_is_in_flight_and_closes() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(_request: HttpRequest) -> Reply:
        begun.set()
        await go.wait()
        return Reply(200, b"done")

    async with connected(slow) as (wire, connections):
        wire.send("GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(begun.wait(), WAIT_S)
        stopping = asyncio.create_task(connections.drain(WAIT_S))
        await asyncio.sleep(0)
        go.set()
        _status, headers, body = await wire.answer()
        assert (headers["connection"], body) == ("close", b"done")
        await asyncio.wait_for(stopping, WAIT_S)
