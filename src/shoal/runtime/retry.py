"""Trying again: exponential back-off with jitter. Whoever waits for it keeps the deadline and the way to stop."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Waits of `first_s`, doubling up to `most_s`, each drawn from the upper half so that crowds spread out."""

    first_s: float = 0.1
    most_s: float = 5.0

    def wait_s(self, attempt: int) -> float:
        return min(self.most_s, self.first_s * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1.0)
