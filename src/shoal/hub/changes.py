"""What changed, for those that wait for it (`http/polling`, the simulator); and who waits for what (`Waits`)."""

import threading
from collections.abc import Callable
from enum import StrEnum

from shoal.protocol import Wait

MAX_WAIT_S = 30.0  # of a long poll
FORGET_AFTER_MS = round(MAX_WAIT_S * 1000) + 15_000  # a node that has not polled again by then is gone, not waiting


class Topic(StrEnum):
    LEASES = "leases"  # a unit may have become free
    AUDITS = "audits"  # a submission may be waiting for a check
    BATCHES = "batches"  # a batch may have become complete


class Changes:
    """Any thread may tell of a change. `listener` is called in that thread with its topic; with None at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = dict.fromkeys(Topic, 0)
        self.listener: Callable[[Topic | None], None] = lambda _topic: None
        self.is_closed = False

    def notify(self, *topics: Topic) -> None:
        for topic in topics:
            with self._lock:
                self.counts[topic] += 1
            self.listener(topic)

    def close(self) -> None:
        """Every wait ends now and from now on: the hub is stopping."""
        self.is_closed = True
        self.listener(None)


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
        """With every write, so that strangers under ever new names cannot fill the memory."""
        while self._entries and now_ms - next(iter(self._entries.values()))[1] > FORGET_AFTER_MS:
            del self._entries[next(iter(self._entries))]
