"""A hub in this process: an httpx2 transport over its app, without a socket; a client reaches it by `InProcess`.

    thread of a role ─► AppTransport.handle_request ─► event loop in a background thread ─► the app
                        (waits for the whole answer)

Tests go through the same client, routes and signatures as separate processes do. Requests of several threads run
concurrently on the one loop, so a long poll blocks nobody.
"""

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import httpx2

from shoal.hub.http.app import App
from shoal.runtime.exchange import ClientRequest, ClientResponse, HttpClient, Limit, NoAnswer
from shoal.runtime.http import HttpRequest

STOP_S = 10.0


class InProcess(HttpClient):
    """What a `HubClient` sends goes to a transport or a function in this process."""

    def __init__(self, to: httpx2.BaseTransport | Callable[[httpx2.Request], httpx2.Response]) -> None:
        super().__init__()
        self.transport = to if isinstance(to, httpx2.BaseTransport) else httpx2.MockTransport(to)

    def send(self, request: ClientRequest, _limit: Limit) -> ClientResponse:
        """`silence_s` and `connect_s` are in the request's extensions, as httpx2 has them."""
        timeout = {"connect": request.connect_s, "read": request.silence_s}
        sent = httpx2.Request(
            request.method, request.url, headers=request.headers, content=request.body, extensions={"timeout": timeout}
        )
        assert sent.url.raw_path.decode() == request.target
        try:
            answer = self.transport.handle_request(sent)
        except httpx2.TransportError as error:
            raise NoAnswer(str(error)) from error
        return ClientResponse(answer.status_code, {k.lower(): v for k, v in answer.headers.items()}, answer.read())


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        asyncio.run(test(*args, **options))

    return run


class AppTransport(httpx2.BaseTransport):
    """`httpx2.Client(transport=AppTransport(app))` talks to `app`, whose lifespan is from construction to `close()`."""

    def __init__(self, app: App, peer: str = "127.0.0.1") -> None:
        self._app, self.peer = app, peer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="asgi", daemon=True)
        self._thread.start()
        self._lifespan = app.lifespan()
        self._run(self._lifespan.__aenter__()).result(STOP_S)

    def _serve(self) -> None:
        """The thread holds on to all of this: the collector must never end a lifespan that nobody closed, since
        CPython 3.11 crashes if another thread collects meanwhile."""
        self._loop.run_forever()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        timeout_s = request.extensions.get("timeout", {}).get("read")
        future = self._run(self._answer(request, request.read()))
        try:
            response: httpx2.Response = future.result(timeout_s)
            return response
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise httpx2.ReadTimeout(f"no answer within {timeout_s} s", request=request) from error
        except concurrent.futures.CancelledError as error:
            raise httpx2.ConnectError("the app was closed", request=request) from error

    async def _answer(self, request: httpx2.Request, body: bytes) -> httpx2.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        target = request.url.raw_path.decode("ascii")
        reply = await self._app.answer(HttpRequest(request.method, target, headers, self.peer, body))
        media = {"content-type": reply.media} if reply.body else {}
        return httpx2.Response(reply.status, headers={**reply.headers, **media}, content=reply.body)

    def _run(self, coroutine: Any) -> concurrent.futures.Future[Any]:
        if self._loop.is_closed() or not self._thread.is_alive():
            coroutine.close()
            raise httpx2.ConnectError("the app was closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """End the app: its lifespan, requests still running, and the loop. Calls made later fail to connect."""
        if self._loop.is_closed():
            return
        self._run(self._shut_down()).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()

    async def _shut_down(self) -> None:
        await self._lifespan.__aexit__(None, None, None)
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
