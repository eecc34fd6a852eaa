"""Long polls: waiting for something to change, without asking the database over and over.

    a service commits ─► notify(topic) ─► every waiter of that topic tries once more ─► answers, or waits on
                                                     │
                                  deadline, client gone, or hub stopping ─► answers with what there is

Services run in threads, waiters on an event loop; `notify` may be called from anywhere.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")

MAX_WAIT_S = 30.0
GATHER_S = 0.05  # after a change, others are usually close behind: one look serves them all


class Topic(StrEnum):
    LEASES = "leases"  # a unit may have become free
    AUDITS = "audits"  # a submission may be waiting for a check
    BATCHES = "batches"  # a batch may have become complete


class Changes:
    """Counts changes per topic and wakes whoever waits for one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(Topic, 0)
        self._waiters: dict[Topic, set[_Waiter]] = {topic: set() for topic in Topic}
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def count(self, topic: Topic) -> int:
        """To be read before looking at the database: a change after that ends the wait at once."""
        return self._counts[topic]

    def notify(self, *topics: Topic) -> None:
        with self._lock:
            for topic in topics:
                self._counts[topic] += 1
                for waiter in self._waiters[topic]:
                    waiter.wake()

    def close(self) -> None:
        """End every wait now and from now on: the hub is stopping."""
        self._closed = True
        self.notify(*Topic)

    async def wait(self, topic: Topic, seen: int, timeout_s: float) -> None:
        """Return when the topic has changed since `seen`, when the hub stops, or at the deadline."""
        waiter = _Waiter()
        with self._lock:
            if self._closed or self._counts[topic] != seen:
                return
            self._waiters[topic].add(waiter)
        try:
            await asyncio.wait_for(waiter.event.wait(), timeout_s)
        except TimeoutError:
            return
        finally:
            with self._lock:
                self._waiters[topic].discard(waiter)


class _Waiter:
    """An event of one loop that any thread can set."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.event.set)


async def long_poll(
    changes: Changes,
    topic: Topic,
    wait_s: float,
    attempt: Callable[[], Awaitable[tuple[T, bool]]],
    is_gone: Callable[[], Awaitable[bool]],
) -> T:
    """Repeat `attempt` (answer, whether it is worth answering) on every change until the deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + min(wait_s, MAX_WAIT_S)
    while True:
        seen = changes.count(topic)
        answer, is_ready = await attempt()
        left_s = end - loop.time()
        if is_ready or left_s <= 0 or changes.closed:
            return answer
        await changes.wait(topic, seen, left_s)
        await asyncio.sleep(min(GATHER_S, left_s))
        if await is_gone():  # nobody reads the answer any more: do not give work away to it
            return answer
