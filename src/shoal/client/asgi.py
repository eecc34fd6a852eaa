"""A hub in this process: a synchronous httpx transport over an ASGI app, without a socket.

    thread of a role ─► AsgiTransport.handle_request ─► event loop in a background thread ─► the app
                        (waits for the whole answer)

Tests and one-process runs use it so that they go through the same client, the same routes and the same signatures
as separate processes do. Requests of several threads run concurrently on the one loop, so a long poll blocks nobody.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

import httpx

AsgiApp = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[MutableMapping[str, Any]]],
        Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ],
    Awaitable[None],
]

STOP_S = 10.0


class AsgiTransport(httpx.BaseTransport):
    """`httpx.Client(transport=AsgiTransport(app))` talks to `app`. Close it to end the app and its loop.

    The app's lifespan runs from construction to `close()`, as under a real server.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._inner = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="asgi", daemon=True)
        self._thread.start()
        self._lifespan = _Lifespan(app)
        self._run(self._lifespan.start()).result(STOP_S)

    def _serve(self) -> None:
        """The thread holds on to all of this: the collector must never end a lifespan that nobody closed, since
        CPython 3.11 crashes if another thread collects meanwhile."""
        self._loop.run_forever()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        timeout_s = request.extensions.get("timeout", {}).get("read")
        future = self._run(self._answer(request, request.read()))
        try:
            response: httpx.Response = future.result(timeout_s)
            return response
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise httpx.ReadTimeout(f"no answer within {timeout_s} s", request=request) from error
        except concurrent.futures.CancelledError as error:
            raise httpx.ConnectError("the app was closed", request=request) from error

    async def _answer(self, request: httpx.Request, body: bytes) -> httpx.Response:
        inner = httpx.Request(request.method, request.url, headers=request.headers, content=body)
        response = await self._inner.handle_async_request(inner)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(response.aclose)
            content = await response.aread()
        return httpx.Response(response.status_code, headers=response.headers, content=content)

    def _run(self, coroutine: Any) -> concurrent.futures.Future[Any]:
        if self._loop.is_closed() or not self._thread.is_alive():
            coroutine.close()
            raise httpx.ConnectError("the app was closed")
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
        await self._lifespan.stop()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class _Lifespan:
    """Drives an app's ASGI lifespan: `start` returns when the app is ready, `stop` when it has cleaned up."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._to_app: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._from_app: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._serve())
        await self._to_app.put({"type": "lifespan.startup"})
        await self._expect("lifespan.startup.complete")

    async def stop(self) -> None:
        await self._to_app.put({"type": "lifespan.shutdown"})
        await self._expect("lifespan.shutdown.complete")

    async def _serve(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        await self._app(scope, self._to_app.get, self._from_app.put)

    async def _expect(self, kind: str) -> None:
        """Wait for the app's word. An app that ends or fails without one has no lifespan, which is allowed."""
        assert self._task is not None
        word = asyncio.ensure_future(self._from_app.get())
        await asyncio.wait({word, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not word.done():
            word.cancel()
            if self._task.done() and not self._task.cancelled():
                self._task.exception()  # looked at: nobody shall be told of it when it is thrown away
            return
        message = word.result()
        if message["type"] != kind:
            raise RuntimeError(f"the app answered {message['type']}: {message.get('message', '')}")
