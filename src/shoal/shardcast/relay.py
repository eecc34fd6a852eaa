"""A relay follows the head of its upstreams, mirrors the offered versions and serves them.

    upstream ─(long poll)─► poller ─┐                        ┌─► TreeServer ─► clients, further relays
    upstream ─(long poll)─► poller ─┼─► Mirror ─► pool ──────┤
    peer     ─(long poll)─► poller ─┘                        └─► … and its peers

Peers are relays of the same level. They trade chunks, so upstream sends each about once, and report new heads to each
other. All peers can have the same list: a relay asks each peer for its identity and leaves itself out.

    head (signed) ─► manifest (signed, hash in head) ─► both on disk and served ─► chunks, newest version first
                                                        requests for chunks that are being fetched are held

Invariants: the head never goes back; a manifest is served only with a valid signature; a chunk is served only if this
process has checked its hash; only offered chunks are fetched; no chunk of a mirrored version is removed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal.errors import BroadcastError, ConfigError, ManifestRefused
from shoal.protocol import BroadcastHead, Chunk, PolicyManifest
from shoal.runtime import Backoff, FolderLock, StopToken, show_bytes
from shoal.runtime.targets import Reach
from shoal.shardcast import manifest as manifests
from shoal.shardcast.connection import Address, Connection, Deadline, PoolSettings, Timeouts
from shoal.shardcast.lookup import MANIFEST_S, get_document, get_head
from shoal.shardcast.manifest import Place, Selection, check_not_rolled_back, offered, read_head
from shoal.shardcast.pool import ChunkPool
from shoal.shardcast.scheduler import SourceScores
from shoal.shardcast.server import Blob, Catalogue, Inventory, TreeServer, run_server
from shoal.shardcast.tree import CHUNK, HEAD, WITNESS, chunk_key, have_key, manifest_key, parse_label

log = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
RESTORE_S = 60.0  # a dropped upstream is tried again after this: its disk may have been repaired
RETRY = Backoff(first_s=0.1, most_s=5.0)
MAX_HEALTH_BYTES = 1024 * 1024


@dataclass(frozen=True)
class RelayConfig:
    """`peers` are relays of the same level; the relay's own address among them is left out. The newest `keep_versions`
    are kept, within `disk_bytes` fewer. `connections` fetch chunks at the same time; `connections_per_client` are
    served to one address. `reach`: allowed addresses of upstreams, if a hub has named them. Long polls last
    `long_poll_s`; an upstream without them is asked every `poll_s`."""

    folder: Path
    upstreams: tuple[str, ...]
    run: str
    trusted_key: str
    host: str = "127.0.0.1"
    port: int = 8472
    peers: tuple[str, ...] = ()
    keep_versions: int = 3
    disk_bytes: int | None = None
    connections: int = 4
    connections_per_client: int | None = 256
    reach: Reach | None = None
    long_poll_s: float = 20.0
    poll_s: float = 1.0


def run_relay(config: RelayConfig, stop: StopToken, on_ready: Callable[[str], None]) -> None:
    if not config.upstreams:
        raise ConfigError("a relay needs at least one upstream: the URL of an origin or of another relay")
    for peer in config.peers:
        Address.parse(peer)
    with FolderLock(config.folder).acquire(stop, LOCK_WAIT_S):
        mirror, closing = Mirror(config), StopToken()
        server = TreeServer(mirror, config.connections_per_client)
        mirror.load()
        sources = dict.fromkeys((*config.upstreams, *config.peers))
        pollers = [HeadPoller(source, config, mirror, server.instance, closing) for source in sources]

        def error() -> Exception | None:
            return next(filter(None, [mirror.pool.error, *(poller.error for poller in pollers)]), None)

        def ready(url: str) -> None:  # after the port was opened
            mirror.pool.start()
            for poller in pollers:
                poller.thread.start()
            on_ready(url)

        try:
            ended = lambda: stop.is_set() or error() is not None  # noqa: E731
            run_server(server, config.host, config.port, stop, ended, ready)
        finally:
            closing.set(stop.reason or "closed")
            mirror.pool.close()
            for poller in pollers:
                if poller.thread.ident is not None:
                    poller.thread.join(Timeouts().connect_s + 2)
        if (found := error()) is not None:
            raise found


class HeadPoller:
    def __init__(self, source: str, config: RelayConfig, mirror: Mirror, instance: str, stop: StopToken) -> None:
        self._source, self._config, self._mirror, self._instance, self._stop = source, config, mirror, instance, stop
        timeouts = Timeouts(stall_s=config.long_poll_s + Timeouts().stall_s, reach=config.reach)
        self._connection, self._last_logged = Connection(source, stop, timeouts), ""
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            if self._source in self._config.upstreams or self._identify_peer():
                self._follow()
        except Exception as error:  # noqa: BLE001  `run_relay` raises it
            self.error = error
        finally:
            self._connection.close()

    def _identify_peer(self) -> bool:
        """Wait for the peer's identity, then trade with it; false if it is this relay itself."""
        attempt, instance, peer = 0, None, self._source
        while not self._stop.is_set():
            try:
                data = get_document(self._connection, "health", MAX_HEALTH_BYTES, Deadline(MANIFEST_S))
                instance = json.loads(data or b"{}").get("instance")
                break
            except BroadcastError as error:
                log.debug("%s", error)
                self._stop.wait(RETRY.wait_s(attempt))
                attempt += 1
            except (ValueError, AttributeError):  # no JSON object: a plain file server
                break
        if instance == self._instance:
            log.info("the peer %s is this relay itself: it is left out", peer)
            return False
        if isinstance(instance, str):
            self._mirror.add_peer(peer)
            log.info("trading chunks with %s", peer)
        elif not self._stop.is_set():
            log.warning(
                "the peer %s is not a relay: only its head is used; to fetch from it, name it as upstream", peer
            )
        return True

    def _follow(self) -> None:
        attempt, forgiven_s = 0, time.monotonic()
        while not self._stop.is_set():
            started_s = time.monotonic()
            if started_s - forgiven_s > RESTORE_S:
                forgiven_s = started_s
                self._mirror.scores.restore()
            try:
                news, attempt = self._poll(), 0
            except BroadcastError as error:
                self._log_once(str(error), logging.WARNING if isinstance(error, ManifestRefused) else logging.INFO)
                self._stop.wait(RETRY.wait_s(attempt))
                attempt += 1
                continue
            if not news:  # a plain file server answers at once, so wait here
                self._stop.wait(max(0.0, self._config.poll_s - (time.monotonic() - started_s)))

    def _poll(self) -> bool:
        known = self._mirror.head
        if (data := get_head(self._connection, known, self._config.long_poll_s, MANIFEST_S)) is None:
            self._log_once(f"{self._source} has nothing published yet")
            return False
        head, news, known = read_head(data, self._config.run, self._config.trusted_key), False, self._mirror.head
        check_not_rolled_back(head, known)
        if known is None or head.policy.place != known.policy.place:
            if (manifest := self._get_manifest(head.policy.place)) is None:
                raise BroadcastError(f"{self._source} names policy {head.policy.label}, but not its manifest")
            if news := self._mirror.adopt_head(head, data, manifest):
                self._log_once(f"policy {head.policy.label} from {self._source}")
        # Manifests of older versions that are still offered; missing ones are asked for again later. A manifest that is
        # not an anchor makes the mirror want the version before it.
        asked: set[Place] = set()
        while places := [place for place in self._mirror.missing_places() if place not in asked]:
            asked.update(places)
            for place in places:
                if (older := self._get_manifest(place)) is not None:
                    self._mirror.adopt_manifest(place, older)
                    news = True
        return news

    def _get_manifest(self, place: Place) -> bytes | None:
        return get_document(self._connection, manifest_key(place), manifests.MAX_MANIFEST_BYTES, Deadline(MANIFEST_S))

    def _log_once(self, sentence: str, level: int = logging.INFO) -> None:
        if sentence != self._last_logged:
            self._last_logged = sentence
            log.log(level, "%s", sentence)


class Mirror(Catalogue):
    """A relay's catalogue and its pool's store. Any thread may call it."""

    role = "relay"

    def __init__(self, config: RelayConfig) -> None:
        super().__init__(config.folder)
        self._tree.prepare()
        self.scores = SourceScores(config.upstreams)
        self._run, self._trusted_key, self._config = config.run, config.trusted_key, config
        self._upstreams, self._peers = config.upstreams, set[str]()  # peers whose identity is known
        self._lock = threading.RLock()
        # Replaced as a whole, so that the event loop can read them without the lock:
        self._manifests: dict[Place, PolicyManifest] = {}
        self._sizes: dict[str, int] = {}  # of every chunk of every mirrored version, by hash
        self._selection = Selection()
        # Changed in place, read one element at a time:
        self._complete: set[str] = set()  # chunks that this process has verified
        self.head: BroadcastHead | None = None
        pool = PoolSettings(config.connections, timeouts=Timeouts(reach=config.reach))
        self.pool = ChunkPool(self.scores, self, pool)

    # For the server: without the lock, which is held while files are written, so that the event loop never waits for a
    # disk. Each method reads one object; a file that is removed meanwhile gives a 404.

    def find(self, key: str) -> Blob | None:
        if match := CHUNK.fullmatch(key):
            size = self._sizes.get(match[2])
            return Blob(self._tree.path(key), size) if size is not None and match[2] in self._complete else None
        place = parse_label(key.removeprefix("manifests/").removesuffix(".json"))
        served = self.head is not None if key == HEAD else place in self._manifests or WITNESS.fullmatch(key)
        return super().find(key) if served else None

    def expects(self, key: str) -> bool:
        match = CHUNK.fullmatch(key)
        return match is not None and match[2] in self._sizes and match[2] not in self._complete

    def announced(self) -> set[str]:
        return self.pool.announced()

    def places(self) -> list[Place]:
        return sorted(self._selection.mirrored & self._manifests.keys())

    def health(self) -> dict[str, Any]:
        head, problem = self.head, self._budget_problem(self._selection)
        return {
            "ok": not problem, **({"problem": problem} if problem else {}), **super().health(),
            "head": None if head is None else head.policy.label, "missing_versions": len(self.missing_places()),
            "missing_chunks": sum(chunk_hash not in self._complete for chunk_hash in self._sizes),
            "disk_bytes": sum(size for chunk_hash, size in self._sizes.items() if chunk_hash in self._complete),
            "bytes_in": sum(self.pool.fetched_bytes.values()),
            "sources": dict.fromkeys(self.scores.kinds(), False) | dict.fromkeys(self.scores.ready(), True),
        }  # fmt: skip

    def has(self, chunk: Chunk, scratch: memoryview) -> bool:
        """For the pool: a chunk of an earlier process is hashed again before it counts."""
        try:
            with self._tree.path(chunk_key(chunk.hash)).open("rb", buffering=0) as file:
                whole = file.readinto(scratch) == chunk.size_bytes and not file.read(1)
        except FileNotFoundError:
            return False
        if not whole or blake3(scratch).hexdigest() != chunk.hash:
            log.warning("chunk %s… on this disk is damaged; it is fetched again", chunk.hash[:16])
            return False
        self._arrived(chunk)
        return True

    def keep(self, chunk: Chunk, data: memoryview) -> None:
        self._tree.put_chunk(chunk.hash, data, durable=False)  # a restart hashes it again
        with self._lock:  # it was perhaps removed as old, and is wanted again
            if chunk.hash in self._sizes and not self._tree.has_chunk(chunk.hash, chunk.size_bytes):
                self._tree.put_chunk(chunk.hash, data, durable=False)
            self._arrived(chunk)

    def _arrived(self, chunk: Chunk) -> None:
        with self._lock:
            if chunk.hash not in self._sizes:
                return
            self._complete.add(chunk.hash)
            updated = [place for place, one in self.inventories.items() if one.add(chunk.hash)]
            for place in updated:
                if self.inventories[place].complete:
                    size = show_bytes(manifests.size_of([self._manifests[place]]))
                    log.info("policy %d.%d is whole: %s; from %s", *place, size, self.pool.shares())
        self.arrivals.notify(chunk_key(chunk.hash), *map(have_key, updated))

    def add_peer(self, peer: str) -> None:
        with self._lock:
            self._peers.add(peer)
            self.scores.set_sources(self._upstreams, peers=sorted(self._peers))
        self.pool.start_map_threads()

    def load(self) -> None:
        self._tree.sweep_temporaries()
        for place in self._tree.places():
            try:
                self._manifests[place] = self._read(self._tree.read(manifest_key(place)) or b"", place)
            except ManifestRefused as error:
                log.warning("%s; it is fetched again", error)
                self._tree.remove_manifest(place)
        data = self._tree.read(HEAD)
        try:
            head = None if data is None else read_head(data, self._run, self._trusted_key)
            self.head = head if head is not None and head.policy.place in self._manifests else None
        except ManifestRefused as error:
            log.warning("%s; it is fetched again", error)
        with self._lock:
            self._reselect()

    def adopt_head(self, head: BroadcastHead, head_data: bytes, manifest_data: bytes) -> bool:
        if manifests.manifest_hash(manifest_data) != head.manifest_hash:
            raise ManifestRefused(f"the manifest of policy {head.policy.label} is not the one that its head names")
        manifest = self._read(manifest_data, head.policy.place)
        if manifest.policy != head.policy:
            raise ManifestRefused(f"the head of policy {head.policy.label} names the manifest of another policy")
        with self._lock:
            if self.head is not None and head.policy.place <= self.head.policy.place:
                check_not_rolled_back(head, self.head)
                return False
            self._store_manifest(head.policy.place, manifest, manifest_data)
            self._tree.write(HEAD, head_data)  # after its manifest, so that every reader of the head finds it
            self.head = head
            self._reselect()
        self.arrivals.notify(HEAD)
        return True

    def adopt_manifest(self, place: Place, data: bytes) -> None:
        manifest = self._read(data, place)
        with self._lock:
            if place in self.missing_places():
                self._store_manifest(place, manifest, data)
                self._reselect()

    def missing_places(self) -> list[Place]:
        """Older versions whose manifests are still to be fetched, newest first."""
        with self._lock:
            return sorted(self._selection.wanted - self._manifests.keys(), reverse=True)

    def lost(self, key: str) -> None:
        match = CHUNK.fullmatch(key)
        with self._lock:
            size = None if match is None else self._sizes.get(match[2])
            if match is None or size is None or self._tree.has_chunk(match[2], size):
                return  # the version was removed just now, or the chunk is back already
            log.warning("chunk %s… has gone from this disk; it is fetched again", match[2][:16])
            self._complete.discard(match[2])
            known = self._manifests.items()
            self.inventories = {place: Inventory(offered(one), self._complete) for place, one in known}
            self._want_all()

    def _read(self, data: bytes, place: Place) -> PolicyManifest:
        manifest = manifests.read_manifest(data, self._run, self._trusted_key)
        if manifest.policy.place != place:
            raise ManifestRefused(f"the manifest of policy {manifest.policy.label} is offered as another version")
        return manifest

    def _store_manifest(self, place: Place, manifest: PolicyManifest, data: bytes) -> None:
        self._tree.write(manifest_key(place), data)
        self._manifests = self._manifests | {place: manifest}

    def _reselect(self) -> None:
        """Decide again what to mirror, under the lock: versions that the head offers, or that are complete here."""
        labels = self.head.versions if self.head is not None else ()
        places = {place for place in map(parse_label, labels) if place is not None}
        whole = {place for place, inventory in self.inventories.items() if inventory.complete}
        candidates = places | whole if self.head is not None else self._manifests
        before, config = self._selection, self._config
        known = {place: self._manifests.get(place) for place in candidates}
        self._selection = manifests.select_versions(known, config.keep_versions, config.disk_bytes)
        if (problem := self._budget_problem(self._selection)) != self._budget_problem(before):
            log.warning("%s", problem or "the newest version fits into the disk budget again")
        gone = self._manifests.keys() - self._selection.wanted
        self._manifests = {place: one for place, one in self._manifests.items() if place not in gone}
        chunks = (chunk for place in self.places() for chunk in offered(self._manifests[place]))
        self._sizes = {chunk.hash: chunk.size_bytes for chunk in chunks}
        self._complete = {chunk_hash for chunk_hash in self._complete if chunk_hash in self._sizes}
        # A map of a version whose chunks may have been removed meanwhile is made again.
        unchanged = before.mirrored & self._selection.mirrored & self.inventories.keys()
        self.inventories = {
            place: self.inventories[place] if place in unchanged else Inventory(offered(manifest), self._complete)
            for place, manifest in self._manifests.items()
        }
        self.pool.forget_except(set(self._sizes))
        for place in gone:
            self._tree.remove_manifest(place)
        self._tree.remove_chunks_except(set(self._sizes))
        self._want_all()
        self.arrivals.notify(*map(have_key, gone))

    def _want_all(self) -> None:
        for place in reversed(self.places()):
            if not self.inventories[place].complete:
                chunks = offered(self._manifests[place])
                self.pool.want(self._manifests[place], [one for one in chunks if one.hash not in self._complete])

    def _budget_problem(self, selection: Selection) -> str:
        if selection.fits or self._config.disk_bytes is None:
            return ""
        needed, allowed = (show_bytes(size) for size in (selection.route_bytes, self._config.disk_bytes))
        return (
            f"the newest version does not fit: it needs {needed} of disk, {allowed} are allowed (--max-disk), so that "
            "this relay offers only a part"
        )
