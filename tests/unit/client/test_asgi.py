"""The in-process transport: concurrent calls, lifespan, time-outs, and an app that has gone away."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request

from shoal.client import AsgiTransport


def app_with(events: list[str]) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        events.append("up")
        yield
        events.append("down")

    app = FastAPI(lifespan=lifespan)
    gate = asyncio.Event()

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, str]:
        return {"body": (await request.body()).decode(), "query": request.url.query, "x": request.headers["x-test"]}

    @app.get("/wait")
    async def wait() -> dict[str, bool]:
        await gate.wait()
        return {"ok": True}

    @app.get("/open")
    async def open_gate() -> None:
        gate.set()

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("on purpose")

    return app


def test_a_call_goes_through_the_app_within_its_lifespan() -> None:
    events: list[str] = []
    transport = AsgiTransport(app_with(events))
    with httpx.Client(transport=transport) as http:
        assert events == ["up"]
        answer = http.post("http://app/echo?a=1", content=b"hello", headers={"x-test": "y"})
        assert answer.json() == {"body": "hello", "query": "a=1", "x": "y"}
    assert events == ["up", "down"]


def test_a_long_poll_blocks_nobody_else() -> None:
    with httpx.Client(transport=AsgiTransport(app_with([]))) as http:
        answers: list[object] = []
        poll = threading.Thread(target=lambda: answers.append(http.get("http://app/wait", timeout=20).json()))
        poll.start()
        assert http.get("http://app/open").status_code == 200
        poll.join(20)
        assert answers == [{"ok": True}]


def test_a_time_out_is_a_read_timeout() -> None:
    with httpx.Client(transport=AsgiTransport(app_with([]))) as http, pytest.raises(httpx.ReadTimeout):
        http.get("http://app/wait", timeout=0.05)


def test_an_error_in_the_app_is_a_500() -> None:
    with httpx.Client(transport=AsgiTransport(app_with([]))) as http:
        assert http.get("http://app/broken").status_code == 500


def test_closing_ends_running_calls_and_refuses_new_ones() -> None:
    transport = AsgiTransport(app_with([]))
    http = httpx.Client(transport=transport)
    failures: list[Exception] = []
    started = threading.Event()

    def poll() -> None:
        started.set()
        try:
            http.get("http://app/wait", timeout=20)
        except httpx.TransportError as error:
            failures.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    assert started.wait(10)
    transport.close()
    thread.join(20)
    assert len(failures) == 1
    with pytest.raises(httpx.ConnectError):
        http.get("http://app/open")
    transport.close()


def test_an_app_without_lifespan_works_too() -> None:
    async def bare(scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 204, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

    with httpx.Client(transport=AsgiTransport(bare)) as http:  # type: ignore[arg-type]
        assert http.get("http://app/").status_code == 204


def test_a_transport_that_is_dropped_unclosed_is_not_ended_by_the_collector() -> None:
    """CPython 3.11 crashes if one thread collects while another one's collector ends a coroutine."""
    ended: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    dropped = weakref.ref(AsgiTransport(FastAPI(lifespan=lifespan)))
    gc.collect()
    transport = dropped()
    assert transport is not None
    transport.close()
    assert ended == []
