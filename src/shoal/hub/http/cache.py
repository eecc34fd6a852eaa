"""Answers that are the same for everybody: computed once for all who ask, one at a time.

Anyone may ask for them as often as they like, and they cost more than anything else that anyone may ask for: strangers
get one that is a second old at most, whoever is on this machine one that began after it asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.runtime.clock import Clock, SystemClock

KEPT_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class _Kept:
    task: asyncio.Task[Any]
    began_s: float

    @property
    def is_usable(self) -> bool:
        """Not of a loop that has ended, and no failure: that is for those who waited for it, not for the next."""
        if self.task.get_loop() is not asyncio.get_running_loop():
            return False
        return not self.task.done() or (not self.task.cancelled() and self.task.exception() is None)


class Answers:
    """By name, the last one and the one that is being computed. On one event loop only."""

    def __init__(self, clock: Clock = SystemClock()) -> None:
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    async def get(self, name: str, max_age_s: float, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """An answer whose computation began `max_age_s` before this call at the earliest."""
        since_s = self._clock.monotonic_s() - max_age_s
        while True:
            kept = self._kept.get(name)
            if kept is None or not kept.is_usable or (kept.task.done() and kept.began_s < since_s):
                kept = self._kept[name] = _Kept(asyncio.create_task(compute()), self._clock.monotonic_s())
            if kept.began_s >= since_s:
                answer: T = await asyncio.shield(kept.task)  # who hangs up does not take it from the others
                return answer
            await asyncio.wait([kept.task])
