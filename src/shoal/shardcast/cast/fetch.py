"""`shoal cast fetch`: bring a version here, and put it where it was asked for.

    sources ─► .model.bin.cast/<digest>.part ─► .bin ─► model.bin   a link: the disk holds the bytes once
               trust.json   whom to believe

The hidden folder beside the output is what makes a fetch resumable, a second one free, and the next version a small
difference. Removing it costs nothing but that.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BroadcastError, UserError, VersionNotFound
from shoal.protocol import PolicyManifest, PolicyRef
from shoal.runtime.files import ensure_folder
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
from shoal.runtime.text import visible
from shoal.shardcast import Downloader, DownloadSettings, Progress
from shoal.shardcast.cast.delivery import Delivery
from shoal.shardcast.cast.serving import Terminal, megabytes, percent
from shoal.shardcast.cast.trust import Sources, Trust, meet
from shoal.shardcast.connection import Deadline, Timeouts
from shoal.shardcast.lookup import MANIFEST_S, Lookup
from shoal.shardcast.sources import SourceScores
from shoal.shardcast.tree import parse_label

log = logging.getLogger(__name__)

STOPPED_CODE = 130
NEWEST = "newest"
FOLLOW_S = 1.0
DEADLINE_S = 30 * 86_400.0  # in all; a fetch that gets nowhere ends after `patience_s`
LONG_NAME_BYTES = 240  # a name may have 255


@dataclass(frozen=True)
class FetchRequest:
    sources: tuple[str, ...]
    output: str
    version: str
    follow: bool
    wait_s: float
    patience_s: float
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
    sources = Sources.parse(request.sources)
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
            fetch = Fetch(request, sources, trust, stop, delivery, terminal)
            return fetch.follow() if request.follow else fetch.once(version)
    except BroadcastError:
        if not stop.is_set():
            raise
        log.warning("stopped; the same command continues from here")
        return STOPPED_CODE


@dataclass
class Fetch:
    """One output and where it comes from."""

    request: FetchRequest
    sources: Sources
    trust: Trust
    stop: StopToken
    delivery: Delivery
    terminal: Terminal
    held: PolicyRef | None = None

    def once(self, version: int | None) -> int:
        """One version."""
        with closing(self._downloader()) as downloader:
            while True:
                ref = downloader.newest(self.request.wait_s) if version is None else self._find(version)
                try:
                    self._bring(ref, downloader)
                    return 0
                except VersionNotFound:
                    if version is not None or downloader.newest(self.request.wait_s) == ref:
                        raise
                    log.warning("version %d is no longer offered; the newest is fetched instead", ref.version)

    def follow(self) -> int:
        """Every new version, until stopped. Sources that are away, or lie, are waited out."""
        said = ""
        while not self.stop.is_set():
            try:
                with closing(self._downloader()) as downloader:
                    while not self.stop.wait(FOLLOW_S if self.held is not None else 0):
                        newest = downloader.newest(self.request.wait_s)
                        if newest != self.held:
                            self._bring(newest, downloader)
                            self.held = newest
                        said = ""
            except BroadcastError as error:
                if str(error) != said and not self.stop.is_set():
                    log.warning("%s; trying again", error)
                said = str(error)
                self.stop.wait(FOLLOW_S)
        return 0

    def _downloader(self) -> Downloader:
        settings = DownloadSettings(kept_payloads=1, remember_changes=False, patience_s=self.request.patience_s)
        trust = self.trust
        return Downloader(self.sources.urls, trust.run, trust.key, self.request.cache, self.stop, settings)

    def _bring(self, ref: PolicyRef, downloader: Downloader) -> None:
        last: Progress | None = None
        started_s = time.monotonic()
        with self.terminal.metered(f"fetching version {ref.version}") as report:

            def on_progress(progress: Progress) -> None:
                nonlocal last
                last = progress
                report(progress.done_bytes, progress.total_bytes)

            payload = downloader.fetch(ref, DEADLINE_S, on_progress)
        seconds = time.monotonic() - started_s
        target = self.delivery.deliver(payload)
        self.terminal.say(visible(_summary(target, payload.manifest, last, seconds)))

    def _find(self, version: int) -> PolicyRef:
        """Which content a version number stands for, by the publisher's signature."""
        deadline, trust = Deadline(self.request.wait_s), self.trust
        with closing(Lookup(SourceScores(self.sources.urls), trust.run, trust.key, self.stop, Timeouts())) as lookup:
            labels = {label for found in lookup.heads(deadline).values() for label in found.head.kept_versions}
            places = sorted(place for place in map(parse_label, labels) if place is not None)
            wanted = [place for place in places if place[1] == version]
            if not wanted:
                offered = ", ".join(str(place[1]) for place in places)
                raise VersionNotFound(f"version {version} is not offered; there is {offered or 'nothing'}")
            found = lookup.manifest_now(wanted[-1], Deadline(MANIFEST_S))
        if found is None:
            raise VersionNotFound(f"version {version} is announced, but no source has its manifest (yet)")
        return found.policy


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
