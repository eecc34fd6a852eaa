"""Putting what was fetched where it was asked for, without touching what somebody else put there.

    .out.cast/delivered.json    name → size and time of every file that a fetch has written here

A file that is not on that list is somebody else's and is not replaced unless forced. A file that is on it, unchanged
since, and no longer part of the version, goes.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from shoal.errors import UserError
from shoal.protocol import PolicyManifest
from shoal.runtime.files import ensure_folder, resource_error, write_atomically
from shoal.shardcast import Payload
from shoal.shardcast.payload import copy_or_link

Stamp = tuple[int, int]  # size, time of the last change


class Delivery:
    """The output of a fetch: a file, or a folder of files."""

    def __init__(self, output: str, cache: Path, force: bool) -> None:
        self._output = output
        self._path = Path(output).absolute()
        self._record = cache / "delivered.json"
        self._force = force

    def check(self) -> None:
        """Refuse before anything is fetched what would be refused at the end."""
        if self._path.is_file():
            self._refuse_strangers([self._path])

    def deliver(self, payload: Payload) -> Path:
        """Write the version; where it is. A single file is a second name of the copy in the cache."""
        manifest = payload.manifest
        if len(manifest.entries) == 1 and manifest.entries[0].type == "file":
            target = self._file_target(manifest)
            self._refuse_strangers([target])
            assert payload.path is not None
            _link(payload.path, target)
            self._remove_old({str(target)})
            self._remember([target])
            return target
        if self._path.exists() and not self._path.is_dir():
            raise UserError(f"a folder has been fetched, but {self._path} is a file; give a folder with -o")
        targets = [self._path / entry.name for entry in manifest.entries if entry.type == "file"]
        self._refuse_strangers(targets)
        self._remove_old({str(target) for target in targets})  # first: a file may have become a folder
        payload.export(self._path)
        self._remember(targets)
        return self._path

    def _file_target(self, manifest: PolicyManifest) -> Path:
        if not (self._path.is_dir() or self._output.endswith("/")):
            return self._path
        ensure_folder(self._path)
        target = self._path / Path(manifest.entries[0].name).name
        if target.is_dir():
            raise UserError(f"a file has been fetched, but {target} is a folder; give another -o")
        return target

    def _refuse_strangers(self, targets: list[Path]) -> None:
        known = self._delivered()
        strangers = [target for target in targets if target.is_file() and str(target) not in known]
        if strangers and not self._force:
            raise UserError(
                f"{strangers[0]} exists and was not fetched from here: move it away, give another -o, or add --force"
            )

    def _remove_old(self, kept: set[str]) -> None:
        """Remove what an older version brought and this one does not have, unless it was changed since."""
        for name, stamp in self._delivered().items():
            path = Path(name)
            if name not in kept and path.is_relative_to(self._path) and _stamp(path) == stamp:
                path.unlink(missing_ok=True)
                self._remove_empty(path.parent)

    def _remove_empty(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # not empty, or gone already
            while folder != self._path and folder.is_relative_to(self._path):
                folder.rmdir()
                folder = folder.parent

    def _delivered(self) -> dict[str, Stamp]:
        try:
            found = json.loads(self._record.read_bytes())
            return {str(name): (int(size), int(time_ns)) for name, (size, time_ns) in found.items()}
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return {}

    def _remember(self, targets: list[Path]) -> None:
        stamps = {str(target): stamp for target in targets if (stamp := _stamp(target)) is not None}
        write_atomically(self._record, json.dumps(stamps).encode())


def _stamp(path: Path) -> Stamp | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _link(whole: Path, target: Path) -> None:
    """Make `target` a second name of `whole`: at once, and without a second copy where the disk allows it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and target.samefile(whole):
            return
    except OSError as error:
        raise resource_error("write", target, error) from error
    copy_or_link(whole, target)
