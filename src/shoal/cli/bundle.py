"""The file of a backup: a plain tar that any tool opens, with what proves it at its end.

    hub/hub.db  hub/blobs/9f…  keys/root.key  …        members, as they lie in the run's folder
    manifest.json                                      last: the SHA-256 of each, and a hash over all of that

Written under a hidden name and renamed when it is whole and on the disk. Names are checked before anything is written:
a file from elsewhere cannot reach outside the folder that it is unpacked into.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from pydantic import ValidationError

from shoal import __version__
from shoal.errors import ConfigError, ProtocolError
from shoal.protocol import Message, canonical_json, first_problem
from shoal.runtime.crash import point
from shoal.runtime.files import PRIVATE_FOLDER, ensure_folder, make_private, resource_error, sync_folder

MANIFEST, MAX_MANIFEST_BYTES = "manifest.json", 2**30
SECRET = ("hub/", "keys/", "worker-")


class Manifest(Message):
    """What a backup says of itself; `members` has the SHA-256 of each by its name."""

    format: Literal[2] = 2
    run: str
    made_at_ms: int
    software: str
    members: dict[str, str]
    hash: str = ""

    def hashed(self) -> Manifest:
        digest = hashlib.sha256(canonical_json(self.model_dump(exclude={"hash"}))).hexdigest()
        return self.model_copy(update={"hash": digest})


class Hashing:
    """Reads through to a file, and hashes what comes."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        return data


class BundleWriter:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self.members: dict[str, str] = {}

    def add(self, name: str, source: Path | bytes, mode: int = 0o644) -> None:
        """Bytes, or a file with its mode, as long as it is now: one that grows meanwhile is cut there."""
        info = tarfile.TarInfo(_proper(name))
        with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
            info.mode = source.stat().st_mode & 0o777 if isinstance(source, Path) else mode
            info.size = file.seek(0, os.SEEK_END)
            file.seek(0)
            hashing = Hashing(file)
            self._tar.addfile(info, hashing)
        self.members[name] = hashing.digest.hexdigest()


@contextlib.contextmanager
def new_bundle(path: Path, run: str, made_at_ms: int) -> Iterator[BundleWriter]:
    """Left without an exception, the file is there with its manifest; otherwise there is none."""
    if path.exists():
        raise ConfigError(f"{path} exists already: a backup replaces nothing; choose another name")
    folder = ensure_folder(path.absolute().parent)
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make_private(hidden)
        with hidden.open("wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                yield (bundle := BundleWriter(tar))
                software = f"shoal {__version__}"
                manifest = Manifest(run=run, made_at_ms=made_at_ms, software=software, members=bundle.members)
                bundle.add(MANIFEST, manifest.hashed().model_dump_json(indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        point("backup.before_rename")
        hidden.rename(path)
        sync_folder(folder)
    except OSError as error:
        raise resource_error("copy to the backup", Path(error.filename or path), error) from error
    finally:
        hidden.unlink(missing_ok=True)


def read_bundle(path: Path, folder: Path, only: str = "") -> Manifest:
    """Unpack into `folder` every member, or only one, and compare all with the manifest: raises if they differ."""
    seen: dict[str, str] = {}
    data = b""
    try:
        with tarfile.open(path, mode="r|") as tar:
            for info in tar:
                file = tar.extractfile(info) if info.isreg() and not info.issparse() else None  # a hole is a bomb
                if file is None or _proper(info.name) in seen or data:
                    raise _damaged(path, f"it has a member that no backup has: {info.name!r}")
                if info.name == MANIFEST:
                    data = file.read(MAX_MANIFEST_BYTES)
                    continue
                hashing = Hashing(file)
                with _created(folder, info) if only in ("", info.name) else Path(os.devnull).open("wb") as out:
                    shutil.copyfileobj(hashing, out)
                seen[info.name] = hashing.digest.hexdigest()
        manifest = Manifest.model_validate_json(data)
    except (tarfile.TarError, EOFError) as error:
        raise _damaged(path, f"it ends early, or is no tar file ({error})") from error
    except OSError as error:
        raise resource_error("unpack the backup", path, error) from error
    except ValidationError as error:
        raise _damaged(path, f"its manifest is missing or cannot be read ({first_problem(error)})") from error
    if manifest != manifest.hashed():
        raise _damaged(path, "its manifest does not match its own hash")
    differing = [name for name in {**manifest.members, **seen} if manifest.members.get(name) != seen.get(name)]
    if differing:
        raise _damaged(path, f"{len(differing)} of its files do not match its manifest, first of all {differing[0]}")
    return manifest


def _created(folder: Path, info: tarfile.TarInfo) -> IO[bytes]:
    target = folder / info.name
    target.parent.mkdir(PRIVATE_FOLDER if info.name.startswith(SECRET) else 0o777, parents=True, exist_ok=True)
    return os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, info.mode & 0o777), "wb")


def _proper(name: str) -> str:
    """The name, if it is a plain path below the folder."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name:
        raise ProtocolError(f"{name!r} is no name of a file in a run's folder: shoal has not written this backup")
    return name


def _damaged(path: Path, what: str) -> ProtocolError:
    return ProtocolError(f"the backup {path} is damaged: {what}; take another one")
