"""Where submissions are kept, named by their hash: a folder of this machine, or a bucket (`s3.py`). One contract.

    put ─► on return the bytes survive a crash ─► only then the row, and only then the receipt

A crash between bytes and row leaves bytes that nobody refers to; the same put again finds them there. The name is the
hash of the content, which is checked when it is read.
"""

import contextlib
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from shoal.errors import ConfigError, ResourceError
from shoal.protocol import submission_digest
from shoal.runtime import SystemClock, ensure_folder, resource_error, sync_folder, write_atomically
from shoal.runtime.extras import require

LEFT_OVER_S = 3600.0  # another hub that shares this folder may be writing a younger hidden file


class Blobs(Protocol):
    def put(self, body: bytes) -> str:
        """The name of `body`. On return it survives a crash of the machine."""

    def get(self, name: str) -> bytes:
        """Raises `ResourceError` if the store lost or changed it."""

    def has(self, name: str) -> bool:
        """Whether there is something; `get` says whether it is whole."""


class BlobFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = ensure_folder(folder)
        before_s = SystemClock().now_ms() / 1000 - LEFT_OVER_S
        for path in self._folder.glob(".*"):  # of a process that died between writing and renaming
            with contextlib.suppress(FileNotFoundError):  # another hub on this folder has just finished with it
                if path.stat().st_mtime < before_s:
                    path.unlink()

    def put(self, body: bytes) -> str:
        name = submission_digest(body)
        path = self._folder / name
        if path.exists():  # renamed into place after its own fsync, so what is there is whole
            sync_folder(self._folder)  # the process that put it may not have done this yet
        else:
            write_atomically(path, body)
        return name

    def get(self, name: str) -> bytes:
        path = self._folder / name
        try:
            return checked(path.read_bytes(), name, str(path))
        except OSError as error:
            raise resource_error("read the submission", path, error) from error

    def has(self, name: str) -> bool:
        return (self._folder / name).is_file()


def checked(body: bytes, name: str, where: str) -> bytes:
    if submission_digest(body) != name:
        raise ResourceError(f"the submission {where} is damaged: its content does not match its name")
    return body


def bucket_of(storage: str, endpoint: str) -> tuple[SplitResult, SplitResult]:
    """The parts of `hub.storage` and of `hub.storage_endpoint`, which name a bucket."""
    parts, server = urlsplit(storage), urlsplit(endpoint)
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"hub.storage = {storage!r} is no bucket: write s3://BUCKET/PREFIX, or nothing for a folder")
    if endpoint and (server.scheme not in ("http", "https") or not server.netloc or server.path.strip("/")):
        raise ConfigError(f"hub.storage_endpoint = {endpoint!r} is no server: write for instance http://HOST:9000")
    return parts, server


def open_blobs(storage: str, endpoint: str, folder: Path) -> Blobs:
    """`storage` is the setting `hub.storage`: a bucket; empty: the run's folder."""
    if not storage:
        return BlobFolder(folder)
    require("fleet", f"hub.storage = {storage!r}")
    from shoal.hub.storage.s3 import S3Blobs  # hubs with a folder do not wait for it to load

    return S3Blobs(storage, endpoint)
