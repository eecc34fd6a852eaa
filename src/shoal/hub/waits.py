"""Who is waiting for what, and since when: kept while a client polls, so that a stuck run can say why."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from shoal.hub.changes import MAX_WAIT_S
from shoal.protocol import Wait

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
