"""One fetch on its way: the files of a road filled by a pool, then the deltas applied, with progress and a last line.

road ─► files: a payload, deltas ─► pool, until nothing is pending ─► files renamed ─► deltas applied ─► target
                                      every TICK_S: stop? deadline? every source a liar? a version gone? progress
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.errors import BroadcastError, ChunkCorrupt, VersionNotFound
from shoal.protocol import PolicyManifest
from shoal.runtime.stop import StopToken
from shoal.shardcast.cache import PayloadCache, PayloadFiles
from shoal.shardcast.catalogue import PayloadCatalogue
from shoal.shardcast.connection import Deadline
from shoal.shardcast.lookup import Lookup, Road
from shoal.shardcast.pool import ChunkPool, PoolSettings
from shoal.shardcast.sources import SourceScores

log = logging.getLogger(__name__)

TICK_S = 0.1
GONE_CHECK_S = 1.0


@dataclass(frozen=True)
class Progress:
    """How far a fetch has come: of the bytes that its road needs, those that are here."""

    label: str
    done_bytes: int
    total_bytes: int
    seconds: float
    by_source: Mapping[str, int]
    road: str


OnProgress = Callable[[Progress], None]


class RoadClosed(Exception):
    """A version in between is gone; another road may lead to the target."""


class Superseded(BroadcastError):
    """A fetch in the background has given way to one that somebody waits for."""


@dataclass
class Transfer:
    """Takes roads to one target until one of them leads there. `give_way`: somebody waits for another fetch."""

    cache: PayloadCache
    scores: SourceScores
    lookup: Lookup
    stop: StopToken
    pool: PoolSettings
    share: PayloadCatalogue
    target: PolicyManifest
    deadline: Deadline
    on_progress: OnProgress | None
    give_way: Callable[[], bool]
    started_s: float = field(default_factory=time.monotonic)

    def take(self, road: Road) -> None:
        """Fetch what the road needs and travel it. Raises `RoadClosed` or `DeltaRefused` if another may be better."""
        cache = self.cache
        files = [] if road.whole is None else [cache.fill(road.whole)]
        files += [cache.fill_delta(step) for step in road.steps]
        pool = self._fill(road, PayloadFiles(files))
        if road.whole is not None:
            cache.finish(road.whole)
        for step in road.steps:
            cache.finish_delta(step)
        if road.steps:
            cache.travel(road.begin, road.steps)
        self._report(road, pool)

    def _fill(self, road: Road, files: PayloadFiles) -> ChunkPool:
        pool = ChunkPool(self.scores, files, self.pool)
        if road.whole is not None:
            pool.want(road.whole, road.whole.chunks)
        for step in road.steps:
            pool.want(step.manifest, step.delta.chunks)
        self.share.fetching = pool.announced
        pool.start()
        try:
            self._await(road, pool)
        finally:
            pool.close(self.stop.reason or "done")
            self.share.fetching = tuple
            files.close()
        return pool

    def _await(self, road: Road, pool: ChunkPool) -> None:
        next_check = Deadline(0)
        while not pool.wait(TICK_S):
            self._tell(road, pool)
            self._raise_if_pointless(pool)
            usable = self.scores.usable()
            if usable and usable <= pool.absent and next_check.passed():
                self._check_not_gone(road)
                next_check = Deadline(GONE_CHECK_S)
        if pool.error is not None:
            raise pool.error
        self._tell(road, pool)

    def _raise_if_pointless(self, pool: ChunkPool) -> None:
        policy, why = f"policy {self.target.policy.label}", self.scores.describe()
        if self.stop.is_set():
            raise BroadcastError(f"stopped ({self.stop.reason}) while fetching {policy}")
        if self.give_way():
            raise Superseded(f"the fetch of {policy} gives way to another; what has come stays")
        if not self.scores.usable() and self.scores.kinds():
            raise ChunkCorrupt(f"{policy} cannot be fetched: every source is dropped: {why}")
        if self.deadline.passed():
            missing = f"{pool.pending()} chunks are missing"
            raise BroadcastError(f"{policy} did not arrive before the deadline: {missing}; {why}")

    def _check_not_gone(self, road: Road) -> None:
        """Nobody has a chunk: is a version of this road no longer offered?"""
        self.lookup.check_not_gone(self.target.policy, self.deadline)
        for ref in {manifest.policy for manifest in road.manifests()} - {self.target.policy}:
            try:
                self.lookup.check_not_gone(ref, self.deadline)
            except VersionNotFound as error:
                raise RoadClosed(str(error)) from error

    def _tell(self, road: Road, pool: ChunkPool) -> None:
        if self.on_progress is not None:
            sizes, seconds = pool.progress(), time.monotonic() - self.started_s
            by_source = dict(pool.fetched_bytes)
            self.on_progress(Progress(self.target.policy.label, *sizes, seconds, by_source, road.describe()))

    def _report(self, road: Road, pool: ChunkPool) -> None:
        fetched = sum(pool.fetched_bytes.values())
        parts = ", ".join(f"{source}: {size / 1e6:.1f} MB" for source, size in pool.fetched_bytes.most_common())
        log.info(
            "policy %s: %.1f MB (of %.1f MB) in %.1f s by %s; from %s",
            self.target.policy.label, fetched / 1e6, self.target.size_bytes / 1e6, time.monotonic() - self.started_s,
            road.describe(), parts or "nobody",
        )  # fmt: skip
