"""The client: fetch one version from several sources, by the cheapest route, in parallel, verified, resumable.

    fetch(ref) ─► whole here already? ─► manifest (signed, exactly ref) ─► route ─► transfer ─► mapped payload
                                              │ gone: VersionNotFound       ▲           │ all lie: ChunkCorrupt
                                              │                             └─ closed ◄─┘ a delta gives other bytes
                                              └────────────── the deadline covers all of it ──────────────┘

What has arrived stays in the folder, so that the next attempt resumes from there. So does the newest head ever seen:
an older one is refused even after a restart.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from shoal.errors import BroadcastError, ChunkCorrupt, DeltaRefused, ManifestRefused, ShoalError, VersionNotFound
from shoal.protocol import BroadcastHead, PolicyManifest, PolicyRef
from shoal.runtime import MachineLimits, StopToken, show_bytes, write_atomically
from shoal.shardcast.cache import PartFiles, PayloadCache
from shoal.shardcast.connection import Deadline, PoolSettings
from shoal.shardcast.lookup import Lookup, Route, find_route
from shoal.shardcast.manifest import read_head
from shoal.shardcast.payload import Payload
from shoal.shardcast.pool import ChunkPool
from shoal.shardcast.scheduler import SourceScores
from shoal.shardcast.tree import HEAD

log = logging.getLogger(__name__)

TICK_S = 0.1
GONE_CHECK_S = 1.0  # without a byte, until it is checked whether the version is still offered
FORGET_S = 10.0  # for a background fetch to stop
BETWEEN_S = 5.0  # for the manifest of an intermediate version; without it there is another route


@dataclass(frozen=True)
class Progress:
    label: str
    done_bytes: int
    total_bytes: int
    seconds: float
    by_source: Mapping[str, int]
    route: str


OnProgress = Callable[[Progress], None]


class RouteClosed(Exception): ...


class Superseded(BroadcastError): ...


@dataclass(frozen=True)
class DownloadSettings:
    """`kept_payloads`: versions that stay on disk; the validator needs max_staleness + 1. `remember_changes`: keep
    changes in memory, for an engine that has the version before (`Payload.changes_from`). `max_payload_bytes` and
    `limits` (of the disk) are checked before a version is fetched. A fetch fails if nothing arrives for
    `patience_s`."""

    kept_payloads: int = 3
    remember_changes: bool = True
    patience_s: float = math.inf
    pool: PoolSettings = field(default_factory=PoolSettings)
    max_payload_bytes: int | None = None
    limits: MachineLimits | None = None


@dataclass(frozen=True)
class Fetch:
    target: PolicyManifest
    deadline: Deadline
    on_progress: OnProgress | None
    background: bool
    started_s: float = field(default_factory=time.monotonic)


class Downloader:
    """Fetches versions of one run into its own folder. Thread-safe: one thread fetches at a time."""

    def __init__(
        self, sources: Sequence[str], run: str | None, trusted_key: str, folder: Path | str, stop: StopToken,
        settings: DownloadSettings = DownloadSettings(), last_resort: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._scores = SourceScores(sources, last_resort=last_resort)
        self._cache = PayloadCache(Path(folder), run, trusted_key, settings.remember_changes)
        self._lookup = Lookup(self._scores, run, trusted_key, stop, settings.pool.timeouts)
        self._trusted_key, self._stop, self._settings, self._lock = trusted_key, stop, settings, threading.Lock()
        self._waiting = 0  # foreground fetches that wait for the lock
        self._head_path = Path(folder) / HEAD
        self._head: BroadcastHead | None = None
        with suppress(FileNotFoundError, ManifestRefused):
            self._head = read_head(self._head_path.read_bytes(), run, trusted_key)
            self._lookup.run = self._cache.run = self._head.run

    @property
    def run(self) -> str | None:
        return self._lookup.run

    def set_sources(self, sources: Sequence[str], last_resort: Sequence[str] = ()) -> None:
        self._scores.set_sources(sources, last_resort=last_resort)

    def newest(self, deadline_s: float) -> PolicyRef:
        deadline = Deadline(deadline_s)
        with self._exclusive(deadline, "the newest version"):
            head, data = self._lookup.newest(self._head, deadline)
            self._cache.run = head.run
            if self._head is None or head.policy.place > self._head.policy.place:
                write_atomically(self._head_path, data)
            self._head = head
            return head.policy

    def head_poller(self) -> Lookup:
        lookup = Lookup(self._scores, self.run, self._trusted_key, self._stop, self._settings.pool.timeouts)
        lookup.known = self._head
        return lookup

    def fetch(
        self, ref: PolicyRef, deadline_s: float, on_progress: OnProgress | None = None, background: bool = False
    ) -> Payload:
        """The payload of `ref`, verified. A `background` fetch stops when another one waits."""
        deadline = Deadline(deadline_s)
        with self._exclusive(deadline, f"policy {ref.label}", background):
            self._scores.restore()
            if (manifest := self._cache.manifest(ref)) is None:
                manifest, data = self._lookup.manifest(ref, deadline.tighter(self._settings.patience_s))
                if self._is_too_large(manifest):
                    raise ManifestRefused(
                        f"the manifest of policy {ref.label} is refused: it announces {manifest.size_bytes} bytes, "
                        f"and a policy of this run has at most {self._settings.max_payload_bytes}"
                    )
                self._cache.run = manifest.run
                self._cache.remember(manifest, data)
            if not self._cache.is_verified(ref) and not self._cache.adopt(manifest):
                try:
                    self._fetch_missing(Fetch(manifest, deadline, on_progress, background))
                except ShoalError:
                    self._cache.forget_unused(ref)
                    raise
            payload = self._cache.load(manifest)
            self._cache.retain(self._settings.kept_payloads)
            return payload

    def forget(self) -> None:
        """Remove all payloads: the run is finished. Mappings stay valid."""
        with suppress(BroadcastError), self._exclusive(Deadline(FORGET_S), "the cache"):
            self._cache.retain(0)

    def close(self) -> None:
        self._lookup.close()

    @contextmanager
    def _exclusive(self, deadline: Deadline, wanted: str, background: bool = False) -> Iterator[None]:
        self._waiting += not background
        try:
            if not self._lock.acquire(timeout=max(0.0, deadline.remaining_s())):
                raise BroadcastError(f"{wanted} could not be asked for before the deadline: another fetch is under way")
        finally:
            self._waiting -= not background
        try:
            yield
        finally:
            self._lock.release()

    def _is_too_large(self, manifest: PolicyManifest) -> bool:
        most = self._settings.max_payload_bytes
        return most is not None and manifest.size_bytes > most

    def _fetch_missing(self, fetch: Fetch) -> None:
        manifest, closed = fetch.target, set[str]()
        refusal: DeltaRefused | None = None

        def between(ref: PolicyRef) -> PolicyManifest | None:
            found = self._cache.manifest(ref) or self._lookup.manifest_now(ref, fetch.deadline.tighter(BETWEEN_S))
            return None if found is None or self._is_too_large(found) else found

        while True:
            held = {digest for digest, other in self._cache.held().items() if other.entries == manifest.entries}
            try:
                route = find_route(manifest, held, between, closed)
            except VersionNotFound as error:
                raise refusal or error from None
            self._lookup.close()  # its idle connections would count against a source's limit
            if self._settings.limits is not None:
                self._cache.make_room(manifest, route, self._settings.limits)
            try:
                return self._follow_route(route, fetch)
            except (RouteClosed, DeltaRefused) as error:
                log.warning("%s; another route is taken", error)
                refusal = error if isinstance(error, DeltaRefused) else refusal
            # The first payload is at fault if it is damaged, else the steps are.
            if route.whole is None and not self._cache.is_whole(route.begin):
                log.warning("the payload of policy %s on this disk is damaged; it is removed", route.begin.label)
                self._cache.discard(route.begin)
            else:
                closed.update(step.name for step in route.steps)

    def _follow_route(self, route: Route, fetch: Fetch) -> None:
        cache, target = self._cache, fetch.target
        with closing(PartFiles()) as files:
            pool = ChunkPool(self._scores, files, self._settings.pool)
            if route.whole is not None:
                cache.fill(route.whole, files)
                pool.want(route.whole, route.whole.chunks)
            for step in route.steps:
                cache.fill_delta(step, files)
                pool.want(step.manifest, step.delta.chunks)
            pool.start()
            try:
                self._wait(route, pool, fetch)
            finally:
                pool.close(self._stop.reason or "done")
        if route.whole is not None:
            cache.finish(route.whole)
        if route.steps:
            cache.apply_deltas(route.begin, route.steps)
        log.info(
            "policy %s: %s (of %s) in %.1f s by %s; from %s",
            target.policy.label, show_bytes(pool.fetched_bytes.total()), show_bytes(target.size_bytes),
            time.monotonic() - fetch.started_s, route.describe(), pool.shares(),
        )  # fmt: skip

    def _wait(self, route: Route, pool: ChunkPool, fetch: Fetch) -> None:
        scores, policy, patience_s = self._scores, f"policy {fetch.target.policy.label}", self._settings.patience_s
        patience, next_check, here = Deadline(patience_s), Deadline(GONE_CHECK_S), -1
        while True:
            over, sizes = pool.wait(TICK_S), pool.progress()
            if fetch.on_progress is not None:
                seconds, by_source = time.monotonic() - fetch.started_s, dict(pool.fetched_bytes)
                label = fetch.target.policy.label
                fetch.on_progress(Progress(label, *sizes, seconds, by_source, route.describe()))
            if pool.error is not None:
                raise pool.error
            if over:
                return
            if self._stop.is_set():
                raise BroadcastError(f"stopped ({self._stop.reason}) while fetching {policy}")
            if fetch.background and self._waiting > 0:
                raise Superseded(f"the fetch of {policy} gives way to another; what has come stays")
            if not scores.usable() and scores.kinds():
                raise ChunkCorrupt(f"{policy} cannot be fetched: every source is dropped: {scores.describe()}")
            if fetch.deadline.passed():
                missing = f"{pool.pending()} chunks are missing"
                raise BroadcastError(f"{policy} did not arrive before the deadline: {missing}; {scores.describe()}")
            if sizes[0] != here:
                patience, next_check, here = Deadline(patience_s), Deadline(GONE_CHECK_S), sizes[0]
            elif patience.passed():
                raise BroadcastError(f"nothing has arrived for {patience_s:.0f} s: {scores.describe()}")
            elif next_check.passed():
                # raise if the target, or a version of the route, is no longer offered; each source is asked once
                heads = self._lookup.heads(fetch.deadline)
                self._lookup.close()
                self._lookup.check_not_gone(fetch.target.policy, heads)
                try:
                    for manifest in route.manifests():
                        self._lookup.check_not_gone(manifest.policy, heads)
                except VersionNotFound as error:
                    raise RouteClosed(str(error)) from error
                next_check = Deadline(GONE_CHECK_S)


WAIT_S = 10.0  # of a long poll; below the time after which silence is a failure
PACE_S = 1.0  # between two requests to a source without long polls
FETCH_S = 3600.0
END_S = 5.0


class Prefetch:
    """A context manager with a thread that keeps the newest version on this disk. `on_newer` is called in that thread
    with each newer version, before it is fetched."""

    def __init__(
        self, downloader: Downloader, stop: StopToken, on_newer: Callable[[PolicyRef], None] = lambda _ref: None
    ) -> None:
        self._downloader, self._stop, self._on_newer = downloader, stop, on_newer
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """The thread ends with its current request; after a stop it is waited for, at most `END_S`."""
        self._closing.set()
        if self._stop.is_set():
            self._thread.join(END_S)

    def _run(self) -> None:
        poller = self._downloader.head_poller()
        unfetched: PolicyRef | None = None  # its fetch was stopped for another one
        try:
            while not (self._closing.is_set() or self._stop.is_set()):
                found = poller.newer(0.0 if unfetched else WAIT_S)
                if found is not None:
                    self._on_newer(found)
                newer = found or unfetched
                if newer is not None and not (self._closing.is_set() or self._stop.is_set()):
                    unfetched = None if self._fetch(newer) else newer
                if newer is None or unfetched:
                    self._closing.wait(PACE_S)
        except Exception:
            log.exception("prefetching has ended; versions are fetched when they are needed")
        finally:
            poller.close()

    def _fetch(self, ref: PolicyRef) -> bool:
        try:
            self._downloader.fetch(ref, FETCH_S, background=True)
        except Superseded as error:
            log.debug("%s", error)
            return False
        except BroadcastError as error:
            log.info("a version could not be prefetched: %s", error)
        except ShoalError as error:  # for example a full disk; `fetch` will raise it again
            log.warning("prefetching has ended; versions are fetched when they are needed: %s", error)
            self._closing.set()
        return True
