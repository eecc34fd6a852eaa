"""A relay: follows its upstreams' head, mirrors what it offers, serves it on. Needs a disk and nothing else.

    upstream ─(long poll)─► follower ─┐                      ┌─► TreeServer ─► clients, further relays
    upstream ─(long poll)─► follower ─┼─► Mirror ─► pool ────┤
    peer     ─(long poll)─► follower ─┘                      └─► … and its peers
                                          chunks from whichever source serves best

A relay is not trusted and trusts nobody: it passes on only what the trainer signed and what matches its hash. Peers are
relays of the same level: they trade chunks, so that upstream sends each about once, and tell each other of new heads. A
peer is first asked who it is, so that all relays can be given the same list: one that meets itself leaves itself out.

    head (signed) ─► manifest (signed, hash in head) ─► both on disk and served ─► chunks, newest version first
                                                        requests for chunks on their way are held, not refused

Invariants: the head never goes back; a manifest is served only with a valid signature; a chunk is served only if this
process has seen its hash match; only what a version offers is fetched; no chunk of a mirrored version is removed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from shoal.errors import BroadcastError, ConfigError, ManifestRefused
from shoal.protocol import BroadcastHead, Chunk, PolicyManifest
from shoal.runtime.clock import Backoff
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
from shoal.shardcast import manifest as manifests
from shoal.shardcast.connection import Address, Connection, Deadline, Timeouts
from shoal.shardcast.limits import PoolSettings, RelayConfig, ServerLimits
from shoal.shardcast.lookup import MANIFEST_S, get_document, get_head
from shoal.shardcast.manifest import Place, Selection, check_not_rolled_back, offered, read_head
from shoal.shardcast.plan import SourceScores
from shoal.shardcast.pool import ChunkPool
from shoal.shardcast.server import Blob, Catalogue, Inventory, TreeServer, serve
from shoal.shardcast.tree import CHUNK, HEAD, WITNESS, chunk_key, have_key, manifest_key, parse_label

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
    with FolderLock(config.folder).acquire(stop, LOCK_WAIT_S):
        mirror, closing = Mirror(config), StopToken()
        server = TreeServer(mirror, ServerLimits(connections_per_client=config.settings.connections_per_client))
        mirror.load()
        sources = dict.fromkeys((*config.upstreams, *config.peers))
        followers = [Follower(source, config, mirror, server.instance, closing) for source in sources]

        def error() -> Exception | None:
            return next(filter(None, [mirror.pool.error, *(follower.error for follower in followers)]), None)

        def ready(url: str) -> None:  # only once the port is ours
            mirror.pool.start()
            for follower in followers:
                follower.thread.start()
            on_ready(url)

        try:
            asyncio.run(serve(server, config.host, config.port, lambda: stop.is_set() or error() is not None, ready))
        finally:
            closing.set(stop.reason or "closed")
            mirror.pool.close()
            for follower in followers:
                if follower.thread.ident is not None:
                    follower.thread.join(Timeouts().connect_s + 2)
        if (found := error()) is not None:
            raise found


class Follower:
    """A thread that keeps asking one upstream or peer for a newer head, and hands it to the mirror with its manifest.
    `instance`: who this relay is. `error`: what it ended by: a full disk, or a bug."""

    def __init__(self, source: str, config: RelayConfig, mirror: Mirror, instance: str, stop: StopToken) -> None:
        self._source, self._config, self._mirror, self._instance, self._stop = source, config, mirror, instance, stop
        timeouts = Timeouts(stall_s=config.long_poll_s + Timeouts().stall_s, reach=config.reach)
        self._connection = Connection(source, stop, timeouts)
        self._said = ""
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            if self._source in self._config.upstreams or self._meet():
                self._follow()
        except Exception as error:  # noqa: BLE001  whoever runs the relay raises it
            self.error = error
        finally:
            self._connection.close()

    def _meet(self) -> bool:
        """Wait until a peer says who it is, and trade with it from then on; false if it is this relay itself."""
        attempt, instance, peer = 0, None, self._source
        while not self._stop.is_set():
            try:
                data = get_document(self._connection, "health", MAX_HEALTH_BYTES, Deadline(MANIFEST_S))
                instance = json.loads(data or b"{}").get("instance")
                break
            except BroadcastError as error:
                log.debug("%s", error)
                self._stop.wait(AGAIN.wait_s(attempt))
                attempt += 1
            except (ValueError, AttributeError):  # no JSON, or none with names: any server of files
                break
        if instance == self._instance:
            log.info("%s is this relay itself: left out of its peers", peer)
            return False
        if isinstance(instance, str):
            self._mirror.trade_with(peer)
            log.info("trading chunks with %s", peer)
        elif not self._stop.is_set():
            log.warning("%s is no relay: its heads are followed; to fetch chunks from it, name it as upstream", peer)
        return True

    def _follow(self) -> None:
        attempt, forgiven_s = 0, time.monotonic()
        while not self._stop.is_set():
            started_s = time.monotonic()
            if started_s - forgiven_s > FORGIVE_S:
                forgiven_s = started_s
                self._mirror.scores.restore()
            try:
                news, attempt = self._poll(), 0
            except BroadcastError as error:
                self._say(str(error), logging.WARNING if isinstance(error, ManifestRefused) else logging.INFO)
                self._stop.wait(AGAIN.wait_s(attempt))
                attempt += 1
                continue
            if not news:  # a plain file server answers at once, so the pace has to be ours
                self._stop.wait(max(0.0, self._config.poll_s - (time.monotonic() - started_s)))

    def _poll(self) -> bool:
        """Ask once; true if something new was taken."""
        known = self._mirror.head
        data = get_head(self._connection, known, self._config.long_poll_s, MANIFEST_S)
        if data is None:
            self._say(f"{self._source} has nothing published yet")
            return False
        head, news, known = read_head(data, self._config.run, self._config.trusted_key), False, self._mirror.head
        check_not_rolled_back(head, known)
        if known is None or head.policy.place != known.policy.place:
            manifest = self._get_manifest(head.policy.place)
            if manifest is None:
                raise BroadcastError(f"{self._source} names policy {head.policy.label}, but not its manifest")
            news = self._mirror.adopt_head(head, data, manifest)
            if news:
                self._say(f"policy {head.policy.label} from {self._source}")
        # The manifests of older versions that are still offered; one that is not there is asked for later. One that
        # turns out to be no anchor makes the mirror want the one before it.
        asked: set[Place] = set()
        while places := [place for place in self._mirror.missing_places() if place not in asked]:
            asked.update(places)
            for place in places:
                older = self._get_manifest(place)
                if older is not None:
                    self._mirror.adopt_manifest(place, older)
                    news = True
        return news

    def _get_manifest(self, place: Place) -> bytes | None:
        return get_document(self._connection, manifest_key(place), manifests.MAX_MANIFEST_BYTES, Deadline(MANIFEST_S))

    def _say(self, sentence: str, level: int = logging.INFO) -> None:
        """Log a state once, not once per attempt."""
        if sentence != self._said:
            self._said = sentence
            log.log(level, "%s", sentence)


class Mirror(Catalogue):
    """A relay's catalogue and the keeper of its pool. Any thread may call it."""

    role = "relay"

    def __init__(self, config: RelayConfig) -> None:
        super().__init__(config.folder)
        self._tree.prepare()
        self.scores = SourceScores(config.upstreams)
        self._run, self._trusted_key, self._settings = config.run, config.trusted_key, config.settings
        self._upstreams, self._met = config.upstreams, set[str]()  # peers that have said who they are
        self._lock = threading.RLock()
        # Replaced as a whole, never changed, so that the event loop can look at them at any time:
        self._manifests: dict[Place, PolicyManifest] = {}
        self._sizes: dict[str, int] = {}  # of every chunk of every mirrored version, by hash
        self._selection = Selection()
        # Changed in place, looked at one element at a time:
        self._complete: set[str] = set()  # chunks that this process has verified
        self.head: BroadcastHead | None = None
        pool = PoolSettings(config.settings.connections, timeouts=Timeouts(reach=config.reach))
        self.pool = ChunkPool(self.scores, self, pool)

    # What the server asks. Without the lock: it is held while files are written, and the event loop must not wait for
    # a disk. Each look is at one object, which is enough; a file that is removed just then is answered with 404.

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
        """Versions whose chunks are here or coming, oldest first."""
        return sorted(self._selection.mirrored & self._manifests.keys())

    def health(self) -> dict[str, Any]:
        head, problem = self.head, self._budget_problem(self._selection)
        return {
            "ok": not problem,
            **({"problem": problem} if problem else {}),
            **super().health(),
            "head": None if head is None else head.policy.label,
            "missing_versions": len(self.missing_places()),
            "missing_chunks": sum(chunk_hash not in self._complete for chunk_hash in self._sizes),
            "disk_bytes": sum(size for chunk_hash, size in self._sizes.items() if chunk_hash in self._complete),
            "bytes_in": sum(self.pool.fetched_bytes.values()),
            "sources": dict.fromkeys(self.scores.kinds(), False) | dict.fromkeys(self.scores.ready(), True),
        }

    # What the pool asks

    def has(self, chunk: Chunk, scratch: memoryview) -> bool:
        """A chunk left by an earlier process counts once its bytes have been hashed again."""
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
        with self._lock:  # a retirement may have removed it just now, although it has become wanted again
            if chunk.hash in self._sizes and not self._tree.has_chunk(chunk.hash, chunk.size_bytes):
                self._tree.put_chunk(chunk.hash, data, durable=False)
            self._arrived(chunk)

    def _arrived(self, chunk: Chunk) -> None:
        with self._lock:
            if chunk.hash not in self._sizes:
                return
            self._complete.add(chunk.hash)
            told = [place for place, one in self.inventories.items() if one.add(chunk.hash)]
            for place in told:
                if self.inventories[place].complete:
                    size = manifests.size_of([self._manifests[place]])
                    log.info("policy %d.%d is whole: %.1f MB; from %s", *place, size / 1e6, self.pool.shares())
        self.arrivals.notify(chunk_key(chunk.hash), *map(have_key, told))

    # What the followers say

    def trade_with(self, peer: str) -> None:
        with self._lock:
            self._met.add(peer)
            self.scores.set_sources(self._upstreams, peers=sorted(self._met))
        self.pool.follow_sources()

    def load(self) -> None:
        """Resume with what an earlier process left."""
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
            self._settle()

    def adopt_head(self, head: BroadcastHead, head_data: bytes, manifest_data: bytes) -> bool:
        """Take a newer head with its manifest; false if another upstream was faster with this or a newer one."""
        if manifests.manifest_hash(manifest_data) != head.manifest_hash:
            raise ManifestRefused(f"the manifest of policy {head.policy.label} is not the one that its head names")
        manifest = self._read(manifest_data, head.policy.place)
        if manifest.policy != head.policy:
            raise ManifestRefused(f"the head of policy {head.policy.label} names the manifest of another policy")
        with self._lock:
            if self.head is not None and head.policy.place <= self.head.policy.place:
                check_not_rolled_back(head, self.head)
                return False
            self._take(head.policy.place, manifest, manifest_data)
            self._tree.write(HEAD, head_data)  # after its manifest, so that whoever sees the head finds the manifest
            self.head = head
            self._settle()
        self.arrivals.notify(HEAD)
        return True

    def adopt_manifest(self, place: Place, data: bytes) -> None:
        """Take the manifest of an older version that is still kept."""
        manifest = self._read(data, place)
        with self._lock:
            if place not in self.missing_places():
                return
            self._take(place, manifest, data)
            self._settle()

    def missing_places(self) -> list[Place]:
        """The older versions whose manifests should be here besides the head's, newest first."""
        with self._lock:
            return sorted(self._selection.wanted - self._manifests.keys(), reverse=True)

    def lost(self, key: str) -> None:
        """A chunk that was here has vanished from the disk: it is fetched again, and no longer promised."""
        match = CHUNK.fullmatch(key)
        with self._lock:
            size = None if match is None else self._sizes.get(match[2])
            if match is None or size is None or self._tree.has_chunk(match[2], size):
                return  # a version that was retired just now, or a chunk that is back already
            log.warning("chunk %s… has gone from this disk; it is fetched again", match[2][:16])
            self._complete.discard(match[2])
            self.inventories = {
                place: Inventory(offered(one), self._complete) for place, one in self._manifests.items()
            }
            self._want_all()

    def _read(self, data: bytes, place: Place) -> PolicyManifest:
        manifest = manifests.read_manifest(data, self._run, self._trusted_key)
        if manifest.policy.place != place:
            raise ManifestRefused(f"the manifest of policy {manifest.policy.label} is offered as another version")
        return manifest

    def _take(self, place: Place, manifest: PolicyManifest, data: bytes) -> None:
        self._tree.write(manifest_key(place), data)
        self._manifests = self._manifests | {place: manifest}

    # Deciding what to mirror; all of it under the lock

    def _settle(self) -> None:
        """Choose the versions from what is known now, remove the others, want what is missing."""
        # Of what the head offers, and of what is whole here although it is offered no more.
        labels = self.head.kept_versions if self.head is not None else ()
        places = {place for place in map(parse_label, labels) if place is not None}
        whole = {place for place, inventory in self.inventories.items() if inventory.complete}
        candidates = places | whole if self.head is not None else self._manifests
        before, settings = self._selection, self._settings
        budget = None if settings.disk_budget_gb is None else int(settings.disk_budget_gb * 1e9)
        known = {place: self._manifests.get(place) for place in candidates}
        self._selection = manifests.select_versions(known, settings.kept_versions, budget)
        problem = self._budget_problem(self._selection)
        if problem != self._budget_problem(before):
            log.warning("%s", problem or "the newest version fits into the disk budget again")
        gone = self._manifests.keys() - self._selection.wanted
        self._manifests = {place: one for place, one in self._manifests.items() if place not in gone}
        chunks = (chunk for place in self.places() for chunk in offered(self._manifests[place]))
        self._sizes = {chunk.hash: chunk.size_bytes for chunk in chunks}
        self._complete = {chunk_hash for chunk_hash in self._complete if chunk_hash in self._sizes}
        # A map of a version whose chunks may have been removed meanwhile is made anew.
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
        """Want what is not complete, newest version first."""
        for place in reversed(self.places()):
            if not self.inventories[place].complete:
                chunks = offered(self._manifests[place])
                self.pool.want(self._manifests[place], [one for one in chunks if one.hash not in self._complete])

    def _budget_problem(self, selection: Selection) -> str:
        if selection.fits:
            return ""
        return (
            f"the newest version does not fit: it needs {selection.route_bytes / 1e9:.6g} GB of disk, and "
            f"disk_budget_gb is {self._settings.disk_budget_gb:g}; raise it, or this relay can offer only a part"
        )
