"""How a route gets at the hub, a long poll at its caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias, TypeVar

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from shoal.hub.changes import Topic, long_poll
from shoal.hub.service import Hub

T = TypeVar("T")


def hub_of(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub


HubDependency: TypeAlias = Annotated[Hub, Depends(hub_of)]


async def poll(
    hub: Hub, request: Request, topic: Topic, wait_s: float, call: Callable[[], T], is_ready: Callable[[T], bool]
) -> T:
    """Call a service in a thread, again on every change of `topic`, until its answer is worth giving."""

    async def attempt() -> tuple[T, bool]:
        answer = await run_in_threadpool(call)
        return answer, is_ready(answer)

    return await long_poll(hub.context.changes, topic, wait_s, attempt, request.is_disconnected)
