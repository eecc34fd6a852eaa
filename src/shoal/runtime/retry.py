"""Trying again: exponential back-off with jitter, always under a deadline, always able to stop."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shoal.errors import DeadlineExceeded
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.stop import StopToken

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """Waits of `first_s`, doubling up to `most_s`, each drawn from the upper half so that crowds spread out."""

    first_s: float = 0.1
    most_s: float = 5.0

    def wait_s(self, attempt: int) -> float:
        return min(self.most_s, self.first_s * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1.0)


def retry(
    call: Callable[[], T],
    *,
    on: tuple[type[Exception], ...],
    deadline_s: float,
    stop: StopToken,
    backoff: Backoff = Backoff(),
    clock: Clock = SystemClock(),
    on_failure: Callable[[Exception, float], None] | None = None,
) -> T:
    """The result of `call`, retried while it raises one of `on`. Past the deadline its last error is raised."""
    end = clock.monotonic_s() + deadline_s
    attempt = 0
    while True:
        try:
            return call()
        except on as error:
            pause = backoff.wait_s(attempt)
            if clock.monotonic_s() + pause > end:
                raise
            if on_failure is not None:
                on_failure(error, pause)
            if stop.wait(pause):
                raise DeadlineExceeded(f"stopped ({stop.reason}) while retrying: {error}") from error
            attempt += 1
