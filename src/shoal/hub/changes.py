"""Long polls: waiting for something to change, without asking the database over and over.

A thousand workers may wait for a unit while units come free one by one. So a change wakes a few, those who waited
longest, and each who finds something wakes two more; who finds nothing goes to the end of the queue. Who is kept from
what there is by rules of its own (its window is full, newcomers have their share) waits behind all others: however many
they are, they keep nothing from who may take it.

Services run in threads, waiters on an event loop; `notify` may be called from anywhere.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, islice
from typing import TypeVar

from shoal.protocol import Wait

T = TypeVar("T")

MAX_WAIT_S = 30.0
GATHER_S = 0.05  # after a change, others are usually close behind: one look serves them all
OVER_S = 1.0
WOKEN = 16
"""How many a change wakes. Some of them may be kept from what there is by rules of their own: one would be too few."""


class Topic(StrEnum):
    LEASES = "leases"  # a unit may have become free
    AUDITS = "audits"  # a submission may be waiting for a check
    BATCHES = "batches"  # a batch may have become complete


class Changes:
    """Counts changes per topic and wakes whoever waits for one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(Topic, 0)
        self._waiters: dict[Topic, dict[_Waiter, None]] = {topic: {} for topic in Topic}  # longest first
        self._polls: dict[tuple[Topic, str], _Poll] = {}
        self._closed = False

    @property
    def polling(self) -> int:
        """How many callers have a long poll."""
        return len(self._polls)

    def enter(self, topic: Topic, who: str) -> _Poll:
        """A long poll begins. One that the same caller has for the same topic ends: it has gone, or takes others'
        places. Callers without a name do not get into each other's way."""
        poll = _Poll()
        if who:
            with self._lock:
                older, self._polls[topic, who] = self._polls.get((topic, who)), poll
                if older is not None:
                    older.is_over = True
                    if older.waiter is not None:
                        self._waiters[topic].pop(older.waiter, None)
                        older.waiter.wake()
        return poll

    def leave(self, topic: Topic, who: str, poll: _Poll) -> None:
        with self._lock:
            if self._polls.get((topic, who)) is poll:
                del self._polls[topic, who]

    @property
    def closed(self) -> bool:
        return self._closed

    def crowd(self, topic: Topic) -> float:
        """How many wait for a topic, in multiples of those that a change wakes; 1 at least."""
        return max(1.0, len(self._waiters[topic]) / WOKEN)

    def count(self, topic: Topic) -> int:
        """To be read before looking at the database: a change after that ends the wait at once."""
        return self._counts[topic]

    def notify(self, *topics: Topic) -> None:
        with self._lock:
            for topic in topics:
                self._counts[topic] += 1
                self._wake(topic, WOKEN)

    def pass_on(self, topic: Topic) -> None:
        """Who was woken has found something: there may be something for others, too."""
        with self._lock:
            self._wake(topic, 2)

    def _wake(self, topic: Topic, count: int) -> None:
        waiters = self._waiters[topic]
        first = (waiter for waiter in waiters if not waiter.held_back)
        last = (waiter for waiter in waiters if waiter.held_back)
        for waiter in list(islice(chain(first, last), count)):
            del waiters[waiter]
            waiter.wake()

    def close(self) -> None:
        """End every wait now and from now on: the hub is stopping."""
        with self._lock:
            self._closed = True
            for topic in Topic:
                self._counts[topic] += 1
                self._wake(topic, len(self._waiters[topic]))

    async def wait(self, topic: Topic, seen: int, timeout_s: float, poll: _Poll | None = None) -> None:
        """Return when the topic has changed since `seen`, and it is this one's turn; when the hub stops, or the poll
        is over; or at the deadline."""
        waiter = _Waiter(held_back=poll is not None and poll.held_back)
        with self._lock:
            if self._closed or (poll is not None and poll.is_over):
                return
            if poll is not None:
                poll.waiter = waiter
            self._waiters[topic][waiter] = None
            if self._counts[topic] != seen:  # what came since is for whoever has waited longest: this one, if alone
                self._wake(topic, 1)
        try:
            await asyncio.wait_for(waiter.event.wait(), timeout_s)
        except TimeoutError:
            return
        finally:
            with self._lock:
                self._waiters[topic].pop(waiter, None)


@dataclass
class _Poll:
    """One long poll of a caller, over once the same caller has begun another; `held_back` is what it found last."""

    is_over: bool = False
    held_back: bool = False
    waiter: _Waiter | None = None


class _Waiter:
    """An event of one loop that any thread can set."""

    def __init__(self, held_back: bool = False) -> None:
        self.held_back = held_back
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
    look_s: float | None = None,
    who: str = "",
    is_held_back: Callable[[T], bool] = lambda _: False,
) -> T:
    """Repeat `attempt` (answer, whether it is worth answering) on every change until the deadline. Where others can
    make changes that nobody hears of, look every `look_s` seconds; of a crowd, so many look in that time as a change
    would wake.

    `who` has one poll for a topic: a newer one ends the older, which answers with what it found last, nothing.
    """
    poll, loop = changes.enter(topic, who), asyncio.get_running_loop()
    end, waited = loop.time() + min(wait_s, MAX_WAIT_S), False
    try:
        while True:
            seen = changes.count(topic)
            answer, is_ready = await attempt()
            left_s = end - loop.time()
            if is_ready and waited:
                changes.pass_on(topic)
            if is_ready or left_s <= 0 or changes.closed:
                return answer
            if not poll.is_over:
                waited, poll.held_back = True, is_held_back(answer)
                rest_s = left_s if look_s is None else min(left_s, look_s * changes.crowd(topic))
                await changes.wait(topic, seen, rest_s, poll)
                await asyncio.sleep(min(GATHER_S, left_s))
                if poll.is_over or await is_gone():  # nobody reads the answer any more: do not give work away to it
                    changes.pass_on(topic)
                    if not poll.is_over:
                        return answer
            if poll.is_over:
                # Two machines with a copy of one key would end each other's polls without a pause: answer later.
                await asyncio.sleep(min(OVER_S, left_s))
                return answer
    finally:
        changes.leave(topic, who, poll)


FORGET_AFTER_MS = round(MAX_WAIT_S * 1000) + 15_000
"""A poller that has not come back for this long is gone, not waiting."""


@dataclass(frozen=True)
class _Entry:
    what: str
    since_ms: int
    seen_ms: int


class Waits:
    """`since` counts from the first poll in a row that got nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def waiting(self, who: str, what: str, now_ms: int) -> None:
        with self._lock:
            known = self._entries.get(who)
            if known is None or now_ms - known.seen_ms > FORGET_AFTER_MS:
                known = _Entry(what, now_ms, now_ms)
            self._entries.pop(who, None)
            self._entries[who] = replace(known, what=what, seen_ms=now_ms)  # last: in order of when they were seen
            self._forget(now_ms)

    def _forget(self, now_ms: int) -> None:
        """Drop who did not come back: on every writing, so that strangers under ever new names fill nothing up."""
        while self._entries:
            who = next(iter(self._entries))
            if now_ms - self._entries[who].seen_ms <= FORGET_AFTER_MS:
                return
            del self._entries[who]

    def done(self, who: str) -> None:
        with self._lock:
            self._entries.pop(who, None)

    def current(self, now_ms: int) -> list[Wait]:
        with self._lock:
            self._forget(now_ms)
            entries = sorted(self._entries.items(), key=lambda pair: pair[1].since_ms)
            return [Wait(who=who, what=entry.what, since_ms=entry.since_ms) for who, entry in entries]
