"""Files that survive a crash: written whole or not at all, and on the disk when the call returns."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from shoal.errors import ResourceError

_HINTS = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EACCES: "permission denied: choose a folder that this user may write to",
    errno.EPERM: "permission denied: choose a folder that this user may write to",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EEXIST: "a part of the path is a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
}


def resource_error(action: str, path: Path, error: OSError) -> ResourceError:
    """What the operating system said, as one sentence with what to do about it."""
    hint = _HINTS.get(error.errno or 0, error.strerror or str(error))
    return ResourceError(f"cannot {action} {path}: {hint}")


def ensure_folder(path: Path) -> Path:
    """The folder, made if need be and proven writable."""
    probe = path / f".write-test-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise resource_error("write to the folder", path, error) from error
    return path


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable (a rename is on disk only after this)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Put `data` at `path`: readers see the old bytes or the new ones, and after return a crash keeps the new ones."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one that tells
            temporary.unlink(missing_ok=True)
        raise resource_error("write", path, error) from error
