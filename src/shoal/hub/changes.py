"""Long polls: waiting for a change without asking the database over and over; and who waits for what.

    service (a thread) ─ notify(topic) ─► wakes the WOKEN polls that waited longest
    poll (event loop)  ─ looks ─┬─ found something ─► wakes two more, answers
                                └─ nothing ─► waits at the end of the queue, until its deadline

Whoever is kept from what there is by rules about itself (its window is full) waits behind all others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from enum import StrEnum
from itertools import chain, islice
from typing import TypeVar

from shoal.protocol import Wait

T = TypeVar("T")

MAX_WAIT_S = 30.0
GATHER_S = 0.05  # after a change, others are usually close behind: one look serves them all
OVER_S = 1.0  # two machines with a copy of one key would end each other's polls without a pause
WOKEN = 16  # how many a change wakes: some of them may be kept from what there is by rules of their own


class Topic(StrEnum):
    LEASES = "leases"  # a unit may have become free
    AUDITS = "audits"  # a submission may be waiting for a check
    BATCHES = "batches"  # a batch may have become complete


class _Poll:
    """One long poll, over once the same caller has begun another; any thread can wake it."""

    def __init__(self) -> None:
        self.is_over = self.held_back = False
        self.woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.woken.set)


class Changes:
    """Counts changes by topic and wakes whoever waits for one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(Topic, 0)
        self._waiting: dict[Topic, dict[_Poll, None]] = {topic: {} for topic in Topic}  # longest first
        self._polls: dict[tuple[Topic, str], _Poll] = {}
        self._closed = False

    def count(self, topic: Topic) -> int:
        """To be read before looking at the database: a change after that ends the wait at once."""
        return self._counts[topic]

    def notify(self, *topics: Topic) -> None:
        with self._lock:
            for topic in topics:
                self._counts[topic] += 1
                self._wake(topic, WOKEN)

    def close(self) -> None:
        """End every wait now and from now on: the hub is stopping."""
        with self._lock:
            self._closed = True
            for topic in Topic:
                self._wake(topic, len(self._waiting[topic]))

    def _wake(self, topic: Topic, count: int) -> None:
        waiting = self._waiting[topic]
        free, held = (poll for poll in waiting if not poll.held_back), (poll for poll in waiting if poll.held_back)
        for poll in list(islice(chain(free, held), count)):
            del waiting[poll]
            poll.wake()

    async def poll(
        self, topic: Topic, wait_s: float, attempt: Callable[[], Awaitable[tuple[T, bool]]], who: str = "",
        is_gone: Callable[[], bool] = lambda: False, look_s: float | None = None,
        is_held_back: Callable[[T], bool] = lambda _: False,
    ) -> T:  # fmt: skip
        """Repeat `attempt` (answer, whether it is worth answering) on every change until the deadline.

        `who` has one poll for a topic: a newer one ends the older, which answers with what it found last. Where others
        make changes that nobody hears of, look every `look_s` seconds; of a crowd, as many as a change would wake.
        """
        poll, loop = self._begin(topic, who), asyncio.get_running_loop()
        end_s, has_waited = loop.time() + min(wait_s, MAX_WAIT_S), False
        try:
            while True:
                seen = self.count(topic)
                answer, is_ready = await attempt()
                left_s = end_s - loop.time()
                if is_ready or left_s <= 0 or self._closed:
                    if is_ready and has_waited:
                        self._pass_on(topic)
                    return answer
                has_waited, poll.held_back = True, is_held_back(answer)
                crowd = max(1.0, len(self._waiting[topic]) / WOKEN)
                await self._wait(topic, seen, left_s if look_s is None else min(left_s, look_s * crowd), poll)
                await asyncio.sleep(min(GATHER_S, left_s))
                if poll.is_over or is_gone():  # nobody reads the answer any more: do not give work away to it
                    self._pass_on(topic)
                    await asyncio.sleep(min(OVER_S, left_s) if poll.is_over else 0)
                    return answer
        finally:
            with self._lock:
                if self._polls.get((topic, who)) is poll:
                    del self._polls[topic, who]

    def _begin(self, topic: Topic, who: str) -> _Poll:
        poll = _Poll()
        if who:
            with self._lock:
                older, self._polls[topic, who] = self._polls.get((topic, who)), poll
                if older is not None:
                    older.is_over = True
                    self._waiting[topic].pop(older, None)
                    older.wake()
        return poll

    def _pass_on(self, topic: Topic) -> None:
        """Whoever was woken found something, or is gone: there may be something for others."""
        with self._lock:
            self._wake(topic, 2)

    async def _wait(self, topic: Topic, seen: int, timeout_s: float, poll: _Poll) -> None:
        with self._lock:
            if self._closed or poll.is_over:
                return
            poll.woken.clear()
            self._waiting[topic][poll] = None
            if self._counts[topic] != seen:  # what came since is for whoever has waited longest: this one, if alone
                self._wake(topic, 1)
        try:
            await asyncio.wait_for(poll.woken.wait(), timeout_s)
        except TimeoutError:
            return
        finally:
            with self._lock:
                self._waiting[topic].pop(poll, None)


FORGET_AFTER_MS = round(MAX_WAIT_S * 1000) + 15_000
"""A poller that has not come back for this long is gone, not waiting."""


class Waits:
    """Who waits for what, since its first poll in a row that got nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[Wait, int]] = {}  # and when it was last seen; in that order

    def waiting(self, who: str, what: str, now_ms: int) -> None:
        with self._lock:
            self._forget(now_ms)
            known = self._entries.pop(who, None)
            since_ms = now_ms if known is None else known[0].since_ms
            self._entries[who] = (Wait(who=who, what=what, since_ms=since_ms), now_ms)

    def done(self, who: str) -> None:
        with self._lock:
            self._entries.pop(who, None)

    def current(self, now_ms: int) -> list[Wait]:
        with self._lock:
            self._forget(now_ms)
            return sorted((wait for wait, _ in self._entries.values()), key=lambda wait: wait.since_ms)

    def _forget(self, now_ms: int) -> None:
        """Drop who did not come back: on every writing, so that strangers under ever new names fill nothing up."""
        while self._entries and now_ms - next(iter(self._entries.values()))[1] > FORGET_AFTER_MS:
            del self._entries[next(iter(self._entries))]
