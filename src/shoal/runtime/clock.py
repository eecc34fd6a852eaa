"""Time as an argument: the system clock in production, a manual one in tests and in the simulator.

Wall time jumps (NTP, a laptop that sleeps). Deadlines that are stored as wall time are read from `SteadyClock`.
"""

import random
import threading
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Wall time for what is written down, monotonic time for durations."""

    def now_ms(self) -> int: ...

    def monotonic_s(self) -> float: ...


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


class SteadyClock:
    """Wall time without jumps: it runs at most a tenth faster or slower until it agrees with the clock again, so it
    never goes back and durations are right within a tenth. `not_before_ms`: the newest time that an earlier process
    wrote down."""

    FOLLOWS = 0.1

    def __init__(self, clock: Clock, not_before_ms: int = 0) -> None:
        self._lock = threading.Lock()
        self._clock, self.monotonic_s = clock, clock.monotonic_s
        self._ms = float(max(clock.now_ms(), not_before_ms))
        self._read_s = clock.monotonic_s()

    def now_ms(self) -> int:
        with self._lock:
            read_s = self._clock.monotonic_s()
            passed_ms = (read_s - self._read_s) * 1000
            behind_ms = self._clock.now_ms() - (self._ms + passed_ms)
            most_ms = passed_ms * self.FOLLOWS
            self._ms += passed_ms + min(max(behind_ms, -most_ms), most_ms)
            self._read_s = read_s
            return round(self._ms)


class SharedClock:
    """A wall clock corrected by the times that another machine tells."""

    SLOW_S = 1.0

    def __init__(self, clock: Clock) -> None:
        self._clock, self.monotonic_s = clock, clock.monotonic_s
        self._ahead_ms: int | None = None

    def agree(self, their_ms: int, took_s: float) -> None:
        """`their_ms` was their time within the last `took_s` seconds; of slow answers only the first is used."""
        if self._ahead_ms is None or took_s < self.SLOW_S:
            self._ahead_ms = their_ms + round(took_s * 500) - self._clock.now_ms()

    def now_ms(self) -> int:
        return self._clock.now_ms() + (self._ahead_ms or 0)


class ManualClock:
    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._ms, self._jumped_ms = start_ms, 0
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        with self._lock:
            return self._ms + self._jumped_ms

    def monotonic_s(self) -> float:
        with self._lock:
            return self._ms / 1000

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._ms += round(seconds * 1000)

    def jump(self, seconds: float) -> None:
        with self._lock:
            self._jumped_ms += round(seconds * 1000)


@dataclass(frozen=True)
class Backoff:
    """Waits of `first_s`, doubling up to `most_s`, each drawn from the upper half so that clients spread out."""

    first_s: float = 0.1
    most_s: float = 5.0

    def wait_s(self, attempt: int) -> float:
        return min(self.most_s, self.first_s * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1.0)
