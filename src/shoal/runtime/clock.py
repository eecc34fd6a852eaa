"""Time as an argument: the system's clock in production, a manual one in tests and in the simulator."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for what is written down, monotonic time for how long something takes."""

    def now_ms(self) -> int: ...

    def monotonic_s(self) -> float: ...


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to.

    >>> clock = ManualClock(start_ms=1000)
    >>> clock.advance(2.5); clock.now_ms()
    3500
    """

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._ms = start_ms
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        with self._lock:
            return self._ms

    def monotonic_s(self) -> float:
        return self.now_ms() / 1000

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._ms += round(seconds * 1000)
