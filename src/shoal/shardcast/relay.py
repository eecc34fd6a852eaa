"""A relay: follows its upstreams' head, mirrors what it offers, serves it on. Needs a disk and nothing else.

    upstream ─(long poll)─► follower ─┐                      ┌─► TreeServer ─► clients, further relays
    upstream ─(long poll)─► follower ─┼─► Mirror ─► pool ────┤
    peer     ─(long poll)─► follower ─┘                      └─► … and its peers
                                          chunks from whichever source serves best

A relay is not trusted and trusts nobody: it passes on only what the trainer signed and what matches its hash. Peers are
relays of the same level: they trade chunks, so that upstream sends each about once, and tell each other of new heads. A
peer is first asked who it is, so that all relays can be given the same list: one that meets itself leaves itself out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable

from shoal.errors import BroadcastError, ConfigError, ManifestRefused
from shoal.runtime.clock import Backoff
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Address, Connection, Deadline, Timeouts
from shoal.shardcast.limits import RelayConfig
from shoal.shardcast.lookup import MANIFEST_S, get_document
from shoal.shardcast.manifest import (
    MAX_HEAD_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_WITNESS_BYTES,
    Place,
    check_not_rolled_back,
    place_of,
    read_head,
)
from shoal.shardcast.mirror import Mirror
from shoal.shardcast.server import TreeServer, serve
from shoal.shardcast.tree import HEAD, manifest_key, witness_key

log = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
FORGIVE_S = 60.0  # an upstream dropped for a lie is tried again after this: its disk may have been mended
AGAIN = Backoff(first_s=0.1, most_s=5.0)
MAX_HEALTH_BYTES = 1024 * 1024


def run_relay(config: RelayConfig, stop: StopToken, on_ready: Callable[[str], None]) -> None:
    """Mirror and serve until `stop`. `on_ready` gets the URL as soon as it listens, whatever it holds by then."""
    if not config.upstreams:
        raise ConfigError("a relay needs at least one upstream: the URL of an origin or of another relay")
    for peer in config.peers:
        Address.parse(peer)
    relay = Relay(config)
    with FolderLock(config.folder).acquire(stop, LOCK_WAIT_S):
        relay.run(stop, on_ready)


class Relay:
    """The wiring of one relay."""

    def __init__(self, config: RelayConfig) -> None:
        self._config = config
        self._mirror = Mirror(config)
        self._server = TreeServer(self._mirror, config.settings.limits)
        self._closing = StopToken()
        self._error: Exception | None = None
        self._met: set[str] = set()
        self._lock = threading.Lock()
        self._peers = [peer for peer in config.peers if peer not in config.upstreams]

    def run(self, stop: StopToken, on_ready: Callable[[str], None]) -> None:
        self._mirror.load()
        followed = [*self._config.upstreams, *self._peers]
        followers = [threading.Thread(target=self._follow, args=(source,), daemon=True) for source in followed]

        def ended() -> bool:
            return stop.is_set() or self._error is not None or self._mirror.pool.error is not None

        def ready(url: str) -> None:  # only once the port is ours
            self._mirror.pool.start()
            for follower in followers:
                follower.start()
            on_ready(url)

        try:
            asyncio.run(serve(self._server, self._config.host, self._config.port, ended, ready))
        finally:
            self._closing.set(stop.reason or "closed")
            self._mirror.pool.close()
            for follower in followers:
                if follower.ident is not None:
                    follower.join(Timeouts().connect_s + 2)
        error = self._error or self._mirror.pool.error
        if error is not None:
            raise error

    def _follow(self, source: str) -> None:
        try:
            if source not in self._peers or self._meet(source):
                Follower(source, self._config, self._mirror, self._closing).run()
        except Exception as error:  # noqa: BLE001  a full disk, or a bug: `run` raises it
            self._error = error

    def _meet(self, peer: str) -> bool:
        """Wait until a peer says who it is, and trade with it from then on; false if it is this relay itself."""
        instance = instance_of(peer, self._closing)
        if self._closing.is_set():
            return False
        if instance == self._server.instance:
            log.info("%s is this relay itself: left out of its peers", peer)
            return False
        if instance is None:
            log.warning("%s is no relay: its heads are followed; to fetch chunks from it, name it as upstream", peer)
            return True
        with self._lock:
            self._met.add(peer)
            self._mirror.scores.set_sources(self._config.upstreams, peers=sorted(self._met))
        self._mirror.pool.follow_sources()
        log.info("trading chunks with %s", peer)
        return True


def instance_of(source: str, stop: StopToken) -> str | None:
    """Who serves at this address, asked until it answers; None if it does not say (any server of files)."""
    connection = Connection(source, stop, Timeouts())
    attempt = 0
    while not stop.is_set():
        try:
            data = get_document(connection, "health", MAX_HEALTH_BYTES, Deadline(MANIFEST_S))
            connection.close()
            said = json.loads(data or b"null")
            instance = said.get("instance") if isinstance(said, dict) else None
            return instance if isinstance(instance, str) else None
        except ValueError:
            return None
        except BroadcastError as error:
            log.debug("%s", error)
            stop.wait(AGAIN.wait_s(attempt))
            attempt += 1
    return None


class Follower:
    """Keeps asking one upstream for a newer head, and hands it to the mirror with its manifest."""

    def __init__(self, upstream: str, config: RelayConfig, mirror: Mirror, stop: StopToken) -> None:
        self._upstream = upstream
        self._config = config
        self._mirror = mirror
        self._stop = stop
        timeouts = Timeouts(stall_s=config.long_poll_s + Timeouts().stall_s, reach=config.reach)
        self._connection = Connection(upstream, stop, timeouts)
        self._said = ""
        self._forgiven_s = time.monotonic()

    def run(self) -> None:
        attempt = 0
        while not self._stop.is_set():
            started_s = time.monotonic()
            if started_s - self._forgiven_s > FORGIVE_S:
                self._forgiven_s = started_s
                self._mirror.scores.restore()
            try:
                news = self._poll()
            except BroadcastError as error:
                self._say(str(error), logging.WARNING if isinstance(error, ManifestRefused) else logging.INFO)
                self._stop.wait(AGAIN.wait_s(attempt))
                attempt += 1
                continue
            attempt = 0
            if not news:  # a plain file server answers at once, so the pace has to be ours
                self._stop.wait(max(0.0, self._config.poll_s - (time.monotonic() - started_s)))
        self._connection.close()

    def _poll(self) -> bool:
        """Ask once; true if something new was taken."""
        known = self._mirror.head
        after = "" if known is None else f"&after={known.policy.label}"
        target = f"{HEAD}?wait_s={self._config.long_poll_s:g}{after}"
        deadline = Deadline(self._config.long_poll_s + MANIFEST_S)
        data = get_document(self._connection, target, MAX_HEAD_BYTES, deadline)
        if data is None:
            self._say(f"{self._upstream} has nothing published yet")
            return False
        head, news = read_head(data, self._config.run, self._config.trusted_key), False
        known = self._mirror.head
        check_not_rolled_back(head, known)
        if known is None or place_of(head) != place_of(known):
            manifest = self._get_manifest(place_of(head))
            if manifest is None:
                raise BroadcastError(f"{self._upstream} names policy {head.policy.label}, but not its manifest")
            news = self._mirror.adopt_head(head, data, manifest)
            if news:
                self._say(f"policy {head.policy.label} from {self._upstream}")
        for key in self._config.witnesses:
            signed = get_document(self._connection, witness_key(key), MAX_WITNESS_BYTES, Deadline(MANIFEST_S))
            if signed is not None:
                self._mirror.adopt_witness(key, signed)
        return self._take_older() or news

    def _take_older(self) -> bool:
        """Fetch the manifests of older versions that are still offered; one that is not there is asked for later. One
        that turns out to be no anchor makes the mirror want the one before it."""
        asked: set[Place] = set()
        news = False
        while places := [place for place in self._mirror.missing_places() if place not in asked]:
            asked.update(places)
            for place in places:
                with self._mirror.promised(place):
                    data = self._get_manifest(place)
                    if data is not None:
                        self._mirror.adopt_manifest(place, data)
                        news = True
        return news

    def _get_manifest(self, place: Place) -> bytes | None:
        return get_document(self._connection, manifest_key(place), MAX_MANIFEST_BYTES, Deadline(MANIFEST_S))

    def _say(self, sentence: str, level: int = logging.INFO) -> None:
        """Log a state once, not once per attempt."""
        if sentence != self._said:
            self._said = sentence
            log.log(level, "%s", sentence)
