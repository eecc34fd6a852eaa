"""The client: fetch one version from several sources, in parallel, verified, resumable.

    fetch(ref) ─► already whole here? ─► manifest (signed, exactly ref) ─► pool of chunks ─► mapped payload
                                              │ gone: VersionNotFound          │ every source lies: ChunkCorrupt
                                              └────────── the deadline covers all of it ──────────┘

What has arrived stays in the folder whatever happens, so that the next attempt continues from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import BroadcastError, ChunkCorrupt
from shoal.protocol import BroadcastHead, PolicyManifest, PolicyRef
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Deadline
from shoal.shardcast.lookup import Lookup
from shoal.shardcast.payload import Payload, PayloadCache
from shoal.shardcast.pool import ChunkPool, PoolSettings
from shoal.shardcast.sources import SourceScores

log = logging.getLogger(__name__)

TICK_S = 0.1
GONE_CHECK_S = 1.0


@dataclass(frozen=True)
class DownloadSettings:
    """`kept_payloads`: how many versions stay on disk; the validator needs max_staleness + 1 of them."""

    kept_payloads: int = 3
    pool: PoolSettings = field(default_factory=PoolSettings)


class Downloader:
    """Fetches versions of one run into a folder of its own.

    >>> downloader = Downloader(["http://relay:8471"], run, trusted_key, Path("cache"), StopToken())
    >>> payload = downloader.fetch(ref, deadline_s=600)
    >>> payload.files["config.json"], payload.tensors[0].data
    """

    def __init__(
        self,
        sources: Sequence[str],
        run: str,
        trusted_key: str,
        folder: Path,
        stop: StopToken,
        settings: DownloadSettings = DownloadSettings(),
    ) -> None:
        self._scores = SourceScores(sources)
        self._cache = PayloadCache(folder, run, trusted_key)
        self._lookup = Lookup(self._scores, run, trusted_key, stop, settings.pool.timeouts)
        self._stop = stop
        self._settings = settings
        self._head: BroadcastHead | None = None
        self._lock = threading.Lock()

    def set_sources(self, sources: Sequence[str]) -> None:
        """From now on ask these, also in a fetch that is under way."""
        self._scores.set_sources(sources)

    def newest(self, deadline_s: float) -> PolicyRef:
        """The newest version that any source offers; `ManifestRefused` if that is older than one seen before."""
        with self._lock:
            self._head = self._lookup.newest(self._head, Deadline(deadline_s))
            return self._head.policy

    def fetch(self, ref: PolicyRef, deadline_s: float) -> Payload:
        """The payload of `ref`, verified. Raises a `BroadcastError` of the kind that tells what went wrong."""
        with self._lock:
            deadline = Deadline(deadline_s)
            self._scores.restore()
            manifest = self._cache.manifest(ref)
            if manifest is None:
                manifest, data = self._lookup.manifest(ref, deadline)
                self._cache.remember(manifest, data)
            if not self._cache.is_verified(ref):
                self._fill(manifest, deadline)
            payload = self._cache.load(manifest)
            self._cache.retain(self._settings.kept_payloads)
            return payload

    def close(self) -> None:
        self._lookup.close()

    def _fill(self, manifest: PolicyManifest, deadline: Deadline) -> None:
        started_s = time.monotonic()
        file = self._cache.fill(manifest)
        pool = ChunkPool(self._scores, file, self._settings.pool)
        pool.want(manifest.chunks)
        pool.start()
        try:
            self._await_chunks(pool, manifest.policy, deadline)
        finally:
            pool.close(self._stop.reason or "done")
            file.close()
        self._cache.finish(file)
        _report(manifest, pool, time.monotonic() - started_s)

    def _await_chunks(self, pool: ChunkPool, ref: PolicyRef, deadline: Deadline) -> None:
        next_check = Deadline(0)
        while not pool.wait(TICK_S):
            if self._stop.is_set():
                raise BroadcastError(f"stopped ({self._stop.reason}) while fetching policy {ref.label}")
            usable = self._scores.usable()
            if not usable and self._scores.sources():
                raise self._all_lied(ref)
            if usable and usable <= pool.absent and next_check.passed():
                self._lookup.check_not_gone(ref, deadline)
                next_check = Deadline(GONE_CHECK_S)
            if deadline.passed():
                raise BroadcastError(
                    f"policy {ref.label} did not arrive before the deadline: {pool.pending()} chunks are missing; "
                    f"{self._scores.describe()}"
                )
        if pool.error is not None:
            raise pool.error

    def _all_lied(self, ref: PolicyRef) -> BroadcastError:
        return ChunkCorrupt(f"policy {ref.label} cannot be fetched: every source is dropped: {self._scores.describe()}")


def _report(manifest: PolicyManifest, pool: ChunkPool, seconds: float) -> None:
    fetched = sum(pool.fetched_bytes.values())
    parts = ", ".join(f"{source}: {size / 1e6:.1f} MB" for source, size in pool.fetched_bytes.most_common())
    size, here = manifest.size_bytes / 1e6, (manifest.size_bytes - fetched) / 1e6
    sentence = "policy %s: %.1f MB in %.1f s, %.1f MB of it were here already; from %s"
    log.info(sentence, manifest.policy.label, size, seconds, here, parts or "nobody")
