"""A relay: follows its upstreams' head, mirrors what it offers, serves it on. Needs a disk and nothing else.

    upstream ─(long poll)─► follower ─┐                      ┌─► TreeServer ─► clients, further relays
    upstream ─(long poll)─► follower ─┴─► Mirror ─► pool ────┘
                                          chunks from whichever upstream serves best

A relay is not trusted and trusts nobody: it passes on only what the trainer signed and what matches its hash. An
upstream that is not up yet is waited for, with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from shoal.errors import BroadcastError, ConfigError, ManifestRefused
from shoal.protocol import BroadcastHead
from shoal.runtime.lock import FolderLock
from shoal.runtime.retry import Backoff
from shoal.runtime.stop import StopToken
from shoal.shardcast.catalogue import Arrivals
from shoal.shardcast.config import RelayConfig
from shoal.shardcast.connection import Connection, Deadline, Timeouts
from shoal.shardcast.lookup import MANIFEST_S, get_document
from shoal.shardcast.manifest import (
    MAX_HEAD_BYTES,
    MAX_MANIFEST_BYTES,
    check_not_rolled_back,
    place_of,
    read_head,
)
from shoal.shardcast.mirror import Mirror
from shoal.shardcast.server import ServerLimits, TreeServer, serve
from shoal.shardcast.sources import SourceScores
from shoal.shardcast.tree import HEAD, Tree, manifest_key

log = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
FORGIVE_S = 60.0  # an upstream dropped for a lie is tried again after this: its disk may have been mended
AGAIN = Backoff(first_s=0.1, most_s=5.0)


def run_relay(config: RelayConfig, stop: StopToken, on_ready: Callable[[str], None]) -> None:
    """Mirror and serve until `stop`. `on_ready` gets the URL as soon as it listens, whatever it holds by then."""
    if not config.upstreams:
        raise ConfigError("a relay needs at least one upstream: the URL of an origin or of another relay")
    relay = Relay(config)
    with FolderLock(config.folder).acquire(stop, LOCK_WAIT_S):
        relay.run(stop, on_ready)


class Relay:
    """The wiring of one relay."""

    def __init__(self, config: RelayConfig) -> None:
        self._config = config
        self._arrivals = Arrivals()
        self._scores = SourceScores(config.upstreams)
        self._tree = Tree(config.folder)
        self._mirror = Mirror(config, self._tree, self._arrivals, self._scores)
        limits = ServerLimits(max_connections=config.settings.max_clients)
        self._server = TreeServer(self._mirror, self._arrivals, limits)
        self._closing = StopToken()
        self._error: Exception | None = None

    def run(self, stop: StopToken, on_ready: Callable[[str], None]) -> None:
        self._tree.prepare()
        self._mirror.load()
        followers = [threading.Thread(target=self._follow, args=(u,), daemon=True) for u in self._config.upstreams]

        def ready(url: str) -> None:  # only once the port is ours
            self._mirror.pool.start()
            for follower in followers:
                follower.start()
            on_ready(url)

        try:
            asyncio.run(serve(self._server, self._config.host, self._config.port, lambda: self._ended(stop), ready))
        finally:
            self._closing.set(stop.reason or "closed")
            self._mirror.pool.close()
            for follower in followers:
                if follower.ident is not None:
                    follower.join(Timeouts().connect_s + 2)
        error = self._error or self._mirror.pool.error
        if error is not None:
            raise error

    def _ended(self, stop: StopToken) -> bool:
        return stop.is_set() or self._error is not None or self._mirror.pool.error is not None

    def _follow(self, upstream: str) -> None:
        try:
            Follower(upstream, self._config, self._mirror, self._scores, self._closing).run()
        except Exception as error:  # noqa: BLE001  a full disk, or a bug: `run` raises it
            self._error = error


class Follower:
    """Keeps asking one upstream for a newer head, and hands it to the mirror with its manifest."""

    def __init__(
        self, upstream: str, config: RelayConfig, mirror: Mirror, scores: SourceScores, stop: StopToken
    ) -> None:
        self._upstream = upstream
        self._config = config
        self._mirror = mirror
        self._scores = scores
        self._stop = stop
        timeouts = Timeouts(stall_s=config.settings.long_poll_s + Timeouts().stall_s)
        self._connection = Connection(upstream, stop, timeouts)
        self._said = ""
        self._forgiven_s = time.monotonic()

    def run(self) -> None:
        attempt = 0
        while not self._stop.is_set():
            self._forgive()
            started_s = time.monotonic()
            try:
                news = self._poll()
            except BroadcastError as error:
                self._say(str(error), logging.WARNING if isinstance(error, ManifestRefused) else logging.INFO)
                self._stop.wait(AGAIN.wait_s(attempt))
                attempt += 1
                continue
            attempt = 0
            held_s = time.monotonic() - started_s
            if not news:  # a plain file server answers at once, so the pace has to be ours
                self._stop.wait(max(0.0, self._config.settings.poll_s - held_s))
        self._connection.close()

    def _poll(self) -> bool:
        """Ask once; true if something new was taken."""
        known = self._mirror.head
        after = "" if known is None else f"&after={known.policy.label}"
        target = f"{HEAD}?wait_s={self._config.settings.long_poll_s:g}{after}"
        deadline = Deadline(self._config.settings.long_poll_s + MANIFEST_S)
        data = get_document(self._connection, target, MAX_HEAD_BYTES, deadline)
        if data is None:
            self._say(f"{self._upstream} has nothing published yet")
            return False
        head = read_head(data, self._config.run, self._config.trusted_key)
        check_not_rolled_back(head, self._mirror.head)
        news = self._take_head(head, data)
        return self._take_older() or news

    def _take_head(self, head: BroadcastHead, data: bytes) -> bool:
        known = self._mirror.head
        if known is not None and place_of(head) == place_of(known):
            return False
        manifest = self._get_manifest(manifest_key(place_of(head)))
        if manifest is None:
            raise BroadcastError(f"{self._upstream} names policy {head.policy.label} but does not have its manifest")
        news = self._mirror.adopt_head(head, data, manifest)
        if news:
            self._say(f"policy {head.policy.label} from {self._upstream}")
        return news

    def _take_older(self) -> bool:
        """Fetch the manifests of older versions that are still offered; one that is not there is asked for later."""
        news = False
        for place in self._mirror.missing_places():
            self._mirror.promise(place, True)
            try:
                data = self._get_manifest(manifest_key(place))
                if data is not None:
                    self._mirror.adopt_manifest(place, data)
                    news = True
            finally:
                self._mirror.promise(place, False)
        return news

    def _get_manifest(self, key: str) -> bytes | None:
        return get_document(self._connection, key, MAX_MANIFEST_BYTES, Deadline(MANIFEST_S))

    def _forgive(self) -> None:
        if time.monotonic() - self._forgiven_s > FORGIVE_S:
            self._forgiven_s = time.monotonic()
            self._scores.restore()

    def _say(self, sentence: str, level: int = logging.INFO) -> None:
        """Log a state once, not once per attempt."""
        if sentence != self._said:
            self._said = sentence
            log.log(level, "%s", sentence)
