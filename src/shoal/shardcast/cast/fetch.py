"""`shoal cast fetch`: bring a version here, and put it where it was asked for.

    sources ─► .model.bin.cast/<digest>.part ─► .bin ─► model.bin   a link: the disk holds the bytes once
               trust.json   whom to believe

The hidden folder beside the output is what makes a fetch resumable, a second one free, and the next version a small
difference. Removing it costs nothing but that.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BroadcastError, ManifestRefused, UserError, VersionNotFound
from shoal.protocol import PolicyManifest, PolicyRef
from shoal.runtime.files import ensure_folder
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
from shoal.runtime.text import visible
from shoal.shardcast import Downloader, DownloadSettings, Progress
from shoal.shardcast.cast.delivery import Delivery
from shoal.shardcast.cast.serving import Terminal, megabytes, percent, public_url
from shoal.shardcast.cast.trust import Sources, Trust, meet
from shoal.shardcast.catalogue import PayloadCatalogue
from shoal.shardcast.connection import Connection, Deadline, Timeouts
from shoal.shardcast.lookup import MANIFEST_S, Lookup, get_document
from shoal.shardcast.manifest import MAX_MANIFEST_BYTES, read_manifest
from shoal.shardcast.server import run_share
from shoal.shardcast.sources import SourceScores
from shoal.shardcast.tree import manifest_key, parse_label

log = logging.getLogger(__name__)

STOPPED_CODE = 130
NEWEST = "newest"
FOLLOW_S = 1.0
DEADLINE_S = 30 * 86_400.0  # in all; what ends a fetch that gets nowhere is `patience_s`
TICK_S = 0.2
READY_S = 10.0
LONG_NAME_BYTES = 240  # a name may have 255


@dataclass(frozen=True)
class FetchRequest:
    sources: tuple[str, ...]
    peers: tuple[str, ...]
    output: str
    version: str
    share: int | None
    follow: bool
    wait_s: float
    patience_s: float
    host: str = "0.0.0.0"
    force: bool = False

    @property
    def path(self) -> Path:
        return Path(self.output).absolute()

    @property
    def cache(self) -> Path:
        name = self.path.name
        if len(name.encode()) > LONG_NAME_BYTES:
            name = hashlib.sha256(name.encode()).hexdigest()
        return self.path.with_name(f".{name}.cast")


def run_fetch(request: FetchRequest, begin: Callable[[], StopToken], terminal: Terminal) -> int:
    """Fetch, say what came from whom; the exit code. `begin` is called when what was asked for makes sense."""
    sources, peers = Sources.parse(request.sources), Sources.parse(request.peers).urls
    version = _wanted(request)
    _check_output(request.path)
    stop = begin()
    ensure_folder(request.cache)
    try:
        with FolderLock(request.cache).acquire(stop):
            delivery = Delivery(request.output, request.cache, request.force)
            delivery.check()
            trust, first_use = meet(sources, request.cache / "trust.json", stop, request.wait_s)
            if first_use:
                terminal.note(visible(_first_use(trust, request.cache)))
            with contextlib.ExitStack() as stack:
                sharing = _share(request, stack, terminal)
                fetch = Fetch(request, sources, peers, trust, stop, delivery, terminal, sharing)
                return fetch.follow() if request.follow else fetch.once(version)
    except BroadcastError:
        if not stop.is_set():
            raise
        log.warning("stopped; the same command continues from here")
        return STOPPED_CODE


def _share(request: FetchRequest, stack: contextlib.ExitStack, terminal: Terminal) -> Sharing | None:
    if request.share is None:
        return None
    sharing = stack.enter_context(Sharing(request.host, request.share))
    terminal.say(f"others may take from here what has arrived:  --peer {public_url(sharing.url, request.host)}")
    return sharing


@dataclass
class Fetch:
    """One output and where it comes from."""

    request: FetchRequest
    sources: Sources
    peers: tuple[str, ...]
    trust: Trust
    stop: StopToken
    delivery: Delivery
    terminal: Terminal
    sharing: Sharing | None = None
    held: PolicyRef | None = None

    def once(self, version: int | None) -> int:
        """One version; whoever shares it stays until stopped."""
        with self._attempt() as (downloader, patience):
            while True:
                ref = downloader.newest(self.request.wait_s) if version is None else self._find(version)
                try:
                    self._bring(ref, downloader, patience)
                    break
                except VersionNotFound:
                    if version is not None or downloader.newest(self.request.wait_s) == ref:
                        raise
                    log.warning("version %d is no longer offered; the newest is fetched instead", ref.version)
        while self.sharing is not None and not self.stop.wait(FOLLOW_S):
            pass
        return 0

    def follow(self) -> int:
        """Every new version, until stopped. Sources that are away, or lie, are waited out."""
        said = ""
        while not self.stop.is_set():
            try:
                with self._attempt() as (downloader, patience):
                    while not self.stop.wait(FOLLOW_S if self.held is not None else 0):
                        newest = downloader.newest(self.request.wait_s)
                        if newest != self.held:
                            self._bring(newest, downloader, patience)
                            self.held = newest
                        said = ""
            except BroadcastError as error:
                if str(error) != said and not self.stop.is_set():
                    log.warning("%s; trying again", error)
                said = str(error)
                self.stop.wait(FOLLOW_S)
        return 0

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[tuple[Downloader, Patience]]:
        """A downloader, which somebody watches for standing still."""
        request, trust = self.request, self.trust
        share = None if self.sharing is None else self.sharing.catalogue
        with closing(Patience(self.stop, request.patience_s)) as patience:
            downloader = Downloader(
                self.sources.urls,
                trust.run,
                trust.key,
                request.cache,
                patience.token,
                DownloadSettings(kept_payloads=1, remember_changes=False),
                peers=self.peers,
                share=share,
            )
            with closing(downloader):
                yield downloader, patience

    def _bring(self, ref: PolicyRef, downloader: Downloader, patience: Patience) -> None:
        last: Progress | None = None
        started_s = time.monotonic()
        with self.terminal.metered(f"fetching version {ref.version}") as report, patience.running():

            def on_progress(progress: Progress) -> None:
                nonlocal last
                last = progress
                patience.note(progress.done_bytes, progress.total_bytes)
                report(progress.done_bytes, progress.total_bytes)

            payload = downloader.fetch(ref, DEADLINE_S, on_progress)
        seconds = time.monotonic() - started_s
        target = self.delivery.deliver(payload)
        self.terminal.say(visible(_summary(target, payload.manifest, last, seconds)))

    def _find(self, version: int) -> PolicyRef:
        """Which content a version number stands for, by the publisher's signature."""
        scores = SourceScores(self.sources.urls)
        lookup = Lookup(scores, self.trust.run, self.trust.key, self.stop, Timeouts())
        with closing(lookup):
            heads = lookup.heads(Deadline(self.request.wait_s))
        kept = {parse_label(label) for found in heads.values() for label in found.head.kept_versions}
        places = [place for place in kept if place is not None and place[1] == version]
        if not places:
            offered = ", ".join(str(place[1]) for place in sorted(place for place in kept if place is not None))
            raise VersionNotFound(f"version {version} is not offered; there is {offered or 'nothing'}")
        for url in heads:
            manifest = self._manifest(url, max(places))
            if manifest is not None:
                return manifest.policy
        raise VersionNotFound(f"version {version} is announced, but no source has its manifest (yet)")

    def _manifest(self, url: str, place: tuple[int, int]) -> PolicyManifest | None:
        connection = Connection(url, self.stop)
        try:
            data = get_document(connection, manifest_key(place), MAX_MANIFEST_BYTES, Deadline(MANIFEST_S))
            return None if data is None else read_manifest(data, self.trust.run, self.trust.key)
        except BroadcastError as error:
            log.warning("%s%s", f"{url}: " if isinstance(error, ManifestRefused) else "", error)
            return None
        finally:
            connection.close()


class Sharing:
    """A server of what has been fetched, for as long as the block lasts; the downloader tells the catalogue. Off unless
    asked for: it shows this address."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._stop = StopToken()
        self.catalogue = PayloadCatalogue()
        self._url: Future[str] = Future()
        self._thread = threading.Thread(target=self._serve, name="share", daemon=True)

    def __enter__(self) -> Sharing:
        self._thread.start()
        self._url.result(READY_S)  # raises if the port is taken
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set("done")
        self._thread.join(READY_S)

    @property
    def url(self) -> str:
        return self._url.result(READY_S)

    def _serve(self) -> None:
        try:
            run_share(self.catalogue, self._host, self._port, self._stop, self._url.set_result)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the address
            if not self._url.done():
                self._url.set_exception(error)


class Patience:
    """Ends a fetch that gets nowhere: its token is set when the user's is, or when nothing has arrived for too long."""

    def __init__(self, stop: StopToken, patience_s: float) -> None:
        self.token = StopToken()
        self._stop = stop
        self._patience_s = patience_s
        self._bytes = -1
        self._since_s: float | None = None  # since when nothing has arrived, if something should
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)
        self._thread.start()

    def note(self, done_bytes: int, total_bytes: int) -> None:
        """So much is here. When all is, what is left is work of our own, which takes as long as it takes."""
        if done_bytes >= total_bytes:
            self._since_s = None
        elif done_bytes != self._bytes or self._since_s is None:
            self._since_s = time.monotonic()
        self._bytes = done_bytes

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, something must arrive now and then."""
        self._bytes, self._since_s = -1, time.monotonic()
        try:
            yield
        finally:
            self._since_s = None

    def close(self) -> None:
        self._closed.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while not self._closed.wait(TICK_S):
            since_s = self._since_s
            if self._stop.is_set():
                self.token.set(self._stop.reason)
            elif since_s is not None and time.monotonic() - since_s > self._patience_s:
                self.token.set(f"nothing has arrived for {self._patience_s:.0f} s")


def _summary(target: Path, manifest: PolicyManifest, last: Progress | None, seconds: float) -> str:
    """Bytes, seconds, rate, and from whom."""
    fetched = sum(last.by_source.values()) if last is not None else 0
    what = f"{target.name} version {manifest.policy.version}: {megabytes(manifest.size_bytes)}"
    if not fetched:
        return f"{what}, all of it here already; verified in {seconds:.1f} s"
    assert last is not None
    parts = f", {megabytes(fetched)} of it fetched" if megabytes(fetched) != megabytes(manifest.size_bytes) else ""
    rate = "" if "delta" in last.road else f", {fetched / 1e6 / max(last.seconds, 1e-3):.1f} MB/s"
    return f"{what} in {seconds:.1f} s{parts}{rate}; from {shares(last.by_source)}"


def shares(by_source: Mapping[str, int]) -> str:
    """Who sent how much: `http://a:8471 60 %, http://b:8471 40 %`."""
    total = sum(by_source.values())
    ranked = sorted(by_source.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{source} {percent(size, total)}" for source, size in ranked if size)


def _first_use(trust: Trust, cache: Path) -> str:
    return (
        f"no key was given: believing {trust.key} (broadcast {trust.run}) from now on, remembered in {cache}; "
        "to be sure, compare it with what `shoal cast publish` printed"
    )


def _wanted(request: FetchRequest) -> int | None:
    if request.version == NEWEST:
        return None
    if request.follow:
        raise UserError("--follow fetches the newest version, whatever it is: leave --version out")
    if not (request.version.isascii() and request.version.isdigit() and len(request.version) <= 10):
        raise UserError(f"--version is a number or {NEWEST!r}, not {request.version!r}")
    return int(request.version)


def _check_output(path: Path) -> None:
    if not path.name:
        raise UserError(f"{path} cannot be the output; give a file or folder with -o")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is neither a file nor a folder; give another -o")
