"""How often somebody may do something: a bucket for each caller, which fills at a rate."""

import threading


class Buckets:
    """A bucket for each caller that fills at a rate; a rate of 0 is no limit. Threads may share it. Beyond `remembered`
    callers, the one that called longest ago is forgotten: many addresses cost no more memory.

    >>> buckets = Buckets(rate_s=1.0, burst_s=2.0)
    >>> [buckets.take("alice", now_s=0.0) for _ in range(3)]
    [0.0, 0.0, 1.0]
    """

    def __init__(self, rate_s: float, burst_s: float = 10.0, remembered: int = 4096) -> None:
        self._rate_s, self._full, self._remembered = rate_s, max(1.0, rate_s * burst_s), remembered
        self._buckets: dict[str, tuple[float, float]] = {}  # level, and when it was that
        self._lock = threading.Lock()

    def take(self, who: str, now_s: float, only_look: bool = False) -> float:
        """Take one, if there is one; else for how long to wait. `only_look` takes and remembers nothing."""
        if self._rate_s <= 0:
            return 0.0
        with self._lock:
            level, at_s = self._buckets.get(who, (self._full, now_s))
            level = min(self._full, level + max(0.0, now_s - at_s) * self._rate_s)
            wait_s = max(0.0, 1.0 - level) / self._rate_s
            if not only_look:
                self._buckets.pop(who, None)
                self._buckets[who] = (level if wait_s else level - 1.0, now_s)
                if len(self._buckets) > self._remembered:
                    del self._buckets[next(iter(self._buckets))]
            return wait_s
