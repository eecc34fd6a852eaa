"""The file of a backup: a plain tar that any tool opens, with what proves it at its end.

    hub/hub.db  hub/blobs/9f…  keys/root.key  …        members, as they lie in the run's folder
    manifest.json                                      last: size and SHA-256 of each, and a hash over all of that

Written under a hidden name and renamed when it is whole and on the disk. Read in one pass: what is unpacked is hashed
on the way, and stays hidden until the manifest has vouched for all of it. Names are checked before anything is written:
a file from elsewhere cannot reach outside the folder that it is unpacked into.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any, Protocol

from shoal.errors import ConfigError, ProtocolError
from shoal.protocol import canonical_json
from shoal.runtime.crash import point
from shoal.runtime.files import PRIVATE, PRIVATE_FOLDER, ensure_folder, resource_error, sync_folder

FORMAT = 1
MANIFEST = "manifest.json"
ORDINARY = 0o644
SECRET = ("hub/", "keys/", "worker-")
PIECE = 1024 * 1024
MAX_MANIFEST_BYTES = 2**30


@dataclass(frozen=True)
class Member:
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Contents:
    """What a whole backup says of itself."""

    run: str
    made_at_ms: int
    software: str
    members: dict[str, Member]


class BundleWriter:
    """Use as a context manager: left without an exception, the file is there; otherwise there is none."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise ConfigError(f"{path} exists already: a backup replaces nothing; choose another name")
        self._path = path
        self._hidden = path.with_name(f".{path.name}.{os.getpid()}")
        self._members: dict[str, Member] = {}

    def __enter__(self) -> BundleWriter:
        ensure_folder(self._path.absolute().parent)
        try:
            descriptor = os.open(self._hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE)
        except OSError as error:
            raise resource_error("write", self._hidden, error) from error
        self._file = os.fdopen(descriptor, "wb")
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._tar.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                point("backup.before_rename")
                self._hidden.rename(self._path)
                sync_folder(self._path.absolute().parent)
        except OSError as failure:
            raise resource_error("write the backup", self._path, failure) from failure
        finally:
            with contextlib.suppress(OSError, ValueError):  # the first error is the one that tells
                self._file.close()
            self._hidden.unlink(missing_ok=True)
        if isinstance(error, OSError):
            at_fault = Path(os.fsdecode(error.filename)) if error.filename else self._path
            raise resource_error("copy to the backup", at_fault, error) from error

    def add_bytes(self, name: str, data: bytes, mode: int = ORDINARY) -> None:
        self._add(name, io.BytesIO(data), len(data), mode)

    def add_file(self, name: str, path: Path) -> None:
        """A file as long as it is now: one that grows meanwhile is cut there."""
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            self._add(name, file, found.st_size, found.st_mode & 0o777)

    def seal(self, run: str, made_at_ms: int, software: str) -> Contents:
        """Write what proves the rest. Nothing comes after it."""
        members = {name: vars(member) for name, member in self._members.items()}
        content = {"format": FORMAT, "run": run, "made_at_ms": made_at_ms, "software": software, "members": members}
        data = json.dumps({**content, "hash": _hash(content)}, indent=1).encode() + b"\n"
        self._add(MANIFEST, io.BytesIO(data), len(data), ORDINARY)
        del self._members[MANIFEST]
        return Contents(run, made_at_ms, software, dict(self._members))

    def _add(self, name: str, source: IO[bytes], size_bytes: int, mode: int) -> None:
        info = tarfile.TarInfo(_proper(name))
        info.size, info.mode = size_bytes, mode
        hashing = _Hashing(source)
        self._tar.addfile(info, hashing)
        self._members[name] = Member(size_bytes, hashing.digest.hexdigest())


class Sink(Protocol):
    """Where members go as they are read."""

    def __call__(self, name: str, mode: int, data: Iterator[bytes], /) -> None: ...


def read_bundle(path: Path, sink: Sink) -> Contents:
    """Hand every member to `sink`, which must read all of it, then compare with the manifest: raises if they differ."""
    seen: dict[str, Member] = {}
    manifest: bytes | None = None
    try:
        with tarfile.open(path, mode="r|") as tar:
            for info in tar:
                file = tar.extractfile(info) if info.isreg() and not info.issparse() else None  # a hole is a bomb
                if file is None or _proper(info.name) in seen or manifest is not None:
                    raise _damaged(path, f"it has a member that no backup has: {info.name!r}")
                if info.name == MANIFEST:
                    manifest = file.read(MAX_MANIFEST_BYTES)
                    continue
                hashing = _Hashing(file)
                sink(info.name, info.mode & 0o777, iter(lambda source=hashing: source.read(PIECE), b""))  # type: ignore[misc]
                seen[info.name] = Member(info.size, hashing.digest.hexdigest())
    except (tarfile.TarError, EOFError) as error:
        raise _damaged(path, f"it ends early, or is no tar file ({error})") from error
    except OSError as error:
        raise resource_error("read the backup", path, error) from error
    contents = _parsed(path, manifest)
    differing = [name for name in {**contents.members, **seen} if contents.members.get(name) != seen.get(name)]
    if differing:
        raise _damaged(path, f"{len(differing)} of its files do not match its manifest, first of all {differing[0]}")
    return contents


def unpack(path: Path, folder: Path) -> Contents:
    """Restore a backup as `folder`, which must not exist or be empty; it appears when everything has proven whole."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: a restore replaces nothing; choose another folder")
    hidden = folder.with_name(f".{folder.name}.restoring")
    shutil.rmtree(hidden, ignore_errors=True)  # of a restore that was interrupted
    ensure_folder(hidden)
    hidden.chmod(0o755)

    def write(name: str, mode: int, data: Iterator[bytes]) -> None:
        target = hidden / name
        target.parent.mkdir(mode=PRIVATE_FOLDER if name.startswith(SECRET) else 0o777, parents=True, exist_ok=True)
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.writelines(data)

    try:
        contents = read_bundle(path, write)
        os.sync()  # once for all: a folder of thousands of small files would wait for each
        if folder.exists():
            folder.rmdir()
        point("restore.before_rename")
        hidden.rename(folder)
        sync_folder(folder.absolute().parent)
    except OSError as error:
        raise resource_error("restore to", folder, error) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return contents


class _Hashing(io.RawIOBase):
    """Reads through to a file, and hashes what comes."""

    def __init__(self, source: IO[bytes]) -> None:
        super().__init__()
        self._source = source
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        return data


def _proper(name: str) -> str:
    """The name, if it is a plain path below the folder."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name:
        raise ProtocolError(
            f"{name!r} is no name of a file in a run's folder: this is no backup that shoal has written"
        )
    return name


def _parsed(path: Path, data: bytes | None) -> Contents:
    if data is None:
        raise _damaged(path, "it ends before its manifest")
    try:
        content: dict[str, Any] = json.loads(data)
        recorded = content.pop("hash")
        if content["format"] != FORMAT:
            raise ConfigError(f"{path} has format {content['format']}; this shoal reads {FORMAT}: upgrade shoal")
        if recorded != _hash(content):
            raise _damaged(path, "its manifest does not match its own hash")
        members = {name: Member(**member) for name, member in content["members"].items()}
        return Contents(content["run"], content["made_at_ms"], content["software"], members)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "its manifest cannot be read") from error


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _damaged(path: Path, what: str) -> ProtocolError:
    return ProtocolError(f"the backup {path} is damaged: {what}; take another one")
