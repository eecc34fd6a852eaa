"""Which source to ask next: the better it has served, the likelier it is asked; none is forgotten for ever.

    weight = success × bandwidth     both exponential moving averages; a success rate heals a little with every update
    rest     after a failure: not asked for a while, doubling with every failure in a row
    drop     after a lie (bytes that do not match their hash, an unsigned manifest): not asked until `restore`

Bandwidth that is not known yet counts as the best that is, so that a new source is tried soon.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum

from shoal.runtime.clock import Backoff
from shoal.shardcast.connection import Address

SMOOTHING = 0.3
HEALING = 0.01  # a source that always fails keeps 0.01 / 0.3 of its success, so that it is still asked now and then
UNKNOWN_S = 1.0  # what an unmeasured source is taken to need for a chunk, or for its map
REST = Backoff(first_s=0.1, most_s=2.0)


class Kind(Enum):
    UPSTREAM = "upstream"  # has what we want, or will have it: relays for a client, the origin or relays for a relay
    PEER = "peer"  # of our own level: fetches other chunks than we do and trades them
    LAST_RESORT = "last resort"  # the origin, for a client: asked when nobody else can help


@dataclass
class Standing:
    """What is known of a source. `bandwidth_bytes_s` is that of one connection, as far as it is known."""

    kind: Kind = Kind.UPSTREAM
    success: float = 1.0
    bandwidth_bytes_s: float | None = None
    failures: int = 0  # in a row, up to now
    resting_until_s: float = 0.0
    dropped: bool = False
    problem: str = ""
    weight: float = 0.0

    def seconds(self, size_bytes: int) -> float:
        """What so many bytes take from it, as far as that is known."""
        return UNKNOWN_S if self.bandwidth_bytes_s is None else size_bytes / self.bandwidth_bytes_s


class SourceScores:
    """What is known of each source. Used from many threads. What is said of a source that is gone does no harm.

    >>> scores = SourceScores(["http://a:8471", "http://b:8471"], last_resort=["http://origin:8471"])
    >>> scores.drop("http://a:8471", "sent a corrupt chunk")
    >>> scores.choose()
    'http://b:8471'
    """

    def __init__(
        self, sources: Sequence[str], peers: Sequence[str] = (), last_resort: Sequence[str] = (),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._now_s = now_s
        self._lock = threading.Lock()
        self._scores: dict[str, Standing] = {}
        self.set_sources(sources, peers, last_resort)

    def set_sources(self, sources: Sequence[str], peers: Sequence[str] = (), last_resort: Sequence[str] = ()) -> None:
        """From now on these; what is known of those that stay is kept. Who is named twice is what comes first here."""
        kinds: dict[str, Kind] = {}
        for kind, named in ((Kind.UPSTREAM, sources), (Kind.PEER, peers), (Kind.LAST_RESORT, last_resort)):
            for source in named:
                Address.parse(source)
                kinds.setdefault(source, kind)
        with self._lock:
            self._scores = {source: self._scores.get(source, Standing()) for source in kinds}
            for source, kind in kinds.items():
                self._scores[source].kind = kind

    def kinds(self) -> dict[str, Kind]:
        with self._lock:
            return {source: score.kind for source, score in self._scores.items()}

    def usable(self) -> dict[str, Kind]:
        """Those that are not dropped, resting or not."""
        with self._lock:
            return {source: score.kind for source, score in self._scores.items() if not score.dropped}

    def ready(self) -> dict[str, Standing]:
        """Those that may be asked now: neither dropped nor resting."""
        with self._lock:
            now_s = self._now_s()
            best = max((score.bandwidth_bytes_s or 0.0 for score in self._scores.values()), default=0.0) or 1.0
            for score in self._scores.values():
                score.weight = score.success * (score.bandwidth_bytes_s or best)
            scores = self._scores.items()
            return {source: copy(one) for source, one in scores if not one.dropped and one.resting_until_s <= now_s}

    def choose(self) -> str | None:
        """A source to ask now, by chance in proportion to its weight; None if all of them rest or are dropped. A last
        resort is chosen only where there is no other."""
        ready = self.ready()
        chosen = {source: one for source, one in ready.items() if one.kind is not Kind.LAST_RESORT} or ready
        return random.choices(list(chosen), [standing.weight for standing in chosen.values()])[0] if chosen else None

    def succeeded(self, source: str, size_bytes: int, seconds: float) -> None:
        self._update(source, success=1.0, rate=size_bytes / max(seconds, 1e-6))

    def failed(self, source: str, problem: str, success: float | None = 0.0, rate: float | None = None) -> None:
        """It rests. `success` None: it answered, but does not have it yet, or not fast enough. `rate`: what is known of
        its bandwidth, if it was left in the middle of a chunk."""
        self._update(source, problem, success, rate, rests=True)

    def drop(self, source: str, problem: str) -> None:
        self._update(source, problem, drop=True)

    def note(self, source: str, problem: str) -> None:
        """Remember a problem for `describe`, without any consequence."""
        self._update(source, problem)

    def _update(
        self, source: str, problem: str = "", success: float | None = None, rate: float | None = None,
        rests: bool = False, drop: bool = False,
    ) -> None:  # fmt: skip
        with self._lock:
            score, now_s = self._scores.get(source, Standing()), self._now_s()
            score.problem = score.problem if score.dropped else problem or score.problem  # why it was dropped stays
            score.dropped |= drop
            if success is not None:
                score.success = min(1.0, (1 - SMOOTHING) * score.success + SMOOTHING * success + HEALING)
            if rate is not None:
                rate = max(1.0, rate)  # never 0, which would read as "not known"
                score.bandwidth_bytes_s = (1 - SMOOTHING) * (score.bandwidth_bytes_s or rate) + SMOOTHING * rate
            if success:
                score.failures, score.resting_until_s = 0, 0.0
            if rests and score.resting_until_s <= now_s:  # several connections failing at once are one failure
                score.resting_until_s = now_s + REST.wait_s(score.failures)
                score.failures += 1

    def restore(self) -> None:
        """Forgive those that were dropped."""
        with self._lock:
            for score in self._scores.values():
                score.dropped = False

    def describe(self) -> str:
        """The last problem of each source, for an error message."""
        with self._lock:
            lines = [score.problem for score in self._scores.values() if score.problem]
            return "; ".join(lines) or ("no source has failed" if self._scores else "no source is known")
