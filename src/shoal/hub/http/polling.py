"""Long polls wait for a change without asking the database again and again.

    a change ─► the WOKEN polls that waited longest look ─┬─ something found ─► two more look; it answers
                                                          └─ nothing ─► it waits behind the others, until its deadline

A poll that is held back by rules about its own node (its window is full) waits behind all others.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from itertools import chain, islice
from typing import TypeVar

from shoal.hub.changes import MAX_WAIT_S, Changes, Topic

T = TypeVar("T")

GATHER_S = 0.05  # after a change, others are usually close behind: one look serves them all
OVER_S = 1.0  # two machines with a copy of one key would end each other's polls without a pause
WOKEN = 16  # how many a change wakes: rules of their own may hold some of them back


class _Waiter:
    """One long poll, over once the same caller has begun another."""

    def __init__(self) -> None:
        self.is_over = self.held_back = False
        self.woken = asyncio.Event()


class Polls:
    """All state belongs to the event loop; changes, which come from any thread, are handed to it."""

    def __init__(self, changes: Changes) -> None:
        self._changes, self._loop = changes, asyncio.get_running_loop()
        self._waiting: dict[Topic, dict[_Waiter, None]] = {topic: {} for topic in Topic}  # longest first
        self._latest: dict[tuple[Topic, str], _Waiter] = {}
        changes.listener = self._hear

    def _hear(self, topic: Topic | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all polls with it
            self._loop.call_soon_threadsafe(self._wake, topic)

    def _wake(self, topic: Topic | None, count: int = WOKEN) -> None:
        if topic is None:
            for each in Topic:
                self._wake(each, len(self._waiting[each]))
            return
        waiting = self._waiting[topic]
        free, held = (each for each in waiting if not each.held_back), (each for each in waiting if each.held_back)
        for waiter in list(islice(chain(free, held), count)):
            del waiting[waiter]
            waiter.woken.set()

    async def poll(
        self, topic: Topic, wait_s: float, attempt: Callable[[], Awaitable[tuple[T, bool]]], who: str = "",
        is_gone: Callable[[], bool] = lambda: False, look_s: float | None = None,
        is_held_back: Callable[[T], bool] = lambda _: False,
    ) -> T:  # fmt: skip
        """Repeat `attempt` (answer, whether it is worth answering) on every change until the deadline. `who` has one
        poll for a topic: a newer one ends the older, which answers with what it found last. Where other hubs make
        changes without notice, look every `look_s` seconds; of a crowd, as many as a change would wake."""
        waiter, end_s, has_waited = self._begin(topic, who), self._loop.time() + min(wait_s, MAX_WAIT_S), False
        try:
            while True:
                seen = self._changes.counts[topic]  # before looking: a change after that ends the wait at once
                answer, is_ready = await attempt()
                left_s = end_s - self._loop.time()
                if is_ready or left_s <= 0 or self._changes.is_closed:
                    if is_ready and has_waited:
                        self._wake(topic, 2)  # there may be something for others, too
                    return answer
                has_waited, waiter.held_back = True, is_held_back(answer)
                crowd = max(1.0, len(self._waiting[topic]) / WOKEN)
                await self._wait(topic, seen, left_s if look_s is None else min(left_s, look_s * crowd), waiter)
                await asyncio.sleep(min(GATHER_S, left_s))
                if waiter.is_over or is_gone():  # nobody reads the answer any more: do not give work away to it
                    self._wake(topic, 2)
                    await asyncio.sleep(min(OVER_S, left_s) if waiter.is_over else 0)
                    return answer
        finally:
            if self._latest.get((topic, who)) is waiter:
                del self._latest[topic, who]

    def _begin(self, topic: Topic, who: str) -> _Waiter:
        waiter = _Waiter()
        if who:
            older, self._latest[topic, who] = self._latest.get((topic, who)), waiter
            if older is not None:
                older.is_over = True
                self._waiting[topic].pop(older, None)
                older.woken.set()
        return waiter

    async def _wait(self, topic: Topic, seen: int, timeout_s: float, waiter: _Waiter) -> None:
        if self._changes.is_closed or waiter.is_over:
            return
        waiter.woken.clear()
        self._waiting[topic][waiter] = None
        if self._changes.counts[topic] != seen:  # what came since is for who has waited longest: this one, if alone
            self._wake(topic, 1)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiter.woken.wait(), timeout_s)
        finally:
            self._waiting[topic].pop(waiter, None)
