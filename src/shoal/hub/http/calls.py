"""How a route gets at the hub, a long poll at its caller, and a submission at a slot.

route ─► serve ─► service, in a thread, again if its decision was overtaken (`service.context.retry`) ─► answer

PUT /submissions/… ─► wait, with an end ─┬─► a slot is free ─► stored
                                         └─► none in time ─► 503 hub.busy, Retry-After
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, ParamSpec, TypeAlias, TypeVar

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from shoal.hub.changes import Topic, long_poll
from shoal.hub.http.middleware import visit_of
from shoal.hub.service import Hub, retry
from shoal.hub.state.commands import Refusal

P = ParamSpec("P")
T = TypeVar("T")

LOOK_AGAIN_S = 0.5
"""What another hub changes in a shared database comes without notice: a long poll looks again so often."""

WAIT_S = 15.0
"""Well within what a client waits for an answer. A store that hangs lets go of a slot after its own deadlines."""
AGAIN_S = 2


def hub_of(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub


HubDependency: TypeAlias = Annotated[Hub, Depends(hub_of)]


async def serve(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a service in a thread, and again if its decision was overtaken."""
    return await run_in_threadpool(retry, lambda: call(*args, **kwargs))


async def poll(
    hub: Hub,
    request: Request,
    topic: Topic,
    wait_s: float,
    call: Callable[[], T],
    is_ready: Callable[[T], bool],
    is_held_back: Callable[[T], bool] = lambda _: False,
) -> T:
    """Call a service in a thread, again on every change of `topic`, until its answer is worth giving."""
    visit = visit_of(request.scope)
    began_s, worked_s = time.monotonic(), 0.0

    async def attempt() -> tuple[T, bool]:
        nonlocal worked_s
        asked_s = time.monotonic()
        answer = await serve(call)
        worked_s += time.monotonic() - asked_s
        return answer, is_ready(answer)

    look_s = LOOK_AGAIN_S if hub.context.storage.is_shared else None
    try:
        gone = request.is_disconnected
        return await long_poll(hub.context.changes, topic, wait_s, attempt, gone, look_s, visit.node, is_held_back)
    finally:  # what was waited for is no time that the hub took
        visit.waited_s = time.monotonic() - began_s - worked_s


class UploadSlots:
    """Use as an asynchronous context manager: inside, a slot is held."""

    def __init__(self, count: int, wait_s: float = WAIT_S) -> None:
        self._free = asyncio.Semaphore(count)
        self._wait_s = wait_s

    async def __aenter__(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError as error:
            sentence = "many submissions are being stored just now; submit it again in a moment"
            raise Refusal(503, "hub.busy", sentence, retry_after_s=AGAIN_S) from error

    async def __aexit__(self, *_error: object) -> None:
        self._free.release()
