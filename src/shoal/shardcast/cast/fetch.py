"""`shoal cast fetch`: download a version to a given place.

    sources ─► .model.bin.cast/<digest>.part ─► .bin ─► model.bin   a link: the disk holds the bytes once
               head.json        the newest version seen: an older one, or another broadcast, is refused
               delivered.json   name → size and time of every file that a fetch has written here

With the hidden folder a fetch can be resumed, and the next version is a small delta. A file that is not in
delivered.json is replaced only with --force. A listed and unchanged file that the new version lacks is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BroadcastError, UserError, VersionNotFound
from shoal.protocol import PolicyRef
from shoal.runtime import FolderLock, StopToken, ensure_folder, show_bytes, visible, write_atomically
from shoal.shardcast import Downloader, DownloadSettings, Payload, Progress
from shoal.shardcast.cast import Sources, Terminal
from shoal.shardcast.payload import copy_or_link, os_errors

log = logging.getLogger(__name__)

STOPPED_CODE = 130
DEADLINE_S = 30 * 86_400.0  # in all; a fetch without progress ends after `patience_s`
LONG_NAME_BYTES = 240  # a name may have 255

Stamp = tuple[int, int]  # size, time of the last change


@dataclass(frozen=True)
class FetchRequest:
    sources: tuple[str, ...]
    output: str
    wait_s: float
    patience_s: float
    force: bool = False


def run_fetch(request: FetchRequest, begin: Callable[[], StopToken], terminal: Terminal) -> int:
    """Fetch and report; the exit code. `begin` is called when the request was found valid."""
    sources, path = Sources.parse(request.sources), Path(request.output).absolute()
    if not path.name:
        raise UserError(f"{path} cannot be the output; give a file or folder with --out")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is neither a file nor a folder; give another --out")
    is_long = len(path.name.encode()) > LONG_NAME_BYTES
    name = hashlib.sha256(path.name.encode()).hexdigest() if is_long else path.name
    stop, cache = begin(), ensure_folder(path.with_name(f".{name}.cast"))
    try:
        with FolderLock(cache).acquire(stop):
            delivery = Delivery(request.output, cache, request.force)
            if path.is_file():  # before anything is fetched
                delivery.refuse_strangers([path])
            settings = DownloadSettings(kept_payloads=1, remember_changes=False, patience_s=request.patience_s)
            downloader = Downloader(sources.urls, None, sources.key, cache, stop, settings)
            with contextlib.closing(downloader):
                while True:
                    ref = downloader.newest(request.wait_s)
                    try:
                        _fetch_version(ref, downloader, delivery, terminal)
                        return 0
                    except VersionNotFound:
                        if downloader.newest(request.wait_s) == ref:
                            raise
                        log.warning("version %d is no longer offered; the newest is fetched instead", ref.version)
    except BroadcastError:
        if not stop.is_set():
            raise
        log.warning("stopped; the same command resumes from here")
        return STOPPED_CODE


def _fetch_version(ref: PolicyRef, downloader: Downloader, delivery: Delivery, terminal: Terminal) -> None:
    last: Progress | None = None
    started_s = time.monotonic()
    with terminal.metered(f"fetching version {ref.version}") as report:

        def on_progress(progress: Progress) -> None:
            nonlocal last
            fetched = 0 if last else sum(progress.by_source.values())  # the first report is what was here before
            last = progress
            report(max(0, progress.done_bytes - fetched), progress.total_bytes)

        payload = downloader.fetch(ref, DEADLINE_S, on_progress)
    seconds, whole = time.monotonic() - started_s, show_bytes(payload.manifest.size_bytes)
    line = f"{delivery.deliver(payload).name} version {ref.version}: {whole}"
    fetched = sum(last.by_source.values()) if last is not None else 0
    if last is None or not fetched:
        line += f", all of it here already; verified in {seconds:.1f} s"
    else:
        part = "" if show_bytes(fetched) == whole else f", {show_bytes(fetched)} of it fetched"
        rate = "" if "delta" in last.route else f", {fetched / 1e6 / max(last.seconds, 1e-3):.1f} MB/s"
        line += f" in {seconds:.1f} s{part}{rate}; from {shares(last.by_source)}"
    terminal.say(visible(line))


def shares(by_source: Mapping[str, int]) -> str:
    total = sum(by_source.values())
    ranked = sorted(by_source.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{source} {100 * size / total:.0f} %" for source, size in ranked if size)


class Delivery:
    def __init__(self, output: str, cache: Path, force: bool) -> None:
        self._output, self._path, self._force = output, Path(output).absolute(), force
        self._record = cache / "delivered.json"

    def deliver(self, payload: Payload) -> Path:
        """Write the version and return its path. A single file is a hard link to the copy in the cache."""
        entries, target = payload.manifest.entries, self._path
        if len(entries) == 1 and entries[0].type == "file":
            if target.is_dir() or self._output.endswith("/"):
                target = ensure_folder(target) / Path(entries[0].name).name
                if target.is_dir():
                    raise UserError(f"a file has been fetched, but {target} is a folder; give another --out")
            targets = [target]
        elif target.exists() and not target.is_dir():
            raise UserError(f"a folder has been fetched, but {target} is a file; give a folder with --out")
        else:
            targets = [target / entry.name for entry in entries if entry.type == "file"]
        self.refuse_strangers(targets)
        self._remove_old({str(path) for path in targets})  # first: a file may have become a folder
        if targets == [target]:
            assert payload.path is not None
            with os_errors("write", target):
                target.parent.mkdir(parents=True, exist_ok=True)
                if not (target.exists() and target.samefile(payload.path)):
                    copy_or_link(payload.path, target)
        else:
            payload.export(target)
        stamps = {str(path): stamp for path in targets if (stamp := _stamp(path)) is not None}
        write_atomically(self._record, json.dumps(stamps).encode())
        return target

    def refuse_strangers(self, targets: Iterable[Path]) -> None:
        known = self._delivered()
        strangers = [target for target in targets if target.is_file() and str(target) not in known]
        if strangers and not self._force:
            advice = "move it away, give another --out, or add --force"
            raise UserError(f"{strangers[0]} exists and was not fetched from here: {advice}")

    def _remove_old(self, kept: set[str]) -> None:
        for name, stamp in self._delivered().items():
            path = Path(name)
            if name not in kept and path.is_relative_to(self._path) and _stamp(path) == stamp:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty, or gone already
                    for folder in path.relative_to(self._path).parents[:-1]:
                        (self._path / folder).rmdir()

    def _delivered(self) -> dict[str, Stamp]:
        try:
            found = json.loads(self._record.read_bytes())
            return {str(name): (int(size), int(time_ns)) for name, (size, time_ns) in found.items()}
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return {}


def _stamp(path: Path) -> Stamp | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
